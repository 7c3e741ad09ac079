"""What every format answers: which planes it stores, and how values become planes and back."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

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
        return prod(self.shape) * self.storage.itemsize


class Format(ABC):
    """A codec: the one place that knows what the bytes of a tensor mean.

    `encode` and `decode` are NumPy and are the definition of the format; kernels must equal
    `decode`. Leading dimensions before the last two are batch dimensions (experts).
    """

    is_sparse: ClassVar = False
    """Whether blocks of zeros are left out (`bsr`)."""

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
