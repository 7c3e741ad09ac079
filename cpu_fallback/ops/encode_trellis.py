"""Rounding to trellises: the Viterbi algorithm over the rows of a column, see `Tcq`.

Columns are rounded one after another; what a column's rounding has lost corrects those behind it
(GPTQ). A vector has the costs of the 8 states of two strips.

Source: Viterbi 1967; Frantar et al. 2023 (arXiv 2210.17323).
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from clocher_kernels.formats.tcq import STATES, STRIP, UNIT, first_subset, levels
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device, i64
from cpu_fallback.lanes.record import reader, words

ROWS = 2 * STRIP
"""Rows that are rounded together."""
_SPAN, _FINE = 64, 2  # Levels are whole numbers below 64: bins of a half have one nearest level
_BINS = 2 * _SPAN * _FINE
# Scratch: bins and values of 32 rows now and next, their weights, moves, costs, levels, errors
_VALUES, _WEIGHTS, _MOVES, _COSTS, _LEVELS = 256, 512, 768, 832, 896
_ERRORS = 1024


class Columns(NamedTuple):
    """Columns to round, in their order; addresses."""

    values: int  # fp32 [columns, rows]
    errors: int  # fp32 [columns, rows]: of values, over the factor's diagonal
    codes: int  # u8 [columns, rows]: 2 m + u
    steps: int  # fp32 [columns / 32, rows]: what levels are multiplied by
    lower: int  # fp32 [columns, columns], of the Hessian's factor; 0: none corrects another
    rows: int  # a multiple of 32
    columns: int  # whole units
    table: int  # fp32 [256, 4]: the nearest level of each subset
    marks: int  # u8 [256, 4]: m of these


_columns_at = reader(Columns)


def _lanes(pairs: Any) -> tuple[list[int], list[int]]:
    """Return, for both states before each, what `pairs(strip, state before, bit)` gives."""
    new = [(strip, state) for strip in (0, 1) for state in range(STATES)]
    low, high = (
        [pairs(strip, (state >> 1) + more, state & 1) for strip, state in new]
        for more in (0, STATES // 2)
    )
    return low, high


_FROM = _lanes(lambda strip, before, bit: STATES * strip + before)
_SUBSET = _lanes(lambda strip, before, bit: 4 * strip + int(first_subset()[before] ^ 2 * bit))


@v.op(v.F32, v.F32, i64, i64, i64)
def _step(b, cost, table, scratch, t):
    """Return the costs of the states after a weight, and write their moves; t in bytes."""
    nearest, values, weights = [], [], []
    for strip in (0, 1):
        at = v.behind(b, b.add(scratch, t), 128 * strip)
        place = b.sext(v.emit_load(b, v.INT32, at), v.INT64)
        line = v.emit_at(b, table, place, 16)
        nearest.append(v.emit_load(b, ir.VectorType(v.FLOAT, 4), line))
        for found, start in ((values, _VALUES), (weights, _WEIGHTS)):
            number = v.emit_load(b, v.FLOAT, v.behind(b, at, start))
            found.append(v.spread(b, nearest[0].type, number))
    lost = b.fsub(v.join(b, values), v.join(b, nearest))
    lost = b.fmul(b.fmul(lost, lost), v.join(b, weights))
    low, high = (
        b.fadd(v.pick(b, cost, source), v.pick(b, lost, subset))
        for source, subset in zip(_FROM, _SUBSET, strict=True)
    )
    move = b.fcmp_ordered("<", high, low)
    moves = v.behind(b, b.add(scratch, b.lshr(t, v.number(1))), _MOVES)
    v.emit_store(b, b.bitcast(move, v.INT16), moves)
    return b.select(move, high, low)


@v.op(v.F32, i64, i64)
def _start(b, one, other):
    """Return costs of two strips that are in these states."""
    state = [v.spread(b, v.I32, b.trunc(each, v.INT32)) for each in (one, other)]
    both = v.shuffle(b, *state, [*range(STATES), *range(v.LANES, v.LANES + STATES)])
    here = b.icmp_signed("==", both, v.constant(v.I32, [*range(STATES)] * 2))
    return b.select(here, v.constant(v.F32, 0.0), v.constant(v.F32, 1e30))


@device
def _prepare(scratch, x, step, over):
    """Write bins, values and weights of 16 rows: x / step, and (step over)^2."""
    zero = v.zero()
    safe = v.select(v.lt(zero, step), step, v.splat(np.float32(1)))
    near = v.select(v.lt(zero, step), v.div(x, safe), zero)
    most = v.splat(np.float32(_SPAN - 1 / (2 * _FINE)))
    inside = v.minimum(v.maximum(near, v.neg(most)), most)
    place = v.fma(inside, v.splat(np.float32(_FINE)), v.splat(np.float32(_FINE * _SPAN)))
    v.store_i32(scratch, v.to_i32(place))
    v.store_f32(scratch + _VALUES, near)
    weight = v.mul(step, v.splat(over))
    v.store_f32(scratch + _WEIGHTS, v.mul(weight, weight))


@device
def _trace(of, scratch, strip, count, codes):
    """Write codes and levels of a strip's 16 rows from the best end; return the next state."""
    costs = scratch + _COSTS + 4 * STATES * strip
    at = 0
    for state in range(1, STATES):
        if v.read_f32(costs + 4 * state) < v.read_f32(costs + 4 * at):
            at = state
    after = at
    for t in range(count - 1, -1, -1):
        if t == STRIP - 1:
            after = at
        move = v.read_u16(scratch + _MOVES + 2 * t) >> (STATES * strip + at)
        before = (at >> 1) + STATES // 2 * (move & 1)
        if t < STRIP:
            z = (before >> 1 & 1) + 2 * ((before ^ (before >> 2) ^ at) & 1)
            place = 4 * v.read_i32(scratch + 128 * strip + 4 * t) + z
            v.write_f32(scratch + _LEVELS + 64 * strip + 4 * t, v.read_f32(of.table + 4 * place))
            v.write_u8(codes + t, 2 * v.read_u8(of.marks + place) + (at & 1))
        at = before
    return after


