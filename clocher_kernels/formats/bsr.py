"""Block-sparse rows: the non-zero R x C blocks of a matrix, row of blocks by row of blocks."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from clocher_kernels.dtypes import to_f32
from clocher_kernels.errors import FormatError, ShapeError
from clocher_kernels.formats import scaling
from clocher_kernels.formats.base import Format, Plane, Planes, Shape
from clocher_kernels.formats.float import FLOATS, round_to

MAX_BLOCK = 1024


@dataclass(frozen=True, repr=False)
class Bsr(Format):
    """Dense blocks where the matrix is not zero.

    Planes, for an [N, K] matrix cut into R x C blocks of which `nnzb` are stored:
        row_ptr: i32 [ceil(N/R) + 1]; row i has the blocks row_ptr[i] .. row_ptr[i+1] - 1.
        col_idx: i32 [nnzb], block columns, strictly increasing within a row.
        values: f32, f16 or bf16 [nnzb, R, C]. Blocks at the matrix's edge are stored whole, and
            what hangs over it is zero.

    The number of blocks depends on the values, so it is part of the format but not of its name:
    `for_values` counts it, and whoever reads a file sets it from the length of col_idx.

    Attributes:
        block: (R, C), rows and columns of a block.
        inner: "f32", "f16" or "bf16".
        nnzb: blocks stored.
    """

    block: tuple[int, int]
    inner: str
    nnzb: int = 0

    def __post_init__(self) -> None:
        if not all(1 <= side <= MAX_BLOCK for side in self.block):
            raise FormatError(
                f"{self.name}: blocks of {self.block}; expected 1 to {MAX_BLOCK} rows and columns"
            )
        if self.inner not in FLOATS:
            raise FormatError(
                f"{self.name}: values of {self.inner!r}; expected one of {', '.join(FLOATS)}"
            )
        if not 0 <= self.nnzb < 2**31:
            raise FormatError(f"{self.name}: {self.nnzb} blocks; expected 0 .. 2^31 - 1")

    @property
    def name(self) -> str:
        """Canonical name: "bsr_16x32_f32"."""
        return f"bsr_{self.block[0]}x{self.block[1]}_{self.inner}"

    @classmethod
    def for_values(cls, values: np.ndarray, block: tuple[int, int], inner: str = "f32") -> Self:
        """Return the format that holds the non-zero blocks of fp32 values [N, K]."""
        empty = cls(block, inner)
        occupied = empty._occupied(round_to(empty.name, values, inner))
        return replace(empty, nnzb=int(np.count_nonzero(occupied)))

    def planes(self, shape: Shape) -> dict[str, Plane]:
        block_rows, block_cols = self._grid(shape)
        if self.nnzb > block_rows * block_cols:
            raise ShapeError(
                f"{self.name}: {self.nnzb} blocks in a {list(shape)} matrix, which has room for "
                f"{block_rows * block_cols}"
            )
        return {
            "row_ptr": Plane("i32", (block_rows + 1,)),
            "col_idx": Plane("i32", (self.nnzb,)),
            "values": Plane(self.inner, (self.nnzb, *self.block)),
        }

    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Encode fp32 values [N, K], leaving out the blocks that are zero once rounded.

        Raises:
            ShapeError: the values have another number of non-zero blocks than `nnzb`.
        """
        self._grid(values.shape)
        stored = round_to(self.name, values, self.inner)
        occupied = self._occupied(stored)
        counts = np.count_nonzero(occupied, axis=1)
        if counts.sum() != self.nnzb:
            raise ShapeError(
                f"{self.name}: the values have {counts.sum()} non-zero blocks, the format is for "
                f"{self.nnzb}; encode with Bsr.for_values(values, {self.block}, {self.inner!r})"
            )
        return {
            "row_ptr": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            "col_idx": np.nonzero(occupied)[1].astype(np.int32),
            "values": self._cut(stored).swapaxes(1, 2)[occupied],
        }

    def decode(self, planes: Planes, shape: Shape) -> np.ndarray:
        height, width = self.block
        block_rows, block_cols = self._grid(shape)
        blocks = np.zeros((block_rows, height, block_cols, width), np.float32)
        row_of = np.repeat(np.arange(block_rows), np.diff(planes["row_ptr"]))
        blocks.swapaxes(1, 2)[row_of, planes["col_idx"]] = self.block_values(planes)
        dense = blocks.reshape(block_rows * height, -1)
        return np.ascontiguousarray(dense[: shape[0], : shape[1]])

    def block_values(self, planes: Planes) -> np.ndarray:
        """Return the stored blocks, fp32 [nnzb, R, C]."""
        return to_f32(planes["values"], self.inner)

    def check(self, planes: Planes, shape: Shape) -> None:
        block_rows, block_cols = self._grid(shape)
        row_ptr, col_idx, values = planes["row_ptr"], planes["col_idx"], planes["values"]
        if row_ptr[0] != 0 or row_ptr[-1] != self.nnzb or np.any(row_ptr[1:] < row_ptr[:-1]):
            raise FormatError(
                f"{self.name}: row_ptr does not rise from 0 to {self.nnzb}; the file is damaged"
            )
        if self.nnzb == 0:
            return
        if col_idx.min() < 0 or col_idx.max() >= block_cols:
            raise FormatError(
                f"{self.name}: block columns {col_idx.min()} .. {col_idx.max()}; expected "
                f"0 .. {block_cols - 1}; the file is damaged"
            )
        row_of = np.repeat(np.arange(block_rows), np.diff(row_ptr))
        if np.any((np.diff(col_idx) <= 0) & (np.diff(row_of) == 0)):
            raise FormatError(
                f"{self.name}: block columns of a row do not rise; the file is damaged"
            )
        height, width = self.block
        below = values[row_of == block_rows - 1, (shape[0] - 1) % height + 1 :]
        beside = values[col_idx == block_cols - 1, :, (shape[1] - 1) % width + 1 :]
        if np.any(to_f32(below, self.inner)) or np.any(to_f32(beside, self.inner)):
            raise FormatError(
                f"{self.name}: a block is not zero beyond the edge of the {list(shape)} matrix; "
                "the file is damaged"
            )

    def _grid(self, shape: Shape) -> tuple[int, int]:
        """Return the number of block rows and block columns of a matrix."""
        lead, n, k = scaling.matrix_shape(self.name, shape)
        if lead:
            raise ShapeError(f"{self.name}: shape {list(shape)}; expected [N, K]")
        return -(-n // self.block[0]), -(-k // self.block[1])

    def _cut(self, stored: np.ndarray) -> np.ndarray:
        """View [N, K] as [block rows, R, block columns, C], zero-padded."""
        height, width = self.block
        block_rows, block_cols = self._grid(stored.shape)
        whole = np.zeros((block_rows * height, block_cols * width), stored.dtype)
        whole[: stored.shape[0], : stored.shape[1]] = stored
        return whole.reshape(block_rows, height, block_cols, width)

    def _occupied(self, stored: np.ndarray) -> np.ndarray:
        """Return which blocks hold a value other than zero, bool [block rows, block columns]."""
        return np.asarray(self._cut(to_f32(stored, self.inner)).any(axis=(1, 3)))
