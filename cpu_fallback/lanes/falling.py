"""Powers of e that do not grow: e^x of x <= 0, and tanh, which is made of one."""

from typing import Any

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


@op(F32, F32)
def tanh(b, x):
    """Return tanh x within 2 units in the last place (3 on generic); NaN stays NaN.

    Of |x| < 0.625 it is an odd polynomial, beyond 1 - 2 e / (1 + e) with e = e^(-2 |x|).

    Source: Cephes `tanhf`.
    """
    bits, sign = b.bitcast(x, I32.llvm), constant(I32, -(1 << 31))
    size = b.bitcast(b.and_(bits, constant(I32, 0x7FFFFFFF)), F32.llvm)
    square = b.fmul(x, x)
    p = _emit_polynomial(
        b,
        square,
        "-0x1.75e1d4p-8",
        "0x1.52269cp-6",
        "-0x1.b83c5ap-5",
        "0x1.110726p-3",
        "-0x1.555532p-2",
    )
    near = emit_fma(b, b.fmul(p, square), x, x)
    e = _emit_exp_falling(b, b.fmul(size, constant(F32, -2.0)))
    part = b.fdiv(b.fadd(e, e), b.fadd(e, constant(F32, 1.0)))
    far = b.bitcast(b.fsub(constant(F32, 1.0), part), I32.llvm)
    far = b.bitcast(b.or_(far, b.and_(bits, sign)), F32.llvm)
    return b.select(b.fcmp_ordered("<", size, constant(F32, 0.625)), near, far)
