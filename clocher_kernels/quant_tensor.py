"""A tensor: a logical shape, a format, and the planes (arrays) that the format names."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from clocher_kernels.errors import ShapeError
from clocher_kernels.formats.base import Format


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class QuantTensor:
    """A stored tensor.

    `shape` is logical: [N, K], or [E, N, K] for experts. `planes` by name ("data", "codes",
    "scales", "zeros", ...) may be read-only views of a mapped file.
    """

    shape: tuple[int, ...]
    format: Format
    planes: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        expected = self.format.planes(self.shape)
        if set(expected) != set(self.planes):
            raise ShapeError(
                f"{self.format.name}: planes {sorted(self.planes)}, expected {sorted(expected)}"
            )
        for name, plane in expected.items():
            got = self.planes[name]
            if got.shape != plane.shape or got.dtype != plane.storage:
                raise ShapeError(
                    f"{self.format.name}: plane {name!r} of a {list(self.shape)} tensor is "
                    f"{got.dtype}{list(got.shape)}, expected {plane.storage}{list(plane.shape)}"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(plane.nbytes for plane in self.planes.values())

    def decode(self) -> np.ndarray:
        """Return the values as fp32, in the logical shape."""
        return self.format.decode(self.planes, self.shape)

    def check(self) -> None:
        """Raise FormatError if a stored code is forbidden by the format."""
        self.format.check(self.planes, self.shape)

    def __repr__(self) -> str:
        return f"QuantTensor({list(self.shape)}, {self.format.name}, {self.nbytes} bytes)"


def encode(values: np.ndarray, fmt: Format) -> QuantTensor:
    """Encode fp32 values [..., N, K] in a format."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    return QuantTensor(values.shape, fmt, fmt.encode(values))
