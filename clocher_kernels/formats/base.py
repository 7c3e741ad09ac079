"""What every format answers: which planes it stores, and how values become planes and back.

A block-scaled format splits its tensor into cells, the runs of elements that share a scale:
"tensor" makes one cell of each matrix, "row" one of each row, and a number G cuts rows into
groups of G, the last of which may be short.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import ClassVar, Literal

import numpy as np

from clocher_kernels.dtypes import LARGEST, SMALLEST, STORAGE, from_f32, to_f32
from clocher_kernels.errors import FormatError, ShapeError

Shape = tuple[int, ...]
Planes = Mapping[str, np.ndarray]
_EXPONENT = {"f16": 0x7C00, "bf16": 0x7F80}
"""Bits of the exponent of each float type of 16 bits."""
_BLOCK = 1 << 16

Group = int | Literal["tensor", "row"]

SCALE_DTYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Plane:
    """One stored array: its element type (a name in `dtypes.STORAGE`) and its shape."""

    dtype: str
    shape: Shape

    @property
    def storage(self) -> np.dtype:
        """NumPy dtype that holds the bytes (bf16 is uint16, fp8 is uint8)."""
        return STORAGE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the plane."""
        return prod(self.shape) * self.storage.itemsize


class Format(ABC):
    """A codec: the one place that knows what the bytes of a tensor mean.

    `encode` and `decode` are NumPy and are the definition of the format; kernels must equal
    `decode`. Leading dimensions before the last two are batch dimensions (experts).
    """

    is_sparse: ClassVar = False
    """Whether blocks of zeros are left out (`bsr`)."""
    turned: ClassVar = 0
    """Columns of blocks that a Hadamard matrix has rotated (`turn`), and has to rotate in inputs
    before they are multiplied: planes hold values after it. 0: none."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Canonical name, as `parse_format` reads it."""

    @abstractmethod
    def planes(self, shape: Shape) -> dict[str, Plane]:
        """Return the planes of a tensor with this logical shape.

        Raises:
            ShapeError: the format cannot hold this shape.
        """

    @abstractmethod
    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Encode fp32 values into planes.

        Raises:
            FormatError: a value cannot be stored: NaN, infinite, or beyond the largest number.
            ShapeError: the format cannot hold this shape.
        """

    @abstractmethod
    def decode(self, planes: Planes, shape: Shape) -> np.ndarray:
        """Decode planes into fp32 values [*shape]."""

    def check(self, planes: Planes, shape: Shape) -> None:  # noqa: B027  most formats allow all codes
        """Raise FormatError if a plane holds a code that the format forbids."""

    def nbytes(self, shape: Shape) -> int:
        """Bytes of all planes of a tensor with this logical shape."""
        return sum(plane.nbytes for plane in self.planes(shape).values())

    def __repr__(self) -> str:
        return f"<format {self.name}>"


def turn(values: np.ndarray, size: int) -> np.ndarray:
    """Return values [..., K] with each `size` columns times the Hadamard matrix over its root.

    The matrix is Sylvester's, symmetric: twice gives the values again.
    """
    found = values.reshape(-1, size).astype(np.float32)
    step = max(1, _BLOCK // size)
    for start in range(0, len(found), step):
        half, some = 1, found[start : start + step]
        while half < size:
            pairs = some.reshape(len(some), -1, 2, half)
            low, high = pairs[:, :, 0].copy(), pairs[:, :, 1]
            with np.errstate(over="ignore", invalid="ignore"):
                pairs[:, :, 0], pairs[:, :, 1] = low + high, low - high
            half *= 2
        some *= np.float32(size**-0.5)
    return found.reshape(values.shape)


def matrix_shape(name: str, shape: Shape) -> tuple[Shape, int, int]:
    """Split a logical shape into (leading dimensions, N, K); ShapeError if it has no matrices."""
    if len(shape) < 2 or min(shape) < 1:
        raise ShapeError(
            f"{name} holds matrices, got shape {list(shape)}; expected [N, K] or [E, N, K], "
            "each dimension at least 1"
        )
    return shape[:-2], shape[-2], shape[-1]


def blocked_shape(name: str, shape: Shape, block: int) -> tuple[Shape, int, int]:
    """Split a shape as `matrix_shape` does; ShapeError unless K is a multiple of a block."""
    lead, n, k = matrix_shape(name, shape)
    if k % block:
        raise ShapeError(
            f"{name}: K = {k} of shape {list(shape)}; expected a multiple of {block}; "
            "keep this tensor in another format"
        )
    return lead, n, k


def scales_shape(group: Group, shape: Shape) -> Shape:
    """Return the shape of the scales plane: [*lead, 1], [*lead, N] or [*lead, N, ceil(K/G)]."""
    *lead, n, k = shape
    if group == "tensor":
        return (*lead, 1)
    if group == "row":
        return (*lead, n)
    return (*lead, n, -(-k // group))


def split(array: np.ndarray, group: Group) -> np.ndarray:
    """View [*lead, N, K] as cells [*scales_shape, elements]; a short last group is zero-padded."""
    *lead, n, k = array.shape
    if group == "tensor":
        return array.reshape(*lead, 1, n * k)
    if group == "row":
        return array
    # A group may be longer than the row, by a lot in a hostile file.
    size = min(group, k)
    groups = -(-k // size)
    if k % size:
        whole = np.zeros((*lead, n, groups * size), array.dtype)
        whole[..., :k] = array
        array = whole
    return array.reshape(*lead, n, groups, size)


def join(cells: np.ndarray, shape: Shape) -> np.ndarray:
    """Undo `split`: cells -> contiguous [*shape]."""
    *lead, n, k = shape
    return np.ascontiguousarray(cells.reshape(*lead, n, -1)[..., :k])


def absmax(cells: np.ndarray) -> np.ndarray:
    """Return the largest magnitude along the last axis, without a temporary of the full size."""
    return np.asarray(np.maximum(cells.max(axis=-1), -cells.min(axis=-1)))


def store(name: str, ideal: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Round the ideal scales to their stored type.

    Return the scales as stored, and their fp32 values: codes are chosen for these. A cell whose
    ideal scale is zero gets scale 1; one that only rounds to zero gets the smallest positive value
    of its type. FormatError if a scale is beyond the largest.
    """
    largest = float(absmax(ideal.reshape(-1)))
    if largest > LARGEST[dtype]:
        raise FormatError(
            f"{name}: a scale of {largest:.3g} is beyond {dtype} (at most {LARGEST[dtype]:.5g}); "
            "choose the same format with f32 or bf16 scales"
        )
    value = to_f32(from_f32(ideal, dtype), dtype)
    instead = np.where(ideal == 0, np.float32(1), np.float32(SMALLEST[dtype]))
    value = np.where(value == 0, instead, value)
    return from_f32(value, dtype), value


