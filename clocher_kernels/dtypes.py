"""Element types, their little-endian NumPy storage (bf16, fp8: unsigned), and fp32 conversion."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from clocher_kernels.errors import FormatError

STORAGE: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "e4m3": np.dtype(np.uint8),
    "e5m2": np.dtype(np.uint8),
    "e8m0": np.dtype(np.uint8),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "u32": np.dtype(np.uint32),
    "u64": np.dtype(np.uint64),
}
"""Element type -> NumPy dtype that holds its bytes."""

_PIECE = 1 << 17


@dataclass(frozen=True, slots=True)
class _Minifloat:
    """A float of at most 8 bits: one sign bit, the exponent, the mantissa.

    The largest exponent (`specials`) is used by "none" for numbers, by "nan" for NaN in its largest
    mantissa (the "fn" types), by "ieee" for infinity and NaN.
    """

    exponent_bits: int
    mantissa_bits: int
    specials: str

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    def values(self) -> np.ndarray:
        """Return the value of every code, fp32 [2^bits]."""
        m = self.mantissa_bits
        magnitudes = np.arange(1 << (self.exponent_bits + m))
        exponent, mantissa = magnitudes >> m, magnitudes & ((1 << m) - 1)
        significand = mantissa + np.where(exponent > 0, 1 << m, 0)
        values = np.ldexp(np.float32(significand), np.maximum(exponent, 1) - self.bias - m)
        if self.specials == "nan":
            values[-1] = np.nan
        elif self.specials == "ieee":
            values[-(1 << m)] = np.inf
            values[-(1 << m) + 1 :] = np.nan
        return np.concatenate([values, -values]).astype(np.float32)

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Return the code of each fp32 value, u8: nearest, ties to even, saturating."""
        m = self.mantissa_bits
        table = self.values()
        largest = table[np.isfinite(table)].max()
        smallest_normal = np.float32(2.0 ** (1 - self.bias))
        # Adding this rounds fp32 at the subnormal step.
        magic = np.float32(2.0 ** (1 - self.bias - m + 23))

        shift = 23 - m
        bits = values.view(np.uint32)
        magnitude = np.abs(values)
        nan = np.isnan(magnitude)
        np.fmin(magnitude, largest, out=magnitude)

        codes = magnitude.view(np.uint32).copy()
        codes += ((codes >> shift) & 1) + np.uint32((1 << (shift - 1)) - 1)
        codes >>= shift
        codes -= np.uint32((127 - self.bias) << m)

        subnormal = (magnitude + magic).view(np.uint32) - magic.view(np.uint32)
        codes = np.where(magnitude < smallest_normal, subnormal, codes)
        codes[nan] = (1 << (self.exponent_bits + m)) - 1
        codes |= (bits >> 31) << (self.exponent_bits + m)
        return np.asarray(codes, np.uint8)


_E4M3 = _Minifloat(4, 3, "nan")
_E5M2 = _Minifloat(5, 2, "ieee")
_E2M1 = _Minifloat(2, 1, "none")

E4M3_VALUES = _E4M3.values()
"""Value of each e4m3fn code, fp32 [256]."""
E5M2_VALUES = _E5M2.values()
"""Value of each e5m2 code, fp32 [256]."""
E2M1_VALUES = _E2M1.values()
"""Value of each FP4 e2m1 code, fp32 [16]."""
E8M0_VALUES = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.nan).astype(np.float32)
"""Value of each e8m0 code, fp32 [256]: 2^(code - 127), and NaN for 255."""

_TABLES = {"e4m3": E4M3_VALUES, "e5m2": E5M2_VALUES, "e8m0": E8M0_VALUES}

LARGEST: dict[str, float] = {
    "f32": float(np.finfo(np.float32).max),
    "f16": 65504.0,
    "bf16": float.fromhex("0x1.fep127"),
    "e4m3": 448.0,
    "e5m2": 57344.0,
}
"""Largest finite value of each float type but e8m0."""

SMALLEST: dict[str, float] = {
    "f32": 2.0**-149,
    "f16": 2.0**-24,
    "bf16": 2.0**-133,
    "e4m3": 2.0**-9,
    "e5m2": 2.0**-16,
}
"""Smallest positive value of each float type, subnormals included."""


def to_f32(array: np.ndarray, dtype: str) -> np.ndarray:
    """Convert stored values to fp32, f32 without a copy; FormatError if the storage is wrong."""
    array = np.asarray(array)
    if dtype not in STORAGE:
        known = ", ".join(STORAGE)
        raise FormatError(f"unknown element type {dtype!r}; expected one of {known}")
    if array.dtype != STORAGE[dtype]:
        raise FormatError(f"a {dtype} array is held as {STORAGE[dtype]}, got {array.dtype}")
    if dtype == "bf16":
        bits = array.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    if dtype in _TABLES:
        return look_up(_TABLES[dtype], array)
    with np.errstate(invalid="ignore"):  # a signalling NaN of fp16 warns on Arm
        return array.astype(np.float32, copy=False)


def from_f32(values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert fp32 to a stored float type of the same shape, rounding to nearest even.

    fp8 saturates, infinities included; f16 and bf16 overflow to infinity (IEEE 754). NaN stays NaN.
    "f32" may return the input itself. FormatError if the type is no float, or e8m0.
    """
    values = np.asarray(values, dtype=np.float32)
    if dtype not in LARGEST:
        raise FormatError(
            f"cannot round fp32 to {dtype!r}; expected one of {', '.join(sorted(LARGEST))}"
        )
    if dtype == "f32":
        return values
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    return _by_pieces(_ENCODERS[dtype], values, STORAGE[dtype])


def encode_e2m1(values: np.ndarray) -> np.ndarray:
    """Convert fp32 to FP4 e2m1 codes 0..15, u8 of the same shape, one code a byte.

    Nearest even, saturating at 6; bit 3 is the sign, also of zero. Callers must reject NaN.
    """
    return _by_pieces(_E2M1.encode, np.asarray(values, dtype=np.float32), np.dtype(np.uint8))


def look_up(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return table[codes] for u8 codes and a table of 256 rows, fp32 [*codes.shape, *row]."""
    codes = np.asarray(codes, order="C")
    out = np.empty((codes.size, *table.shape[1:]), np.float32)
    flat = codes.reshape(-1)
    for start in range(0, flat.size, _PIECE):
        piece = slice(start, start + _PIECE)
        # "clip" lets take() write in place; a u8 index cannot leave 256 rows.
        np.take(table, flat[piece], axis=0, out=out[piece], mode="clip")
    return out.reshape(codes.shape + table.shape[1:])


def _encode_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded)


_ENCODERS = {"bf16": _encode_bf16, "e4m3": _E4M3.encode, "e5m2": _E5M2.encode}


def _by_pieces(
    encode: Callable[[np.ndarray], np.ndarray], values: np.ndarray, storage: np.dtype
) -> np.ndarray:
    """Return the codes of fp32 values, encoded a piece at a time, which stays in cache."""
    flat, out = values.ravel(), np.empty(values.size, storage)
    for start in range(0, flat.size, _PIECE):
        out[start : start + _PIECE] = encode(flat[start : start + _PIECE])
    return out.reshape(values.shape)
