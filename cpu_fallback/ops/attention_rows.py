"""The running softmax of a row of attention, a query head of one token.

A row walks its cells in spans of SPAN and a span in blocks, both at fixed places of the sequence.
Within a span a maximum that grows shrinks what was summed before (online softmax); spans are then
folded in their order. So a result depends on the cells that the row sees, however the spans were
spread over threads.

The state of a row is 128 bytes: 16 partial sums of the weights, then four fp32:

    TOP      the largest score of the span so far
    FACTOR   what `mix` multiplies the sums of the values by
    PAST     the largest score of the spans before
    WEIGHT   the sum of the weights of the spans before

Source: Milakov and Gimelshein 2018 (arXiv 1805.02867); Dao et al. 2022 (arXiv 2205.14135).
"""

import numpy as np

from cpu_fallback.lanes.falling import exp_falling, tanh
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.memory import (
    load_f32,
    load_f32_n,
    read_f32,
    store_f32,
    store_f32_n,
    write_f32,
)
from cpu_fallback.lanes.simd import (
    add,
    div,
    first,
    fma,
    hmax,
    hsum,
    lane,
    maximum,
    mul,
    select,
    splat,
    sub,
    zero,
)
from cpu_fallback.ops.attention_tiles import FACTOR

SPAN = 256
TOP, PAST, WEIGHT = 64, 72, 76

LOWEST = np.float32(np.finfo(np.float32).min)


@device
def exp1(x):
    """Return e^x of one x <= 0."""
    return lane(exp_falling(splat(x)), 0)


@device
def begin_row(state, sink, weight, past, size):
    """Begin a row: before its first span it has seen a logit of weight 0, or a sink of weight 1."""
    write_f32(state + PAST, sink)
    write_f32(state + WEIGHT, weight)
    for at in range(0, 4 * size, 64):
        store_f32(past + at, zero())


@device
def begin_span(state, sums, size):
    """Begin a span of a row."""
    store_f32(state, zero())
    write_f32(state + TOP, LOWEST)
    for at in range(0, 4 * size, 64):
        store_f32(sums + at, zero())


@device
def bend(scores, begin, end, key_scales, cap):
    """Cap the scores of cells begin .. end - 1 of a block: cap * tanh(score / cap).

    A score that is not finite becomes NaN.
    """
    limit = splat(cap)
    for i in range(begin & -16, end, 16):
        x = load_f32(scores + 4 * i)
        if key_scales:
            x = mul(x, load_f32(key_scales + 4 * i))
        fault = sub(x, x)  # NaN if x is not finite, else 0
        store_f32(scores + 4 * i, fma(limit, tanh(div(x, limit)), fault))


@device
def weigh(scores, state, begin, end, key_scales, value_scales):
    """Turn the scores of cells begin .. end - 1 of a block into weights, and note the factor."""
    before = read_f32(state + TOP)
    best = splat(LOWEST)
    for i in range(begin & -16, end, 16):
        x = load_f32(scores + 4 * i)
        if key_scales:
            x = mul(x, load_f32(key_scales + 4 * i))
        if end - i < 16:
            x = select(first(end - i), x, splat(LOWEST))
        if begin > i:
            x = select(first(begin - i), splat(LOWEST), x)
        store_f32(scores + 4 * i, x)
        best = maximum(x, best)
    top, factor = max(before, hmax(best)), np.float32(1)
    if top > before:
        factor = exp1(before - top)
    total, shift = mul(load_f32(state), splat(factor)), splat(top)
    for i in range(begin & -16, end, 16):
        weights = exp_falling(sub(load_f32(scores + 4 * i), shift))
        total = add(total, weights)
        if value_scales:
            weights = mul(weights, load_f32(value_scales + 4 * i))
        store_f32(scores + 4 * i, weights)
    store_f32(state, total)
    write_f32(state + TOP, top)
    write_f32(state + FACTOR, factor)


@device
def fold(state, past, top, weight, sums, size):
    """Add a span to the spans before it."""
    before = read_f32(state + PAST)
    largest = max(before, top)
    old, new = exp1(before - largest), exp1(top - largest)
    write_f32(state + PAST, largest)
    write_f32(state + WEIGHT, read_f32(state + WEIGHT) * old + weight * new)
    shrink, grow = splat(old), splat(new)
    for at in range(0, 4 * size, 64):
        store_f32(past + at, fma(load_f32(sums + at), grow, mul(load_f32(past + at), shrink)))


@device
def span_weight(state):
    """Return the sum of the weights of a span."""
    return hsum(load_f32(state))


@device
def end_row(state, past, y, d):
    """Write the result of a row; zeros if it saw nothing."""
    total = read_f32(state + WEIGHT)
    inverse = np.float32(0)
    if total != np.float32(0):
        inverse = np.float32(1) / total
    for i in range(0, d - 15, 16):
        store_f32(y + 4 * i, mul(load_f32(past + 4 * i), splat(inverse)))
    i = d & -16
    if i < d:
        store_f32_n(y + 4 * i, mul(load_f32(past + 4 * i), splat(inverse)), d - i)


@device
def copy_row(source, target, d, scale):
    """Copy a query times a scale, padded with zeros to whole vectors."""
    for i in range(0, d - 15, 16):
        store_f32(target + 4 * i, mul(load_f32(source + 4 * i), splat(scale)))
    i = d & -16
    if i < d:
        store_f32(target + 4 * i, mul(load_f32_n(source + 4 * i, d - i), splat(scale)))