def require_finite(name: str, values: np.ndarray) -> None:
    """Raise FormatError if a value is NaN or infinite."""
    if not (np.isfinite(values.min()) and np.isfinite(values.max())):
        bad = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise FormatError(
            f"{name} cannot hold {values[bad]} (element {list(bad)}); expected finite values, "
            "check the source tensor"
        )


def check_scales(name: str, scales: np.ndarray, dtype: str) -> None:
    """Raise FormatError if a stored scale is NaN or infinite."""
    if dtype not in _EXPONENT or not _all_finite(scales, _EXPONENT[dtype]):
        require_finite(f"{name} scales", to_f32(scales, dtype))


def _all_finite(stored: np.ndarray, exponent: int) -> bool:
    """Return whether no number of 16 bits has all bits of its exponent: reading is all it costs."""
    bits = stored.reshape(-1).view(np.uint16)
    shifted = np.empty(min(_BLOCK, bits.size), np.uint16)
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK]
        if np.left_shift(block, 1, out=shifted[: block.size]).max() >= exponent << 1:
            return False
    return True


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes of 1 to 8 bits in rows of bytes or words, low bits first, u8 [rows, codes].

    A row is whole groups of codes that fill bytes: 8 of 3 bits, 2 of 4.
    """
    count = 8 // gcd(bits, 8)
    bytes_ = np.ascontiguousarray(packed).view(np.uint8)
    packed = bytes_.reshape(len(packed), -1, count * bits // 8)
    out = np.empty((*packed.shape[:2], count), np.uint8)
    for place in range(count):
        byte, shift = divmod(place * bits, 8)
        code = packed[..., byte] >> shift
        if shift + bits > 8:
            code |= packed[..., byte + 1] << (8 - shift)
        out[..., place] = code & ((1 << bits) - 1)
    return out.reshape(len(packed), -1)


def check_scale_dtype(name: str, dtype: str) -> None:
    """Raise FormatError unless the name is that of a type that scales may have."""
    if dtype not in SCALE_DTYPES:
        raise FormatError(f"{name}: scales of {dtype!r}; expected one of {', '.join(SCALE_DTYPES)}")


def spell(group: Group) -> str:
    """Return how a group is written in a format's name: "tensor", "row", "g64"."""
    return f"g{group}" if isinstance(group, int) else group
