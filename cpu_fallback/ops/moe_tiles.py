"""Mixture of experts: int8 activations and weights in tiles, and what is done with all sums.

Each thread has the same range of tiles of every expert. Up to 16 pairs of an expert share a panel,
whatever tokens they come from.
"""

from typing import Any

import numpy as np

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops import linear
from cpu_fallback.ops.bind import BoundCall, share, within
from cpu_fallback.ops.epilogue import silu
from cpu_fallback.team.tape import Launch
from cpu_fallback.tiles.panels import BEHIND, fill_token, width

_strip_room = device(linear.strip_room)
_SHARES = 16  # Shares per thread: few, of all experts, would leave threads to wait for the last


@device
def sort_by_expert(ids, pairs, experts, ends, order):
    """Sort pairs by expert, stably: expert e has order[ends[e-1]] .. order[ends[e] - 1], int32."""
    for e in range(experts):
        v.write_i32(ends + 4 * e, 0)
    for p in range(pairs):
        e = within(v.read_i32(ids + 4 * p), experts)
        v.write_i32(ends + 4 * e, v.read_i32(ends + 4 * e) + 1)
    start = 0
    for e in range(experts):
        count = v.read_i32(ends + 4 * e)
        v.write_i32(ends + 4 * e, start)
        start += count
    for p in range(pairs):
        e = within(v.read_i32(ids + 4 * p), experts)
        at = v.read_i32(ends + 4 * e)
        v.write_i32(order + 4 * at, p)
        v.write_i32(ends + 4 * e, at + 1)


@device
def begin_of(ends, e):
    """Return where the pairs of an expert begin."""
    if e == 0:
        return 0
    return v.read_i32(ends + 4 * (e - 1))


@v.op(v.F32, v.F32)
def _evens(b, x):
    """Return lanes 0, 2, .., 14, twice."""
    return v.pick(b, x, list(range(0, 16, 2)) * 2)


@v.op(v.F32, v.F32)
def _odds(b, x):
    """Return lanes 1, 3, .., 15, twice."""
    return v.pick(b, x, list(range(1, 16, 2)) * 2)


@device
def clamped_pairs(sums, limit, alpha):
    """Return (clamp(up) + 1) * g * sigmoid(alpha g) of 8 (gate, up) pairs, g = min(gate, limit).

    A pair with NaN or infinity gives NaN, which clamping alone would hide.
    """
    top, odd = v.splat(limit), v.mul(sums, v.zero())
    gate = v.minimum(_evens(sums), top)
    up = v.minimum(v.maximum(_odds(sums), v.neg(top)), top)
    up = v.add(up, v.add(_evens(odd), _odds(odd)))
    one = v.splat(np.float32(1))
    return v.div(v.mul(v.add(up, one), gate), v.add(v.exp(v.neg(v.mul(v.splat(alpha), gate))), one))


# Return silu(gate) * up of 8 (gate, up) pairs.
silu_pairs = device(lambda sums, limit, alpha: v.mul(silu(_evens(sums), sums), _odds(sums)))


@device
def _fill(a, k, order, per_row, count, panel, twos):
    wide = width(count)
    for t in range(wide):
        row = v.read_i32(order + 4 * min(t, count - 1)) // per_row
        scale = a.x_scale + 4 * row * a.scales
        fill_token(a.form, a.x + row * k, scale, k, panel, t, wide, twos)


@device
def _scale_tile(factors, sums, order, count):
    for t in range(count):
        factor = v.splat(v.read_f32(factors + 4 * v.read_i32(order + 4 * t)))
        v.store_f32(sums + 64 * t, v.mul(v.load_f32(sums + 64 * t), factor))


@device
def _add_bias_tile(a, rows, expert, tile, count, sums):
    bias = a.bias + 4 * (expert * rows + 16 * tile)
    values = v.load_f32_n(bias, min(16, rows - 16 * tile))
    for t in range(count):
        v.store_f32(sums + 64 * t, v.add(v.load_f32(sums + 64 * t), values))


@device
def _group_and_fill(a, scratch, pairs, k, per_row):
    """Sort pairs by expert and write all panels, unless this thread has; return their address.

    The ends of the experts' pairs are at scratch + PANELS, the pairs in order after that, then a
    strip and its sums, if there are strips, and the panels of each expert's pairs.
    """
    experts = a.E
    ends = scratch + linear.PANELS
    order = ends + 4 * experts
    panel = ((order + 4 * pairs + 63) & -64) + _strip_room(a)
    if linear.is_filled(a.rec, a.ctl, scratch, 0):
        return panel
    sort_by_expert(a.ids, pairs, experts, ends, order)
    at = panel
    for e in range(experts):
        end = v.read_i32(ends + 4 * e)
        begin = begin_of(ends, e)
        for start in range(begin, end, 16):
            count, block = min(16, end - start), (start - begin) // a.per_block * a.per_block
            twos = linear.TWOS * linear.in_strips(a, min(a.per_block, end - begin - block))
            _fill(a, k, order + 4 * start, per_row, count, at, twos)
            at += width(count) * a.per_token
    return panel


