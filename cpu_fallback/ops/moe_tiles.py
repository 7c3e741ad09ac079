"""Mixture of experts, of int8 activations and weights in tiles.

Each thread has the same range of tiles of every expert. Up to 16 pairs of an expert share a panel,
whatever tokens they come from.
"""

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.ops.experts import begin_of, clamped_pairs, silu_pairs, sort_by_expert, weight_of
from cpu_fallback.ops.tiled import PANELS, SHARES, TILE_SUMS, Tiled, is_filled, tiled
from cpu_fallback.team.tape import Launch
from cpu_fallback.tiles.panels import BEHIND, fill_token, width
from cpu_fallback.tiles.tile_product import call_product


@device
def _fill(a, k, order, per_row, count, panel):
    wide = width(count)
    for t in range(wide):
        row = v.read_i32(order + 4 * min(t, count - 1)) // per_row
        scale = a.x_scale + 4 * row * a.scales
        fill_token(a.form, a.x + row * k, scale, k, panel, t, wide)


@device
def _multiply_tile(a, rows, k, expert, tile, panel, count, sums):
    tiles = (rows + 15) >> 4
    at = a.tiles + (expert * tiles + tile) * a.tile_bytes
    call_product(a.product, at, panel, sums, (k + 31) >> 5, width(count), a.ahead)


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

    The ends of the experts' pairs are at scratch + PANELS, the pairs in order after that. Panels
    stand in the order in which `_steps` numbers them.
    """
    experts = a.E
    ends = scratch + PANELS
    order = ends + 4 * experts
    panel = (order + 4 * pairs + 63) & -64
    if is_filled(a.rec, a.ctl, scratch, 0):
        return panel
    sort_by_expert(a.ids, pairs, experts, ends, order)
    at = panel
    for e in range(experts):
        end = v.read_i32(ends + 4 * e)
        for start in range(begin_of(ends, e), end, 16):
            count = min(16, end - start)
            _fill(a, k, order + 4 * start, per_row, count, at)
            at += width(count) * a.per_token
    return panel


@executes("moe_gate_up", Tiled)
def clamped_gate_up_of_codes(a, rank, size, scratch):
    """Compute the gated hidden layer of the chosen experts, clamped."""
    _gate_up_of_codes(a, rank, size, scratch, clamped_pairs)


@executes("moe_gate_up", Tiled)
def silu_gate_up_of_codes(a, rank, size, scratch):
    """Compute the gated hidden layer of the chosen experts, of silu gates."""
    _gate_up_of_codes(a, rank, size, scratch, silu_pairs)


@device
def _gate_up_of_codes(a, rank, size, scratch, act):
    first, last = share((a.J + 15) >> 4, rank, size)
    if first == last:
        return
    panel = _group_and_fill(a, scratch, a.M * a.A, a.K, a.A)
    ends, sums = scratch + PANELS, scratch + TILE_SUMS
    order = ends + 4 * a.E
    for e in range(a.E):
        start, end = begin_of(ends, e), v.read_i32(ends + 4 * e)
        while start < end:
            stop = min(start + a.per_block, end)
            for tile in range(first, last):
                at = panel
                for p in range(start, stop, 16):
                    count = min(16, stop - p)
                    _multiply_tile(a, a.J, a.K, e, tile, at, count, sums)
                    if a.factors:
                        _scale_tile(a.factors, sums, order + 4 * p, count)
                    if a.bias:
                        _add_bias_tile(a, a.J, e, tile, count, sums)
                    _activate_tile(a, sums, order + 4 * p, tile, count, act)
                    at += width(count) * a.per_token
            panel += _panels_of(stop - start) * a.per_token
            start = stop


@device
def _panels_of(pairs):
    """Return the width of the panels of a block of pairs of one expert."""
    whole = pairs & -16
    return whole + width(pairs - whole)


@device
def _activate_tile(a, sums, order, tile, count, act):
    """Write 8 hidden values of up to 16 pairs."""
    values = min(8, a.I - 8 * tile)
    for t in range(count):
        pair = v.read_i32(order + 4 * t)
        y = a.y + 4 * (pair * a.I + 8 * tile)
        result = act(v.load_f32(sums + 64 * t), a.limit, a.alpha)
        v.store_f32_n(y, result, values)


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
        start, end = begin_of(ends, e), v.read_i32(ends + 4 * e)
        while start < end:
            stop = min(start + a.per_block, end)
            for tile in range(first, last):
                at = panel
                for p in range(start, stop, 16):
                    count = min(16, stop - p)
                    _multiply_tile(a, a.N, a.I, e, tile, at, count, sums)
                    if a.bias:
                        _add_bias_tile(a, a.N, e, tile, count, sums)
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
        value = v.zero()
        if a.residual:
            value = v.load_f32_n(a.residual + at, count)
        v.store_f32_n(a.y + at, value, count)
        row += 16


@device
def _accumulate(a, sums, order, tile, count):
    """Add 16 weighted rows of up to 16 pairs to their tokens' results."""
    rows = min(16, a.N - 16 * tile)
    for t in range(count):
        pair = v.read_i32(order + 4 * t)
        weight = v.splat(weight_of(a, pair))
        y = a.y + 4 * (pair // a.A * a.N + 16 * tile)
        total = v.fma(weight, v.load_f32(sums + 64 * t), v.load_f32_n(y, rows))
        v.store_f32_n(y, total, rows)


def of_codes(call: BoundCall, kernel: Kernel, columns: str) -> list[Launch]:
    """Return the launch of a kernel for int8 activations; `columns` is the letter of a row."""
    pairs = call.dim("M") * call.dim("A")
    own, _ = tiled(call, columns, pairs)
    # A panel of 9 pairs is 16 wide, the worst case.
    wide = pairs + 7 * min(call.dim("E"), pairs)
    scratch = PANELS + 4 * (call.dim("E") + pairs) + 64 + wide * own.per_token + BEHIND
    return [call.launch(kernel, own, scratch, SHARES)]
