"""Mixture of experts on int8 activations and integer weights in tiles.

Each thread has the same range of tiles of every expert, and walks the experts that have tokens in
ascending order. A pair is a token and one of its experts, numbered m * A + a. Up to 16 pairs of an
expert share a panel, whatever tokens they come from.
"""

from cpu_fallback import panels
from cpu_fallback.bind import BoundCall, bits, counted, share
from cpu_fallback.jit import Kernel, device, kernel
from cpu_fallback.memory import (
    field,
    field_f32,
    load_f32,
    load_f32_n,
    read_f32,
    read_i32,
    store_f32,
    store_f32_n,
)
from cpu_fallback.moe import _begin, _group, _swiglu
from cpu_fallback.panels import fill_token, width
from cpu_fallback.quantized import (
    AHEAD,
    PANELS,
    SHARES,
    SUMS,
    check_groups,
    is_filled,
    panel_sizes,
)
from cpu_fallback.simd import add, fma, splat, zero
from cpu_fallback.tape import Launch
from cpu_fallback.tile_pack import tiles_of
from cpu_fallback.tile_product import call_product, product_of

# Both kernels have the fields M, A, E, rows, K, q, scale, scales per row of q, ids, product, tiles,
# tile bytes, pairs per block, panel bytes per pair, bias, y, 16 .. 20 the form of the panels; then
# two of their own, and the bytes to ask ahead.


@device
def _fill(rec, order, per_row, count, panel):
    """Write the panel of up to 16 pairs, the last of them repeated up to its width.

    Args:
        rec: address of the fields.
        order: address of the pairs, int32.
        per_row: pairs that share a row of q.
        count: pairs.
        panel: where it goes.
    """
    k, wide = field(rec, 4), width(count)
    for t in range(wide):
        row = read_i32(order + 4 * min(t, count - 1)) // per_row
        scale = field(rec, 6) + 4 * row * field(rec, 7)
        fill_token(rec + 128, field(rec, 5) + row * k, scale, k, panel, t, wide)


@device
def _product(rec, expert, tile, panel, count, sums):
    """Multiply a tile of an expert by a panel of `count` pairs, and add the bias."""
    rows = field(rec, 3)
    tiles = (rows + 15) >> 4
    at = field(rec, 10) + (expert * tiles + tile) * field(rec, 11)
    units = (field(rec, 4) + 31) >> 5
    call_product(field(rec, 9), at, panel, sums, units, width(count), field(rec, 23))
    if field(rec, 14):
        bias = field(rec, 14) + 4 * (expert * rows + 16 * tile)
        values = load_f32_n(bias, min(16, rows - 16 * tile))
        for t in range(count):
            store_f32(sums + 64 * t, add(load_f32(sums + 64 * t), values))


@device
def _sort_and_fill(rec, ctl, scratch, pairs, per_row):
    """Sort pairs by expert and write all panels, unless this thread has; return their address.

    The ends of the experts' pairs are at scratch + PANELS, the pairs in order after that. Panels
    stand in the order in which `_steps` numbers them.
    """
    experts, per_token = field(rec, 2), field(rec, 13)
    ends = scratch + PANELS
    order = ends + 4 * experts
    panel = (order + 4 * pairs + 63) & -64
    if is_filled(rec, ctl, scratch, 0):
        return panel
    _group(field(rec, 8), pairs, experts, ends, order)
    at = panel
    for e in range(experts):
        end = read_i32(ends + 4 * e)
        for start in range(_begin(ends, e), end, 16):
            count = min(16, end - start)
            _fill(rec, order + 4 * start, per_row, count, at)
            at += width(count) * per_token
    return panel


@kernel
def moe_gate_up_q8(rec, ctl, rank, size, scratch):
    """Compute the gated hidden layer of the chosen experts; fields 21, 22: limit, alpha."""
    chosen, experts, per_token = field(rec, 1), field(rec, 2), field(rec, 13)
    pairs = counted(ctl, field(rec, 0)) * chosen
    first, last = share((field(rec, 3) + 15) >> 4, rank, size)
    if first == last:
        return
    panel = _sort_and_fill(rec, ctl, scratch, pairs, chosen)
    ends, sums = scratch + PANELS, scratch + SUMS
    order = ends + 4 * experts
    for e in range(experts):
        start, end = _begin(ends, e), read_i32(ends + 4 * e)
        while start < end:
            stop = min(start + field(rec, 12), end)
            for tile in range(first, last):
                at = panel
                for p in range(start, stop, 16):
                    count = min(16, stop - p)
                    _product(rec, e, tile, at, count, sums)
                    _activate(rec, sums, order + 4 * p, tile, count)
                    at += width(count) * per_token
            panel += _panels_of(stop - start) * per_token
            start = stop


