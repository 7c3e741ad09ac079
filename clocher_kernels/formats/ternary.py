"""Ternary weights, in the packing of the Hugging Face BitNet repositories.

Source: "The Era of 1-bit LLMs" (arXiv 2402.17764), section 2 (absmean quantisation).
"""

from dataclasses import dataclass

import numpy as np

from clocher_kernels.dtypes import from_f32, to_f32
from clocher_kernels.errors import FormatError, ShapeError
from clocher_kernels.formats import base
from clocher_kernels.formats.base import Format, Plane, Planes, Shape

_PER_BYTE = 4


@dataclass(frozen=True, repr=False)
class Ternary(Format):
    """value = digit * multiplier, the digit -1, 0 or 1, one multiplier for the matrix.

    Planes:
        codes: u8 [N/4, K], strided along N: with R = N/4, bits 2i and 2i+1 of byte [r, c] hold
            digit + 1 of row r + i*R. The code 3 is forbidden.
        scale: bf16, f16 or f32 [1]. The multiplier itself, or its inverse.

    The two meanings of the scale are two formats because no byte of the planes tells them apart: a
    BitNet checkpoint says "linear_class": "autobitlinear" for the first and "bitlinear" for the
    second.

    Published checkpoints store a bf16 scale, which the names leave unspelled: "ternary" has one,
    "ternary_f32" an fp32 scale.

    Encoding: mean = max(mean of |value|, 1e-5), digit = clip(rint(value * (1 / mean)), -1, 1) with
    ties to even, in fp32 as in the BitNet code; the scale is then rounded to its dtype.

    Attributes:
        inverse: the stored scale divides.
        scale_dtype: "bf16", "f16" or "f32".
    """

    inverse: bool = False
    scale_dtype: str = "bf16"

    @property
    def name(self) -> str:
        """Canonical name: ternary[_inverse][_f16|_f32]."""
        suffix = "" if self.scale_dtype == "bf16" else f"_{self.scale_dtype}"
        return f"ternary{'_inverse' if self.inverse else ''}{suffix}"

    def planes(self, shape: Shape) -> dict[str, Plane]:
        lead, n, k = base.matrix_shape(self.name, shape)
        if lead or n % _PER_BYTE:
            raise ShapeError(
                f"{self.name}: shape {list(shape)}; expected [N, K] with N a multiple of 4; "
                "keep this tensor in another format"
            )
        return {"codes": Plane("u8", (n // _PER_BYTE, k)), "scale": Plane(self.scale_dtype, (1,))}

    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        self.planes(values.shape)
        base.require_finite(self.name, values)
        digits = np.abs(values)
        mean = np.maximum(np.float32(digits.mean(dtype=np.float64)), np.float32(1e-5))
        inverse = np.float32(1) / mean
        np.multiply(values, inverse, out=digits)
        np.rint(digits, out=digits)
        np.clip(digits, -1, 1, out=digits)
        digits += 1
        codes = pack(digits)
        scale = from_f32(np.array([inverse if self.inverse else mean]), self.scale_dtype)
        return {"codes": codes, "scale": scale}

    def decode(self, planes: Planes, shape: Shape) -> np.ndarray:
        values = self.codes(planes, shape).astype(np.float32)
        values *= self.multiplier(planes)
        return values

    def codes(self, planes: Planes, shape: Shape) -> np.ndarray:
        """Return the digits -1, 0, 1 unpacked, i8 [N, K]."""
        packed = planes["codes"]
        rows = [(packed >> 2 * i & 3).view(np.int8) for i in range(_PER_BYTE)]
        digits = np.concatenate(rows)
        digits -= 1
        return digits

    def check(self, planes: Planes, shape: Shape) -> None:
        codes = planes["codes"]
        if np.any(codes & codes >> 1 & 0x55):
            raise FormatError(
                f"{self.name}: the code 3 is stored; expected 0, 1 or 2 (digit + 1); the file is "
                "damaged or packed in another order"
            )
        scale = float(to_f32(planes["scale"], self.scale_dtype)[0])
        if not np.isfinite(scale) or (self.inverse and scale == 0):
            raise FormatError(
                f"{self.name}: a scale of {scale}; expected a finite number"
                f"{' other than zero' if self.inverse else ''}; the file is damaged"
            )

    def multiplier(self, planes: Planes) -> np.float32:
        """Return what a digit is multiplied by: the scale, or 1 / scale computed in fp32."""
        scale = np.float32(to_f32(planes["scale"], self.scale_dtype)[0])
        return np.float32(1) / scale if self.inverse else scale

    def f16_multiplier(self, planes: Planes) -> np.float16:
        """Return what a digit is multiplied by as f16, which is what ggml stores.

        Raises:
            FormatError: it is no number of that type.
        """
        multiplier = self.multiplier(planes)
        with np.errstate(over="ignore"):
            scale = np.float16(multiplier)
        if np.float32(scale) != multiplier:
            raise FormatError(
                f"{self.name}: the scale {multiplier} is no f16, which is what tq2_0 stores; ask "
                "for one of f32, f16, bf16"
            )
        return scale


def pack(digits: np.ndarray) -> np.ndarray:
    """Return codes 0 to 2, [N, K] of any type, as u8 [N/4, K]."""
    rows = digits.astype(np.uint8).reshape(_PER_BYTE, -1, digits.shape[1])
    packed: np.ndarray = rows[0] | rows[1] << 2 | rows[2] << 4 | rows[3] << 6
    return packed
