"""fp32, fp16 and bf16; fp8 with scales; MXFP4, in the layout of the Hugging Face gpt-oss files.

Source: OCP Microscaling Formats (MX) v1.0, sections 5.2, 5.3.3 and 6.3.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from clocher_kernels.dtypes import E2M1_VALUES, LARGEST, encode_e2m1, from_f32, look_up, to_f32
from clocher_kernels.errors import FormatError, ShapeError
from clocher_kernels.formats import base
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
    """Round fp32 values to a float type, keep NaN and infinity; FormatError if one overflows."""
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


FP8_BLOCK = 128

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
        base.check_scale_dtype(self.name, self.scale_dtype)

    @property
    def name(self) -> str:
        """Canonical name: "fp8_e4m3_row_f32", "fp8_e4m3_b128_bf16"."""
        return f"fp8_{self.code_dtype}_{self.scope}_{self.scale_dtype}"

    def planes(self, shape: Shape) -> dict[str, Plane]:
        lead, n, k = base.matrix_shape(self.name, shape)
        if self.scope == "b128":
            scales: Shape = (*lead, -(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
        else:
            scales = base.scales_shape(_group(self.scope), shape)
        return {"codes": Plane(self.code_dtype, shape), "scales": Plane(self.scale_dtype, scales)}

    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        return self.encode_spanning(values, np.ones(1, np.float32))

    def encode_spanning(self, values: np.ndarray, stretch: np.ndarray) -> dict[str, np.ndarray]:
        """Encode with the scales of `encode` times a stretch, one or one for each scale."""
        shape = values.shape
        planes = self.planes(shape)
        base.require_finite(self.name, values)
        if self.scope == "b128":
            largest = by_blocks(np.maximum, values)
            np.maximum(largest, -by_blocks(np.minimum, values), out=largest)
        else:
            largest = base.absmax(base.split(values, _group(self.scope)))
        ideal = largest / np.float32(LARGEST[self.code_dtype])
        # The stretch alone must not put a scale beyond its type.
        limit = np.maximum(ideal, np.float32(LARGEST[self.scale_dtype]))
        ideal = np.minimum(ideal * stretch, limit)
        scales, step = base.store(self.name, ideal, self.scale_dtype)
        codes = from_f32(values / self._spread(step, shape), self.code_dtype)
        return {"codes": codes, "scales": scales.reshape(planes["scales"].shape)}

    def decode(self, planes: Planes, shape: Shape) -> np.ndarray:
        values = to_f32(planes["codes"], self.code_dtype)
        values *= self._spread(to_f32(planes["scales"], self.scale_dtype), shape)
        return values

    def check(self, planes: Planes, shape: Shape) -> None:
        base.check_scales(self.name, planes["scales"], self.scale_dtype)
        magnitudes = planes["codes"] & 0x7F
        if magnitudes.max() > (0x7E if self.code_dtype == "e4m3" else 0x7B):
            raise FormatError(
                f"{self.name}: a code that is not a finite number; the file is damaged"
            )

    def _spread(self, scales: np.ndarray, shape: Shape) -> np.ndarray:
        """Return the scales as an array that broadcasts against the values."""
        if self.scope == "b128":
            scales = np.repeat(scales, FP8_BLOCK, axis=-2)[..., : shape[-2], :]
        elif self.scope != "g128":
            return scales[..., None]
        return np.repeat(scales, FP8_BLOCK, axis=-1)[..., : shape[-1]]


def _group(scope: Scope) -> base.Group:
    """Return a scope that is no block as a group."""
    return FP8_BLOCK if scope == "g128" else "tensor" if scope == "tensor" else "row"


def by_blocks(reduce: np.ufunc, values: np.ndarray) -> np.ndarray:
    """Reduce each 128 x 128 block of [..., N, K], short ones at the edges included."""
    *_, n, k = values.shape
    rows, columns = np.arange(0, n, FP8_BLOCK), np.arange(0, k, FP8_BLOCK)
    return np.asarray(reduce.reduceat(reduce.reduceat(values, columns, axis=-1), rows, axis=-2))


MXFP4_BLOCK = 32

_PIECE = 1 << 15
# Exponents of a scale; 6 * 2^126 is beyond fp32.
_LEAST, _MOST = -127, 125
_BYTES = np.arange(256)
_PAIRS = np.stack([E2M1_VALUES[_BYTES & 15], E2M1_VALUES[_BYTES >> 4]], axis=1)


@dataclass(frozen=True, repr=False)
class Mxfp4(Format):
    """value = e2m1(code) * 2^(scale - 127); e2m1: 0, .5, 1, 1.5, 2, 3, 4, 6, bit 3 the sign.

    Planes:
        blocks: u8 [..., N, K/32, 16]; byte b holds element 2b in its low nibble, 2b+1 in its high.
        scales: e8m0 [..., N, K/32]; 255 (NaN) is forbidden.

    Encoding: the exponent of the scale is e = floor(log2(absmax)) - 2 (OCP section 6.3), or e - 1
    or e + 1 if the squared error of the block is less with it; codes are the nearest, ties to even,
    saturating at 6, and keep the sign of values that round to zero. The error of an element is at
    most 3 scales. A zero block gets scale 1 (code 127).
    """

    @property
    def name(self) -> str:
        """Canonical name: "mxfp4"."""
        return "mxfp4"

    def planes(self, shape: Shape) -> dict[str, Plane]:
        lead, n, k = base.blocked_shape(self.name, shape, MXFP4_BLOCK)
        return {
            "blocks": Plane("u8", (*lead, n, k // MXFP4_BLOCK, MXFP4_BLOCK // 2)),
            "scales": Plane("e8m0", (*lead, n, k // MXFP4_BLOCK)),
        }

    def encode(self, values: np.ndarray) -> dict[str, np.ndarray]:
        self.planes(values.shape)
        return self.encode_weighted(values, np.ones(values.shape[-1], np.float32))

    def encode_weighted(self, values: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Encode as `encode` does, a squared error counting `weights` [K] times, by its column."""
        planes = {key: np.empty(p.shape, p.storage) for key, p in self.planes(values.shape).items()}
        base.require_finite(self.name, values)
        rows, groups = values.reshape(-1, values.shape[-1]), values.shape[-1] // MXFP4_BLOCK
        blocks = planes["blocks"].reshape(len(rows), groups, -1)
        scales = planes["scales"].reshape(len(rows), groups)
        step = max(1, _PIECE // values.shape[-1])
        for start in range(0, len(rows), step):
            piece = slice(start, start + step)
            cells = base.split(rows[piece], MXFP4_BLOCK)
            exponent = _exponents(cells, weights.reshape(groups, MXFP4_BLOCK))
            codes = encode_e2m1(np.ldexp(cells, -exponent[..., None]))
            blocks[piece] = codes[..., 0::2] | codes[..., 1::2] << 4
            scales[piece] = exponent + 127
        return planes

    def decode(self, planes: Planes, shape: Shape) -> np.ndarray:
        cells = look_up(_PAIRS, planes["blocks"]).reshape(*planes["scales"].shape, MXFP4_BLOCK)
        with np.errstate(over="ignore"):
            cells *= to_f32(planes["scales"], "e8m0")[..., None]
        return cells.reshape(shape)

    def check(self, planes: Planes, shape: Shape) -> None:
        if planes["scales"].max() == 255:
            raise FormatError(
                f"{self.name}: a scale code of 255 (NaN); expected 0..254; the file is damaged"
            )


def _exponents(cells: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the exponent of least weighted squared error of each block [..., 32], i32 [...]."""
    largest = base.absmax(cells)
    # frexp: absmax = m * 2^e with m in [1/2, 1), so floor(log2(absmax)) = e - 1.
    floor = np.where(largest == 0, 0, np.maximum(np.frexp(largest)[1] - 3, _LEAST))
    scaled = np.abs(np.ldexp(cells, -floor[..., None]))
    chosen, least = floor, np.full(floor.shape, np.inf)
    for offset in (0, -1, 1):
        wrong = _rounded(scaled * np.float32(2.0**-offset)) * np.float32(2.0**offset) - scaled
        wrong *= wrong
        error = np.einsum("...i,...i->...", wrong, np.broadcast_to(weights, wrong.shape))
        allowed = (floor + offset >= _LEAST) & (floor + offset <= _MOST) & (largest > 0)
        better = (error < least) & (allowed | (offset == 0))
        least = np.where(better, error, least)
        chosen = np.where(better, floor + offset, chosen)
    return np.asarray(chosen, np.int32)


def _rounded(magnitudes: np.ndarray) -> np.ndarray:
    """Return the nearest values of e2m1, ties to even, saturating."""
    step = np.where(magnitudes < 2, np.float32(0.5), np.float32(1))
    step[magnitudes >= 4] = 2
    out = np.rint(magnitudes / step)
    out *= step
    return np.minimum(out, np.float32(6), out=out)
