"""The two products of attention, on tiles that stay in registers: scores and weighted sums.

A block is up to BLOCK cells of one key/value head, a fixed number of bytes apart, and rows are the
queries that look at it: the heads of a group, of one token or of several. A pair of kernels per KV
dtype does the work where the cells lie; the pair for f32 also serves the panels that `kv` decodes.

    score(queries, rows, keys, stride, size, begin, end, scores, ahead)
    mix(sums, rows, size, state, weights, values, stride, begin, end, ahead)

A score is one accumulator of 16 lanes that walks the head in steps of 16, then the tree of
`simd.hsum`. A sum is one accumulator per row and column that walks the cells in order. Tiles only
decide which accumulators are in registers together, so a row's result depends on its own cells and
on nothing else.
"""

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.memory import emit_load, emit_prefetch, emit_store, prefetch
from cpu_fallback.lanes.simd import emit_fma
from cpu_fallback.lanes.vector import F32, LANES, constant, i64, op, pick, spread, void
from cpu_fallback.lanes.widen import WIDEN, Widen

BLOCK = 64
"""Cells of a block."""
SCORES = 4 * BLOCK
"""Bytes between the scores of one row and of the next."""
STATE, FACTOR = 128, 68
"""Bytes of the state of a row, and where in it `mix` finds what to multiply the sums by."""

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLOAT = ir.FloatType()
_VECTOR = 4 * LANES

# Rows x cells of a tile of scores, rows x vectors of a tile of sums: 32, 16 and 16 registers that
# hold 16, 8 and 4 lanes.
_DOTS = (4, 4) if CURRENT.avx512 else (2, 2) if CURRENT.avx2 else (1, 2)
_MIX = (4, 4) if CURRENT.avx512 else (2, 2) if CURRENT.avx2 else (1, 2)


def _at(b: Any, base: Any, index: Any, size: Any) -> Any:
    return b.add(base, b.mul(index, size))


