"""Attention over the paged cache.

The unit of work is one token and one key/value head with all of its query heads, so a key or value
is decoded once for the group. A unit walks the token's visible cells in order, 16 at a time from
the first one, with a running maximum (online softmax). What a block holds depends on the token
alone, so the result depends neither on the other tokens nor on the threads, and a chain of a
speculative tree gives the bits that decoding token by token gives. Cells that are not visible are
not read.

Source: Milakov and Gimelshein 2018 (arXiv 1805.02867); Dao et al. 2022 (arXiv 2205.14135).
"""

from typing import Any

import numpy as np
from llvmlite import ir

from clocher_kernels.errors import ShapeError
from cpu_fallback.bind import BoundCall, bits, counted
from cpu_fallback.isa import CURRENT
from cpu_fallback.jit import device, kernel
from cpu_fallback.kv import CELLS, kv_dtype, line_of, padded, read_lines
from cpu_fallback.maths import lowest_bit, popcount
from cpu_fallback.memory import (
    emit_load,
    emit_store,
    field,
    field_f32,
    load_f32,
    load_f32_n,
    prefetch,
    read_f32,
    read_i32,
    read_i64,
    store_f32,
    store_f32_n,
    write_f32,
    write_i64,
)
from cpu_fallback.simd import (
    emit_fma,
    exp,
    first,
    fma,
    hmax,
    hsum,
    lane,
    mul,
    select,
    splat,
    sub,
    zero,
)
from cpu_fallback.tape import Launch
from cpu_fallback.vector import F32, LANES, constant, f32, i64, op, spread, void

_I32, _I64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = 4 * LANES

LOWEST = np.float32(np.finfo(np.float32).min)

# Rows of keys whose accumulators are in registers together.
_TALL = 16 if CURRENT.avx512 else 4 if CURRENT.avx2 else 2


def _emit_dots(b: Any, q: Any, rows: list[Any], size: Any) -> list[Any]:
    """Emit 16-lane partial dot products of q with rows, `size` bytes long."""
    entry = b.block
    loop, done = b.append_basic_block("dots"), b.append_basic_block("dots.end")
    b.branch(loop)
    b.position_at_end(loop)
    at = b.phi(_I64)
    at.add_incoming(ir.Constant(_I64, 0), entry)
    sums = [b.phi(F32.llvm) for _ in rows]
    x = emit_load(b, F32.llvm, b.add(q, at))
    after = [
        emit_fma(b, emit_load(b, F32.llvm, b.add(row, at)), x, total)
        for row, total in zip(rows, sums, strict=True)
    ]
    further = b.add(at, ir.Constant(_I64, _VECTOR))
    at.add_incoming(further, loop)
    for total, value in zip(sums, after, strict=True):
        total.add_incoming(constant(F32, 0.0), entry)
        total.add_incoming(value, loop)
    b.cbranch(b.icmp_signed("<", further, size), loop, done)
    b.position_at_end(done)
    return after


def _emit_totals(b: Any, vectors: list[Any]) -> Any:
    """Emit a vector of the sums of 16 vectors, each summed by the tree of `simd.hsum`."""
    width = LANES
    while width > 1:
        half = width // 2
        low = [lane for lane in range(2 * LANES) if lane % width < half]
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            b.fadd(
                *(
                    b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, LANES), lanes))
                    for lanes in (low, [lane + half for lane in low])
                )
            )
            for x, y in pairs
        ]
        width = half
    return vectors[0]


@op(F32, i64, i64, i64)
def _scores(b, q, panel, pitch):
    """Return the dot products of q with the 16 rows of a panel; all are `pitch` bytes long."""
    rows = [b.add(panel, b.mul(pitch, ir.Constant(_I64, r))) for r in range(CELLS)]
    parts = []
    for r in range(0, CELLS, _TALL):
        parts += _emit_dots(b, q, rows[r : r + _TALL], pitch)
    return _emit_totals(b, parts)


