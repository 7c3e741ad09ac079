"""Mixture of experts: the gated hidden layer and the weighted down projection.

Work is split over output rows, so there are no atomics and every thread walks the chosen experts
in the same order. Tokens are grouped by expert first, so that a decoded panel serves all of its
tokens; a pair is a token and one of its experts, numbered m * A + a.
"""

import numpy as np

from cpu_fallback.bind import BoundCall, bits, counted, share, within
from cpu_fallback.decode import ROWS
from cpu_fallback.jit import device, kernel
from cpu_fallback.memory import (
    field,
    field_f32,
    load_f32,
    read_f32,
    read_i32,
    store_f32,
    write_f32,
    write_i32,
    write_i64,
)
from cpu_fallback.product import SCRATCH, SUMS, TOKENS, XS, multiply
from cpu_fallback.simd import add, div, exp, maximum, minimum, mul, neg, splat, zero
from cpu_fallback.stream import weight_fields
from cpu_fallback.tape import Launch
from cpu_fallback.vector import F32, op, pick


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


@kernel
def moe_gate_up(rec, ctl, rank, size, scratch):
    """Compute the gated hidden layer of the chosen experts.

    Fields: M, A, E, J, K, x, ids, bias, y, limit, alpha, product, weight.
    """
    chosen, experts, j, k = field(rec, 1), field(rec, 2), field(rec, 3), field(rec, 4)
    pairs = counted(ctl, field(rec, 0)) * chosen
    x, bias = field(rec, 5), field(rec, 7)
    ends = scratch + SCRATCH
    order = ends + 4 * experts
    _group(field(rec, 6), pairs, experts, ends, order)
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
                        write_i64(scratch + XS + 8 * t, x + 4 * token * k)
                    multiply(field(rec, 11), rec + 96, e, row, count, tokens, scratch)
                    if bias:
                        _add_bias(scratch, tokens, count, bias + 4 * (e * j + row))
                    _activate(rec, scratch, order + 4 * start, row, count, tokens)


@device
def _add_bias(scratch, tokens, count, bias):
    for t in range(tokens):
        for r in range(count):
            at = scratch + SUMS + 4 * (t * ROWS + r)
            write_f32(at, read_f32(at) + read_f32(bias + 4 * r))


@device
def _activate(rec, scratch, order, row, count, tokens):
    hidden, y = field(rec, 3) >> 1, field(rec, 8)
    limit, alpha = field_f32(rec, 9), field_f32(rec, 10)
    # The sums of two tokens fill 16 lanes; their 8 results go where the first token's sums were.
    for t in range(0, tokens, 2):
        sums = scratch + SUMS + 4 * t * ROWS
        store_f32(sums, _swiglu(load_f32(sums), limit, alpha))
        for i in range(min(2, tokens - t)):
            pair = read_i32(order + 4 * (t + i))
            for r in range(count >> 1):
                value = read_f32(sums + 4 * (i * (ROWS // 2) + r))
                write_f32(y + 4 * (pair * hidden + (row >> 1) + r), value)


@kernel
def moe_down(rec, ctl, rank, size, scratch):
    """Compute y = residual + sum over a of weights[a] * (w[ids[a]] x[a] + bias[ids[a]]).

    Fields: M, A, E, N, I, x, ids, weights, bias, residual, y, product, weight.
    """
    m, chosen, experts = counted(ctl, field(rec, 0)), field(rec, 1), field(rec, 2)
    n, k, x, bias = field(rec, 3), field(rec, 4), field(rec, 5), field(rec, 8)
    pairs = m * chosen
    ends = scratch + SCRATCH
    order = ends + 4 * experts
    parts = order + 4 * pairs
    _group(field(rec, 6), pairs, experts, ends, order)
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
                    write_i64(scratch + XS + 8 * t, x + 4 * pair * k)
                multiply(field(rec, 11), rec + 96, e, row, count, tokens, scratch)
                if bias:
                    _add_bias(scratch, tokens, count, bias + 4 * (e * n + row))
                for t in range(tokens):
                    pair = read_i32(order + 4 * (start + t))
                    for r in range(count):
                        part = read_f32(scratch + SUMS + 4 * (t * ROWS + r))
                        write_f32(parts + 4 * (pair * ROWS + r), part)
        _combine(rec, parts, m, row, count)


@device
def _combine(rec, parts, m, row, count):
    """Sum the experts' parts of each token, in the order of its ids."""
    chosen, n, weights = field(rec, 1), field(rec, 3), field(rec, 7)
    residual, y = field(rec, 9), field(rec, 10)
    for t in range(m):
        for r in range(count):
            at = 4 * (t * n + row + r)
            total = np.float32(0)
            if residual:
                total = read_f32(residual + at)
            for a in range(chosen):
                pair = t * chosen + a
                total += read_f32(weights + 4 * pair) * read_f32(parts + 4 * (pair * ROWS + r))
            write_f32(y + at, total)


def _moe_gate_up(call: BoundCall) -> list[Launch]:
    fields = [
        call.count("x"),
        call.dim("A"),
        call.dim("E"),
        call.dim("J"),
        call.dim("K"),
        call.address("x"),
        call.address("ids"),
        call.address("bias"),
        call.address("y"),
        bits(float(call.attr("limit"))),
        bits(float(call.attr("alpha"))),
        *weight_fields("moe_gate_up", call.tensor("w"), call.hints),
    ]
    order = 4 * (call.dim("E") + call.dim("M") * call.dim("A"))
    return [call.launch(moe_gate_up, fields, SCRATCH + order)]


def _moe_down(call: BoundCall) -> list[Launch]:
    fields = [
        call.count("x"),
        call.dim("A"),
        call.dim("E"),
        call.dim("N"),
        call.dim("I"),
        call.address("x"),
        call.address("ids"),
        call.address("weights"),
        call.address("bias"),
        call.address("residual"),
        call.address("y"),
        *weight_fields("moe_down", call.tensor("w"), call.hints),
    ]
    pairs = call.dim("M") * call.dim("A")
    order = 4 * (call.dim("E") + pairs)
    return [call.launch(moe_down, fields, SCRATCH + order + 4 * pairs * ROWS)]


LOWER = {"moe_gate_up": _moe_gate_up, "moe_down": _moe_down}
