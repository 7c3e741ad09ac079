"""Operations on 16 lanes of fp32 or int32, for Numba kernels.

Kernels call these like functions, and each compiles to one instruction or a few. `memory` has the
loads and stores, scalar and vector; `narrow` the small floats; `sync` the atomics.

Conventions:
    F32, I32, MASK  16 lanes of fp32, int32, bool. Every ISA sees the same 16 lanes, so the order
        of every fp32 sum is the same on all of them.
    names  fp32 operations are plain (`add`, `mul`), int32 ones start with i (`iadd`), conversions
        end in the type they return.
    no fast-math  every fp32 operation rounds once, in the order written. `fma` is fused except on
        the generic ISA.
    scalars  Python floats are fp64 in Numba: write np.float32(0.5), never 0.5. Keep integers
        int64: int64 with uint64 gives fp64.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes import neon
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.late import cgutils, f32, i64
from cpu_fallback.lanes.late import i32 as i32
from cpu_fallback.lanes.late import void as void
from cpu_fallback.lanes.vector import BYTES as BYTES
from cpu_fallback.lanes.vector import F32, I32, LANES, MASK, call, constant, op, pick, spread

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLOAT = ir.FloatType()


def halve(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Emit the fixed tree 16 -> 8 -> 4 -> 2 -> 1: lane i with lane i + half."""
    n = vector.type.count
    while n > 1:
        n //= 2
        low, high = (
            pick(builder, vector, list(range(n))),
            pick(builder, vector, list(range(n, 2 * n))),
        )
        vector = combine(low, high)
    return builder.extract_element(vector, ir.Constant(_I32, 0))


@op(F32, f32)
def splat(b, value):
    """Return fp32 lanes that all hold a value."""
    return spread(b, F32, value)


@op(F32)
def zero(b):
    """Return fp32 lanes of zero."""
    return constant(F32, 0.0)


@op(I32, i64)
def isplat(b, value):
    """Return int32 lanes that all hold the low 32 bits of a value."""
    return spread(b, I32, b.trunc(value, _I32))


@op(I32)
def izero(b):
    """Return int32 lanes of zero."""
    return constant(I32, 0)


@op(I32)
def iota(b):
    """Return 0, 1, .., 15."""
    return constant(I32, list(range(LANES)))


@op(F32, F32, F32)
def add(b, x, y):
    """Return x + y."""
    return b.fadd(x, y)


@op(F32, F32, F32)
def sub(b, x, y):
    """Return x - y."""
    return b.fsub(x, y)


@op(F32, F32, F32)
def mul(b, x, y):
    """Return x * y."""
    return b.fmul(x, y)


@op(F32, F32, F32)
def div(b, x, y):
    """Return x / y."""
    return b.fdiv(x, y)


def emit_fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """Emit x * y + z: one rounding, or two on the generic ISA."""
    if not CURRENT.fma:
        return b.fadd(b.fmul(x, y), z)
    suffix = "f32" if x.type == _FLOAT else f"v{x.type.count}f32"
    return call(b, f"llvm.fma.{suffix}", x.type, x, y, z)


@op(F32, F32, F32, F32)
def fma(b, x, y, z):
    """Return x * y + z."""
    return emit_fma(b, x, y, z)


@op(f32, f32, f32, f32)
def fma1(b, x, y, z):
    """Return x * y + z of scalars, rounded like a lane of `fma`."""
    return emit_fma(b, x, y, z)


@op(F32, F32)
def neg(b, x):
    """Return -x."""
    return b.fneg(x)


@op(F32, F32)
def absolute(b, x):
    """Return |x|."""
    bits = b.and_(b.bitcast(x, I32.llvm), constant(I32, 0x7FFFFFFF))
    return b.bitcast(bits, F32.llvm)


@op(F32, F32)
def sqrt(b, x):
    """Return the square root."""
    return call(b, "llvm.sqrt.v16f32", F32.llvm, x)


@op(F32, F32, F32)
def minimum(b, x, y):
    """Return x if x < y, else y: y where one is NaN."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


@op(F32, F32, F32)
def maximum(b, x, y):
    """Return x if x > y, else y: y where one is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@op(f32, F32)
def hsum(b, x):
    """Return the sum of the lanes, by the fixed tree 16 -> 8 -> 4 -> 2 -> 1."""
    return halve(b, x, b.fadd)


@op(f32, F32)
def hmax(b, x):
    """Return the largest lane."""
    return halve(b, x, lambda low, high: b.select(b.fcmp_ordered(">", low, high), low, high))


@op(f32, F32, i64)
def lane(b, x, index):
    """Return one lane."""
    return b.extract_element(x, b.trunc(index, _I32))


@op(MASK, F32, F32)
def lt(b, x, y):
    """Return x < y, false for NaN."""
    return b.fcmp_ordered("<", x, y)


@op(MASK, F32, F32)
def le(b, x, y):
    """Return x <= y, false for NaN."""
    return b.fcmp_ordered("<=", x, y)


@op(MASK, F32, F32)
def eq(b, x, y):
    """Return x == y, false for NaN."""
    return b.fcmp_ordered("==", x, y)


@op(MASK, I32, I32)
def ilt(b, x, y):
    """Return x < y, signed."""
    return b.icmp_signed("<", x, y)


@op(MASK, I32, I32)
def ieq(b, x, y):
    """Return x == y."""
    return b.icmp_signed("==", x, y)