def _emit_mix(
    b: Any, vectors: int, sums: Any, factor: Any, weights: Any, panel: Any, pitch: Any
) -> None:
    places = [b.add(sums, ir.Constant(_I64, _VECTOR * v)) for v in range(vectors)]
    scale = spread(b, F32, factor)
    values = [b.fmul(emit_load(b, F32.llvm, place), scale) for place in places]
    for r in range(CELLS):
        weight = spread(b, F32, emit_load(b, _FLOAT, b.add(weights, ir.Constant(_I64, 4 * r))))
        row = b.add(panel, b.mul(pitch, ir.Constant(_I64, r)))
        for v in range(vectors):
            x = emit_load(b, F32.llvm, b.add(row, ir.Constant(_I64, _VECTOR * v)))
            values[v] = emit_fma(b, weight, x, values[v])
    for place, value in zip(places, values, strict=True):
        emit_store(b, value, place)


@op(void, i64, f32, i64, i64, i64)
def _mix1(b, sums, factor, weights, panel, pitch):
    """Multiply 16 sums by a factor and add 16 weighted rows of a panel."""
    _emit_mix(b, 1, sums, factor, weights, panel, pitch)


@op(void, i64, f32, i64, i64, i64)
def _mix4(b, sums, factor, weights, panel, pitch):
    """Do that for 64 sums."""
    _emit_mix(b, 4, sums, factor, weights, panel, pitch)


