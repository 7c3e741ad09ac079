"""Block-sparse rows: the non-zero R x C blocks of a matrix, row of blocks by row of blocks."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from clocher_kernels.dtypes import to_f32
from clocher_kernels.errors import FormatError, ShapeError
from clocher_kernels.formats import base
from clocher_kernels.formats.base import Format, Plane, Planes, Shape
from clocher_kernels.formats.floats import FLOATS, round_to
from clocher_kernels.formats.integers import Int4, Int8

MAX_BLOCK = 1024
_CODECS: dict[str, Format] = {"int8": Int8("row", "bf16"), "int4": Int4(True, "row", "bf16")}
_CODED = ("codes", "scales")
INNERS = (*FLOATS, *_CODECS)


@dataclass(frozen=True, repr=False)
class Bsr(Format):
    """Dense blocks where the matrix is not zero.

    Planes, for an [N, K] matrix cut into R x C blocks of which `nnzb` are stored:
        row_ptr: i32 [ceil(N/R) + 1]; row i has the blocks row_ptr[i] .. row_ptr[i+1] - 1.
        col_idx: i32 [nnzb], block columns, strictly increasing within a row.
        values: f32, f16 or bf16 [nnzb, R, C]. Blocks at the matrix's edge are stored whole, and
            what hangs over it is zero.

    Blocks of int8 and int4 have two planes instead of `values`, those of `int8_row_bf16` and
    `int4_sym_row_bf16`: every row of a block has its own scale.
        codes: i8 [nnzb, R, C], or u8 [nnzb, R, ceil(C/2)].
        scales: bf16 [nnzb, R].

    The number of blocks depends on the values, so it is part of the format but not of its name:
    `for_values` counts it, and a reader of files sets it from the length of col_idx.

    Attributes:
        block: (R, C), rows and columns of a block.
        inner: "f32", "f16", "bf16", "int8" or "int4".
        nnzb: blocks stored.
    """

    is_sparse: ClassVar = True

    block: tuple[int, int]
    inner: str
    nnzb: int = 0

    def __post_init__(self) -> None:
        if not all(1 <= side <= MAX_BLOCK for side in self.block):
            raise FormatError(
                f"{self.name}: blocks of {self.block}; expected 1 to {MAX_BLOCK} rows and columns"
            )
        if self.inner not in INNERS:
            raise FormatError(
                f"{self.name}: values of {self.inner!r}; expected one of {', '.join(INNERS)}"
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
        occupied = empty._occupied(empty._rounded(values))
        return replace(empty, nnzb=int(np.count_nonzero(occupied)))

    def planes(self, shape: Shape) -> dict[str, Plane]:
        block_rows, block_cols = self._grid(shape)
        if self.nnzb > block_rows * block_cols:
            raise ShapeError(
                f"{self.name}: {self.nnzb} blocks in a {list(shape)} matrix, which has room for "
                f"{block_rows * block_cols}"
            )
        index = {
            "row_ptr": Plane("i32", (block_rows + 1,)),
            "col_idx": Plane("i32", (self.nnzb,)),
        }
        if self.inner in FLOATS:
            return {**index, "values": Plane(self.inner, (self.nnzb, *self.block))}
        height, width = self.block
        codes = ("i8", width) if self.inner == "int8" else ("u8", -(-width // 2))
        return {
            **index,
            "codes": Plane(codes[0], (self.nnzb, height, codes[1])),
            "scales": Plane("bf16", (self.nnzb, height)),
        }

    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Encode fp32 values [N, K], leaving out the blocks that are zero once rounded.

        Raises:
            FormatError: a value cannot be stored.
            ShapeError: the values have another number of non-zero blocks than `nnzb`.
        """
        self._grid(values.shape)
        stored = self._rounded(values)
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
            **self._encode_blocks(self._cut(stored).swapaxes(1, 2)[occupied]),
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
        return self._decode_blocks(planes, np.arange(self.nnzb))

    def check(self, planes: Planes, shape: Shape) -> None:
        block_rows, block_cols = self._grid(shape)
        row_ptr, col_idx = planes["row_ptr"], planes["col_idx"]
        if row_ptr[0] != 0 or row_ptr[-1] != self.nnzb or np.any(row_ptr[1:] < row_ptr[:-1]):
            raise FormatError(
                f"{self.name}: row_ptr does not rise from 0 to {self.nnzb}; the file is damaged"
            )
        if self.nnzb == 0:
            return
        if self.inner not in FLOATS:
            base.check_scales(self.name, planes["scales"], "bf16")
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
        lowest = self._decode_blocks(planes, np.flatnonzero(row_of == block_rows - 1))
        last = self._decode_blocks(planes, np.flatnonzero(col_idx == block_cols - 1))
        below = lowest[:, (shape[0] - 1) % height + 1 :]
        beside = last[:, :, (shape[1] - 1) % width + 1 :]
        if np.any(below) or np.any(beside):
            raise FormatError(
                f"{self.name}: a block is not zero beyond the edge of the {list(shape)} matrix; "
                "the file is damaged"
            )

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        """Return the values as floats are stored; those that become codes as they are."""
        if self.inner in FLOATS:
            return round_to(self.name, values, self.inner)
        base.require_finite(self.name, values)
        return values

    def _encode_blocks(self, blocks: np.ndarray) -> dict[str, np.ndarray]:
        if self.inner in FLOATS:
            return {"values": blocks}
        if len(blocks):
            return _CODECS[self.inner].encode(blocks)
        room = self.planes(self.block)
        return {name: np.empty(room[name].shape, room[name].storage) for name in _CODED}

    def _decode_blocks(self, planes: Planes, chosen: np.ndarray) -> np.ndarray:
        """Return some blocks, fp32 [chosen, R, C]."""
        if self.inner in FLOATS:
            return to_f32(planes["values"][chosen], self.inner)
        if not len(chosen):
            return np.zeros((0, *self.block), np.float32)
        codes = {name: planes[name][chosen] for name in _CODED}
        return _CODECS[self.inner].decode(codes, (len(chosen), *self.block))

    def _grid(self, shape: Shape) -> tuple[int, int]:
        """Return the number of block rows and block columns of a matrix."""
        lead, n, k = base.matrix_shape(self.name, shape)
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
        values = to_f32(stored, self.inner) if self.inner in FLOATS else stored
        return np.asarray(self._cut(values).any(axis=(1, 3)))
