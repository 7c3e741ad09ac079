"""Operations that few kernels need: bits of 64-bit masks."""

from llvmlite import ir

from cpu_fallback.simd import call, i64, op

_I64, _FALSE = ir.IntType(64), ir.Constant(ir.IntType(1), 0)


@op(i64, i64)
def popcount(b, mask):
    """Return how many bits are set."""
    return call(b, "llvm.ctpop.i64", _I64, mask)


@op(i64, i64)
def lowest_bit(b, mask):
    """Return the index of the lowest bit that is set, 64 if none is."""
    return call(b, "llvm.cttz.i64", _I64, mask, _FALSE)


@op(i64, i64)
def highest_bit(b, mask):
    """Return the index of the highest bit that is set, -1 if none is."""
    return b.sub(ir.Constant(_I64, 63), call(b, "llvm.ctlz.i64", _I64, mask, _FALSE))
