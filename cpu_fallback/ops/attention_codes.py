"""The two products of attention on int8 cells, in integers.

The query of a row and the weights of a row in one block are rounded to 16 bits, each with a step
of its own: the largest magnitude over 32639 (less if a head has more than 518 values) and 32767.
Sums of their products with int8 are whole numbers that fit int32, so they are exact in any order. A
step depends on the row's own query, or on the cells of the block that the row sees, and on nothing
else.

With AVX-512 a code of a query is two signed bytes, and four values of 16 cells are turned so that a
lane is a cell: byte dot products then leave nothing to be added across lanes. Elsewhere codes are
int16, of which pairs are multiplied; so are weights everywhere.

A row of queries is padded with zeros to whole vectors, int16 codes to whole chunks of CHUNK values,
and so are the lines of a panel; cells are read where they lie only if their lines are whole chunks.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import device, i64, void
from cpu_fallback.ops import attention_tiles as tiles
from cpu_fallback.ops.attention_tiles import QUERY_STEP, SCORES, STEP, Cells, emit_sums
from cpu_fallback.tiles.multiply import dot, pair_dots

CHUNK = 32  # Values of a line that are multiplied at once

_BYTES = ir.VectorType(v.INT8, CHUNK)
_BYTEWISE = CURRENT.vnni
"""Whether a query is kept as the high bytes of its codes, the low ones, and what the bias adds."""
_BIASES = 0x80808080 - (1 << 32)
_LARGEST = 127 * 257  # The largest code: two signed bytes
_MOST = ((1 << 31) - 1) // 127  # What the magnitudes of the codes of a query may add up to
_LEAST = np.float32(1e-30)  # Smaller steps have codes of zero


def _emit_dots(b: Any, qs: list[Any], ks: list[Any], size: Any) -> list[Any]:
    """Emit the 16-lane partial dot products of every q with every k, whole chunks of values."""
    pairs = [(q, k) for q in range(len(qs)) for k in range(len(ks))]

    def add(at: Any, sums: list[Any]) -> list[Any]:
        x = [v.emit_load(b, v.SHORTS, v.emit_at(b, q, at, 2)) for q in qs]
        y = [b.sext(v.emit_load(b, _BYTES, b.add(k, at)), v.SHORTS) for k in ks]
        return [b.add(t, pair_dots(b, x[q], y[k])) for (q, k), t in zip(pairs, sums, strict=True)]

    return emit_sums(b, [v.constant(v.I32, 0)] * len(pairs), (v.number(0), size, CHUNK), add)


def _emit_turned(b: Any, lines: list[Any]) -> list[Any]:
    """Emit dwords of 16 lines, 4 or 16 of each, as vectors that have one of every line, biased."""
    count = lines[0].type.count
    fours = []
    for i in range(0, v.LANES, 4):
        x, y, z, w = lines[i : i + 4]
        low, high = ([v.interleave(b, *two, half) for two in ((x, z), (y, w))] for half in (0, 1))
        fours.append([v.interleave(b, *pair, half) for pair in (low, high) for half in (0, 1)])
    turned = []
    for piece in range(0, count, 4):
        for quarter in zip(*fours, strict=True):
            lanes = [side + piece + i for side in (0, count) for i in range(4)]
            left, right = (v.shuffle(b, *quarter[i : i + 2], lanes) for i in (0, 2))
            turned.append(v.shuffle(b, left, right, list(range(v.LANES))))
    return [b.xor(dwords, v.constant(v.I32, _BIASES)) for dwords in turned]


def _emit_sixteen(b: Any, qs: list[Any], ks: list[Any], size: Any) -> list[Any]:
    """Emit the dot products of rows with 16 cells, a lane each, so nothing is added across lanes.

    Cells are biased by 128 to be unsigned, and four values of each meet the high and the low bytes
    of four codes; what that adds is taken off first.
    """
    highs = v.variables(b, [v.constant(v.I32, 0)] * len(qs))
    lows = v.variables(b, (v.emit_everywhere(b, v.I32, v.emit_at(b, q, size, 2)) for q in qs))
    whole = b.and_(size, v.number(-64))
    for start, stop, dwords in ((v.number(0), whole, 16), (whole, size, 4)):
        kind = ir.VectorType(v.INT32, dwords)
        with v.loop(b, start, stop, 4 * dwords) as (at, _):
            turned = _emit_turned(b, [v.emit_load(b, kind, b.add(k, at)) for k in ks])
            for i, cells in enumerate(turned):
                for r, q in enumerate(qs):
                    place = b.add(b.add(q, at), v.number(4 * i))
                    for slot, codes in ((highs[r], place), (lows[r], b.add(place, size))):
                        x = b.bitcast(v.emit_everywhere(b, v.I32, codes), v.BYTES.llvm)
                        total = dot(b, b.load(slot), b.bitcast(cells, v.BYTES.llvm), x)
                        b.store(total, slot)
    eight = v.constant(v.I32, 8)
    return [
        b.add(b.shl(b.load(high), eight), b.load(low))
        for high, low in zip(highs, lows, strict=True)
    ]


def _scores(rows: int) -> Any:
    """Make the operation that scores `rows` rows and 16 cells."""

    @v.op(void, i64, i64, i64, i64, i64, i64)
    def scores(b, queries, keys, stride, size, out, ahead):
        qs = [v.emit_at(b, queries, b.mul(size, v.number(4)), r) for r in range(rows)]
        ks = [v.emit_at(b, keys, stride, c) for c in range(v.LANES)]
        tiles.emit_ahead(b, ks, stride, ahead)
        for r, totals in enumerate(_emit_sixteen(b, qs, ks, size)):
            v.emit_store(b, b.sitofp(totals, v.F32.llvm), b.add(out, v.number(SCORES * r)))

    return scores


def _emit_interleaved(b: Any, one: Any, other: Any) -> list[Any]:
    """Emit pairs of int16 of two lines of 16, 32 or 64 bytes, 16 pairs to a vector.

    Registers interleave within 16 bytes. So of two vectors or more the first half has the first
    eight of every sixteen pairs; `_emit_in_order` undoes it.
    """
    count = one.type.count
    halves = [v.interleave(b, one, other, half) for half in (0, 1)]
    if count == 16:
        return [b.sext(v.shuffle(b, *halves, range(CHUNK)), v.SHORTS)]
    parts = [(h, list(range(i, i + CHUNK))) for h in halves for i in range(0, count, CHUNK)]
    return [b.sext(v.pick(b, half, lanes), v.SHORTS) for half, lanes in parts]


def _emit_in_order(b: Any, sums: list[Any]) -> list[Any]:
    """Emit the vectors of sums of `_emit_interleaved` in the order of the line."""
    if len(sums) == 1:
        return sums
    found, half = [], len(sums) // 2
    for low, high in zip(sums[:half], sums[half:], strict=True):
        for start in (0, 8):
            lanes = [*range(start, start + 8), *range(v.LANES + start, v.LANES + start + 8)]
            found.append(v.shuffle(b, low, high, lanes))
    return found


def _emit_mix(b: Any, places: list[list[Any]], state: list[Any], cells: Cells) -> None:
    """Emit sums[r][c] = sums[r][c] * factor[r] + step[r] * the whole sums of codes times cells.

    Cells are taken two by two; the weight of what a row does not see is zero.
    """
    rows, vectors = range(len(places)), range(len(places[0]))
    kind = ir.VectorType(v.INT8, v.LANES * len(vectors))

    def add(cell: Any, totals: list[Any]) -> list[Any]:
        line = v.emit_at(b, cells.values, cell, cells.stride)
        other = b.add(line, cells.stride)
        tiles.emit_request(b, cells, cell, kind.count // 2)
        x = _emit_interleaved(b, v.emit_load(b, kind, line), v.emit_load(b, kind, other))
        after, sums = [], iter(totals)
        for r in rows:
            pair = v.emit_load(b, v.INT32, v.emit_at(b, cells.weights[r], cell, 2))
            w = b.bitcast(v.spread(b, v.I32, pair), v.SHORTS)
            after += [b.add(next(sums), pair_dots(b, x[c], w)) for c in vectors]
        return after

    start = b.and_(cells.begin, v.number(-2))
    starts = [v.constant(v.I32, 0)] * (len(rows) * len(vectors))
    after = emit_sums(b, starts, (start, cells.end, 2), add)
    for r in rows:
        factor, step = (
            v.emit_everywhere(b, v.F32, v.behind(b, state[r], at)) for at in (tiles.FACTOR, STEP)
        )
        own = after[r * len(vectors) : (r + 1) * len(vectors)]
        for c, total in enumerate(_emit_in_order(b, own)):
            before = b.fmul(v.emit_load(b, v.F32.llvm, places[r][c]), factor)
            value = v.emit_fma(b, b.sitofp(total, v.F32.llvm), step, before)
            v.emit_store(b, value, places[r][c])


CODES = tiles.products(
    "i8", tiles.Arithmetic(1, _emit_dots, _emit_mix, _scores if _BYTEWISE else None)
)
"""The kernels of int8."""


@device
def _bits_largest(x, largest):
    """Return the larger of magnitudes as int32 bits, which order NaN above all numbers."""
    bits = v.bits_i32(v.absolute(x))
    return v.iselect(v.ilt(largest, bits), bits, largest)


@device
def _step(largest, most):
    """Return the largest magnitude of 16 lanes, NaN if one is not finite, over the largest code."""
    top = v.lane(v.bits_f32(v.isplat(v.ihmax(largest))), 0)
    return (top + (top - top)) / most


@device
def _code(x, inverse, most):
    return v.to_i32(v.maximum(v.minimum(v.rint(v.mul(x, inverse)), v.splat(most)), v.splat(-most)))


@device
def _inverse(step):
    if step > _LEAST:
        return v.splat(np.float32(1) / step)
    return v.splat(np.float32(0))


@device
def code_query(source, target, d, size, scale, state):
    """Write the codes of a query times a scale, padded with zeros to `size`, and note their step.

    A query that is not finite has a step that is NaN.
    """
    largest, most = v.izero(), np.float32(min(_LARGEST, _MOST // d))
    for i in range(0, d, 16):
        largest = _bits_largest(v.load_up_to(source + 4 * i, d - i), largest)
    step = _step(largest, most)
    inverse = _inverse(step)
    v.write_f32(state + QUERY_STEP, step * scale)
    if _BYTEWISE:
        _split_query(source, target, d, inverse, most)
        return
    for i in range(0, size, 16):
        n = min(16, max(0, d - i))
        v.store_u16(target + 2 * i, _code(v.load_f32_n(source + 4 * i, n), inverse, most))


@device
def _split_query(source, target, d, inverse, most):
    """Write the high bytes of codes, padded to whole vectors, their low bytes, and the bias."""
    size, total = (d + 15) & -16, v.izero()
    for i in range(0, size, 16):
        code = _code(v.load_f32_n(source + 4 * i, min(16, d - i)), inverse, most)
        total = v.iadd(total, code)
        v.store_u8(target + i, v.sra(v.iadd(code, v.isplat(128)), 8))
        v.store_u8(target + size + i, code)
    v.write_i32(target + 2 * size, -128 * v.ihsum(total))


@device
def code_weights(weights, state, begin, end):
    """Replace the weights of cells begin .. end - 1 of a block by their codes; note their step.

    Cells around them that are multiplied with them have codes of zero.
    """
    largest, most = v.izero(), np.float32(32767)
    for i in range(begin & -16, end, 16):
        x = v.load_f32(weights + 4 * i)
        if end - i < 16:
            x = v.select(v.first(end - i), x, v.zero())
        if begin > i:
            x = v.select(v.first(begin - i), v.zero(), x)
        v.store_f32(weights + 4 * i, x)
        largest = _bits_largest(x, largest)
    step = _step(largest, most)
    inverse = _inverse(step)
    v.write_f32(state + STEP, step)
    for i in range(begin & -16, end, 16):
        v.store_u16(weights + 2 * i, _code(v.load_f32(weights + 4 * i), inverse, most))
