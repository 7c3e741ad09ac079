"""What every format answers: which planes it stores, and how values become planes and back."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from clocher_kernels.dtypes import STORAGE

Shape = tuple[int, ...]
Planes = Mapping[str, np.ndarray]


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
        count = 1
        for dim in self.shape:
            count *= dim
        return count * self.storage.itemsize


class Format(ABC):
    """A codec: the one place that knows what the bytes of a tensor mean.

    `encode` and `decode` are NumPy and are the definition of the format; kernels must equal
    `decode`. Leading dimensions before the last two are batch dimensions (experts).
    """

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

    @property
    def unit(self) -> tuple[int, int]:
        """Rows and columns that a part of a tensor has to be multiples of; its last may be less."""
        return 1, 1

    def cut(self, planes: Planes, shape: Shape, axis: int, start: int, stop: int) -> Planes:
        """Return the planes of a part of a tensor, views of these where its rows lie together.

        Args:
            planes: of the whole.
            shape: of the whole.
            axis: -2 for rows, -1 for columns, 0 for experts where there are any.
            start: first index of the part, a multiple of `unit`.
            stop: index behind its last, a multiple of `unit`, or the end.
        """
        part = list(shape)
        axis %= len(shape)
        part[axis] = stop - start
        found = {}
        for name, wanted in self.planes(tuple(part)).items():
            plane = planes[name]
            # A scale of whole rows or of the matrix is the part's too.
            if axis < plane.ndim and plane.shape[axis] != wanted.shape[axis]:
                first = start * plane.shape[axis] // shape[axis]
                taken = slice(first, first + wanted.shape[axis])
                plane = plane[(slice(None),) * axis + (taken,)]
            found[name] = plane
        return found

    def check(self, planes: Planes, shape: Shape) -> None:  # noqa: B027  most formats allow all codes
        """Raise FormatError if a plane holds a code that the format forbids."""

    def nbytes(self, shape: Shape) -> int:
        """Bytes of all planes of a tensor with this logical shape."""
        return sum(plane.nbytes for plane in self.planes(shape).values())

    def __repr__(self) -> str:
        return f"<format {self.name}>"
