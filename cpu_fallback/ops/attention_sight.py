"""What each token of a tile sees.

Tokens that follow each other in a step and belong to one slot make a tile. A token sees the cells
`begin` .. `end` - 1 of its own numbering: those below `committed` are cells of its slot, the rest
the bits of `tree`, its ancestors, in their order. Nobody sees a cell beyond the page table.
"""

from typing import NamedTuple

import numpy as np

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.record import reader
from cpu_fallback.ops.attention_rows import SPAN
from cpu_fallback.ops.attention_tiles import BLOCK
from cpu_fallback.ops.bind import within


class Sight(NamedTuple):
    """What a token sees."""

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


padded = device(lambda d: (d + 15) & -16)  # Round up to whole vectors


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
