"""Mixture of experts: the gated hidden layer and the weighted down projection.

Work is split over output rows, so there are no atomics and every thread walks the chosen experts
in the same order. Tokens are grouped by expert first, so that a decoded panel serves all of its
tokens; a pair is a token and one of its experts, numbered m * A + a.
"""

import numpy as np

from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.memory import (
    load_f32,
    read_f32,
    read_i32,
    store_f32,
    write_f32,
    write_i32,
    write_i64,
)
from cpu_fallback.lanes.record import executes
from cpu_fallback.lanes.simd import add, div, exp, maximum, minimum, mul, neg, splat, zero
from cpu_fallback.lanes.vector import F32, op, pick
from cpu_fallback.ops.bind import BoundCall, share, within
from cpu_fallback.ops.decode import ROWS
from cpu_fallback.ops.product import SCRATCH, SUMS, TOKENS, XS, multiply
from cpu_fallback.ops.stream import Stored, stored
from cpu_fallback.team.tape import Launch


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


def _moe_gate_up(call: BoundCall) -> list[Launch]:
    order = 4 * (call.dim("E") + call.dim("M") * call.dim("A"))
    return [call.launch(moe_gate_up, stored(call), SCRATCH + order)]


def _moe_down(call: BoundCall) -> list[Launch]:
    pairs = call.dim("M") * call.dim("A")
    order = 4 * (call.dim("E") + pairs)
    return [call.launch(moe_down, stored(call), SCRATCH + order + 4 * pairs * ROWS)]


LOWER = {"moe_gate_up": _moe_gate_up, "moe_down": _moe_down}
