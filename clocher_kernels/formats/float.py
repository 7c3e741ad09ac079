"""Plain floats: fp32, fp16, bf16."""

from dataclasses import dataclass

import numpy as np

from clocher_kernels.dtypes import LARGEST, from_f32, to_f32
from clocher_kernels.errors import FormatError, ShapeError
from clocher_kernels.formats.base import Format, Plane, Planes, Shape

FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True, repr=False)
class Float(Format):
    """Values as they are, rounded to nearest even.

    Planes:
        data: f32, f16 or bf16 [*shape].

    Any shape is allowed. For f32 encode and decode return the array they were given. NaN and
    infinity are stored as they are; a run that meets one in a weight ends with an error that names
    the weight.

    Attributes:
        dtype: "f32", "f16" or "bf16".
    """

    dtype: str

    @property
    def name(self) -> str:
        """Canonical name: that of the element type."""
        return self.dtype

    def planes(self, shape: Shape) -> dict[str, Plane]:
        if shape and min(shape) < 1:
            raise ShapeError(f"{self.name}: shape {list(shape)}; expected dimensions of at least 1")
        return {"data": Plane(self.dtype, shape)}

    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        return {"data": round_to(self.name, values, self.dtype)}

    def decode(self, planes: Planes, shape: Shape) -> np.ndarray:
        return to_f32(planes["data"], self.dtype)


def round_to(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    """Round fp32 values to a float type. NaN and infinity are kept.

    Raises:
        FormatError: a finite value would become infinite.
    """
    limit = LARGEST[dtype]
    stored = from_f32(values, dtype)
    if dtype != "f32":
        lost = np.isinf(to_f32(stored, dtype))
        lost &= np.isfinite(values)
        if lost.any():
            raise FormatError(
                f"{name}: {values[lost][0]:.6g} is beyond {dtype} (at most {limit:.6g}); "
                "keep the tensor in f32 or bf16"
            )
    return stored
