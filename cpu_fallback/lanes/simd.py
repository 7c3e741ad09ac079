"""Vectors for Numba, how an intrinsic is made, and operations on 16 lanes of fp32 or int32.

Numba has no vector types: `jit` gives it one whose data model is an LLVM vector. `op` makes an
intrinsic of a function that emits LLVM.

Kernels call these like functions, and each compiles to one instruction or a few. `memory` has the
loads and stores, scalar and vector; `language` the small floats and what takes a polynomial;
`tape` the atomics. `language` has all of them but the last.

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

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Intrinsic, Kind, VecT, cgutils, f32, i64, numba_type, void

LANES = 16
INT1, INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
FLOAT, DOUBLE, VOID = ir.FloatType(), ir.DoubleType(), ir.VoidType()

F32, I32, MASK = VecT(FLOAT, LANES), VecT(INT32, LANES), VecT(INT1, LANES)
BYTES = VecT(INT8, 64)  # 64 bytes, signed or unsigned as the operation says
SHORTS = ir.VectorType(INT16, 32)  # The LLVM type of 64 bytes as int16


def op(result: Kind, *params: Kind) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator: function (builder, *values) -> value that emits LLVM -> intrinsic.

    Arguments are cast to the types of the parameters.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def typing(context: Any, *args: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                made = emit(builder, *values)
                return context.get_dummy_value() if result is void else made

            return numba_type(result)(*map(numba_type, params)), generate

        name = getattr(emit, "__name__", "emitted")  # a partial has none
        return intrinsic(typing, name, [f"p{i}" for i in range(len(params))])

    return decorate


def intrinsic(typing: Callable[..., Any], name: str, params: Sequence[str]) -> Intrinsic:
    """Return the intrinsic of a typing function (context, *params)."""
    # Numba looks at the parameters of the typing function.
    names = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in ("context", *params)]
    typing.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    typing.__name__ = name
    return Intrinsic(typing)


def call(b: Any, name: str, result: ir.Type, *values: Any) -> Any:
    """Emit a call of an LLVM intrinsic or of a C function."""
    function = ir.FunctionType(result, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, function, name), values)


def call_at(b: Any, address: Any, result: ir.Type, *values: Any) -> Any:
    """Emit a call of the function at an address."""
    function = ir.FunctionType(result, [value.type for value in values])
    return b.call(b.inttoptr(address, function.as_pointer()), values)


def caller(params: int) -> Any:
    """Return the intrinsic (address, *int64) that calls a kernel of so many parameters."""

    def call_kernel(b: Any, address: Any, *values: Any) -> None:
        call_at(b, address, VOID, *values)

    return op(void, *[i64] * (params + 1))(call_kernel)


def number(value: Any) -> Any:
    """Return a constant int64; what is a value of LLVM already is returned as it is."""
    return ir.Constant(INT64, value) if isinstance(value, int) else value


def emit_at(b: Any, base: Any, index: Any, size: Any) -> Any:
    """Emit base + index * size."""
    return b.add(number(base), b.mul(number(index), number(size)))


def behind(b: Any, base: Any, nbytes: int) -> Any:
    """Emit base + nbytes."""
    return b.add(base, number(nbytes))


def loop(b: Any, start: Any, stop: Any, step: Any) -> Any:
    """Return the context that emits a loop over int64, and yields (index, count)."""
    return cgutils.for_range_slice(b, number(start), number(stop), number(step), INT64)


def variables(b: Any, values: Iterable[Any]) -> list[Any]:
    """Emit variables that have these values."""
    return [cgutils.alloca_once_value(b, value) for value in values]


def constant(kind: VecT | ir.VectorType, values: Any) -> ir.Constant:
    """Return a constant vector of these values, or of one value everywhere."""
    vector = kind.llvm if isinstance(kind, VecT) else kind
    many = isinstance(values, (list, tuple, range))
    return ir.Constant(vector, list(values) if many else [values] * vector.count)


def spread(b: Any, kind: VecT | ir.VectorType, scalar: Any) -> Any:
    """Emit a vector with a scalar in every lane."""
    vector = kind.llvm if isinstance(kind, VecT) else kind
    undefined = ir.Constant(vector, ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(INT32, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INT32, vector.count), None))


def shuffle(b: Any, x: Any, y: Any, lanes: Sequence[int]) -> Any:
    """Emit a shuffle: lanes of two vectors, those of the second one behind those of the first."""
    return b.shuffle_vector(x, y, constant(ir.VectorType(INT32, len(lanes)), list(lanes)))


def pick(b: Any, vector: Any, lanes: Sequence[int]) -> Any:
    """Emit a shuffle: the lanes of one vector, in another order or number."""
    return shuffle(b, vector, ir.Constant(vector.type, ir.Undefined), lanes)


def interleave(b: Any, x: Any, y: Any, half: int) -> Any:
    """Emit the elements of two vectors in turn, of the first or second half of each 16 bytes."""
    count, of_16 = x.type.count, 128 // x.type.element.width
    starts = range(of_16 // 2 * half, count, of_16)
    lanes = [lane for start in starts for lane in range(start, start + of_16 // 2)]
    return shuffle(b, x, y, [side + lane for lane in lanes for side in (0, count)])


def halve(b: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Emit the fixed tree 16 -> 8 -> 4 -> 2 -> 1: lane i with lane i + half."""
    n = vector.type.count
    while n > 1:
        n //= 2
        vector = combine(pick(b, vector, range(n)), pick(b, vector, range(n, 2 * n)))
    return b.extract_element(vector, ir.Constant(INT32, 0))