def _number(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _emit_dots(b: Any, kind: Widen, qs: list[Any], ks: list[Any], size: Any) -> list[Any]:
    """Emit the 16-lane partial dot products of every q with every k, `size` values long."""
    pairs = [(q, k) for q in range(len(qs)) for k in range(len(ks))]
    entry = b.block
    loop, done = b.append_basic_block("dots"), b.append_basic_block("dots.end")
    b.branch(loop)
    b.position_at_end(loop)
    at = b.phi(_I64)
    at.add_incoming(_number(0), entry)
    sums = [b.phi(F32.llvm) for _ in pairs]
    x = [emit_load(b, F32.llvm, _at(b, q, at, _number(4))) for q in qs]
    y = [kind.emit(b, _at(b, k, at, _number(kind.bits // 8))) for k in ks]
    after = [emit_fma(b, y[k], x[q], total) for (q, k), total in zip(pairs, sums, strict=True)]
    further = b.add(at, _number(LANES))
    at.add_incoming(further, loop)
    for total, value in zip(sums, after, strict=True):
        total.add_incoming(constant(F32, 0.0), entry)
        total.add_incoming(value, loop)
    b.cbranch(b.icmp_signed("<", further, size), loop, done)
    b.position_at_end(done)
    return after


def emit_totals(b: Any, vectors: list[Any]) -> Any:
    """Emit a vector of the sums of 16 vectors, each summed by the tree of `simd.hsum`.

    Two vectors of partial sums become one: half of the lanes of each stay where they are, the other
    half cross over, and one addition does both.
    """
    half = LANES // 2
    while half:
        stay = [lane if not lane & half else LANES + lane for lane in range(LANES)]
        cross = [lane ^ half if not lane & half else LANES + (lane ^ half) for lane in range(LANES)]
        masks = [ir.Constant(ir.VectorType(_I32, LANES), lanes) for lanes in (stay, cross)]
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [b.fadd(*(b.shuffle_vector(x, y, mask) for mask in masks)) for x, y in pairs]
        half //= 2
    return vectors[0]


def _scores(kind: Widen, rows: int) -> Any:
    """Make the operation that scores `rows` rows and as many cells as fill 16 lanes."""
    cells = LANES // rows
    tall, wide = min(_DOTS[0], rows), min(_DOTS[1] * _DOTS[0] // min(_DOTS[0], rows), cells)

    @op(void, i64, i64, i64, i64, i64)
    def scores(b, queries, keys, stride, size, out):
        pitch = b.mul(size, _number(4))
        qs = [_at(b, queries, pitch, _number(r)) for r in range(rows)]
        ks = [_at(b, keys, stride, _number(c)) for c in range(cells)]
        parts: dict[tuple[int, int], Any] = {}
        for r in range(0, rows, tall):
            for c in range(0, cells, wide):
                some = _emit_dots(b, kind, qs[r : r + tall], ks[c : c + wide], size)
                places = [(r + i, c + j) for i in range(tall) for j in range(wide)]
                parts.update(zip(places, some, strict=True))
        totals = emit_totals(b, [parts[r, c] for r in range(rows) for c in range(cells)])
        for r in range(rows):
            lanes = list(range(r * cells, (r + 1) * cells))
            emit_store(b, pick(b, totals, lanes), b.add(out, _number(SCORES * r)))

    return scores


def _emit_mix(
    b: Any, kind: Widen, places: list[list[Any]], state: list[Any], cells: "_Cells"
) -> None:
    """Emit sums[r][v] = sums[r][v] * factor[r] + the weighted cells; places are those of sums."""
    rows, vectors = range(len(places)), range(len(places[0]))
    factors = [spread(b, F32, emit_load(b, _FLOAT, b.add(at, _number(FACTOR)))) for at in state]
    before = [
        b.fmul(emit_load(b, F32.llvm, places[r][v]), factors[r]) for r in rows for v in vectors
    ]
    entry = b.block
    loop, done = b.append_basic_block("mix"), b.append_basic_block("mix.end")
    b.branch(loop)
    b.position_at_end(loop)
    cell = b.phi(_I64)
    cell.add_incoming(cells.begin, entry)
    totals = [b.phi(F32.llvm) for _ in before]
    line = _at(b, cells.values, cell, cells.stride)
    x = [kind.emit(b, b.add(line, _number(kind.nbytes * v))) for v in vectors]
    for v in range(0, len(vectors), max(1, 64 // kind.nbytes)):
        emit_prefetch(b, b.add(line, b.add(cells.ahead, _number(kind.nbytes * v))))
    weights = [_at(b, at, cell, _number(4)) for at in cells.weights]
    w = [spread(b, F32, emit_load(b, _FLOAT, at)) for at in weights]
    sums = iter(totals)
    after = [emit_fma(b, w[r], x[v], next(sums)) for r in rows for v in vectors]
    further = b.add(cell, _number(1))
    cell.add_incoming(further, loop)
    for total, start, value in zip(totals, before, after, strict=True):
        total.add_incoming(start, entry)
        total.add_incoming(value, loop)
    b.cbranch(b.icmp_signed("<", further, cells.end), loop, done)
    b.position_at_end(done)
    for r in rows:
        for v in vectors:
            emit_store(b, after[r * len(vectors) + v], places[r][v])


@dataclass(frozen=True, slots=True)
class _Cells:
    """Cells begin .. end - 1 of a block, and where the weights of each row are."""

    values: Any
    stride: Any
    begin: Any
    end: Any
    weights: list[Any]
    ahead: Any


def _sums(kind: Widen, rows: int) -> Any:
    """Make the operation that adds weighted cells to `rows` rows of sums."""
    tall = min(_MIX[0], rows)
    wide = _MIX[1]

    @op(void, *[i64] * 9)
    def sums(b, sums, size, state, weights, values, stride, begin, end, ahead):
        pitch = b.mul(size, _number(4))
        whole = b.and_(size, _number(-LANES * wide))
        for first in range(0, rows, tall):
            some = range(first, first + tall)
            own = [b.add(weights, _number(SCORES * r)) for r in some]
            states = [b.add(state, _number(STATE * r)) for r in some]
            for start, stop, width in ((_number(0), whole, wide), (whole, size, 1)):
                step = _number(LANES * width)
                with cgutils.for_range_slice(b, start, stop, step, _I64) as (column, _):
                    top = b.add(sums, b.mul(column, _number(4)))
                    lines = [_at(b, top, pitch, _number(r)) for r in some]
                    places = [
                        [b.add(line, _number(_VECTOR * v)) for v in range(width)] for line in lines
                    ]
                    shown = _at(b, values, column, _number(kind.bits // 8))
                    cells = _Cells(shown, stride, begin, end, own, ahead)
                    _emit_mix(b, kind, places, states, cells)

    return sums


@device
def _ask(address, nbytes):
    for at in range(0, nbytes, 64):
        prefetch(address + at)


@dataclass(frozen=True, slots=True)
class Products:
    """The two kernels of a KV dtype."""

    score: Kernel
    mix: Kernel


def _products(name: str) -> Products:
    dots4, dots2, dots1 = (_scores(WIDEN[name], rows) for rows in (4, 2, 1))
    sums4, sums2, sums1 = (_sums(WIDEN[name], rows) for rows in (4, 2, 1))

    def score(queries, rows, keys, stride, size, begin, end, scores, ahead):
        pitch = 4 * size
        r = begin - begin
        while r + 4 <= rows:
            for c in range(begin & -4, end, 4):
                out = scores + SCORES * r + 4 * c
                if ahead:
                    _ask(keys + ahead + c * stride, 4 * stride)
                dots4(queries + r * pitch, keys + c * stride, stride, size, out)
            r += 4
            ahead = begin - begin
        if r + 2 <= rows:
            for c in range(begin & -8, end, 8):
                out = scores + SCORES * r + 4 * c
                if ahead:
                    _ask(keys + ahead + c * stride, 8 * stride)
                dots2(queries + r * pitch, keys + c * stride, stride, size, out)
            r += 2
            ahead = begin - begin
        if r < rows:
            for c in range(begin & -16, end, 16):
                out = scores + SCORES * r + 4 * c
                if ahead:
                    _ask(keys + ahead + c * stride, 16 * stride)
                dots1(queries + r * pitch, keys + c * stride, stride, size, out)

    def mix(sums, rows, size, state, weights, values, stride, begin, end, ahead):
        pitch = 4 * size
        r = begin - begin
        while r + 4 <= rows:
            own, w = state + STATE * r, weights + SCORES * r
            sums4(sums + r * pitch, size, own, w, values, stride, begin, end, ahead)
            r += 4
            ahead = begin - begin
        if r + 2 <= rows:
            own, w = state + STATE * r, weights + SCORES * r
            sums2(sums + r * pitch, size, own, w, values, stride, begin, end, ahead)
            r += 2
            ahead = begin - begin
        if r < rows:
            own, w = state + STATE * r, weights + SCORES * r
            sums1(sums + r * pitch, size, own, w, values, stride, begin, end, ahead)

    score.__name__, mix.__name__ = f"score_{name}", f"mix_{name}"
    return Products(Kernel(score), Kernel(mix))


PRODUCTS = {name: _products(name) for name in ("f32", "bf16", "f16", "e4m3", "e5m2", "i8")}
"""KV dtype -> kernels."""


def _pointer(kinds: int) -> Any:
    return ir.FunctionType(ir.VoidType(), [_I64] * kinds).as_pointer()


@op(void, *[i64] * 10)
def score(b, kernel, queries, rows, keys, stride, size, begin, end, scores, ahead):
    """Call a kernel that scores."""
    args = [queries, rows, keys, stride, size, begin, end, scores, ahead]
    b.call(b.inttoptr(kernel, _pointer(9)), args)


@op(void, *[i64] * 11)
def mix(b, kernel, sums, rows, size, state, weights, values, stride, begin, end, ahead):
    """Call a kernel that mixes."""
    args = [sums, rows, size, state, weights, values, stride, begin, end, ahead]
    b.call(b.inttoptr(kernel, _pointer(10)), args)