@device
def _lost(scratch, x, step, over):
    """Return what rounding has lost of a strip's 16 values."""
    level = v.load_f32(scratch + _LEVELS)
    return v.mul(v.sub(x, v.mul(level, step)), v.splat(over))


def _round(rec, first, last, scratch):
    """Round the columns of rows 32 first .. 32 last."""
    of = _columns_at(rec)
    for pair in range(first, last):
        one = other = 0
        for i in range(of.columns):
            if i % UNIT == 0:
                one = other = 0
            ahead = 1 if i % UNIT < UNIT - 1 else 0
            place = 4 * ROWS * pair
            x = of.values + 4 * of.rows * i + place
            y = x + 4 * of.rows * ahead
            a, b, c, d = v.load_f32(x), v.load_f32(x + 64), v.load_f32(y), v.load_f32(y + 64)
            own = over = np.float32(1)
            if of.lower:
                shares = of.lower + 4 * of.columns * i
                later = shares + 4 * of.columns * ahead
                for before in range(i):
                    e = scratch + _ERRORS + 128 * before
                    share = v.splat(-v.read_f32(shares + 4 * before))
                    other_share = v.splat(-v.read_f32(later + 4 * before))
                    one_e, other_e = v.load_f32(e), v.load_f32(e + 64)
                    a, b = v.fma(share, one_e, a), v.fma(share, other_e, b)
                    c, d = v.fma(other_share, one_e, c), v.fma(other_share, other_e, d)
                own /= v.read_f32(shares + 4 * i)
                over /= v.read_f32(later + 4 * (i + ahead))
            steps = of.steps + 4 * of.rows * (i // UNIT) + place
            step, other_step = v.load_f32(steps), v.load_f32(steps + 64)
            _prepare(scratch, a, step, own)
            _prepare(scratch + 128, b, other_step, own)
            _prepare(scratch + 64, c, step, over)
            _prepare(scratch + 192, d, other_step, over)
            cost = _start(one, other)
            for t in range(STRIP << ahead):
                cost = _step(cost, of.table, scratch, 4 * t)
            v.store_f32(scratch + _COSTS, cost)
            codes = of.codes + of.rows * i + ROWS * pair
            one = _trace(of, scratch, 0, STRIP << ahead, codes)
            other = _trace(of, scratch, 1, STRIP << ahead, codes + STRIP)
            a = _lost(scratch, a, step, own)
            b = _lost(scratch + 64, b, other_step, own)
            errors = of.errors + 4 * of.rows * i + place
            v.store_f32(errors, a)
            v.store_f32(errors + 64, b)
            v.store_f32(scratch + _ERRORS + 128 * i, a)
            v.store_f32(scratch + _ERRORS + 128 * i + 64, b)
    return last


@cache
def _tables(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return table and marks of `Columns`."""
    middle = (np.arange(_BINS, dtype=np.float32) + 0.5) / _FINE - _SPAN
    subsets = levels(bits).reshape(-1, 4).T
    m = np.abs(middle[:, None, None] - subsets).argmin(axis=-1)
    return np.take_along_axis(subsets.T, m, axis=0).astype(np.float32), m.astype(np.uint8)


_kernel = Kernel(_round, i64, "encode.trellis")


def round_columns(
    bits: int,
    values: np.ndarray,
    steps: np.ndarray,
    lower: np.ndarray | None,
    codes: np.ndarray,
    errors: np.ndarray,
    rows: slice,
) -> None:
    """Round some rows of columns to trellises, into codes and errors; see `Columns`."""
    columns, count = values.shape
    arrays = (values, errors, codes, steps, lower, *_tables(bits))
    *of, table, marks = (0 if array is None else int(array.ctypes.data) for array in arrays)
    record = np.array(list(words(Columns(*of, count, columns, table, marks))), np.int64)
    scratch = np.empty(_ERRORS + 4 * ROWS * columns, np.uint8)
    first, last = rows.start // ROWS, rows.stop // ROWS
    _kernel.callable(record.ctypes.data, first, last, scratch.ctypes.data)
