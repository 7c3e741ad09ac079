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

from typing import NamedTuple

import numpy as np

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.record import reader
from cpu_fallback.ops.attention_codes import code_weights
from cpu_fallback.ops.attention_tiles import BLOCK, FACTOR, QUERY_STEP, SCORES, STATE
from cpu_fallback.ops.bind import within

SPAN = 256
TOP, PAST, WEIGHT = 64, 72, 76

LOWEST = np.float32(np.finfo(np.float32).min)


@device
def begin_row(state, sink, weight, past, size):
    """Begin a row: before its first span it has seen a logit of weight 0, or a sink of weight 1."""
    v.write_f32(state + PAST, sink)
    v.write_f32(state + WEIGHT, weight)
    for at in range(0, 4 * size, 64):
        v.store_f32(past + at, v.zero())


@device
def begin_span(state, sums, size):
    """Begin a span of a row."""
    v.store_f32(state, v.zero())
    v.write_f32(state + TOP, LOWEST)
    for at in range(0, 4 * size, 64):
        v.store_f32(sums + at, v.zero())


@device
def bend(scores, state, begin, end, key_scales, cap):
    """Cap the scores of cells begin .. end - 1 of a block: cap * tanh(score / cap).

    A score that is not finite becomes NaN.
    """
    limit, step = v.splat(cap), v.splat(v.read_f32(state + QUERY_STEP))
    for i in range(begin & -16, end, 16):
        x = v.load_f32(scores + 4 * i)
        if key_scales:
            x = v.mul(x, v.mul(v.load_f32(key_scales + 4 * i), step))
        fault = v.sub(x, x)  # NaN if x is not finite, else 0
        v.store_f32(scores + 4 * i, v.fma(limit, v.tanh(v.div(x, limit)), fault))


@device
def weigh(scores, state, low, high, begin, end, scales, soon, nbytes):
    """Turn scores of rows low .. high - 1 of a tile into weights, and note the factors.

    They see cells begin .. end - 1 of a block; `scales`: of its keys and values, or 0. Scores are
    multiplied by those and by the steps of the queries, weights before they become codes
    (`attention_codes`). Rows go through each stage one after the other, for within a row a stage
    waits for the last. Meanwhile `nbytes` from `soon` on are asked for, so that memory is as busy
    as during the products.
    """
    key_scales, value_scales = scales
    share = nbytes // (2 * (high - low))
    for row in range(low, high):
        soon = request(soon, share)
        _rise(scores + SCORES * row, state + STATE * row, begin, end, key_scales)
    for row in range(low, high):
        soon = request(soon, share)
        _weigh(scores + SCORES * row, state + STATE * row, begin, end, value_scales)
    if value_scales:
        for row in range(low, high):
            code_weights(scores + SCORES * row, state + STATE * row, begin, end)


@device
def request(start, nbytes):
    """Ask for the lines of some bytes; return where they end."""
    for at in range(0, nbytes, 64):
        v.prefetch(start + at)
    return start + nbytes


@device
def _rise(scores, state, begin, end, key_scales):
    """Note the largest score so far, and shrink the weights before if it grew.

    Scores are multiplied by their scales; those around the cells that are seen become the lowest.
    """
    step, best = v.splat(v.read_f32(state + QUERY_STEP)), v.splat(LOWEST)
    for i in range(begin & -16, end, 16):
        x = v.load_f32(scores + 4 * i)
        if key_scales:
            x = v.mul(x, v.mul(v.load_f32(key_scales + 4 * i), step))
        if end - i < 16:
            x = v.select(v.first(end - i), x, v.splat(LOWEST))
        if begin > i:
            x = v.select(v.first(begin - i), v.splat(LOWEST), x)
        v.store_f32(scores + 4 * i, x)
        best = v.maximum(x, best)
    before = v.read_f32(state + TOP)
    top = max(before, v.hmax(best))
    factor = v.exp_falling(v.splat(before - top))  # without a branch, which nothing could foresee
    v.store_f32(state, v.mul(v.load_f32(state), factor))
    v.write_f32(state + TOP, top)
    v.write_f32(state + FACTOR, v.lane(factor, 0))


@device
def _weigh(scores, state, begin, end, value_scales):
    """Turn scores into weights, and add them up before they are multiplied by the scales."""
    total, shift = v.load_f32(state), v.splat(v.read_f32(state + TOP))
    for i in range(begin & -16, end, 16):
        weights = v.exp_falling(v.sub(v.load_f32(scores + 4 * i), shift))
        total = v.add(total, weights)
        if value_scales:
            weights = v.mul(weights, v.load_f32(value_scales + 4 * i))
        v.store_f32(scores + 4 * i, weights)
    v.store_f32(state, total)


@device
def fold(state, past, top, weight, sums, size):
    """Add a span to the spans before it."""
    before = v.read_f32(state + PAST)
    largest = max(before, top)
    both = v.exp_falling(v.select(v.first(1), v.splat(before - largest), v.splat(top - largest)))
    old, new = v.lane(both, 0), v.lane(both, 1)
    v.write_f32(state + PAST, largest)
    v.write_f32(state + WEIGHT, v.read_f32(state + WEIGHT) * old + weight * new)
    shrink, grow = v.splat(old), v.splat(new)
    for at in range(0, 4 * size, 64):
        v.store_f32(
            past + at, v.fma(v.load_f32(sums + at), grow, v.mul(v.load_f32(past + at), shrink))
        )


