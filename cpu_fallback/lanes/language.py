"""What kernels are written in, imported as `v`: `simd`, `memory`, conversions and maths.

Narrow floats, 16 lanes at a time: bf16, fp16, fp8, fp4 codes to fp32, and fp32 to codes.

Codes are int32 lanes, as `memory.load_u16` and `load_u8` give them and `store_u16`, `store_u8`
take them. Every conversion equals `clocher_kernels.dtypes` bit by bit (a NaN's payload aside):
rounding is to nearest even, fp8 saturates, fp16 and bf16 overflow to infinity. `WIDEN` has the
loads of all kinds of number, for intrinsics that emit whole loops.

Below them e^x and tanh, and 64-bit arithmetic: bits of masks, probabilities.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from clocher_kernels.dtypes import E2M1_VALUES
from cpu_fallback.lanes import simd as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import VecT, device, f32, f64, i64, void
from cpu_fallback.lanes.memory import *
from cpu_fallback.lanes.simd import *

HALF = ir.VectorType(ir.HalfType(), LANES)
_U16, _U8 = ir.VectorType(INT16, LANES), ir.VectorType(INT8, LANES)
_PAIRS = ir.VectorType(INT8, LANES // 2)


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


def emit_half(b: Any, codes: Any, by_bits: bool = not CURRENT.fma) -> Any:
    """Emit fp32 of fp16, i16 [n], of 16 if by bits."""
    if not by_bits:
        count = codes.type.count
        half = b.bitcast(codes, ir.VectorType(ir.HalfType(), count))
        return b.fpext(half, ir.VectorType(FLOAT, count))
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
    """Emit fp32 of the upper bytes of fp16, i8 [n]."""
    shorts = ir.VectorType(INT16, codes.type.count)
    return emit_half(b, b.shl(b.zext(codes, shorts), constant(shorts, 8)))


def emit_e4m3_bits(b: Any, codes: Any) -> Any:
    """Emit fp16 of 2^-8 times e4m3, i8 [n], which makes subnormals come out right; NaN does not."""
    shorts = ir.VectorType(INT16, codes.type.count)
    return b.and_(b.shl(b.sext(codes, shorts), constant(shorts, 7)), constant(shorts, 0xBFFF))


def _e4m3(b: Any, codes: Any) -> Any:
    # Bit 14 is a copy of the sign. Only NaN, all ones, carries into it: then it must be set.
    wide = b.shl(b.sext(codes, _U16), constant(_U16, 7))
    carried = b.and_(b.add(wide, constant(_U16, 0x80)), constant(_U16, 0x4000))
    return b.fmul(emit_half(b, b.xor(wide, carried)), constant(F32, 256.0))


def _e8m0(b: Any, codes: Any) -> Any:
    """Emit 2^(code - 127) of finite codes."""
    bits = b.shl(b.zext(codes, I32.llvm), constant(I32, 23))
    least = constant(I32, 1 << 22)
    return b.bitcast(call(b, "llvm.umax.v16i32", I32.llvm, bits, least), F32.llvm)


def _i8(b: Any, codes: Any) -> Any:
    return b.sitofp(b.sext(codes, I32.llvm), F32.llvm)


def _nibbles(b: Any, packed: Any) -> Any:
    """Emit the 16 nibbles of 8 bytes, the low one of each first."""
    wide = b.zext(packed, ir.VectorType(INT16, LANES // 2))
    spread = b.or_(wide, b.shl(wide, constant(wide.type, 4)))
    pairs = b.and_(spread, constant(wide.type, 0x0F0F))
    return b.zext(b.bitcast(pairs, _U8), I32.llvm)


def _u4(b: Any, packed: Any) -> Any:
    return b.sitofp(_nibbles(b, packed), F32.llvm)


def _i4(b: Any, packed: Any) -> Any:
    return b.sitofp(b.sub(_nibbles(b, packed), constant(I32, 8)), F32.llvm)


def _e2m1(b: Any, packed: Any) -> Any:
    return emit_lookup(
        b, constant(F32, [float(value) for value in E2M1_VALUES]), _nibbles(b, packed)
    )


WIDEN = {
    "f32": Widen(32, F32.llvm, lambda b, values: values),
    "bf16": Widen(16, _U16, _bf16),
    "f16": Widen(16, _U16, emit_half),
    "e4m3": Widen(8, _U8, _e4m3),
    "e5m2": Widen(8, _U8, _e5m2),
    "e8m0": Widen(8, _U8, _e8m0),
    "i8": Widen(8, _U8, _i8),
    "u8": Widen(8, _U8, lambda b, codes: b.uitofp(codes, F32.llvm)),
    "u4": Widen(4, _PAIRS, _u4),
    "i4": Widen(4, _PAIRS, _i4),
    "e2m1": Widen(4, _PAIRS, _e2m1),
}
"""Kind of number -> how it is loaded; i4 is u4 minus 8, e8m0 is finite."""


def loads_of(kind: str) -> tuple[Any, Any]:
    """Return the intrinsics that load 16 numbers of a kind as fp32, and the first n of 16."""
    widen = WIDEN[kind]
    return op(F32, i64)(widen.emit), op(F32, i64, i64)(widen.emit_n)


from_bf16 = op(F32, I32)(lambda b, x: b.bitcast(b.shl(x, constant(I32, 16)), F32.llvm))
from_f16 = op(F32, I32)(lambda b, codes: emit_half(b, b.trunc(codes, _U16)))
from_f16_bits = op(F32, I32)(lambda b, codes: emit_half(b, b.trunc(codes, _U16), by_bits=True))
from_e4m3 = op(F32, I32)(lambda b, codes: _e4m3(b, b.trunc(codes, _U8)))
from_e5m2 = op(F32, I32)(lambda b, codes: _e5m2(b, b.trunc(codes, _U8)))


@device
def to_bf16(x):
    """Convert fp32 to bf16 codes."""
    bits = v.bits_i32(x)
    odd = v.iand(v.shr(bits, 16), v.isplat(1))
    rounded = v.shr(v.iadd(bits, v.iadd(odd, v.isplat(0x7FFF))), 16)
    quiet = v.ior(v.shr(bits, 16), v.isplat(0x40))
    return v.iselect(v.eq(x, x), rounded, quiet)


@device
def _narrow(x, shift, bias, largest, nan, sign):
    """Convert fp32 to codes with `shift` bits less, of an exponent smaller by `bias`.

    Magnitudes end at the bits `largest`; `sign` is the place of the sign.
    """
    # Integer comparisons of magnitudes order floats, infinity included; NaN is replaced at the end.
    bits, least = v.bits_i32(v.absolute(x)), v.isplat((bias + 1) << 23)
    bits = v.iselect(v.ilt(v.isplat(largest), bits), v.isplat(largest), bits)
    odd = v.iand(v.shr(bits, shift), v.isplat(1))
    rounded = v.iadd(bits, v.iadd(odd, v.isplat((1 << (shift - 1)) - 1)))
    normal = v.isub(v.shr(rounded, shift), v.isplat(bias << (23 - shift)))
    magic = v.isplat((bias + 1 + shift) << 23)  # leaves a subnormal code in the low bits
    subnormal = v.isub(v.bits_i32(v.add(v.bits_f32(bits), v.bits_f32(magic))), magic)
    code = v.iselect(v.ilt(bits, least), subnormal, normal)
    code = v.iselect(v.eq(x, x), code, v.isplat(nan))
    return v.ior(code, v.shl(v.shr(v.bits_i32(x), 31), sign))


# Convert fp32 to fp8 codes, e4m3 (fn) and e5m2, and to fp16 codes without an instruction for it.
to_e4m3 = device(lambda x: _narrow(x, 20, 120, 0x43E00000, 0x7F, 7))
to_e5m2 = device(lambda x: _narrow(x, 21, 112, 0x47600000, 0x7F, 7))
to_f16_bits = device(lambda x: _narrow(x, 13, 112, 143 << 23, 0x7E00, 15))
_to_f16 = op(I32, F32)(lambda b, x: b.zext(b.bitcast(b.fptrunc(x, HALF), _U16), I32.llvm))
to_f16 = _to_f16 if CURRENT.fma else to_f16_bits  # Convert fp32 to fp16 codes


F64 = VecT(DOUBLE, LANES)
_TERMS = 13
_EXP = ("0x1.a0d2cep-13", "0x1.6e879cp-10", "0x1.1112fap-7", "0x1.555506p-5", "0x1.555558p-3")
_LOG2_E = float.fromhex("0x1.715476p+0")


def emit_polynomial(b: Any, x: Any, *coefficients: str) -> Any:
    """Emit a polynomial of fp32 in hexadecimal, by Horner's rule; the highest power is first."""
    value = constant(F32, float.fromhex(coefficients[0]))
    for coefficient in coefficients[1:]:
        value = emit_fma(b, value, x, constant(F32, float.fromhex(coefficient)))
    return value


