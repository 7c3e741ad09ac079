"""Mixture of experts: the gated hidden layer and the weighted down projection.

Work is split over output rows, so there are no atomics and every thread walks the chosen experts
in the same order. Tokens are grouped by expert first, so that a decoded panel serves all of its
tokens; a pair is a token and one of its experts, numbered m * A + a.

With int8 activations each thread has the same range of tiles of every expert. Up to 16 pairs of an
expert share a panel, whatever tokens they come from.
"""

import numpy as np

from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.memory import (
    load_f32,
    load_f32_n,
    read_f32,
    read_i32,
    store_f32,
    store_f32_n,
    write_f32,
    write_i32,
    write_i64,
)
from cpu_fallback.lanes.record import executes
from cpu_fallback.lanes.simd import add, div, exp, fma, maximum, minimum, mul, neg, splat, zero
from cpu_fallback.lanes.vector import F32, op, pick
from cpu_fallback.ops.bind import BoundCall, share, within
from cpu_fallback.ops.decode import ROWS
from cpu_fallback.ops.product import SCRATCH, SUMS, TOKENS, XS, multiply
from cpu_fallback.ops.stream import Stored, stored
from cpu_fallback.ops.tiled import PANELS, SHARES, TILE_SUMS, Tiled, has_codes, is_filled, tiled
from cpu_fallback.team.tape import Launch
from cpu_fallback.tiles.panels import fill_token, width
from cpu_fallback.tiles.tile_product import call_product


@device
def _group(ids, pairs, experts, ends, order):
    """Sort pairs by expert, stably: expert e has order[ends[e-1]] .. order[ends[e] - 1], int32."""
    for e in range(experts):
        write_i32(ends + 4 * e, 0)
    for p in range(pairs):
        e = within(read_i32(ids + 4 * p), experts)
        write_i32(ends + 4 * e, read_i32(ends + 4 * e) + 1)
    start = 0
    for e in range(experts):
        count = read_i32(ends + 4 * e)
        write_i32(ends + 4 * e, start)
        start += count
    for p in range(pairs):
        e = within(read_i32(ids + 4 * p), experts)
        at = read_i32(ends + 4 * e)
        write_i32(order + 4 * at, p)
        write_i32(ends + 4 * e, at + 1)


@device
def _begin(ends, e):
    if e == 0:
        return 0
    return read_i32(ends + 4 * (e - 1))


@op(F32, F32)
def _evens(b, x):
    """Return lanes 0, 2, .., 14, twice."""
    return pick(b, x, list(range(0, 16, 2)) * 2)


@op(F32, F32)
def _odds(b, x):
    """Return lanes 1, 3, .., 15, twice."""
    return pick(b, x, list(range(1, 16, 2)) * 2)


@device
def _swiglu(sums, limit, alpha):
    """Return (clamp(up) + 1) * g * sigmoid(alpha g) of 8 (gate, up) pairs, g = min(gate, limit).

    A pair with NaN or infinity gives NaN, which clamping alone would hide.
    """
    top, odd = splat(limit), mul(sums, zero())
    gate = minimum(_evens(sums), top)
    up = minimum(maximum(_odds(sums), neg(top)), top)
    up = add(up, add(_evens(odd), _odds(odd)))
    one = splat(np.float32(1))
    return div(mul(add(up, one), gate), add(exp(neg(mul(splat(alpha), gate))), one))


