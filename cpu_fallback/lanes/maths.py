"""64-bit arithmetic that few kernels need: bits of masks, fp64 probabilities, random numbers."""

import math
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.late import VecT, f32, f64, i64, void
from cpu_fallback.lanes.memory import emit_load, emit_store
from cpu_fallback.lanes.vector import F32, LANES, MASK, call, op, pick

_I1, _I16, _I64, _DOUBLE = ir.IntType(1), ir.IntType(16), ir.IntType(64), ir.DoubleType()

F64 = VecT(_DOUBLE, LANES)

_TERMS = 13


@op(i64, i64)
def popcount(b, mask):
    """Return how many bits are set."""
    return call(b, "llvm.ctpop.i64", _I64, mask)


@op(i64, i64)
def lowest_bit(b, mask):
    """Return the index of the lowest bit that is set, 64 if none is."""
    return call(b, "llvm.cttz.i64", _I64, mask, ir.Constant(_I1, 0))


@op(i64, i64)
def highest_bit(b, mask):
    """Return the index of the highest bit that is set, -1 if none is."""
    zeros = call(b, "llvm.ctlz.i64", _I64, mask, ir.Constant(_I1, 0))
    return b.sub(ir.Constant(_I64, 63), zeros)


@op(i64, MASK)
def mask_bits(b, mask):
    """Return the lanes of a mask as bits."""
    return b.zext(b.bitcast(mask, _I16), _I64)


@op(f64, i64)
def read_f64(b, address):
    """Return an fp64."""
    return emit_load(b, _DOUBLE, address)


@op(void, i64, f64)
def write_f64(b, address, value):
    """Store an fp64."""
    emit_store(b, value, address)


@op(void, i64, F64)
def store_f64(b, address, value):
    """Store 16 fp64."""
    emit_store(b, value, address)


@op(F64)
def ones64(b):
    """Return 16 fp64 that are 1."""
    return _many(1.0)


def _many(value: float) -> ir.Constant:
    return ir.Constant(F64.llvm, [value] * LANES)


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    if not CURRENT.fma:
        return b.fadd(b.fmul(x, y), z)
    return call(b, f"llvm.fma.v{LANES}f64", F64.llvm, x, y, z)


def _emit_exp(b: Any, x: Any) -> Any:
    """Emit e^x for x <= 0, within 2 units in the last place; below -708 it is 0.

    x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its Taylor series, whose first term left out is
    below 2^-57.
    """
    under = b.fcmp_ordered("<", x, _many(-708.0))
    x = b.select(under, _many(0.0), x)
    # Adding 1.5 * 2^52 leaves no room for a fraction, and n in the low bits.
    magic = _many(6755399441055744.0)
    shifted = _fma(b, x, _many(1 / math.log(2)), magic)
    n = b.fneg(b.fsub(shifted, magic))
    # ln 2 in two parts; n times the first is exact, for its last 32 bits are zero.
    r = _fma(b, n, _many(float.fromhex("0x1.62e42feep-1")), x)
    r = _fma(b, n, _many(float.fromhex("0x1.a39ef35793c76p-33")), r)
    y = _many(1 / math.factorial(_TERMS))
    for k in reversed(range(_TERMS)):
        y = _fma(b, y, r, _many(1 / math.factorial(k)))
    wide = ir.VectorType(_I64, LANES)
    biased = b.add(b.bitcast(shifted, wide), ir.Constant(wide, [1023] * LANES))
    power = b.shl(biased, ir.Constant(wide, [52] * LANES))
    return b.select(under, _many(0.0), b.fmul(y, b.bitcast(power, F64.llvm)))


def _spread(b: Any, value: Any) -> Any:
    undefined = ir.Constant(F64.llvm, ir.Undefined)
    first = b.insert_element(undefined, b.fpext(value, _DOUBLE), ir.Constant(ir.IntType(32), 0))
    return pick(b, first, [0] * LANES)


@op(F64, F32, f32, f32)
def boltzmann(b, x, top, temperature):
    """Return e^((x - top) / temperature) in fp64; x must not be above top."""
    below = b.fsub(b.fpext(x, F64.llvm), _spread(b, top))
    return _emit_exp(b, b.fdiv(below, _spread(b, temperature)))


@op(f64, i64, i64)
def uniform(b, seed, draw):
    """Return the draw-th number in [0, 1) of a seed, as `clocher_kernels.ops.sampling.uniform`."""

    def constant(value: int) -> ir.Constant:
        return ir.Constant(_I64, value)

    z = b.add(seed, b.mul(b.add(draw, constant(1)), constant(0x9E3779B97F4A7C15)))
    z = b.mul(b.xor(z, b.lshr(z, constant(30))), constant(0xBF58476D1CE4E5B9))
    z = b.mul(b.xor(z, b.lshr(z, constant(27))), constant(0x94D049BB133111EB))
    z = b.xor(z, b.lshr(z, constant(31)))
    return b.fmul(b.uitofp(b.lshr(z, constant(11)), _DOUBLE), ir.Constant(_DOUBLE, 2.0**-53))
