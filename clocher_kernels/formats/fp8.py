"""fp8 (e4m3 or e5m2) with one scale per matrix, per row or per 128 x 128 block."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from clocher_kernels.dtypes import LARGEST, from_f32, to_f32
from clocher_kernels.errors import FormatError
from clocher_kernels.formats import scaling
from clocher_kernels.formats.base import Format, Plane, Planes, Shape

BLOCK = 128

Scope = Literal["tensor", "row", "b128"]


@dataclass(frozen=True, repr=False)
class Fp8(Format):
    """value = code * scale. What Hugging Face files call `weight_scale_inv` is this scale.

    Planes:
        codes: e4m3 or e5m2 [..., N, K].
        scales: f32, f16 or bf16; [..., 1], [..., N] or [..., ceil(N/128), ceil(K/128)].

    Encoding: scale = absmax / 448 (57344 for e5m2), rounded to its stored type; codes are the
    nearest, ties to even, saturating. The error of an element is at most 2^-4 of it (2^-3 for
    e5m2), or 2^-10 (2^-17) of a scale among the subnormals.

    Attributes:
        code_dtype: "e4m3" or "e5m2".
        scope: which elements share a scale.
        scale_dtype: "f32", "f16" or "bf16".
    """

    code_dtype: Literal["e4m3", "e5m2"]
    scope: Scope
    scale_dtype: str

    def __post_init__(self) -> None:
        scaling.check_scale_dtype(self.name, self.scale_dtype)

    @property
    def name(self) -> str:
        """Canonical name: "fp8_e4m3_row_f32", "fp8_e4m3_b128_bf16"."""
        return f"fp8_{self.code_dtype}_{self.scope}_{self.scale_dtype}"

    def planes(self, shape: Shape) -> dict[str, Plane]:
        lead, n, k = scaling.matrix_shape(self.name, shape)
        if self.scope == "b128":
            scales: Shape = (*lead, -(-n // BLOCK), -(-k // BLOCK))
        else:
            scales = scaling.scales_shape(self.scope, shape)
        return {"codes": Plane(self.code_dtype, shape), "scales": Plane(self.scale_dtype, scales)}

    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        shape = values.shape
        planes = self.planes(shape)
        scaling.require_finite(self.name, values)
        if self.scope == "b128":
            largest = _block_absmax(values)
        else:
            largest = scaling.absmax(scaling.split(values, self.scope))
        ideal = largest / np.float32(LARGEST[self.code_dtype])
        scales, step = scaling.store(self.name, ideal, self.scale_dtype)
        codes = from_f32(values / self._spread(step, shape), self.code_dtype)
        return {"codes": codes, "scales": scales.reshape(planes["scales"].shape)}

    def decode(self, planes: Planes, shape: Shape) -> np.ndarray:
        values = to_f32(planes["codes"], self.code_dtype)
        values *= self._spread(to_f32(planes["scales"], self.scale_dtype), shape)
        return values

    def check(self, planes: Planes, shape: Shape) -> None:
        scaling.check_scales(self.name, planes["scales"], self.scale_dtype)
        magnitudes = planes["codes"] & 0x7F
        if magnitudes.max() > (0x7E if self.code_dtype == "e4m3" else 0x7B):
            raise FormatError(
                f"{self.name}: a code that is not a finite number; the file is damaged"
            )

    def _spread(self, scales: np.ndarray, shape: Shape) -> np.ndarray:
        """Return the scales as an array that broadcasts against the values."""
        if self.scope != "b128":
            return scales[..., None]
        rows = np.repeat(scales, BLOCK, axis=-2)[..., : shape[-2], :]
        return np.repeat(rows, BLOCK, axis=-1)[..., : shape[-1]]


def _block_absmax(values: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of each 128 x 128 block, short ones at the edges included."""
    *_, n, k = values.shape
    rows, columns = np.arange(0, n, BLOCK), np.arange(0, k, BLOCK)
    high = np.maximum.reduceat(np.maximum.reduceat(values, columns, axis=-1), rows, axis=-2)
    low = np.minimum.reduceat(np.minimum.reduceat(values, columns, axis=-1), rows, axis=-2)
    return np.maximum(high, -low)