def _emit_fraction(b: Any, x: Any, n: Any) -> Any:
    """Emit e^r of x = n ln 2 + r by a polynomial of degree 6."""
    # ln 2 in two parts; n * the first is exact, for its last 9 bits are zero.
    r = emit_fma(b, n, constant(F32, -0.693359375), x)
    r = emit_fma(b, n, constant(F32, float.fromhex("0x1.bd0106p-13")), r)
    p = emit_polynomial(b, r, *_EXP, "0x1p-1")
    return b.fadd(emit_fma(b, p, b.fmul(r, r), r), constant(F32, 1.0))


@op(F32, F32)
def exp(b, x):
    """Return e^x within 2 units in the last place (3 on generic).

    x = n ln 2 + r with |r| <= ln 2 / 2. Below -87.33, where the result would be subnormal, it is 0;
    above 88.72 infinity; NaN stays NaN.

    Source: the range reduction and coefficients of Cephes `expf`.
    """
    low, high = constant(F32, -87.33), constant(F32, 88.72)
    under, over = b.fcmp_ordered("<", x, low), b.fcmp_ordered(">", x, high)
    nan = b.fcmp_unordered("uno", x, x)
    inside = b.select(b.or_(b.or_(under, over), nan), constant(F32, 0.0), x)
    n = emit_rint(b, b.fmul(inside, constant(F32, _LOG2_E)))
    y = _emit_fraction(b, inside, n)
    # Scaled in two halves: n may be 128, and 2^128 is not a number.
    whole = b.fptosi(n, I32.llvm)
    half = b.ashr(whole, constant(I32, 1))
    for part in (half, b.sub(whole, half)):
        power = b.shl(b.add(part, constant(I32, 127)), constant(I32, 23))
        y = b.fmul(y, b.bitcast(power, F32.llvm))
    y = b.select(under, constant(F32, 0.0), y)
    y = b.select(over, constant(F32, float("inf")), y)
    return b.select(nan, x, y)


