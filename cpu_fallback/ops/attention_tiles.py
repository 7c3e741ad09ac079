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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, device, i64, void

BLOCK = 64  # Cells of a block
SCORES = 4 * BLOCK  # Bytes between the scores of one row and of the next
STATE, FACTOR = 128, 68
"""Bytes of the state of a row, and where in it `mix` finds what to multiply the sums by."""
STEP, QUERY_STEP = 80, 84
"""Where in the state of a row of int8 cells the steps of its weights and of its query are."""

_VECTOR = 4 * v.LANES
_LINE = 64  # bytes of a cache line

SUMS = 16 if CURRENT.avx512 else 4
"""Vectors of 16 sums that are in registers: rows times cells, or rows times vectors of values."""


def emit_sums(
    b: Any, starts: list[Any], places: tuple[Any, Any, int], body: Callable[[Any, list[Any]], Any]
) -> list[Any]:
    """Emit a loop, of one turn at least, that keeps sums in registers; return them.

    `places`: begin, end and step of the loop; `body` emits the next sums, given a place and these.
    """
    (begin, end, step), entry = places, b.block
    loop, done = b.append_basic_block("sums"), b.append_basic_block("sums.end")
    b.branch(loop)
    b.position_at_end(loop)
    at = b.phi(v.INT64)
    at.add_incoming(begin, entry)
    sums = [b.phi(start.type) for start in starts]
    after = body(at, sums)
    further = b.add(at, v.number(step))
    at.add_incoming(further, loop)
    for total, start, value in zip(sums, starts, after, strict=True):
        total.add_incoming(start, entry)
        total.add_incoming(value, loop)
    b.cbranch(b.icmp_signed("<", further, end), loop, done)
    b.position_at_end(done)
    return after