# Return the sum of the weights of a span.
span_weight = device(lambda state: v.hsum(v.load_f32(state)))


@device
def end_row(state, past, y, d):
    """Write the result of a row; zeros if it saw nothing."""
    total = v.read_f32(state + WEIGHT)
    inverse = np.float32(0)
    if total != np.float32(0):
        inverse = np.float32(1) / total
    for i in range(0, d, 16):
        v.store_up_to(y + 4 * i, v.mul(v.load_f32(past + 4 * i), v.splat(inverse)), d - i)


@device
def copy_row(source, target, d, scale):
    """Copy a query times a scale, padded with zeros to whole vectors."""
    for i in range(0, d, 16):
        v.store_f32(target + 4 * i, v.mul(v.load_up_to(source + 4 * i, d - i), v.splat(scale)))


class Sight(NamedTuple):
    """What a token sees: the cells `begin` .. `end` - 1 of its own numbering.

    Those below `committed` are cells of its slot, the rest the bits of `tree`, its ancestors, in
    their order. No token sees a cell beyond the page table.
    """

    begin: int
    end: int
    committed: int
    tree: int


class Seen(NamedTuple):
    """What the tokens of a tile see together."""

    low: int  # the first span
    high: int  # the span after the last
    begin: int  # the first of the committed cells that all of them see
    end: int  # the cell after the last of those


sight_at = reader(Sight)  # Read the record at an address
SIGHT = 32  # Bytes of a token's sight
_ALL = (1 << SPAN // BLOCK) - 1  # The blocks of a span
_SPANS = 64 * BLOCK // SPAN  # Spans of a word of a list, which has a bit for each block


@device
def tile_end(a, t, tokens):
    """Return the token after the tile of at most `tokens` that begins with token t."""
    slot, limit = v.read_i32(a.slots + 4 * t), min(a.M, t + tokens)
    t += 1
    while t < limit and v.read_i32(a.slots + 4 * t) == slot:
        t += 1
    return t


@device
def _look(a, t, sight):
    """Write what a token sees: a `Sight`."""
    cells = a.T * a.B
    end, tree = within(v.read_i32(a.ends + 4 * t), cells + 1), v.read_i64(a.ancestors + 8 * t)
    if cells - end < 64:
        tree &= (np.int64(1) << (cells - end)) - 1
    shown, begin = v.popcount(tree), np.int64(0)
    window = a.window
    if window or a.chunk:
        position = within(v.read_i32(a.positions + 4 * t), cells)
        if a.chunk:
            own = position % a.chunk + 1
            window = min(window, own) if window else own
        begin = max(begin, position - window + 1)
        if begin >= end:
            begin = end + max(0, shown - window)
    v.write_i64(sight, begin)
    v.write_i64(sight + 8, end + shown)
    v.write_i64(sight + 16, end)
    v.write_i64(sight + 24, tree)


@device
def look_all(a, t, stop, sights):
    """Write what the tokens of a tile see; return what they see together."""
    low, high = np.int64(1 << 40), np.int64(0)
    begin, end = np.int64(0), np.int64(1 << 40)
    for i in range(stop - t):
        _look(a, t + i, sights + SIGHT * i)
        sight = sight_at(sights + SIGHT * i)
        if sight.begin < sight.end:
            low = min(low, sight.begin // SPAN)
            high = max(high, (sight.end + SPAN - 1) // SPAN)
        begin, end = max(begin, sight.begin), min(end, sight.committed)
    return Seen(min(low, high), high, begin, end)


# Return where in the block that begins with cell `start` a cell lies, 0 .. BLOCK.
clip = device(lambda value, start: min(max(value - start, 0), BLOCK))


@device
def sees(sight, span):
    """Return whether a token sees a cell of a span."""
    s = sight_at(sight)
    return max(s.begin, span * SPAN) < min(s.end, (span + 1) * SPAN)


@device
def listed(a, t, head, span):
    """Return the blocks of a span that a token reads for a head, as bits; all without a list."""
    if not a.listed:
        return np.int64(_ALL)
    if span >= a.W * _SPANS:
        return np.int64(0)
    word = v.read_i64(a.listed + 8 * ((t * a.H + head) * a.W + span // _SPANS))
    return (word >> (span % _SPANS * (SPAN // BLOCK))) & _ALL


@device
def load_of(a, t, head, low, high):
    """Return the work of a head of a tile: its spans low .. high - 1, or the blocks listed."""
    if not a.listed:
        return high - low
    total = np.int64(0)
    for word in range(a.W):
        total += v.popcount(v.read_i64(a.listed + 8 * ((t * a.H + head) * a.W + word)))
    return total


@device
def span_at(a, t, head, low, high, load):
    """Return the first of the spans low .. high - 1 that begins at so much work, or high."""
    if not a.listed:
        return min(max(low + load, low), high)
    span = low
    while span < high and load > 0:
        load -= v.popcount(listed(a, t, head, span))
        span += 1
    return span


@device
def block_after(a, t, head, start):
    """Return the first cell of the block that is read after that of cell `start`, -1 if none is."""
    if not a.listed:
        return start + BLOCK
    block = start // BLOCK + 1
    words = a.listed + 8 * (t * a.H + head) * a.W
    for word in range(block // 64, a.W):
        bits = v.read_i64(words + 8 * word)
        if word == block // 64:
            bits &= np.int64(-1) << (block % 64)
        if bits:
            return BLOCK * (64 * word + v.lowest_bit(bits))
    return np.int64(-1)
