"""The running softmax of a row of attention, a query head of one token.

A row walks its cells in spans of SPAN and a span in blocks, both at fixed places of the sequence.
Within a span a maximum that grows shrinks what was summed before (online softmax); spans are then
folded in their order. So a result depends on the cells that the row sees, however the spans were
spread over threads.

The state of a row is 128 bytes: 16 partial sums of the weights, then fp32:

    TOP         the largest score of the span so far
    FACTOR      what `mix` multiplies the sums of the values by
    PAST        the largest score of the spans before
    WEIGHT      the sum of the weights of the spans before
    STEP        of its weights in this block, if cells are int8 (`attention_codes`)
    QUERY_STEP  of its query then

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
from cpu_fallback.ops.attention_codes import code_weights
from cpu_fallback.ops.attention_tiles import BLOCK, FACTOR, QUERY_STEP, SCORES, STATE

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
def bend(scores, state, begin, end, key_scales, cap):
    """Cap the scores of cells begin .. end - 1 of a block: cap * tanh(score / cap).

    A score that is not finite becomes NaN.
    """
    limit, step = splat(cap), splat(read_f32(state + QUERY_STEP))
    for i in range(begin & -16, end, 16):
        x = load_f32(scores + 4 * i)
        if key_scales:
            x = mul(x, mul(load_f32(key_scales + 4 * i), step))
        fault = sub(x, x)  # NaN if x is not finite, else 0
        store_f32(scores + 4 * i, fma(limit, tanh(div(x, limit)), fault))


@device
def weigh(scores, state, low, high, begin, end, key_scales, value_scales):
    """Turn scores of rows low .. high - 1 of a tile into weights, and note the factors.

    Rows go through each stage one after the other, for within a row a stage waits for the last.

    Args:
        scores: of the tile's rows, cells begin .. end - 1 of a block.
        state: of the tile's rows.
        low: the first row.
        high: the row after the last.
        begin: the first cell of the block that they see.
        end: the cell after the last.
        key_scales: what the scores are multiplied by, and by the steps of the queries; or 0.
        value_scales: what the weights are multiplied by before they become codes
            (`attention_codes`); 0: they stay fp32.
    """
    for row in range(low, high):
        _rise(scores + SCORES * row, state + STATE * row, begin, end, key_scales)
    for row in range(low, high):
        _weigh(scores + SCORES * row, state + STATE * row, begin, end, value_scales)
    if value_scales:
        for row in range(low, high):
            code_weights(scores + SCORES * row, state + STATE * row, begin, end)


@device
def _rise(scores, state, begin, end, key_scales):
    """Note the largest score so far, and shrink the weights before if it grew.

    Scores are multiplied by their scales; those around the cells that are seen become the lowest.
    """
    step = splat(read_f32(state + QUERY_STEP))
    if begin == 0 and end == BLOCK:
        a, b = load_f32(scores), load_f32(scores + 64)
        c, d = load_f32(scores + 128), load_f32(scores + 192)
        if key_scales:
            a, b = _scaled(a, step, key_scales), _scaled(b, step, key_scales + 64)
            c, d = _scaled(c, step, key_scales + 128), _scaled(d, step, key_scales + 192)
            store_f32(scores, a)
            store_f32(scores + 64, b)
            store_f32(scores + 128, c)
            store_f32(scores + 192, d)
        best = maximum(d, maximum(c, maximum(b, maximum(a, splat(LOWEST)))))
    else:
        best = splat(LOWEST)
        for i in range(begin & -16, end, 16):
            x = load_f32(scores + 4 * i)
            if key_scales:
                x = _scaled(x, step, key_scales + 4 * i)
            if end - i < 16:
                x = select(first(end - i), x, splat(LOWEST))
            if begin > i:
                x = select(first(begin - i), splat(LOWEST), x)
            store_f32(scores + 4 * i, x)
            best = maximum(x, best)
    before, factor = read_f32(state + TOP), np.float32(1)
    top = max(before, hmax(best))
    if top > before:
        factor = exp1(before - top)
        store_f32(state, mul(load_f32(state), splat(factor)))
    write_f32(state + TOP, top)
    write_f32(state + FACTOR, factor)


@device
def _scaled(x, step, scales):
    """Return scores times the scales of their keys and the step of their query."""
    return mul(x, mul(load_f32(scales), step))


@device
def _weigh(scores, state, begin, end, value_scales):
    """Turn scores into weights, and add them up before they are multiplied by the scales."""
    total, shift = load_f32(state), splat(read_f32(state + TOP))
    if begin == 0 and end == BLOCK:
        a = exp_falling(sub(load_f32(scores), shift))
        b = exp_falling(sub(load_f32(scores + 64), shift))
        c = exp_falling(sub(load_f32(scores + 128), shift))
        d = exp_falling(sub(load_f32(scores + 192), shift))
        store_f32(state, add(add(add(add(total, a), b), c), d))
        if value_scales:
            a, b = mul(a, load_f32(value_scales)), mul(b, load_f32(value_scales + 64))
            c, d = mul(c, load_f32(value_scales + 128)), mul(d, load_f32(value_scales + 192))
        store_f32(scores, a)
        store_f32(scores + 64, b)
        store_f32(scores + 128, c)
        store_f32(scores + 192, d)
        return
    for i in range(begin & -16, end, 16):
        weights = exp_falling(sub(load_f32(scores + 4 * i), shift))
        total = add(total, weights)
        if value_scales:
            weights = mul(weights, load_f32(value_scales + 4 * i))
        store_f32(scores + 4 * i, weights)
    store_f32(state, total)


@device
def fold(state, past, top, weight, sums, size):
    """Add a span to the spans before it."""
    before = read_f32(state + PAST)
    largest = max(before, top)
    both = exp_falling(select(first(1), splat(before - largest), splat(top - largest)))
    old, new = lane(both, 0), lane(both, 1)
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