@op(F32, F32)
def exp_falling(b, x):
    """Return e^x of x <= 0 within 2 units in the last place; 0 below -87.33; NaN stays NaN.

    The whole part n of x / ln 2 is in the low bits of n + 1.5 * 2^23, which a shift turns into the
    exponent of 2^n.
    """
    under = b.fcmp_ordered("<", x, constant(F32, -87.33))
    magic = constant(F32, 12582912.0)
    shifted = emit_fma(b, x, constant(F32, _LOG2_E), magic)
    n = b.fsub(shifted, magic)
    y = _emit_fraction(b, x, n)
    power = b.add(b.shl(b.bitcast(shifted, I32.llvm), constant(I32, 23)), constant(I32, 127 << 23))
    return b.select(under, constant(F32, 0.0), b.fmul(y, b.bitcast(power, F32.llvm)))


_ONE = 8.0177335739 if CURRENT.fma else 7.9073896408  # Where the quotient of `tanh` becomes 1


@op(F32, F32)
def tanh(b, x):
    """Return tanh x, clamped to 1 beyond 8.02, within 5.2 units in the last place (6.2 on generic).

    That is a relative error below 4.3e-7. Zeros keep their signs, subnormal numbers are themselves,
    and NaN stays NaN. It is one quotient of polynomials, odd by even, at less than half the cost of
    what is made of an exponential function.

    Source: the coefficients of Eigen's `ptanh_float`, by rminimax (Filip 2018).
    """
    limit = constant(F32, _ONE)
    x = b.select(b.fcmp_ordered(">", x, limit), limit, x)
    x = b.select(b.fcmp_ordered("<", x, b.fneg(limit)), b.fneg(limit), x)
    square = b.fmul(x, x)
    cube = b.fmul(square, x)
    odd = ("0x1.df2a3cp-27", "0x1.60c7b8p-16", "0x1.cd78fep-9", "0x1.1279ecp-3")
    even = ("0x1.ae5800p-21", "0x1.5cdb2cp-12", "0x1.a988c0p-6", "0x1.de9244p-2", "0x1p0")
    p, q = emit_polynomial(b, square, *odd), emit_polynomial(b, square, *even)
    return b.fdiv(emit_fma(b, cube, p, x), q)


