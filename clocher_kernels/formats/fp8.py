"""fp8 (e4m3 or e5m2) with one scale per matrix, row, 128 columns of a row or 128 x 128 block."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from clocher_kernels.dtypes import LARGEST, from_f32, to_f32
from clocher_kernels.errors import FormatError
from clocher_kernels.formats import scaling
from clocher_kernels.formats.base import Format, Plane, Planes, Shape

BLOCK = 128

Scope = Literal["tensor", "row", "g128", "b128"]


@dataclass(frozen=True, repr=False)
class Fp8(Format):
    """value = code * scale. What Hugging Face files call `weight_scale_inv` is this scale.

    Planes:
        codes: e4m3 or e5m2 [..., N, K].
        scales: f32, f16 or bf16; [..., 1], [..., N], [..., N, ceil(K/128)] or
            [..., ceil(N/128), ceil(K/128)].

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

    @property
    def unit(self) -> tuple[int, int]:
        return (BLOCK, BLOCK) if self.scope == "b128" else (1, 1)

    def planes(self, shape: Shape) -> dict[str, Plane]:
        lead, n, k = scaling.matrix_shape(self.name, shape)
        if self.scope == "b128":
            scales: Shape = (*lead, -(-n // BLOCK), -(-k // BLOCK))
        else:
            scales = scaling.scales_shape(_group(self.scope), shape)
        return {"codes": Plane(self.code_dtype, shape), "scales": Plane(self.scale_dtype, scales)}

    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        return self.encode_spanning(values, np.ones(1, np.float32))

    def encode_spanning(self, values: np.ndarray, stretch: np.ndarray) -> dict[str, np.ndarray]:
        """Encode with the scales of `encode` times a stretch, one or as many as there are scales.

        Raises:
            FormatError: a value cannot be stored, or a scale is beyond its type.
            ShapeError: the format cannot hold this shape.
        """
        shape = values.shape
        planes = self.planes(shape)
        scaling.require_finite(self.name, values)
        if self.scope == "b128":
            largest = by_blocks(np.maximum, values)
            np.maximum(largest, -by_blocks(np.minimum, values), out=largest)
        else:
            largest = scaling.absmax(scaling.split(values, _group(self.scope)))
        ideal = largest / np.float32(LARGEST[self.code_dtype])
        # The stretch alone must not put a scale beyond its type.
        limit = np.maximum(ideal, np.float32(LARGEST[self.scale_dtype]))
        ideal = np.minimum(ideal * stretch, limit)
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
        if self.scope == "b128":
            scales = np.repeat(scales, BLOCK, axis=-2)[..., : shape[-2], :]
        elif self.scope != "g128":
            return scales[..., None]
        return np.repeat(scales, BLOCK, axis=-1)[..., : shape[-1]]


def _group(scope: Scope) -> scaling.Group:
    """Return a scope that is no block as a group."""
    return BLOCK if scope == "g128" else "tensor" if scope == "tensor" else "row"


def by_blocks(reduce: np.ufunc, values: np.ndarray) -> np.ndarray:
    """Reduce each 128 x 128 block of [..., N, K], short ones at the edges included."""
    *_, n, k = values.shape
    rows, columns = np.arange(0, n, BLOCK), np.arange(0, k, BLOCK)
    return np.asarray(reduce.reduceat(reduce.reduceat(values, columns, axis=-1), rows, axis=-2))