@executes("moe_gate_up", Stored)
def moe_gate_up(a, rank, size, scratch):
    """Compute the gated hidden layer of the chosen experts."""
    chosen, experts, j, k = a.A, a.E, a.J, a.K
    ends = scratch + SCRATCH
    order = ends + 4 * experts
    _group(a.ids, a.M * chosen, experts, ends, order)
    first, last = share((j + ROWS - 1) // ROWS, rank, size)
    for e in range(experts):
        begin, end = _begin(ends, e), read_i32(ends + 4 * e)
        if begin < end:
            for unit in range(first, last):
                row = unit * ROWS
                count = min(ROWS, j - row)
                for start in range(begin, end, TOKENS):
                    tokens = min(TOKENS, end - start)
                    for t in range(tokens):
                        token = read_i32(order + 4 * (start + t)) // chosen
                        write_i64(scratch + XS + 8 * t, a.x + 4 * token * k)
                    multiply(a.product, a.weight, e, row, count, tokens, scratch)
                    if a.bias:
                        _add_bias(scratch, tokens, count, a.bias + 4 * (e * j + row))
                    _activate(a, scratch, order + 4 * start, row, count, tokens)


@device
def _add_bias(scratch, tokens, count, bias):
    for t in range(tokens):
        for r in range(count):
            at = scratch + SUMS + 4 * (t * ROWS + r)
            write_f32(at, read_f32(at) + read_f32(bias + 4 * r))


@device
def _activate(a, scratch, order, row, count, tokens):
    # The sums of two tokens fill 16 lanes; their 8 results go where the first token's sums were.
    for t in range(0, tokens, 2):
        sums = scratch + SUMS + 4 * t * ROWS
        store_f32(sums, _swiglu(load_f32(sums), a.limit, a.alpha))
        for i in range(min(2, tokens - t)):
            pair = read_i32(order + 4 * (t + i))
            for r in range(count >> 1):
                value = read_f32(sums + 4 * (i * (ROWS // 2) + r))
                write_f32(a.y + 4 * (pair * a.I + (row >> 1) + r), value)


@executes("moe_down", Stored)
def moe_down(a, rank, size, scratch):
    """Compute y = residual + sum over a of weights[a] * (w[ids[a]] x[a] + bias[ids[a]])."""
    n, experts = a.N, a.E
    pairs = a.M * a.A
    ends = scratch + SCRATCH
    order = ends + 4 * experts
    parts = order + 4 * pairs
    _group(a.ids, pairs, experts, ends, order)
    first, last = share((n + ROWS - 1) // ROWS, rank, size)
    for unit in range(first, last):
        row = unit * ROWS
        count = min(ROWS, n - row)
        for e in range(experts):
            end = read_i32(ends + 4 * e)
            for start in range(_begin(ends, e), end, TOKENS):
                tokens = min(TOKENS, end - start)
                for t in range(tokens):
                    pair = read_i32(order + 4 * (start + t))
                    write_i64(scratch + XS + 8 * t, a.x + 4 * pair * a.I)
                multiply(a.product, a.weight, e, row, count, tokens, scratch)
                if a.bias:
                    _add_bias(scratch, tokens, count, a.bias + 4 * (e * n + row))
                for t in range(tokens):
                    pair = read_i32(order + 4 * (start + t))
                    for r in range(count):
                        part = read_f32(scratch + SUMS + 4 * (t * ROWS + r))
                        write_f32(parts + 4 * (pair * ROWS + r), part)
        _combine(a, parts, row, count)


@device
def _combine(a, parts, row, count):
    """Sum the experts' parts of each token, in the order of its ids."""
    for t in range(a.M):
        for r in range(count):
            at = 4 * (t * a.N + row + r)
            total = np.float32(0)
            if a.residual:
                total = read_f32(a.residual + at)
            for pair in range(t * a.A, (t + 1) * a.A):
                total += read_f32(a.weights + 4 * pair) * read_f32(parts + 4 * (pair * ROWS + r))
            write_f32(a.y + at, total)


@device
def _fill(a, k, order, per_row, count, panel):
    """Write the panel of up to 16 pairs, the last of them repeated up to its width.

    Args:
        a: the arguments.
        k: columns of a row of x.
        order: address of the pairs, int32.
        per_row: pairs that share a row of x.
        count: pairs.
        panel: where it goes.
    """
    wide = width(count)
    for t in range(wide):
        row = read_i32(order + 4 * min(t, count - 1)) // per_row
        scale = a.x_scale + 4 * row * a.scales
        fill_token(a.form, a.x + row * k, scale, k, panel, t, wide)


@device
def _multiply_tile(a, rows, k, expert, tile, panel, count, sums):
    """Multiply a tile of an expert [rows, k] by a panel of `count` pairs, and add the bias."""
    tiles = (rows + 15) >> 4
    at = a.tiles + (expert * tiles + tile) * a.tile_bytes
    call_product(a.product, at, panel, sums, (k + 31) >> 5, width(count), a.ahead)
    if a.bias:
        bias = a.bias + 4 * (expert * rows + 16 * tile)
        values = load_f32_n(bias, min(16, rows - 16 * tile))
        for t in range(count):
            store_f32(sums + 64 * t, add(load_f32(sums + 64 * t), values))


@device
def _group_and_fill(a, scratch, pairs, k, per_row):
    """Sort pairs by expert and write all panels, unless this thread has; return their address.

    The ends of the experts' pairs are at scratch + PANELS, the pairs in order after that. Panels
    stand in the order in which `_steps` numbers them.
    """
    experts = a.E
    ends = scratch + PANELS
    order = ends + 4 * experts
    panel = (order + 4 * pairs + 63) & -64
    if is_filled(a.rec, a.ctl, scratch, 0):
        return panel
    _group(a.ids, pairs, experts, ends, order)
    at = panel
    for e in range(experts):
        end = read_i32(ends + 4 * e)
        for start in range(_begin(ends, e), end, 16):
            count = min(16, end - start)
            _fill(a, k, order + 4 * start, per_row, count, at)
            at += width(count) * a.per_token
    return panel


@executes("moe_gate_up", Tiled)
def gate_up_of_codes(a, rank, size, scratch):
    """Compute the gated hidden layer of the chosen experts."""
    first, last = share((a.J + 15) >> 4, rank, size)
    if first == last:
        return
    panel = _group_and_fill(a, scratch, a.M * a.A, a.K, a.A)
    ends, sums = scratch + PANELS, scratch + TILE_SUMS
    order = ends + 4 * a.E
    for e in range(a.E):
        start, end = _begin(ends, e), read_i32(ends + 4 * e)
        while start < end:
            stop = min(start + a.per_block, end)
            for tile in range(first, last):
                at = panel
                for p in range(start, stop, 16):
                    count = min(16, stop - p)
                    _multiply_tile(a, a.J, a.K, e, tile, at, count, sums)
                    _activate_tile(a, sums, order + 4 * p, tile, count)
                    at += width(count) * a.per_token
            panel += _panels_of(stop - start) * a.per_token
            start = stop


@device
def _panels_of(pairs):
    """Return the width of the panels of a block of pairs of one expert."""
    whole = pairs & -16
    return whole + width(pairs - whole)


@device
def _activate_tile(a, sums, order, tile, count):
    """Write 8 hidden values of up to 16 pairs."""
    values = min(8, a.I - 8 * tile)
    for t in range(count):
        pair = read_i32(order + 4 * t)
        y = a.y + 4 * (pair * a.I + 8 * tile)
        result = _swiglu(load_f32(sums + 64 * t), a.limit, a.alpha)
        store_f32_n(y, result, values)


@executes("moe_down", Tiled)
def down_of_codes(a, rank, size, scratch):
    """Compute y = residual + sum over a of weights[a] * (w[ids[a]] x[a] + bias[ids[a]]).

    A token's experts are added in ascending order.
    """
    first, last = share((a.N + 15) >> 4, rank, size)
    if first == last:
        return
    panel = _group_and_fill(a, scratch, a.M * a.A, a.I, 1)
    ends, sums = scratch + PANELS, scratch + TILE_SUMS
    order = ends + 4 * a.E
    for t in range(a.M):
        _begin_rows(a, t, 16 * first, min(16 * last, a.N))
    for e in range(a.E):
        start, end = _begin(ends, e), read_i32(ends + 4 * e)
        while start < end:
            stop = min(start + a.per_block, end)
            for tile in range(first, last):
                at = panel
                for p in range(start, stop, 16):
                    count = min(16, stop - p)
                    _multiply_tile(a, a.N, a.I, e, tile, at, count, sums)
                    _accumulate(a, sums, order + 4 * p, tile, count)
                    at += width(count) * a.per_token
            panel += _panels_of(stop - start) * a.per_token
            start = stop


@device
def _begin_rows(a, t, row, end):
    """Set rows of a token's result to the residual, or to zero."""
    while row < end:
        at = 4 * (t * a.N + row)
        count = min(16, end - row)
        value = zero()
        if a.residual:
            value = load_f32_n(a.residual + at, count)
        store_f32_n(a.y + at, value, count)
        row += 16


@device
def _accumulate(a, sums, order, tile, count):
    """Add 16 weighted rows of up to 16 pairs to their tokens' results."""
    rows = min(16, a.N - 16 * tile)
    for t in range(count):
        pair = read_i32(order + 4 * t)
        weight = splat(read_f32(a.weights + 4 * pair))
        y = a.y + 4 * (pair // a.A * a.N + 16 * tile)
        total = fma(weight, load_f32(sums + 64 * t), load_f32_n(y, rows))
        store_f32_n(y, total, rows)


def _moe_gate_up(call: BoundCall) -> list[Launch]:
    if has_codes(call):
        return _of_codes(call, gate_up_of_codes, "K")
    order = 4 * (call.dim("E") + call.dim("M") * call.dim("A"))
    return [call.launch(moe_gate_up, stored(call), SCRATCH + order)]


def _moe_down(call: BoundCall) -> list[Launch]:
    if has_codes(call):
        return _of_codes(call, down_of_codes, "I")
    pairs = call.dim("M") * call.dim("A")
    order = 4 * (call.dim("E") + pairs)
    return [call.launch(moe_down, stored(call), SCRATCH + order + 4 * pairs * ROWS)]


def _of_codes(call: BoundCall, kernel: Kernel, columns: str) -> list[Launch]:
    """Return the launch of a kernel for int8 activations; `columns` is the letter of a row."""
    pairs = call.dim("M") * call.dim("A")
    own, _ = tiled(call, columns, pairs)
    # A panel of 9 pairs is 16 wide, the worst case.
    wide = pairs + 7 * min(call.dim("E"), pairs)
    scratch = PANELS + 4 * (call.dim("E") + pairs) + 64 + wide * own.per_token
    return [call.launch(kernel, own, scratch, SHARES)]


LOWER = {"moe_gate_up": _moe_gate_up, "moe_down": _moe_down}
