"""Bricks: matrices as warps load them, 8 rows and 64 bytes of each at once (`fragments`).

Codes of int4, as words of `prepack`, are i32 [N / 8, K / 128, 128]: 16 words of each of 8 rows.
Scales and zero points of groups are [N / 8, G, 8]; those of rows stay as they are. Large matrices
of bf16, as heads are, are [N / 8, K / 32, 256].
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from clocher_kernels.formats.base import Format
from clocher_kernels.formats.floats import Float
from clocher_kernels.formats.integers import Int4

BRICK_ROWS = 8
BRICK_WORDS = 16
"""32-bit words of a row of a brick."""
LEAST_FLOAT_ROWS = 1 << 15
"""Rows from which bf16 lies in bricks, an estimate: on an H200 201 088 rows take 3 % longer for one
token than by GEMV, but less than half as long for 32; of matrices of 5120 a step lost 8 %."""
_PIECE = 1 << 18  # words that are moved at a time


def in_bricks(fmt: Format, shape: tuple[int, ...]) -> bool:
    """Return whether a matrix is in bricks: int4 of whole ones a group or row, a head of bf16."""
    if len(shape) != 2 or shape[0] % BRICK_ROWS:
        return False
    if isinstance(fmt, Float):
        return fmt.dtype == "bf16" and shape[0] >= LEAST_FLOAT_ROWS and shape[1] % 64 == 0
    if not isinstance(fmt, Int4):
        return False
    span = fmt.group if isinstance(fmt.group, int) and fmt.group < shape[1] else 0
    return not (shape[1] % (8 * BRICK_WORDS) or span % (8 * BRICK_WORDS))


def to_bricks(planes: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Rearrange the planes of a matrix [N, K], its weights in place."""
    n, k = shape
    name = "codes" if "codes" in planes else "data"
    words = planes[name].view(torch.int32).view(n // BRICK_ROWS, BRICK_ROWS, -1)
    for piece in words.split(max(1, _PIECE // k)):
        piece.copy_(_together(piece, BRICK_WORDS).view_as(piece))
    made = {name: words.view(len(words), -1, BRICK_ROWS * BRICK_WORDS).view(planes[name].dtype)}
    for name in planes.keys() - made.keys():
        own = planes[name]
        of_groups = own.numel() > n
        made[name] = _together(own.view(len(words), BRICK_ROWS, -1), 1) if of_groups else own
    return made


def _together(rows: Tensor, width: int) -> Tensor:
    """Return eights of rows [N / 8, 8, W] as [N / 8, W / width, 8 width]."""
    parts = rows.unflatten(2, (-1, width)).transpose(1, 2)
    return parts.reshape(len(rows), -1, BRICK_ROWS * width).contiguous()
