"""Functions without a part that grows: e^x of x <= 0, and tanh."""

from typing import Any

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.simd import emit_fma
from cpu_fallback.lanes.vector import F32, I32, constant, op


def _emit_polynomial(b: Any, x: Any, *coefficients: str) -> Any:
    """Emit a polynomial of fp32 in hexadecimal, by Horner's rule; the highest power is first."""
    value = constant(F32, float.fromhex(coefficients[0]))
    for coefficient in coefficients[1:]:
        value = emit_fma(b, value, x, constant(F32, float.fromhex(coefficient)))
    return value


def _emit_exp_falling(b: Any, x: Any) -> Any:
    under = b.fcmp_ordered("<", x, constant(F32, -87.33))
    magic = constant(F32, 12582912.0)
    shifted = emit_fma(b, x, constant(F32, float.fromhex("0x1.715476p+0")), magic)
    n = b.fsub(shifted, magic)
    r = emit_fma(b, n, constant(F32, -0.693359375), x)
    r = emit_fma(b, n, constant(F32, float.fromhex("0x1.bd0106p-13")), r)
    p = _emit_polynomial(
        b,
        r,
        "0x1.a0d2cep-13",
        "0x1.6e879cp-10",
        "0x1.1112fap-7",
        "0x1.555506p-5",
        "0x1.555558p-3",
        "0x1p-1",
    )
    y = b.fadd(emit_fma(b, p, b.fmul(r, r), r), constant(F32, 1.0))
    power = b.add(b.shl(b.bitcast(shifted, I32.llvm), constant(I32, 23)), constant(I32, 127 << 23))
    return b.select(under, constant(F32, 0.0), b.fmul(y, b.bitcast(power, F32.llvm)))


@op(F32, F32)
def exp_falling(b, x):
    """Return e^x of x <= 0 within 2 units in the last place; 0 below -87.33; NaN stays NaN.

    The whole part n of x / ln 2 is in the low bits of n + 1.5 * 2^23, which a shift turns into the
    exponent of 2^n.

    Source: the range reduction and coefficients of Cephes `expf`.
    """
    return _emit_exp_falling(b, x)


_ONE = 8.0177335739 if CURRENT.fma else 7.9073896408
"""Where the quotient of `tanh` becomes 1."""


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
    p = _emit_polynomial(
        b, square, "0x1.df2a3cp-27", "0x1.60c7b8p-16", "0x1.cd78fep-9", "0x1.1279ecp-3"
    )
    q = _emit_polynomial(
        b, square, "0x1.ae5800p-21", "0x1.5cdb2cp-12", "0x1.a988c0p-6", "0x1.de9244p-2", "0x1p0"
    )
    return b.fdiv(emit_fma(b, cube, p, x), q)
