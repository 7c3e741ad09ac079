"""What the products of experts have in common: pairs of a token and one of its experts.

A pair is numbered m * A + a. Pairs are sorted by expert first, so that what is read of an expert
serves all of its tokens.
"""

import numpy as np

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.vector import F32, op, pick
from cpu_fallback.ops.activations import silu
from cpu_fallback.ops.bind import within


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


@op(F32, F32)
def _evens(b, x):
    """Return lanes 0, 2, .., 14, twice."""
    return pick(b, x, list(range(0, 16, 2)) * 2)


@op(F32, F32)
def _odds(b, x):
    """Return lanes 1, 3, .., 15, twice."""
    return pick(b, x, list(range(1, 16, 2)) * 2)


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
silu_pairs = device(lambda sums, limit, alpha: v.mul(silu(_evens(sums)), _odds(sums)))


@device
def weight_of(a, pair):
    """Return the weight of a pair's result, 1 if there are none."""
    if a.weights:
        return v.read_f32(a.weights + 4 * pair)
    return np.float32(1)
