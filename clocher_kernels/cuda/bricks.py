"""Bricks: matrices of int4 as warps load them, 8 rows and 128 columns at once (`fragments`).

Codes, as words of `prepack`, are i32 [N / 8, K / 128, 128]: 16 words of each of 8 rows. Scales and
zero points of groups are [N / 8, G, 8]; those of rows stay as they are.
"""

from collections.abc import Mapping

from torch import Tensor

from clocher_kernels.formats.base import Format
from clocher_kernels.formats.integers import Int4

BRICK_ROWS, BRICK_COLUMNS = 8, 128
_WORDS = BRICK_COLUMNS // 8
_PIECE = 1 << 18  # words that are moved at a time


def in_bricks(fmt: Format, shape: tuple[int, ...]) -> bool:
    """Return whether a matrix is kept in bricks: int4 whose groups are whole ones, or its rows."""
    if not isinstance(fmt, Int4) or len(shape) != 2:
        return False
    span = fmt.group if isinstance(fmt.group, int) and fmt.group < shape[1] else 0
    return not (shape[0] % BRICK_ROWS or shape[1] % BRICK_COLUMNS or span % BRICK_COLUMNS)


def to_bricks(planes: Mapping[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Rearrange the planes of a matrix [N, K], its codes in place."""
    n, k = shape
    codes = planes["codes"].view(n // BRICK_ROWS, BRICK_ROWS, k // 8)
    for piece in codes.split(max(1, _PIECE // k)):
        piece.copy_(_together(piece, _WORDS).view_as(piece))
    made = {"codes": codes.view(-1, k // BRICK_COLUMNS, BRICK_ROWS * _WORDS)}
    for name in planes.keys() - made.keys():
        own = planes[name]
        of_groups = own.numel() > n
        made[name] = _together(own.view(len(codes), BRICK_ROWS, -1), 1) if of_groups else own
    return made


def _together(rows: Tensor, width: int) -> Tensor:
    """Return eights of rows [N / 8, 8, W] as [N / 8, W / width, 8 width]."""
    parts = rows.unflatten(2, (-1, width)).transpose(1, 2)
    return parts.reshape(len(rows), -1, BRICK_ROWS * width).contiguous()
