"""Narrow floats, 16 lanes at a time: bf16, fp16, fp8, fp4 codes to fp32, and fp32 to codes.

Codes are int32 lanes, as `memory.load_u16` and `load_u8` give them and `store_u16`, `store_u8`
take them. Every conversion equals `clocher_kernels.dtypes` bit by bit (a NaN's payload aside):
rounding is to nearest even, fp8 saturates, fp16 and bf16 overflow to infinity. `WIDEN` has the
loads of all kinds of number, for intrinsics that emit whole loops.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from clocher_kernels.dtypes import E2M1_VALUES
from cpu_fallback.lanes import simd as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.late import i64
from cpu_fallback.lanes.memory import emit_load, emit_load_n
from cpu_fallback.lanes.vector import F32, I32, INT8, INT16, LANES, call, constant, number, op

HALF = ir.VectorType(ir.HalfType(), LANES)
_U16, _U8, _PAIRS = (
    ir.VectorType(INT16, LANES),
    ir.VectorType(INT8, LANES),
    ir.VectorType(INT8, LANES // 2),
)


@dataclass(frozen=True, slots=True)
class Widen:
    """How one kind of number is loaded as fp32."""

    bits: int  # of one number
    element: ir.VectorType  # LLVM type of what is loaded: 16 numbers
    convert: Callable[[Any, Any], Any]  # emits fp32 lanes of what was loaded

    @property
    def nbytes(self) -> int:
        """Bytes of 16 numbers."""
        return self.bits * LANES // 8

    def emit(self, b: Any, address: Any) -> Any:
        """Emit a load of 16 numbers."""
        return self.convert(b, emit_load(b, self.element, address))

    def emit_n(self, b: Any, address: Any, count: Any) -> Any:
        """Emit a load of the first `count` of 16 numbers; the other lanes are any finite value."""
        if self.bits == 4:
            count = b.lshr(b.add(count, number(1)), number(1))
        return self.convert(b, emit_load_n(b, self.element, address, count))


def _bf16(b: Any, codes: Any) -> Any:
    return b.bitcast(b.shl(b.zext(codes, I32.llvm), constant(I32, 16)), F32.llvm)


def emit_half(b: Any, codes: Any, by_bits: bool = not CURRENT.f16c) -> Any:
    """Emit fp32 of fp16, i16 [16]."""
    if not by_bits:
        return b.fpext(b.bitcast(codes, HALF), F32.llvm)
    wide = b.zext(codes, I32.llvm)
    magnitude = b.shl(b.and_(wide, constant(I32, 0x7FFF)), constant(I32, 13))
    # The exponent is 112 too small; multiplying mends that, for subnormals too.
    value = b.fmul(b.bitcast(magnitude, F32.llvm), constant(F32, 2.0**112))
    top = b.icmp_unsigned(">=", magnitude, constant(I32, 0x7C00 << 13))
    special = b.or_(magnitude, constant(I32, 0x7F800000))
    bits = b.select(top, special, b.bitcast(value, I32.llvm))
    sign = b.shl(b.and_(wide, constant(I32, 0x8000)), constant(I32, 16))
    return b.bitcast(b.or_(bits, sign), F32.llvm)


def _e5m2(b: Any, codes: Any) -> Any:
    return emit_half(b, b.shl(b.zext(codes, _U16), constant(_U16, 8)))


def _e4m3(b: Any, codes: Any) -> Any:
    """Emit the code as an fp16 of 2^-8 times its value, which makes subnormals come out right."""
    wide = b.sext(codes, _U16)
    bits = b.and_(b.shl(wide, constant(_U16, 7)), constant(_U16, 0xBFFF))
    magnitude = b.and_(wide, constant(_U16, 0x7F))
    nan = b.icmp_signed("==", magnitude, constant(_U16, 0x7F))
    bits = b.select(nan, constant(_U16, 0x7E00), bits)
    return b.fmul(emit_half(b, bits), constant(F32, 256.0))


def _e8m0(b: Any, codes: Any) -> Any:
    """Emit 2^(code - 127) of finite codes."""
    bits = b.shl(b.zext(codes, I32.llvm), constant(I32, 23))
    least = constant(I32, 1 << 22)
    return b.bitcast(call(b, "llvm.umax.v16i32", I32.llvm, bits, least), F32.llvm)


def _i8(b: Any, codes: Any) -> Any:
    return b.sitofp(b.sext(codes, I32.llvm), F32.llvm)


def _i4(b: Any, packed: Any) -> Any:
    """Emit the 16 nibbles of 8 bytes, the low one of each first, minus 8."""
    wide = b.zext(packed, ir.VectorType(INT16, LANES // 2))
    spread = b.or_(wide, b.shl(wide, constant(wide.type, 4)))
    pairs = b.and_(spread, constant(wide.type, 0x0F0F))
    codes = b.zext(b.bitcast(pairs, _U8), I32.llvm)
    return b.sitofp(b.sub(codes, constant(I32, 8)), F32.llvm)


WIDEN = {
    "f32": Widen(32, F32.llvm, lambda b, values: values),
    "bf16": Widen(16, _U16, _bf16),
    "f16": Widen(16, _U16, emit_half),
    "e4m3": Widen(8, _U8, _e4m3),
    "e5m2": Widen(8, _U8, _e5m2),
    "e8m0": Widen(8, _U8, _e8m0),
    "i8": Widen(8, _U8, _i8),
    "i4": Widen(4, _PAIRS, _i4),
}
"""Kind of number -> how it is loaded; i4 is a code of 0 .. 15 minus 8, e8m0 is finite."""


def loads_of(kind: str) -> tuple[Any, Any]:
    """Return the intrinsics that load 16 numbers of a kind as fp32, and the first n of 16."""
    widen = WIDEN[kind]
    return op(F32, i64)(widen.emit), op(F32, i64, i64)(widen.emit_n)


from_bf16 = op(F32, I32)(lambda b, x: b.bitcast(b.shl(x, constant(I32, 16)), F32.llvm))
from_f16 = op(F32, I32)(lambda b, codes: emit_half(b, b.trunc(codes, _U16)))
from_f16_bits = op(F32, I32)(lambda b, codes: emit_half(b, b.trunc(codes, _U16), by_bits=True))
from_e4m3 = op(F32, I32)(lambda b, codes: _e4m3(b, b.trunc(codes, _U8)))
from_e5m2 = op(F32, I32)(lambda b, codes: _e5m2(b, b.trunc(codes, _U8)))
e2m1_table = op(F32)(lambda b: constant(F32, [float(value) for value in E2M1_VALUES]))  # of fp4


@device
def to_bf16(x):
    """Convert fp32 to bf16 codes."""
    bits = v.bits_i32(x)
    odd = v.iand(v.shr(bits, 16), v.isplat(1))
    rounded = v.shr(v.iadd(bits, v.iadd(odd, v.isplat(0x7FFF))), 16)
    quiet = v.ior(v.shr(bits, 16), v.isplat(0x40))
    return v.iselect(v.eq(x, x), rounded, quiet)


@op(I32, F32)
def _f32_to_half(b, x):
    return b.zext(b.bitcast(b.fptrunc(x, HALF), _U16), I32.llvm)


@device
def to_f16_bits(x):
    """Convert fp32 to fp16 codes without an instruction for it."""
    sign = v.shl(v.shr(v.bits_i32(x), 31), 15)
    magnitude = v.bits_i32(v.absolute(x))
    odd = v.iand(v.shr(magnitude, 13), v.isplat(1))
    rebias = v.isplat(((15 - 127) << 23) + 0xFFF)
    normal = v.shr(v.iadd(v.iadd(magnitude, rebias), odd), 13)
    magic = v.isplat(126 << 23)
    subnormal = v.isub(v.bits_i32(v.add(v.bits_f32(magnitude), v.bits_f32(magic))), magic)
    value = v.iselect(v.ilt(magnitude, v.isplat(113 << 23)), subnormal, normal)
    value = v.iselect(v.ilt(magnitude, v.isplat(143 << 23)), value, v.isplat(0x7C00))
    value = v.iselect(v.ilt(v.isplat(255 << 23), magnitude), v.isplat(0x7E00), value)
    return v.ior(value, sign)


to_f16 = _f32_to_half if CURRENT.f16c else to_f16_bits  # Convert fp32 to fp16 codes


@device
def _to_fp8(x, shift, rebias, smallest_normal, magic, largest):
    # Integer comparisons of magnitudes order floats, infinity included; NaN is replaced at the end.
    bits = v.bits_i32(v.absolute(x))
    bits = v.iselect(v.ilt(v.isplat(largest), bits), v.isplat(largest), bits)
    odd = v.iand(v.shr(bits, shift), v.isplat(1))
    rounded = v.iadd(bits, v.iadd(odd, v.isplat((1 << (shift - 1)) - 1)))
    normal = v.isub(v.shr(rounded, shift), v.isplat(rebias))
    shifted = v.add(v.bits_f32(bits), v.bits_f32(v.isplat(magic)))
    subnormal = v.isub(v.bits_i32(shifted), v.isplat(magic))
    code = v.iselect(v.ilt(bits, v.isplat(smallest_normal)), subnormal, normal)
    code = v.iselect(v.eq(x, x), code, v.isplat(0x7F))
    return v.ior(code, v.shl(v.shr(v.bits_i32(x), 31), 7))


# Convert fp32 to fp8 e4m3 (fn) codes.
to_e4m3 = device(lambda x: _to_fp8(x, 20, 120 << 3, 121 << 23, 141 << 23, 0x43E00000))
# Convert fp32 to fp8 e5m2 codes.
to_e5m2 = device(lambda x: _to_fp8(x, 21, 112 << 2, 113 << 23, 134 << 23, 0x47600000))
# Convert one bf16 code to fp32.
bf16_scalar = device(lambda code: v.lane(from_bf16(v.isplat(code)), 0))
# Convert one fp16 code to fp32.
f16_scalar = device(lambda code: v.lane(from_f16(v.isplat(code)), 0))


@device
def from_e8m0(codes):
    """Convert e8m0 codes to fp32: 2^(code - 127), NaN for 255."""
    bits = v.iselect(v.ieq(codes, v.isplat(0)), v.isplat(0x400000), v.shl(codes, 23))
    return v.bits_f32(v.iselect(v.ieq(codes, v.isplat(255)), v.isplat(0x7FC00000), bits))


@device
def e8m0_scalar(code):
    """Convert one e8m0 code to fp32."""
    if code == 0:
        bits = 0x400000
    elif code == 255:
        bits = 0x7FC00000
    else:
        bits = code << 23
    return v.lane(v.bits_f32(v.isplat(bits)), 0)
