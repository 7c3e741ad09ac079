"""Narrow floats, 16 lanes at a time: bf16, fp16, fp8, fp4 codes to fp32, and fp32 to codes.

Codes are int32 lanes, as `memory.load_u16` and `load_u8` give them and `store_u16`, `store_u8`
take them. Every conversion equals `clocher_kernels.dtypes` bit by bit (a NaN's payload aside):
rounding is to nearest even, fp8 saturates, fp16 and bf16 overflow to infinity.
"""

import numpy as np
from llvmlite import ir

from clocher_kernels.dtypes import E2M1_VALUES
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.simd import (
    absolute,
    add,
    bits_f32,
    bits_i32,
    eq,
    iadd,
    iand,
    ieq,
    ilt,
    ior,
    iselect,
    isplat,
    isub,
    lane,
    mul,
    shl,
    shr,
    splat,
    sub,
    to_f32,
)
from cpu_fallback.lanes.vector import F32, I32, LANES, constant, op

_HALF = ir.VectorType(ir.HalfType(), LANES)
_U16 = ir.VectorType(ir.IntType(16), LANES)
_E2M1 = [float(value) for value in E2M1_VALUES]
_E4M3_STEP = np.float32(2.0**-9)
_E5M2_STEP = np.float32(2.0**-16)


@op(F32)
def e2m1_table(b):
    """Return the values of the 16 fp4 codes, for `simd.lookup`."""
    return constant(F32, _E2M1)


@device
def from_bf16(codes):
    """Convert bf16 codes to fp32."""
    return bits_f32(shl(codes, 16))


@device
def to_bf16(x):
    """Convert fp32 to bf16 codes."""
    bits = bits_i32(x)
    odd = iand(shr(bits, 16), isplat(1))
    rounded = shr(iadd(bits, iadd(odd, isplat(0x7FFF))), 16)
    quiet = ior(shr(bits, 16), isplat(0x40))
    return iselect(eq(x, x), rounded, quiet)


@op(F32, I32)
def _half_to_f32(b, codes):
    return b.fpext(b.bitcast(b.trunc(codes, _U16), _HALF), F32.llvm)


@op(I32, F32)
def _f32_to_half(b, x):
    return b.zext(b.bitcast(b.fptrunc(x, _HALF), _U16), I32.llvm)


@device
def _from_f16_bits(codes):
    # Rebias the exponent in place; subnormals by a subtraction, which is exact.
    bits = shl(iand(codes, isplat(0x7FFF)), 13)
    exponent = iand(bits, isplat(0x7C00 << 13))
    normal = iadd(bits, isplat((127 - 15) << 23))
    special = iadd(normal, isplat((128 - 16) << 23))
    least = bits_f32(isplat(113 << 23))
    subnormal = bits_i32(sub(bits_f32(iadd(normal, isplat(1 << 23))), least))
    value = iselect(ieq(exponent, isplat(0)), subnormal, normal)
    value = iselect(ieq(exponent, isplat(0x7C00 << 13)), special, value)
    return bits_f32(ior(value, shl(iand(codes, isplat(0x8000)), 16)))


@device
def _to_f16_bits(x):
    sign = shl(shr(bits_i32(x), 31), 15)
    magnitude = bits_i32(absolute(x))
    odd = iand(shr(magnitude, 13), isplat(1))
    rebias = isplat(((15 - 127) << 23) + 0xFFF)
    normal = shr(iadd(iadd(magnitude, rebias), odd), 13)
    magic = isplat(126 << 23)
    subnormal = isub(bits_i32(add(bits_f32(magnitude), bits_f32(magic))), magic)
    value = iselect(ilt(magnitude, isplat(113 << 23)), subnormal, normal)
    value = iselect(ilt(magnitude, isplat(143 << 23)), value, isplat(0x7C00))
    value = iselect(ilt(isplat(255 << 23), magnitude), isplat(0x7E00), value)
    return ior(value, sign)


from_f16 = _half_to_f32 if CURRENT.f16c else _from_f16_bits
"""Convert fp16 codes to fp32."""
to_f16 = _f32_to_half if CURRENT.f16c else _to_f16_bits
"""Convert fp32 to fp16 codes."""


@device
def from_e4m3(codes):
    """Convert fp8 e4m3 (fn) codes to fp32."""
    magnitude = iand(codes, isplat(0x7F))
    normal = iadd(shl(magnitude, 20), isplat((127 - 7) << 23))
    subnormal = bits_i32(mul(to_f32(magnitude), splat(_E4M3_STEP)))
    value = iselect(ilt(magnitude, isplat(8)), subnormal, normal)
    value = iselect(ieq(magnitude, isplat(0x7F)), isplat(0x7FC00000), value)
    return bits_f32(ior(value, shl(iand(codes, isplat(0x80)), 24)))


@device
def from_e5m2(codes):
    """Convert fp8 e5m2 codes to fp32."""
    magnitude = iand(codes, isplat(0x7F))
    normal = iadd(shl(magnitude, 21), isplat((127 - 15) << 23))
    special = ior(shl(magnitude, 21), isplat(0x7F800000))
    subnormal = bits_i32(mul(to_f32(magnitude), splat(_E5M2_STEP)))
    value = iselect(ilt(magnitude, isplat(4)), subnormal, normal)
    value = iselect(ilt(magnitude, isplat(0x7C)), value, special)
    return bits_f32(ior(value, shl(iand(codes, isplat(0x80)), 24)))


@device
def to_e4m3(x):
    """Convert fp32 to fp8 e4m3 (fn) codes."""
    return _to_fp8(x, 20, 120 << 3, 121 << 23, 141 << 23, 0x43E00000)


@device
def to_e5m2(x):
    """Convert fp32 to fp8 e5m2 codes."""
    return _to_fp8(x, 21, 112 << 2, 113 << 23, 134 << 23, 0x47600000)


@device
def _to_fp8(x, shift, rebias, smallest_normal, magic, largest):
    # Integer comparisons of magnitudes order floats, infinity included; NaN is replaced at the end.
    bits = bits_i32(absolute(x))
    bits = iselect(ilt(isplat(largest), bits), isplat(largest), bits)
    odd = iand(shr(bits, shift), isplat(1))
    rounded = iadd(bits, iadd(odd, isplat((1 << (shift - 1)) - 1)))
    normal = isub(shr(rounded, shift), isplat(rebias))
    subnormal = isub(bits_i32(add(bits_f32(bits), bits_f32(isplat(magic)))), isplat(magic))
    code = iselect(ilt(bits, isplat(smallest_normal)), subnormal, normal)
    code = iselect(eq(x, x), code, isplat(0x7F))
    return ior(code, shl(shr(bits_i32(x), 31), 7))


@device
def bf16_scalar(code):
    """Convert one bf16 code to fp32."""
    return lane(from_bf16(isplat(code)), 0)


@device
def f16_scalar(code):
    """Convert one fp16 code to fp32."""
    return lane(from_f16(isplat(code)), 0)


@device
def e8m0_scalar(code):
    """Convert one e8m0 code to fp32: 2^(code - 127), NaN for 255."""
    return lane(bits_f32(isplat(_e8m0_bits(code))), 0)


@device
def from_e8m0(codes):
    """Convert e8m0 codes to fp32."""
    bits = iselect(ieq(codes, isplat(0)), isplat(0x400000), shl(codes, 23))
    return bits_f32(iselect(ieq(codes, isplat(255)), isplat(0x7FC00000), bits))


@device
def _e8m0_bits(code):
    if code == 0:
        return 0x400000
    if code == 255:
        return 0x7FC00000
    return code << 23
