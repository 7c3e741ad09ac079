"""A small tensor inside of a large one: codes and scales are moved, nothing is rounded again.

What the small tensor does not fill is zero, or the numbers of a `Patch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Float, Format, Ternary
from clocher_kernels.formats.base import Shape
from clocher_kernels.quant_tensor import QuantTensor, encode

CELL = 32
"""Columns that are moved together: those that share a scale."""

_DIGITS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """Where the indices of a dimension come from.

    Attributes:
        size: of the large tensor's dimension.
        to: indices of the large tensor.
        of: for each of them that of the small tensor. Others of the large tensor are zero.
    """

    size: int
    to: np.ndarray
    of: np.ndarray

    def cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Return `to` and `of` in units of `CELL` columns.

        Raises:
            UsageError: columns that share a scale do not stay together.
        """
        if self.size % CELL or len(self.to) % CELL:
            raise UsageError(
                f"{len(self.to)} of {self.size} columns; expected multiples of {CELL}, the columns "
                "that share a scale; choose another preset"
            )
        starts = []
        for index in (self.to, self.of):
            rows = index.reshape(-1, CELL)
            if (rows[:, 0] % CELL).any() or (rows != rows[:, :1] + np.arange(CELL)).any():
                raise UsageError(
                    f"{CELL} columns that share a scale would not stay together; choose a preset "
                    f"whose heads have a multiple of {CELL} values"
                )
            starts.append(rows[:, 0] // CELL)
        return starts[0], starts[1]


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """Numbers that some rows have in one cell of columns.

    Attributes:
        rows: of the large tensor.
        column: the first one.
        values: fp32 [CELL].
    """

    rows: slice
    column: int
    values: np.ndarray


def in_scales(small: QuantTensor, fmt: Format, factor: float = 1.0) -> QuantTensor:
    """Return a tensor in a format; ternary digits stay, and their scale takes a factor.

    Args:
        small: float, or of the format already, up to the type of a ternary scale.
        fmt: the format; a ternary one has an fp32 scale, which is not inverse.
        factor: of the values; 1 except in ternary.

    Raises:
        FormatError: a value does not fit in the format.
    """
    if not isinstance(fmt, Ternary):
        return small if small.format.name == fmt.name else encode(small.decode(), fmt)
    if not isinstance(small.format, Ternary):
        small = encode(small.decode(), Ternary())  # its scale is bf16, as it is in published files
    published = small.format
    assert isinstance(published, Ternary)
    scale = np.array([published.multiplier(small.planes) * np.float32(factor)], np.float32)
    return QuantTensor(small.shape, fmt, {"codes": small.planes["codes"], "scale": scale})


def zero_tensor(shape: Shape, fmt: Format) -> QuantTensor:
    """Return a tensor of zeros, as the format encodes them."""
    if isinstance(fmt, Float):
        return QuantTensor(shape, fmt, {"data": np.zeros(shape, fmt.planes(shape)["data"].storage)})
    zero = fmt.encode(np.zeros((_DIGITS, CELL), np.float32))
    planes = {
        key: np.full(plane.shape, zero[key].reshape(-1)[0], plane.storage)
        for key, plane in fmt.planes(shape).items()
    }
    return QuantTensor(shape, fmt, planes)


def placed_vector(small: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """Return a vector, or one for each expert.

    Args:
        small: fp32 [n] or [experts, n].
        axes: of its dimensions.
    """
    large = np.zeros([axis.size for axis in axes], np.float32)
    large[np.ix_(*(axis.to for axis in axes))] = small[np.ix_(*(axis.of for axis in axes))]
    return large


def placed_matrix(
    small: QuantTensor, axes: Sequence[Axis], patches: Sequence[Patch] = ()
) -> QuantTensor:
    """Return a matrix, or a stack of them, of the small one's format.

    Args:
        small: [N, K] or [experts, N, K], in a format whose scales, if any, are those of 32 columns
            or of the whole matrix.
        axes: of its dimensions.
        patches: other numbers, of a matrix that is no stack.

    Raises:
        UsageError: columns that share a scale do not stay together.
    """
    *stack, rows, columns = axes
    fmt = small.format
    large = zero_tensor(tuple(axis.size for axis in axes), fmt)
    if isinstance(fmt, Ternary):
        _place_digits(large.planes["codes"], small.planes["codes"], rows, columns)
        large.planes["scale"][...] = small.planes["scale"]
        return large
    to, of = columns.cells()
    members = list(zip(stack[0].to, stack[0].of, strict=True)) if stack else [((), ())]
    for key, plane in large.planes.items():
        wide = plane.reshape(*plane.shape[: len(axes) - 1], columns.size // CELL, -1)
        source = small.planes[key].reshape(*small.shape[:-1], small.shape[-1] // CELL, -1)
        for target, origin in members:
            wide[target][rows.to[:, None], to] = source[origin][rows.of[:, None], of]
        for patch in patches:
            cell = fmt.encode(patch.values[None])[key].reshape(-1)
            wide[patch.rows, patch.column // CELL] = cell
    return large


def _place_digits(large: np.ndarray, small: np.ndarray, rows: Axis, columns: Axis) -> None:
    """Move ternary digits: two bits of the byte [r % R, k], R a quarter of the rows."""
    quarter, old = len(large), len(small)
    shift = 2 * (rows.of // old).astype(np.uint8)
    codes = small[rows.of % old][:, columns.of] >> shift[:, None] & 3
    for part in range(_DIGITS):
        mine = rows.to // quarter == part
        where = np.ix_(rows.to[mine] % quarter, columns.to)
        kept = large[where] & np.uint8(0xFF ^ 3 << 2 * part)
        large[where] = kept | codes[mine] << np.uint8(2 * part)