@op(MASK, i64)
def first(b, count):
    """Return a mask of the first `count` lanes."""
    lanes = ir.Constant(ir.VectorType(_I64, LANES), list(range(LANES)))
    wide = ir.VectorType(_I64, LANES)
    undefined = ir.Constant(wide, ir.Undefined)
    one = b.insert_element(undefined, count, ir.Constant(_I32, 0))
    return b.icmp_signed("<", lanes, pick(b, one, [0] * LANES))


@op(F32, MASK, F32, F32)
def select(b, mask, x, y):
    """Return x where the mask is set, else y."""
    return b.select(mask, x, y)


@op(I32, MASK, I32, I32)
def iselect(b, mask, x, y):
    """Return x where the mask is set, else y."""
    return b.select(mask, x, y)


@op(I32, I32, I32)
def iadd(b, x, y):
    """Return x + y, wrapping."""
    return b.add(x, y)


@op(I32, I32, I32)
def isub(b, x, y):
    """Return x - y, wrapping."""
    return b.sub(x, y)


@op(I32, I32, I32)
def imul(b, x, y):
    """Return x * y, wrapping."""
    return b.mul(x, y)


@op(I32, I32, I32)
def iand(b, x, y):
    """Return x & y."""
    return b.and_(x, y)


@op(I32, I32, I32)
def ior(b, x, y):
    """Return x | y."""
    return b.or_(x, y)


@op(I32, I32, i64)
def shl(b, x, bits):
    """Return x << bits."""
    return b.shl(x, spread(b, I32, b.trunc(bits, _I32)))


@op(I32, I32, i64)
def shr(b, x, bits):
    """Return x >> bits, zeros coming in."""
    return b.lshr(x, spread(b, I32, b.trunc(bits, _I32)))


@op(I32, I32, i64)
def sra(b, x, bits):
    """Return x >> bits, the sign coming in."""
    return b.ashr(x, spread(b, I32, b.trunc(bits, _I32)))


@op(i64, I32)
def ihsum(b, x):
    """Return the sum of the lanes; it must fit in int32."""
    return b.sext(halve(b, x, b.add), _I64)


@op(i64, I32)
def ihmax(b, x):
    """Return the largest lane, signed."""
    most = halve(b, x, lambda low, high: b.select(b.icmp_signed(">", low, high), low, high))
    return b.sext(most, _I64)


@op(F32, I32)
def to_f32(b, x):
    """Convert int32 to fp32, to nearest even."""
    return b.sitofp(x, F32.llvm)


@op(I32, F32)
def to_i32(b, x):
    """Convert fp32 to int32, towards zero; the value must fit."""
    return b.fptosi(x, I32.llvm)


@op(F32, I32)
def bits_f32(b, x):
    """Read int32 lanes as the bits of fp32."""
    return b.bitcast(x, F32.llvm)


@op(I32, F32)
def bits_i32(b, x):
    """Read fp32 lanes as int32."""
    return b.bitcast(x, I32.llvm)


def emit_rint(b: Any, x: Any) -> Any:
    """Emit rint for |x| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction."""
    magic = constant(F32, 12582912.0)
    return b.fsub(b.fadd(x, magic), magic)


@op(F32, F32)
def rint(b, x):
    """Round to the nearest integer, ties to even; |x| must be below 2^22."""
    return emit_rint(b, x)


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
    n = emit_rint(b, b.fmul(inside, constant(F32, float.fromhex("0x1.715476p+0"))))
    # ln 2 in two parts; n * the first is exact, for its last 9 bits are zero.
    r = emit_fma(b, b.fneg(n), constant(F32, 0.693359375), inside)
    r = emit_fma(b, b.fneg(n), constant(F32, float.fromhex("-0x1.bd0106p-13")), r)
    p = constant(F32, float.fromhex("0x1.a0d2cep-13"))
    for coefficient in (
        "0x1.6e879cp-10",
        "0x1.1112fap-7",
        "0x1.555506p-5",
        "0x1.555558p-3",
        "0x1p-1",
    ):
        p = emit_fma(b, p, r, constant(F32, float.fromhex(coefficient)))
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


def emit_lookup(b: Any, table: Any, index: Any) -> Any:
    """Emit table[index] lane by lane; the index must be 0 .. 15."""
    if CURRENT.avx512:
        return call(b, "llvm.x86.avx512.permvar.sf.512", F32.llvm, table, index)
    if CURRENT.avx2:
        halves = []
        for start in (0, 8):
            part = pick(b, index, list(range(start, start + 8)))
            low, high = (
                call(b, "llvm.x86.avx2.permps", ir.VectorType(_FLOAT, 8), entries, part)
                for entries in (pick(b, table, list(range(8))), pick(b, table, list(range(8, 16))))
            )
            seven = ir.Constant(part.type, [7] * 8)
            halves.append(b.select(b.icmp_signed(">", part, seven), high, low))
        joined = ir.Constant(ir.VectorType(_I32, LANES), list(range(LANES)))
        return b.shuffle_vector(halves[0], halves[1], joined)
    if CURRENT.neon:
        return neon.look_up_f32(b, table, index)
    slot = cgutils.alloca_once(b, F32.llvm)
    b.store(table, slot)
    entries = b.bitcast(slot, _FLOAT.as_pointer())
    out = ir.Constant(F32.llvm, ir.Undefined)
    for i in range(LANES):
        at = ir.Constant(_I32, i)
        value = b.load(b.gep(entries, [b.extract_element(index, at)]))
        out = b.insert_element(out, value, at)
    return out


@op(F32, F32, I32)
def lookup(b, table, index):
    """Return table[index] lane by lane; the index must be 0 .. 15."""
    return emit_lookup(b, table, index)
