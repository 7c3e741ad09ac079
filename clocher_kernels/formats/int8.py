"""8-bit integers with one scale per matrix, per row or per group."""

from dataclasses import dataclass

import numpy as np

from clocher_kernels.dtypes import to_f32
from clocher_kernels.errors import FormatError
from clocher_kernels.formats import scaling
from clocher_kernels.formats.base import Format, Plane, Planes, Shape


@dataclass(frozen=True, repr=False)
class Int8(Format):
    """value = code * scale, symmetric.

    Planes:
        codes: i8 [..., N, K]. The encoder gives -127..127; -128 is decoded like any other.
        scales: f32, f16 or bf16; [..., 1], [..., N] or [..., N, ceil(K/G)].

    Encoding: scale = absmax / 127, rounded to its stored type; code = rint(value / scale) with ties
    to even, clipped to +-127. The error of an element is at most half a scale while the scale is a
    normal number of its type.

    Attributes:
        group: "tensor", "row" or the group length along K.
        scale_dtype: "f32", "f16" or "bf16".
    """

    group: scaling.Group
    scale_dtype: str

    def __post_init__(self) -> None:
        scaling.check_scale_dtype(self.name, self.scale_dtype)
        if isinstance(self.group, int) and self.group < 1:
            raise FormatError(f"{self.name}: group {self.group}; expected at least 1")

    @property
    def name(self) -> str:
        """Canonical name: "int8_row_f32", "int8_g32_f16"."""
        return f"int8_{scaling.spell(self.group)}_{self.scale_dtype}"

    @property
    def unit(self) -> tuple[int, int]:
        return 1, self.group if isinstance(self.group, int) else 1

    def planes(self, shape: Shape) -> dict[str, Plane]:
        scaling.matrix_shape(self.name, shape)
        return {
            "codes": Plane("i8", shape),
            "scales": Plane(self.scale_dtype, scaling.scales_shape(self.group, shape)),
        }

    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        scaling.matrix_shape(self.name, values.shape)
        scaling.require_finite(self.name, values)
        cells = scaling.split(values, self.group)
        ideal = scaling.absmax(cells) / np.float32(127)
        scales, step = scaling.store(self.name, ideal, self.scale_dtype)
        steps = cells / step[..., None]
        np.rint(steps, out=steps)
        np.clip(steps, -127, 127, out=steps)
        return {"codes": scaling.join(steps.astype(np.int8), values.shape), "scales": scales}

    def decode(self, planes: Planes, shape: Shape) -> np.ndarray:
        cells = scaling.split(planes["codes"].astype(np.float32), self.group)
        cells *= to_f32(planes["scales"], self.scale_dtype)[..., None]
        return scaling.join(cells, shape)

    def check(self, planes: Planes, shape: Shape) -> None:
        scaling.check_scales(self.name, planes["scales"], self.scale_dtype)