_TRUE_ZERO = ir.Constant(INT1, 0)  # whether the result for 0 is undefined: it is not
popcount = op(i64, i64)(lambda b, mask: b.ctpop(mask))
# The index of the lowest bit, 64 if none is set, and of the highest, -1 if none is.
lowest_bit = op(i64, i64)(lambda b, mask: b.cttz(mask, _TRUE_ZERO))
highest_bit = op(i64, i64)(lambda b, mask: b.sub(number(63), b.ctlz(mask, _TRUE_ZERO)))
mask_bits = op(i64, MASK)(lambda b, mask: b.zext(b.bitcast(mask, INT16), INT64))
mask_of = op(MASK, i64)(lambda b, bits: b.bitcast(b.trunc(bits, INT16), MASK.llvm))
read_f64 = op(f64, i64)(lambda b, address: emit_load(b, DOUBLE, address))
write_f64 = op(void, i64, f64)(lambda b, address, value: emit_store(b, value, address))
store_f64 = op(void, i64, F64)(lambda b, address, value: emit_store(b, value, address))
ones64 = op(F64)(lambda b: constant(F64, 1.0))


def _emit_exp(b: Any, x: Any) -> Any:
    """Emit e^x for x <= 0, within 2 units in the last place; below -708 it is 0.

    x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its Taylor series, whose first term left out is
    below 2^-57.
    """
    under = b.fcmp_ordered("<", x, constant(F64, -708.0))
    x = b.select(under, constant(F64, 0.0), x)
    # Adding 1.5 * 2^52 leaves no room for a fraction, and n in the low bits.
    magic = constant(F64, 6755399441055744.0)
    shifted = emit_fma(b, x, constant(F64, 1 / math.log(2)), magic)
    n = b.fneg(b.fsub(shifted, magic))
    # ln 2 in two parts; n times the first is exact, for its last 32 bits are zero.
    r = emit_fma(b, n, constant(F64, float.fromhex("0x1.62e42feep-1")), x)
    r = emit_fma(b, n, constant(F64, float.fromhex("0x1.a39ef35793c76p-33")), r)
    y = constant(F64, 1 / math.factorial(_TERMS))
    for k in reversed(range(_TERMS)):
        y = emit_fma(b, y, r, constant(F64, 1 / math.factorial(k)))
    wide = ir.VectorType(INT64, LANES)
    biased = b.add(b.bitcast(shifted, wide), constant(wide, 1023))
    power = b.bitcast(b.shl(biased, constant(wide, 52)), F64.llvm)
    return b.select(under, constant(F64, 0.0), b.fmul(y, power))


@op(F64, F32, f32, f32)
def boltzmann(b, x, top, temperature):
    """Return e^((x - top) / temperature) in fp64; x must not be above top."""
    below = b.fsub(b.fpext(x, F64.llvm), spread(b, F64, b.fpext(top, DOUBLE)))
    return _emit_exp(b, b.fdiv(below, spread(b, F64, b.fpext(temperature, DOUBLE))))


@op(f64, i64, i64)
def uniform(b, seed, draw):
    """Return the draw-th number in [0, 1) of a seed, as `clocher_kernels.ops.sampling.uniform`."""
    z = b.add(seed, b.mul(b.add(draw, number(1)), number(0x9E3779B97F4A7C15)))
    z = b.mul(b.xor(z, b.lshr(z, number(30))), number(0xBF58476D1CE4E5B9))
    z = b.mul(b.xor(z, b.lshr(z, number(27))), number(0x94D049BB133111EB))
    z = b.xor(z, b.lshr(z, number(31)))
    return b.fmul(b.uitofp(b.lshr(z, number(11)), DOUBLE), ir.Constant(DOUBLE, 2.0**-53))
