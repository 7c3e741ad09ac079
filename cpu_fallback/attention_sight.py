"""What attention is told about its tokens, and what each token sees.

A record of `attention` has the fields below. Tokens that follow each other in a step and belong to
one slot make a tile. A token sees the cells BEGIN .. END - 1 of its own numbering: those below
COMMITTED are cells of its slot, the rest the bits of TREE, its ancestors, in their order. Nobody
sees a cell beyond the page table.
"""

import numpy as np

from cpu_fallback.attention_rows import SPAN
from cpu_fallback.attention_tiles import BLOCK
from cpu_fallback.bind import within
from cpu_fallback.jit import device
from cpu_fallback.maths import popcount
from cpu_fallback.memory import field, read_i32, read_i64, write_i64

(
    M,
    HEADS,
    GROUP,
    D,
    CELLS,
    BLOCKS,
    SLOTS,
    POSITIONS,
    ENDS,
    ANCESTORS,
    PAGES,
    K,
    K_SCALE,
    V,
    V_SCALE,
    Q,
    SINKS,
    Y,
    SCALE,
    WINDOW,
    TOKENS,
    LINE,
    IN_PLACE,
    READER,
    SCORE,
    MIX,
    PANEL_SCORE,
    PANEL_MIX,
    SEQUENCES,
    POOL,
    KEPT,
) = range(31)

BEGIN, END, COMMITTED, TREE = range(4)
SIGHT = 32
"""Bytes of a token's sight."""


@device
def padded(d):
    """Round up to whole vectors."""
    return (d + 15) & -16


@device
def tile_end(rec, t, m):
    """Return the token after the tile that begins with token t."""
    slots = field(rec, SLOTS)
    slot, limit = read_i32(slots + 4 * t), min(m, t + field(rec, TOKENS))
    t += 1
    while t < limit and read_i32(slots + 4 * t) == slot:
        t += 1
    return t


@device
def _look(rec, t, sight):
    """Write what a token sees."""
    cells = field(rec, CELLS) * field(rec, BLOCKS)
    end = within(read_i32(field(rec, ENDS) + 4 * t), cells + 1)
    tree = read_i64(field(rec, ANCESTORS) + 8 * t)
    if cells - end < 64:
        tree &= (np.int64(1) << (cells - end)) - 1
    shown, window, begin = popcount(tree), field(rec, WINDOW), np.int64(0)
    if window:
        position = within(read_i32(field(rec, POSITIONS) + 4 * t), cells)
        begin = max(begin, position - window + 1)
        if begin >= end:
            begin = end + max(0, shown - window)
    write_i64(sight + 8 * BEGIN, begin)
    write_i64(sight + 8 * END, end + shown)
    write_i64(sight + 8 * COMMITTED, end)
    write_i64(sight + 8 * TREE, tree)


@device
def look_all(rec, t, stop, sights):
    """Write what the tokens of a tile see; return the first span and the one after the last."""
    low, high = np.int64(1 << 40), np.int64(0)
    for i in range(stop - t):
        sight = sights + SIGHT * i
        _look(rec, t + i, sight)
        if field(sight, BEGIN) < field(sight, END):
            low = min(low, field(sight, BEGIN) // SPAN)
            high = max(high, (field(sight, END) + SPAN - 1) // SPAN)
    return min(low, high), high


@device
def clip(value, start):
    """Return where in the block that begins with cell `start` a cell lies, 0 .. BLOCK."""
    return min(max(value - start, 0), BLOCK)


@device
def sees(sight, span):
    """Return whether a token sees a cell of a span."""
    begin, end = field(sight, BEGIN), field(sight, END)
    return max(begin, span * SPAN) < min(end, (span + 1) * SPAN)