_ask_nothing = device(lambda a, own, t, pairs, tile: None)


@device
def each_tile_of_codes(a, scratch, first, last, rows, k, per_row, write):
    """Multiply a range of tiles of every expert [rows, k]; `write` takes the sums of some pairs."""
    panel = _group_and_fill(a, scratch, a.M * a.A, k, per_row)
    ends, nbytes = scratch + linear.PANELS, ((rows + 15) >> 4) * a.tile_bytes
    order, strip = ends + 4 * a.E, panel - _strip_room(a)
    for e in range(a.E):
        start, end = begin_of(ends, e), v.read_i32(ends + 4 * e)
        while start < end:
            pairs, own = min(a.per_block, end - start), (order + 4 * start, e)
            where = scratch, a.tiles + e * nbytes, panel, strip
            linear.multiply_block(a, where, pairs, k, first, last, own, _ask_nothing, write)
            panel += ((pairs & -16) + width(pairs & 15)) * a.per_token
            start += pairs


def gate_up(name: str, act: Any, each: Any, own: type) -> Kernel:
    """Return the kernel of the gated hidden layer of the chosen experts.

    `each` multiplies a range of tiles of 16 rows of every expert, `own` is the record it reads.
    """

    @device
    def write(a, own, sums, t, count, tile):
        order, e = own[0] + 4 * t, own[1]
        if a.factors:
            _scale_tile(a.factors, sums, order, count)
        if a.bias:
            _add_bias_tile(a, a.J, e, tile, count, sums)
        values = min(8, a.I - 8 * tile)
        for t in range(count):
            y = a.y + 4 * (v.read_i32(order + 4 * t) * a.I + 8 * tile)
            v.store_f32_n(y, act(v.load_f32(sums + 64 * t), a.limit, a.alpha), values)

    def kernel(a, rank, size, scratch):
        first, last = share((a.J + 15) >> 4, rank, size)
        if first < last:
            each(a, scratch, first, last, a.J, a.K, a.A, write)

    kernel.__name__ = name
    return executes("moe_gate_up", own)(kernel)


@device
def _add_rows(a, own, sums, t, count, tile):
    """Add 16 weighted rows of up to 16 pairs to their tokens' results."""
    order, e = own[0] + 4 * t, own[1]
    if a.bias:
        _add_bias_tile(a, a.N, e, tile, count, sums)
    rows = min(16, a.N - 16 * tile)
    for t in range(count):
        pair, weight = v.read_i32(order + 4 * t), np.float32(1)
        if a.weights:
            weight = v.read_f32(a.weights + 4 * pair)
        y = a.y + 4 * (pair // a.A * a.N + 16 * tile)
        total = v.fma(v.splat(weight), v.load_f32(sums + 64 * t), v.load_f32_n(y, rows))
        v.store_f32_n(y, total, rows)


@device
def _begin_rows(a, t, row, end):
    """Set rows of a token's result to the residual, or to zero."""
    while row < end:
        at = 4 * (t * a.N + row)
        count = min(16, end - row)
        value = v.zero()
        if a.residual:
            value = v.load_f32_n(a.residual + at, count)
        v.store_f32_n(a.y + at, value, count)
        row += 16


def down(name: str, each: Any, own: type) -> Kernel:
    """Return the kernel of y = residual + sum over a of weights[a] * (w[ids[a]] x[a] + bias).

    A token's experts are added in ascending order. `each` and `own` as in `gate_up`.
    """

    def kernel(a, rank, size, scratch):
        first, last = share((a.N + 15) >> 4, rank, size)
        if first < last:
            for t in range(a.M):
                _begin_rows(a, t, 16 * first, min(16 * last, a.N))
            each(a, scratch, first, last, a.N, a.I, 1, _add_rows)

    kernel.__name__ = name
    return executes("moe_down", own)(kernel)


def of_codes(call: BoundCall, kernel: Kernel, columns: str) -> list[Launch]:
    """Return the launch of a kernel for int8 activations; `columns` is the letter of a row."""
    pairs = call.dim("M") * call.dim("A")
    own, _ = linear.tiled(call, columns, pairs)
    # A panel of 9 pairs is 16 wide, the worst case.
    wide = pairs + 7 * min(call.dim("E"), pairs)
    scratch = linear.PANELS + 4 * (call.dim("E") + pairs) + 64 + wide * own.per_token + BEHIND
    scratch += linear.strip_room(own)
    return [call.launch(kernel, own, scratch, _SHARES)]