def _emit_dots(kind: v.Widen, b: Any, qs: list[Any], ks: list[Any], size: Any) -> list[Any]:
    """Emit the 16-lane partial dot products of every q with every k, `size` values long."""
    pairs = [(q, k) for q in range(len(qs)) for k in range(len(ks))]

    def add(at: Any, sums: list[Any]) -> list[Any]:
        x = [v.emit_load(b, v.F32.llvm, v.emit_at(b, q, at, 4)) for q in qs]
        y = [kind.emit(b, v.emit_at(b, k, at, kind.bits // 8)) for k in ks]
        return [v.emit_fma(b, y[k], x[q], s) for (q, k), s in zip(pairs, sums, strict=True)]

    return emit_sums(b, [v.constant(v.F32, 0.0)] * len(pairs), (v.number(0), size, v.LANES), add)


def emit_now(b: Any, value: Any) -> Any:
    """Emit nothing but an order: what follows loads nothing before a vector of fp32 is computed.

    LLVM would put the additions off to the end, and all that they add into memory.
    """
    if not (CURRENT.avx2 or CURRENT.neon):
        return value
    lanes, register = (v.LANES, "v") if CURRENT.avx512 else (v.LANES // 2, "x")
    if CURRENT.neon:
        lanes, register = v.LANES // 4, "w"
    lanes = min(lanes, value.type.count)
    kind = ir.VectorType(value.type.element, lanes)
    same = ir.FunctionType(kind, [kind])
    parts = [
        b.asm(same, "", f"={register},0,~{{memory}}", [part], True)
        for part in v.pieces(b, value, value.type.count // lanes)
    ]
    return v.join(b, parts)


def emit_ahead(b: Any, cells: list[Any], stride: Any, ahead: Any) -> None:
    """Emit requests for the lines that lie `ahead` of some cells, if that is not 0."""
    wanted = b.icmp_signed("!=", ahead, v.number(0))
    with b.if_then(wanted), v.loop(b, ahead, b.add(ahead, stride), _LINE) as (at, _):
        for cell in cells:
            v.emit_prefetch(b, b.add(cell, at))


def _scores(own: "Arithmetic", rows: int) -> Any:
    """Make the operation that scores `rows` rows and as many cells as fill 16 lanes.

    Eight and eight of the 16 sums become one vector. Those that are in registers together are the
    ones that are added first, so that no sum is put aside.
    """
    cells, turns = v.LANES // rows, v.LANES // SUMS

    @v.op(void, i64, i64, i64, i64, i64, i64)
    def scores(b, queries, keys, stride, size, out, ahead):
        pitch = b.mul(size, v.number(4))
        qs = [v.emit_at(b, queries, pitch, r) for r in range(rows)]
        ks = [v.emit_at(b, keys, stride, c) for c in range(cells)]
        emit_ahead(b, ks, stride, ahead)
        if turns == 1:
            totals = emit_now(b, v.emit_totals(b, own.dots(b, qs, ks, size)))
        else:
            parts: list[list[Any]] = [[], []]
            for turn in range(turns):
                halves = [v.emit_halves(b, x) for x in own.dots(b, qs, ks[turn::turns], size)]
                some = halves[: SUMS // 2], halves[SUMS // 2 :]
                for part, each in zip(parts, some, strict=True):
                    part.append(emit_now(b, v.emit_joined(b, each, 4)))
            totals = v.join(b, [v.emit_joined(b, part, turns // 2) for part in parts])
        if totals.type == v.I32.llvm:
            totals = b.sitofp(totals, v.F32.llvm)
        for r in range(rows):
            own_lanes = v.pick(b, totals, range(r * cells, (r + 1) * cells))
            v.emit_store(b, own_lanes, v.behind(b, out, SCORES * r))

    return scores


def _emit_mix(
    kind: v.Widen, b: Any, places: list[list[Any]], state: list[Any], cells: "Cells"
) -> None:
    """Emit sums[r][c] = sums[r][c] * factor[r] + the weighted cells; places are those of sums."""
    rows, vectors = range(len(places)), range(len(places[0]))
    factors = [v.emit_everywhere(b, v.F32, v.behind(b, at, FACTOR)) for at in state]
    before = [
        b.fmul(v.emit_load(b, v.F32.llvm, places[r][c]), factors[r]) for r in rows for c in vectors
    ]

    def add(cell: Any, totals: list[Any]) -> list[Any]:
        line = v.emit_at(b, cells.values, cell, cells.stride)
        x = [kind.emit(b, v.behind(b, line, kind.nbytes * c)) for c in vectors]
        emit_request(b, cells, cell, kind.nbytes * len(vectors) // 2)
        weights = [v.emit_at(b, at, cell, 4) for at in cells.weights]
        w = [v.emit_everywhere(b, v.F32, at) for at in weights]
        sums = iter(totals)
        return [v.emit_fma(b, w[r], x[c], next(sums)) for r in rows for c in vectors]

    after = emit_sums(b, before, (cells.begin, cells.end, 1), add)
    for place, value in zip((at for row in places for at in row), after, strict=True):
        v.emit_store(b, value, place)


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells begin .. end - 1 of a block, and where the weights of each row are."""

    values: Any
    stride: Any
    begin: Any
    end: Any
    weights: list[Any]
    soon: Any  # of the cells that are read next, the bytes to ask for meanwhile


def emit_request(b: Any, cells: Cells, cell: Any, nbytes: int) -> None:
    """Emit requests for the lines of a cell's share of `nbytes` of what is read next."""
    share = v.emit_at(b, cells.soon, cell, nbytes)
    for at in range(0, nbytes, _LINE):
        v.emit_prefetch(b, v.behind(b, share, at))


def _sums(own: "Arithmetic", rows: int) -> Any:
    """Make the operation that adds weighted cells to `rows` rows of sums."""
    wide = min(4, SUMS // rows)

    @v.op(void, *[i64] * 9)
    def sums(b, sums, size, state, weights, values, stride, begin, end, ahead):
        pitch = b.mul(size, v.number(4))
        whole = b.and_(size, v.number(-v.LANES * wide))
        lines = [v.behind(b, weights, SCORES * r) for r in range(rows)]
        states = [v.behind(b, state, STATE * r) for r in range(rows)]
        for start, stop, width in ((0, whole, wide), (whole, size, 1)):
            with v.loop(b, start, stop, v.LANES * width) as (column, _):
                tops = [v.emit_at(b, v.emit_at(b, sums, column, 4), pitch, r) for r in range(rows)]
                places = [[v.behind(b, top, _VECTOR * c) for c in range(width)] for top in tops]
                shown = v.emit_at(b, values, column, own.nbytes)
                # A block is one stretch of bytes. Its first half is asked for by `weigh`.
                half = v.emit_at(b, stride, column, own.nbytes)
                soon = v.emit_at(b, b.add(values, ahead), half, BLOCK // 2)
                own.mix(b, places, states, Cells(shown, stride, begin, end, lines, soon))

    return sums


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How cells of a KV dtype are multiplied."""

    nbytes: int  # of a value
    # emits the partial dot products of every query with every key
    dots: Callable[[Any, list[Any], list[Any], Any], list[Any]]
    # emits the sums of values, times their weights
    mix: Callable[[Any, list[list[Any]], list[Any], Cells], None]
    # makes the operation that scores 4, 2 or 1 rows and 16 cells; None: with `dots`
    scores: Callable[[int], Any] | None = None


@dataclass(frozen=True, slots=True)
class Products:
    """The two kernels of a KV dtype."""

    score: Kernel
    mix: Kernel


def _score_by(own: Arithmetic, tall: int) -> Any:
    """Return the device that scores rows from r on, so many at a time; it returns the next row."""
    dots = own.scores(tall) if own.scores else _scores(own, tall)
    cells = v.LANES if own.scores else v.LANES // tall

    @device
    def some(r, queries, rows, keys, stride, size, begin, end, scores, ahead):
        while r + tall <= rows:
            line, asked = queries + 4 * size * r, ahead if r == 0 else r - r
            for c in range(begin & -cells, end, cells):
                out = scores + SCORES * r + 4 * c
                dots(line, keys + c * stride, stride, size, out, asked)
            r += tall
        return r

    return some


def _mix_by(own: Arithmetic, tall: int) -> Any:
    """Return the same of weighted sums."""
    add = _sums(own, tall)

    @device
    def some(r, sums, rows, size, state, weights, values, stride, begin, end, ahead):
        while r + tall <= rows:
            line, state_of, w = sums + 4 * size * r, state + STATE * r, weights + SCORES * r
            asked = ahead if r == 0 else r - r
            add(line, size, state_of, w, values, stride, begin, end, asked)
            r += tall
        return r

    return some


def products(name: str, own: Arithmetic) -> Products:
    """Return the kernels of a KV dtype: rows go by fours, then by twos, then one by one."""
    score4, score2, score1 = (_score_by(own, tall) for tall in (4, 2, 1))
    mix4, mix2, mix1 = (_mix_by(own, tall) for tall in (4, 2, 1))

    def score(queries, rows, keys, stride, size, begin, end, scores, ahead):
        args = queries, rows, keys, stride, size, begin, end, scores, ahead
        score1(score2(score4(begin - begin, *args), *args), *args)

    def mix(sums, rows, size, state, weights, values, stride, begin, end, ahead):
        args = sums, rows, size, state, weights, values, stride, begin, end, ahead
        mix1(mix2(mix4(begin - begin, *args), *args), *args)

    return Products(
        Kernel(score, name=f"attention.score_{name}"), Kernel(mix, name=f"attention.mix_{name}")
    )


def _floats(name: str) -> Products:
    kind = v.WIDEN[name]
    own = Arithmetic(kind.bits // 8, partial(_emit_dots, kind), partial(_emit_mix, kind))
    return products(name, own)


FLOATS = {name: _floats(name) for name in ("f32", "bf16", "f16", "e4m3", "e5m2")}
"""KV dtype -> kernels that multiply in fp32."""


score = v.caller(9)  # (kernel, queries, rows, keys, stride, size, begin, end, scores, ahead)
mix = v.caller(10)  # (kernel, sums, rows, size, state, weights, values, stride, begin, end, ahead)
