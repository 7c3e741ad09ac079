"""Matrices in the order in which kernels read them: bricks, and rows of trellises.

Bricks are what warps load, 8 rows and 64 bytes of each at once (`fragments`). Codes of int4, as
words of `prepack`, are i32 [N / 8, K / 128, 128]: 16 words of each of 8 rows. Scales and zero
points of groups are [N / 8, G, 8]; those of rows stay as they are. Large matrices of bf16, as heads
are, are [N / 8, K / 32, 256].

Trellises (`tcq`) come in strips of 16 rows on disk, here in rows of their own. Codes are i32
[..., N, W], N a multiple of 16 and W = K / 32 bits: of each 64 columns of a row the two words of
line after line. Of rows and scales there are only as many as a matrix has.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from clocher_kernels.errors import ShapeError
from clocher_kernels.formats.base import Format
from clocher_kernels.formats.floats import Float
from clocher_kernels.formats.integers import Int4
from clocher_kernels.formats.tcq import STRIP, Tcq

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


def to_rows(fmt: Tcq, planes: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Rearrange planes; ShapeError for experts with odd strips, whose rows would be elsewhere."""
    if len(shape) > 2 and shape[-2] % STRIP:
        raise ShapeError(
            f"experts of shape {list(shape)} in {fmt.name}: {shape[-2]} rows; expected a multiple "
            f"of {STRIP}; convert them to int4"
        )
    # [..., strips, groups, 2 units, bits, 16 rows]
    lines = planes["codes"].view(torch.int32).unflatten(-3, (-1, 2))
    words = lines.movedim(-1, -4).transpose(-1, -2).flatten(-3).flatten(-3, -2)
    return {**planes, "codes": words.contiguous()}
