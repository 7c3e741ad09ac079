"""Mixture of experts: the gated hidden layer and the weighted down projection.

Work is split over output rows, so there are no atomics and every thread walks the chosen experts
in the same order. `moe_tiles` has the kernels for int8 activations.
"""

import numpy as np

from clocher_kernels.errors import UnsupportedOp
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.ops.linear import has_codes
from cpu_fallback.ops.moe_tiles import (
    begin_of,
    clamped_gate_up_of_codes,
    clamped_pairs,
    down_of_codes,
    of_codes,
    silu_gate_up_of_codes,
    silu_pairs,
    sort_by_expert,
    weight_of,
)
from cpu_fallback.ops.product import ROWS, SCRATCH, SUMS, TOKENS, XS, multiply
from cpu_fallback.ops.stream import Stored, stored
from cpu_fallback.team.tape import Launch


@executes("moe_gate_up", Stored)
def clamped_gate_up(a, rank, size, scratch):
    """Compute the gated hidden layer of the chosen experts, clamped."""
    _gate_up(a, rank, size, scratch, clamped_pairs)


@executes("moe_gate_up", Stored)
def silu_gate_up(a, rank, size, scratch):
    """Compute the gated hidden layer of the chosen experts, of silu gates."""
    _gate_up(a, rank, size, scratch, silu_pairs)


@device
def _gate_up(a, rank, size, scratch, act):
    chosen, experts, j, k = a.A, a.E, a.J, a.K
    ends = scratch + SCRATCH
    order = ends + 4 * experts
    sort_by_expert(a.ids, a.M * chosen, experts, ends, order)
    first, last = share((j + ROWS - 1) // ROWS, rank, size)
    for e in range(experts):
        begin, end = begin_of(ends, e), v.read_i32(ends + 4 * e)
        if begin < end:
            for unit in range(first, last):
                row = unit * ROWS
                count = min(ROWS, j - row)
                for start in range(begin, end, TOKENS):
                    tokens = min(TOKENS, end - start)
                    for t in range(tokens):
                        token = v.read_i32(order + 4 * (start + t)) // chosen
                        v.write_i64(scratch + XS + 8 * t, a.x + 4 * token * k)
                    multiply(a.product, a.weight, e, row, count, tokens, scratch)
                    if a.factors:
                        _scale(scratch, tokens, count, a.factors, order + 4 * start)
                    if a.bias:
                        _add_bias(scratch, tokens, count, a.bias + 4 * (e * j + row))
                    _activate(a, scratch, order + 4 * start, row, count, tokens, act)


@device
def _scale(scratch, tokens, count, factors, order):
    for t in range(tokens):
        factor = v.read_f32(factors + 4 * v.read_i32(order + 4 * t))
        for r in range(count):
            at = scratch + SUMS + 4 * (t * ROWS + r)
            v.write_f32(at, v.read_f32(at) * factor)


@device
def _add_bias(scratch, tokens, count, bias):
    for t in range(tokens):
        for r in range(count):
            at = scratch + SUMS + 4 * (t * ROWS + r)
            v.write_f32(at, v.read_f32(at) + v.read_f32(bias + 4 * r))


@device
def _activate(a, scratch, order, row, count, tokens, act):
    # The sums of two tokens fill 16 lanes; their 8 results go where the first token's sums were.
    for t in range(0, tokens, 2):
        sums = scratch + SUMS + 4 * t * ROWS
        v.store_f32(sums, act(v.load_f32(sums), a.limit, a.alpha))
        for i in range(min(2, tokens - t)):
            pair = v.read_i32(order + 4 * (t + i))
            for r in range(count >> 1):
                value = v.read_f32(sums + 4 * (i * (ROWS // 2) + r))
                v.write_f32(a.y + 4 * (pair * a.I + (row >> 1) + r), value)


@executes("moe_down", Stored)
def moe_down(a, rank, size, scratch):
    """Compute y = residual + sum over a of weights[a] * (w[ids[a]] x[a] + bias[ids[a]])."""
    n, experts = a.N, a.E
    pairs = a.M * a.A
    ends = scratch + SCRATCH
    order = ends + 4 * experts
    parts = order + 4 * pairs
    sort_by_expert(a.ids, pairs, experts, ends, order)
    first, last = share((n + ROWS - 1) // ROWS, rank, size)
    for unit in range(first, last):
        row = unit * ROWS
        count = min(ROWS, n - row)
        for e in range(experts):
            end = v.read_i32(ends + 4 * e)
            for start in range(begin_of(ends, e), end, TOKENS):
                tokens = min(TOKENS, end - start)
                for t in range(tokens):
                    pair = v.read_i32(order + 4 * (start + t))
                    v.write_i64(scratch + XS + 8 * t, a.x + 4 * pair * a.I)
                multiply(a.product, a.weight, e, row, count, tokens, scratch)
                if a.bias:
                    _add_bias(scratch, tokens, count, a.bias + 4 * (e * n + row))
                for t in range(tokens):
                    pair = v.read_i32(order + 4 * (start + t))
                    for r in range(count):
                        part = v.read_f32(scratch + SUMS + 4 * (t * ROWS + r))
                        v.write_f32(parts + 4 * (pair * ROWS + r), part)
        _combine(a, parts, row, count)


@device
def _combine(a, parts, row, count):
    """Sum the experts' parts of each token, in the order of its ids."""
    for t in range(a.M):
        for r in range(count):
            at = 4 * (t * a.N + row + r)
            total = np.float32(0)
            if a.residual:
                total = v.read_f32(a.residual + at)
            for pair in range(t * a.A, (t + 1) * a.A):
                total += weight_of(a, pair) * v.read_f32(parts + 4 * (pair * ROWS + r))
            v.write_f32(a.y + at, total)


_GATE_UP = {
    "clamped": (clamped_gate_up, clamped_gate_up_of_codes),
    "silu": (silu_gate_up, silu_gate_up_of_codes),
}


def _moe_gate_up(call: BoundCall) -> list[Launch]:
    act = str(call.attr("act"))
    if act not in _GATE_UP:
        there = ", ".join(_GATE_UP)
        raise UnsupportedOp(f"moe_gate_up: no CPU kernel for act={act!r}; there are {there}")
    of_floats, of_tiles = _GATE_UP[act]
    if has_codes(call):
        return of_codes(call, of_tiles, "K")
    order = 4 * (call.dim("E") + call.dim("M") * call.dim("A"))
    return [call.launch(of_floats, stored(call), SCRATCH + order)]


def _moe_down(call: BoundCall) -> list[Launch]:
    if has_codes(call):
        return of_codes(call, down_of_codes, "I")
    pairs = call.dim("M") * call.dim("A")
    order = 4 * (call.dim("E") + pairs)
    return [call.launch(moe_down, stored(call), SCRATCH + order + 4 * pairs * ROWS)]


LOWER = {"moe_gate_up": _moe_gate_up, "moe_down": _moe_down}