@kernel
def attention(rec, ctl, rank, size, scratch):
    """Attend from each token to its visible cells; each thread has every size-th (head, token).

    Fields: M, H, G, D, T, B, slots, positions, ends, ancestors, pages, k_cache, k_scale, v_cache,
    v_scale, q, sinks, y, scale, window, reader, bytes of a line.

    Scratch: the lines of a block and of the next, int64 [2, 16]; the states of the query heads;
    their queries; their sums; a panel of 16 keys or values.
    """
    m = counted(ctl, field(rec, 0))
    units = m * field(rec, 1)
    # Not range(): its step might be zero, and that raises.
    while rank < units:
        _attend(rec, rank % m, rank // m, scratch)
        rank += size


@device
def _attend(rec, t, head, scratch):
    group, d = field(rec, 2), field(rec, 3)
    pitch = 4 * padded(d)
    state = scratch + 16 * CELLS
    queries = state + _STATE * group
    sums = queries + group * pitch
    panel = sums + group * pitch
    _begin(rec, t, head, state, queries, sums)

    window = field(rec, 19)
    cell, end = np.int64(0), read_i32(field(rec, 8) + 4 * t)
    tree = read_i64(field(rec, 9) + 8 * t)
    if window:
        cell = max(cell, read_i32(field(rec, 7) + 4 * t) - window + 1)
        while popcount(tree) > window:
            tree &= tree - 1
    while cell < end or tree:
        count = min(CELLS, max(0, end - cell))
        _committed(rec, t, head, cell, count, scratch)
        cell += count
        while count < CELLS and tree:
            line = _line(rec, t, head, end + lowest_bit(tree))
            write_i64(scratch + 8 * count, line)
            tree &= tree - 1
            count += 1
        _ask_for(rec, t, head, cell, min(CELLS, max(0, end - cell)), scratch + 8 * CELLS)
        read_lines(field(rec, 20), field(rec, 11), field(rec, 12), scratch, count, d, panel)
        for g in range(group):
            scores = mul(_scores(queries + g * pitch, panel, pitch), splat(field_f32(rec, 18)))
            at = state + _STATE * g + _WEIGHTS
            store_f32(at, select(first(count), scores, splat(LOWEST)))
        for g in range(group):
            _weigh(state + _STATE * g)
        read_lines(field(rec, 20), field(rec, 13), field(rec, 14), scratch, count, d, panel)
        for g in range(group):
            _mix(state + _STATE * g, sums + g * pitch, panel, pitch)
    _end(rec, t, head, state, sums)


@device
def _line(rec, t, head, cell):
    slot = read_i32(field(rec, 6) + 4 * t)
    return line_of(field(rec, 10), field(rec, 5), field(rec, 1), field(rec, 4), slot, head, cell)


@device
def _committed(rec, t, head, cell, count, lines):
    """Write the lines of `count` cells from `cell` on, looking a page up once."""
    size = field(rec, 4)
    done = np.int64(0)
    while done < count:
        line = _line(rec, t, head, cell + done)
        run = min(count - done, size - (cell + done) % size)
        for i in range(run):
            write_i64(lines + 8 * (done + i), line + i)
        done += run


@device
def _ask_for(rec, t, head, cell, count, lines):
    """Prefetch the next cells: pages are scattered, and hardware does not foresee the next one."""
    nbytes = field(rec, 21)
    _committed(rec, t, head, cell, count, lines)
    for i in range(count):
        offset = field(lines, i) * nbytes
        for at in range(offset, offset + nbytes, 64):
            prefetch(field(rec, 11) + at)
            prefetch(field(rec, 13) + at)


# The state of a query head: 16 partial sums of the weights, the 16 weights of the block, the
# maximum so far, and what the sums of the past must be multiplied by.
_WEIGHTS, _TOP, _FACTOR, _STATE = 64, 128, 132, 192


@device
def _begin(rec, t, head, state, queries, sums):
    group, d, sinks = field(rec, 2), field(rec, 3), field(rec, 16)
    pitch = 4 * padded(d)
    for g in range(group):
        top, total = LOWEST, zero()
        if sinks:
            top = read_f32(sinks + 4 * (head * group + g))
            total = select(first(1), splat(np.float32(1)), total)
        store_f32(state + _STATE * g, total)
        write_f32(state + _STATE * g + _TOP, top)
        row = (t * field(rec, 1) + head) * group + g
        source, target = field(rec, 15) + 4 * row * d, queries + g * pitch
        for i in range(0, d - 15, 16):
            store_f32(target + 4 * i, load_f32(source + 4 * i))
        i = d & -16
        if i < d:
            store_f32(target + 4 * i, load_f32_n(source + 4 * i, d - i))
        for at in range(0, pitch, 64):
            store_f32(sums + g * pitch + at, zero())


@device
def _weigh(state):
    """Turn the scores of a block into weights; a maximum that grows shrinks the past."""
    scores, before = load_f32(state + _WEIGHTS), read_f32(state + _TOP)
    top, factor = max(before, hmax(scores)), np.float32(1)
    if top > before:
        factor = lane(exp(splat(before - top)), 0)
    weights = exp(sub(scores, splat(top)))
    store_f32(state, fma(load_f32(state), splat(factor), weights))
    store_f32(state + _WEIGHTS, weights)
    write_f32(state + _TOP, top)
    write_f32(state + _FACTOR, factor)


@device
def _mix(state, sums, panel, pitch):
    factor, weights = read_f32(state + _FACTOR), state + _WEIGHTS
    at = 0
    while at + 256 <= pitch:
        _mix4(sums + at, factor, weights, panel + at, pitch)
        at += 256
    while at < pitch:
        _mix1(sums + at, factor, weights, panel + at, pitch)
        at += 64


@device
def _end(rec, t, head, state, sums):
    group, d = field(rec, 2), field(rec, 3)
    for g in range(group):
        total = hsum(load_f32(state + _STATE * g))
        inverse = np.float32(0)
        if total != np.float32(0):
            inverse = np.float32(1) / total
        row = (t * field(rec, 1) + head) * group + g
        source, target = sums + 4 * g * padded(d), field(rec, 17) + 4 * row * d
        for i in range(0, d - 15, 16):
            store_f32(target + 4 * i, mul(load_f32(source + 4 * i), splat(inverse)))
        i = d & -16
        if i < d:
            store_f32_n(target + 4 * i, mul(load_f32(source + 4 * i), splat(inverse)), d - i)


def _attention(call: BoundCall) -> list[Launch]:
    kv_heads, d, width = call.dim("H"), call.dim("D"), call.dim("F")
    group = width // (kv_heads * d)
    if width != group * kv_heads * d or not group:
        raise ShapeError(
            f"attention: 'q' has {width} columns; expected a multiple of {kv_heads} key/value "
            f"heads x {d}"
        )
    if call.has("sinks") and call.dim("N") != kv_heads * group:
        raise ShapeError(
            f"attention: {call.dim('N')} sinks; expected one for each of {kv_heads * group} heads"
        )
    names = ("slots", "positions", "ends", "ancestors", "pages")
    names += ("k_cache", "k_scale", "v_cache", "v_scale", "q", "sinks", "y")
    fields = [
        call.count("q"),
        kv_heads,
        group,
        d,
        call.dim("T"),
        call.dim("B"),
        *(call.address(name) for name in names),
        bits(float(call.attr("scale"))),
        int(call.attr("window")),
        kv_dtype(call).reader,
        d * call.array("k_cache").itemsize,
    ]
    rows = -(-d // LANES) * _VECTOR
    return [call.launch(attention, fields, 16 * CELLS + group * (_STATE + 2 * rows) + CELLS * rows)]


LOWER = {"attention": _attention}