def emit_totals(b: Any, vectors: list[Any]) -> Any:
    """Emit a vector of the sums of 16 vectors of fp32 or int32, each summed by the tree of `hsum`.

    Two of them become one: half of the lanes of each stay where they are, the other half cross
    over, and one addition does both. Where 16 lanes are several registers, the halves of each are
    added first, which moves no lane and gives the same sums.
    """
    if CURRENT.avx512:
        return emit_joined(b, vectors, LANES // 2)
    halves = [emit_halves(b, vector) for vector in vectors]
    return join(b, [emit_joined(b, halves[at : at + 8], 4) for at in (0, 8)])


def emit_halves(b: Any, vector: Any) -> Any:
    """Emit the lower half of a vector plus the upper one."""
    low, high = (list(range(at, at + LANES // 2)) for at in (0, LANES // 2))
    return _add(b, pick(b, vector, low), pick(b, vector, high))


def emit_joined(b: Any, vectors: list[Any], step: int) -> Any:
    """Emit one vector of several; in the first addition a lane crosses by `step`."""
    count = vectors[0].type.count
    while len(vectors) > 1:
        half = len(vectors) // 2
        beyond = [lane & step and count for lane in range(count)]  # to the lanes of the other
        stay = [lane + far for lane, far in enumerate(beyond)]
        cross = [(lane ^ step) + far for lane, far in enumerate(beyond)]
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [_add(b, *(shuffle(b, x, y, each) for each in (stay, cross))) for x, y in pairs]
        step //= 2
    return vectors[0]


def _add(b: Any, x: Any, y: Any) -> Any:
    return b.add(x, y) if x.type.element == INT32 else b.fadd(x, y)


def emit_fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """Emit x * y + z of vectors: one rounding, or two on the generic ISA."""
    if not CURRENT.fma:
        return b.fadd(b.fmul(x, y), z)
    of = f"v{x.type.count}{x.type.element.intrinsic_name}"
    return call(b, f"llvm.fma.{of}", x.type, x, y, z)


def emit_rint(b: Any, x: Any) -> Any:
    """Emit rint for |x| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction."""
    magic = constant(F32, 12582912.0)
    return b.fsub(b.fadd(x, magic), magic)


def _greater(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _igreater(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.icmp_signed(">", x, y), x, y)


def _spread_low(b: Any, value: Any) -> Any:
    return spread(b, I32, b.trunc(value, INT32))


_f, _ff, _fff = op(F32, F32), op(F32, F32, F32), op(F32, F32, F32, F32)
_ii, _shift = op(I32, I32, I32), op(I32, I32, i64)
_compare, _icompare = op(MASK, F32, F32), op(MASK, I32, I32)

splat = op(F32, f32)(lambda b, x: spread(b, F32, x))  # x in every lane
isplat = op(I32, i64)(_spread_low)  # the low 32 bits in every lane
zero = op(F32)(lambda b: constant(F32, 0.0))
izero = op(I32)(lambda b: constant(I32, 0))
iota = op(I32)(lambda b: constant(I32, range(LANES)))  # 0, 1, .., 15
lane = op(f32, F32, i64)(lambda b, x, i: b.extract_element(x, b.trunc(i, INT32)))

add = _ff(lambda b, x, y: b.fadd(x, y))
sub = _ff(lambda b, x, y: b.fsub(x, y))
mul = _ff(lambda b, x, y: b.fmul(x, y))
div = _ff(lambda b, x, y: b.fdiv(x, y))
fma = _fff(emit_fma)  # x * y + z
neg = _f(lambda b, x: b.fneg(x))
sqrt = _f(lambda b, x: call(b, "llvm.sqrt.v16f32", F32.llvm, x))
rint = _f(emit_rint)  # ties to even; |x| below 2^22
minimum = _ff(lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))  # y where one is NaN
maximum = _ff(_greater)  # y where one is NaN
select = op(F32, MASK, F32, F32)(lambda b, mask, x, y: b.select(mask, x, y))  # x where it is set
hsum = op(f32, F32)(lambda b, x: halve(b, x, b.fadd))  # by the fixed tree
hmax = op(f32, F32)(lambda b, x: halve(b, x, lambda p, q: _greater(b, p, q)))

lt = _compare(lambda b, x, y: b.fcmp_ordered("<", x, y))  # comparisons: false for NaN
le = _compare(lambda b, x, y: b.fcmp_ordered("<=", x, y))
eq = _compare(lambda b, x, y: b.fcmp_ordered("==", x, y))
ilt = _icompare(lambda b, x, y: b.icmp_signed("<", x, y))
ieq = _icompare(lambda b, x, y: b.icmp_signed("==", x, y))

iadd = _ii(lambda b, x, y: b.add(x, y))  # wrapping, as the next two
isub = _ii(lambda b, x, y: b.sub(x, y))
iand = _ii(lambda b, x, y: b.and_(x, y))
ior = _ii(lambda b, x, y: b.or_(x, y))
iselect = op(I32, MASK, I32, I32)(lambda b, mask, x, y: b.select(mask, x, y))
shl = _shift(lambda b, x, bits: b.shl(x, _spread_low(b, bits)))
shr = _shift(lambda b, x, bits: b.lshr(x, _spread_low(b, bits)))  # zeros come in
sra = _shift(lambda b, x, bits: b.ashr(x, _spread_low(b, bits)))  # the sign comes in
ihsum = op(i64, I32)(lambda b, x: b.sext(halve(b, x, b.add), INT64))  # must fit in int32
ihmax = op(i64, I32)(lambda b, x: b.sext(halve(b, x, lambda p, q: _igreater(b, p, q)), INT64))

to_f32 = op(F32, I32)(lambda b, x: b.sitofp(x, F32.llvm))  # to nearest even
to_i32 = op(I32, F32)(lambda b, x: b.fptosi(x, I32.llvm))  # towards zero; must fit
bits_f32 = op(F32, I32)(lambda b, x: b.bitcast(x, F32.llvm))
bits_i32 = op(I32, F32)(lambda b, x: b.bitcast(x, I32.llvm))
bits_of = op(i64, f32)(lambda b, x: b.sext(b.bitcast(x, INT32), INT64))  # of one number
float_of = op(f32, i64)(lambda b, bits: b.bitcast(b.trunc(bits, INT32), FLOAT))


@op(F32, F32)
def absolute(b, x):
    """Return |x|."""
    bits = b.and_(b.bitcast(x, I32.llvm), constant(I32, 0x7FFFFFFF))
    return b.bitcast(bits, F32.llvm)


@op(MASK, i64)
def first(b, count):
    """Return a mask of the first `count` lanes."""
    wide = ir.VectorType(INT64, LANES)
    return b.icmp_signed("<", constant(wide, range(LANES)), spread(b, wide, count))


def pieces(b: Any, vector: Any, count: int) -> list[Any]:
    """Emit so many pieces of a vector, one behind the other."""
    size = vector.type.count // count
    return [pick(b, vector, range(at, at + size)) for at in range(0, size * count, size)]


def join(b: Any, parts: Sequence[Any]) -> Any:
    """Emit the vector of some pieces, a power of two of them."""
    while len(parts) > 1:
        count = parts[0].type.count
        lanes = ir.Constant(ir.VectorType(INT32, 2 * count), list(range(2 * count)))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [b.shuffle_vector(low, high, lanes) for low, high in pairs]
    return parts[0]


def by_pieces(b: Any, count: int, emit: Callable[..., Any], *vectors: Any) -> Any:
    """Emit something for each of so many pieces of some vectors, joined."""
    parts = zip(*(pieces(b, vector, count) for vector in vectors), strict=True)
    return join(b, [emit(*part) for part in parts])


def _neon_lookup(b: Any, table: Any, index: Any) -> Any:
    """Emit table[index] of 16 lanes: the four bytes of each entry, from four registers."""
    spread = b.mul(index, constant(I32, 0x04040404))
    places = b.bitcast(b.add(spread, constant(I32, 0x03020100)), BYTES.llvm)
    entries = pieces(b, b.bitcast(table, BYTES.llvm), 4)
    name = "llvm.aarch64.neon.tbl4.v16i8"
    found = by_pieces(
        b, 4, lambda part: call(b, name, ir.VectorType(INT8, 16), *entries, part), places
    )
    return b.bitcast(found, F32.llvm)


def emit_lookup(b: Any, table: Any, index: Any) -> Any:
    """Emit table[index] lane by lane; the index must be 0 .. 15."""
    if CURRENT.avx512:
        return call(b, "llvm.x86.avx512.permvar.sf.512", F32.llvm, table, index)
    if CURRENT.avx2:
        halves = []
        for start in (0, 8):
            part = pick(b, index, range(start, start + 8))
            low, high = (
                call(b, "llvm.x86.avx2.permps", ir.VectorType(FLOAT, 8), entries, part)
                for entries in (pick(b, table, range(8)), pick(b, table, range(8, 16)))
            )
            halves.append(b.select(b.icmp_signed(">", part, constant(part.type, 7)), high, low))
        return shuffle(b, *halves, range(LANES))
    if CURRENT.neon:
        return _neon_lookup(b, table, index)
    (slot,) = variables(b, [table])
    entries = b.bitcast(slot, FLOAT.as_pointer())
    out = ir.Constant(F32.llvm, ir.Undefined)
    for i in range(LANES):
        at = ir.Constant(INT32, i)
        value = b.load(b.gep(entries, [b.extract_element(index, at)]))
        out = b.insert_element(out, value, at)
    return out