@device
def _panels_of(pairs):
    """Return the width of the panels of a block of pairs of one expert."""
    whole = pairs & -16
    return whole + width(pairs - whole)


@device
def _activate(rec, sums, order, tile, count):
    """Write 8 hidden values of up to 16 pairs."""
    hidden = field(rec, 3) >> 1
    values = min(8, hidden - 8 * tile)
    for t in range(count):
        pair = read_i32(order + 4 * t)
        y = field(rec, 15) + 4 * (pair * hidden + 8 * tile)
        result = _swiglu(load_f32(sums + 64 * t), field_f32(rec, 21), field_f32(rec, 22))
        store_f32_n(y, result, values)


@kernel
def moe_down_q8(rec, ctl, rank, size, scratch):
    """Compute y = residual + sum over a of weights[a] * (w[ids[a]] x[a] + bias[ids[a]]).

    A token's experts are added in ascending order. Fields 21, 22: weights, residual.
    """
    m, chosen, experts = counted(ctl, field(rec, 0)), field(rec, 1), field(rec, 2)
    n, per_token = field(rec, 3), field(rec, 13)
    first, last = share((n + 15) >> 4, rank, size)
    if first == last:
        return
    panel = _sort_and_fill(rec, ctl, scratch, m * chosen, 1)
    ends, sums = scratch + PANELS, scratch + SUMS
    order = ends + 4 * experts
    for t in range(m):
        _begin_rows(rec, t, 16 * first, min(16 * last, n))
    for e in range(experts):
        start, end = _begin(ends, e), read_i32(ends + 4 * e)
        while start < end:
            stop = min(start + field(rec, 12), end)
            for tile in range(first, last):
                at = panel
                for p in range(start, stop, 16):
                    count = min(16, stop - p)
                    _product(rec, e, tile, at, count, sums)
                    _accumulate(rec, sums, order + 4 * p, tile, count)
                    at += width(count) * per_token
            panel += _panels_of(stop - start) * per_token
            start = stop


@device
def _begin_rows(rec, t, row, end):
    """Set rows of a token's result to the residual, or to zero."""
    n, residual, y = field(rec, 3), field(rec, 22), field(rec, 15)
    while row < end:
        at = 4 * (t * n + row)
        count = min(16, end - row)
        value = zero()
        if residual:
            value = load_f32_n(residual + at, count)
        store_f32_n(y + at, value, count)
        row += 16


@device
def _accumulate(rec, sums, order, tile, count):
    """Add 16 weighted rows of up to 16 pairs to their tokens' results."""
    chosen, n = field(rec, 1), field(rec, 3)
    rows = min(16, n - 16 * tile)
    for t in range(count):
        pair = read_i32(order + 4 * t)
        weight = splat(read_f32(field(rec, 21) + 4 * pair))
        y = field(rec, 15) + 4 * (pair // chosen * n + 16 * tile)
        total = fma(weight, load_f32(sums + 64 * t), load_f32_n(y, rows))
        store_f32_n(y, total, rows)


def _launch(
    call: BoundCall, target: Kernel, rows: str, columns: str, own: list[int]
) -> list[Launch]:
    """Return the launch of either kernel; `rows` and `columns` are the letters of w."""
    k = call.dim(columns)
    group = check_groups(call, k)
    tiles = tiles_of(call.spec.name, call.tensor("w"))
    pairs = call.dim("M") * call.dim("A")
    block, _, per_token = panel_sizes(tiles.layout, group, k, pairs)
    fields = [
        call.count("q"),
        call.dim("A"),
        call.dim("E"),
        call.dim(rows),
        k,
        call.address("q"),
        call.address("scale"),
        call.dim("B"),
        call.address("ids"),
        product_of(tiles.layout, group),
        int(tiles.data.ctypes.data),
        tiles.tile_bytes,
        block,
        per_token,
        call.address("bias"),
        call.address("y"),
        *panels.fields(tiles.layout, group, bits(tiles.factor)),
        *own,
        call.hints.prefetch_distance(AHEAD),
    ]
    # A panel of 9 pairs is 16 wide, the worst case.
    wide = pairs + 7 * min(call.dim("E"), pairs)
    scratch = PANELS + 4 * (call.dim("E") + pairs) + 64 + wide * per_token
    return [call.launch(target, fields, scratch, SHARES)]


def _moe_gate_up_q8(call: BoundCall) -> list[Launch]:
    own = [bits(float(call.attr(name))) for name in ("limit", "alpha")]
    return _launch(call, moe_gate_up_q8, "J", "K", own)


def _moe_down_q8(call: BoundCall) -> list[Launch]:
    own = [call.address(name) for name in ("weights", "residual")]
    return _launch(call, moe_down_q8, "N", "I", own)


LOWER = {"moe_gate_up_q8": _moe_gate_up_q8, "moe_down_q8": _moe_down_q8}
