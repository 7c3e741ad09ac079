"""What takes a polynomial: e^x and tanh; and 64-bit arithmetic: bits of masks, probabilities."""

import math
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.late import VecT, f32, f64, i64, void
from cpu_fallback.lanes.memory import emit_load, emit_store
from cpu_fallback.lanes.simd import emit_fma, emit_rint
from cpu_fallback.lanes.vector import (
    DOUBLE,
    F32,
    I32,
    INT1,
    INT16,
    INT64,
    LANES,
    MASK,
    call,
    constant,
    number,
    op,
    spread,
)

F64 = VecT(DOUBLE, LANES)
_TERMS = 13
_EXP = ("0x1.a0d2cep-13", "0x1.6e879cp-10", "0x1.1112fap-7", "0x1.555506p-5", "0x1.555558p-3")
_LOG2_E = float.fromhex("0x1.715476p+0")


def _emit_polynomial(b: Any, x: Any, *coefficients: str) -> Any:
    """Emit a polynomial of fp32 in hexadecimal, by Horner's rule; the highest power is first."""
    value = constant(F32, float.fromhex(coefficients[0]))
    for coefficient in coefficients[1:]:
        value = emit_fma(b, value, x, constant(F32, float.fromhex(coefficient)))
    return value


@op(F32, F32)
def exp(b, x):
    """Return e^x within 2 units in the last place (3 on generic).

    x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by a polynomial of degree 6. Below -87.33, where
    the result would be subnormal, it is 0; above 88.72 infinity; NaN stays NaN.

    Source: the range reduction and coefficients of Cephes `expf`.
    """
    low, high = constant(F32, -87.33), constant(F32, 88.72)
    under, over = b.fcmp_ordered("<", x, low), b.fcmp_ordered(">", x, high)
    nan = b.fcmp_unordered("uno", x, x)
    inside = b.select(b.or_(b.or_(under, over), nan), constant(F32, 0.0), x)
    n = emit_rint(b, b.fmul(inside, constant(F32, _LOG2_E)))
    # ln 2 in two parts; n * the first is exact, for its last 9 bits are zero.
    r = emit_fma(b, b.fneg(n), constant(F32, 0.693359375), inside)
    r = emit_fma(b, b.fneg(n), constant(F32, float.fromhex("-0x1.bd0106p-13")), r)
    p = _emit_polynomial(b, r, *_EXP, "0x1p-1")
    y = b.fadd(emit_fma(b, p, b.fmul(r, r), r), constant(F32, 1.0))
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
    r = emit_fma(b, n, constant(F32, -0.693359375), x)
    r = emit_fma(b, n, constant(F32, float.fromhex("0x1.bd0106p-13")), r)
    p = _emit_polynomial(b, r, *_EXP, "0x1p-1")
    y = b.fadd(emit_fma(b, p, b.fmul(r, r), r), constant(F32, 1.0))
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
    p, q = _emit_polynomial(b, square, *odd), _emit_polynomial(b, square, *even)
    return b.fdiv(emit_fma(b, cube, p, x), q)


_TRUE_ZERO = ir.Constant(INT1, 0)  # whether the result for 0 is undefined: it is not
popcount = op(i64, i64)(lambda b, mask: call(b, "llvm.ctpop.i64", INT64, mask))
lowest_bit = op(i64, i64)(  # its index, 64 if no bit is set
    lambda b, mask: call(b, "llvm.cttz.i64", INT64, mask, _TRUE_ZERO)
)
highest_bit = op(i64, i64)(  # its index, -1 if no bit is set
    lambda b, mask: b.sub(number(63), call(b, "llvm.ctlz.i64", INT64, mask, _TRUE_ZERO))
)
mask_bits = op(i64, MASK)(lambda b, mask: b.zext(b.bitcast(mask, INT16), INT64))
read_f64 = op(f64, i64)(lambda b, address: emit_load(b, DOUBLE, address))
write_f64 = op(void, i64, f64)(lambda b, address, value: emit_store(b, value, address))
store_f64 = op(void, i64, F64)(lambda b, address, value: emit_store(b, value, address))
ones64 = op(F64)(lambda b: constant(F64, 1.0))


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    if not CURRENT.fma:
        return b.fadd(b.fmul(x, y), z)
    return call(b, f"llvm.fma.v{LANES}f64", F64.llvm, x, y, z)


def _emit_exp(b: Any, x: Any) -> Any:
    """Emit e^x for x <= 0, within 2 units in the last place; below -708 it is 0.

    x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its Taylor series, whose first term left out is
    below 2^-57.
    """
    under = b.fcmp_ordered("<", x, constant(F64, -708.0))
    x = b.select(under, constant(F64, 0.0), x)
    # Adding 1.5 * 2^52 leaves no room for a fraction, and n in the low bits.
    magic = constant(F64, 6755399441055744.0)
    shifted = _fma(b, x, constant(F64, 1 / math.log(2)), magic)
    n = b.fneg(b.fsub(shifted, magic))
    # ln 2 in two parts; n times the first is exact, for its last 32 bits are zero.
    r = _fma(b, n, constant(F64, float.fromhex("0x1.62e42feep-1")), x)
    r = _fma(b, n, constant(F64, float.fromhex("0x1.a39ef35793c76p-33")), r)
    y = constant(F64, 1 / math.factorial(_TERMS))
    for k in reversed(range(_TERMS)):
        y = _fma(b, y, r, constant(F64, 1 / math.factorial(k)))
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
