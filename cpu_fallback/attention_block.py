"""A tile of attention against one block of cells."""

import numpy as np

from cpu_fallback.attention_rows import weigh
from cpu_fallback.attention_sight import (
    BEGIN,
    BLOCKS,
    CELLS,
    COMMITTED,
    END,
    GROUP,
    HEADS,
    IN_PLACE,
    K_SCALE,
    LINE,
    MIX,
    PAGES,
    PANEL_MIX,
    PANEL_SCORE,
    POOL,
    READER,
    SCORE,
    SEQUENCES,
    SIGHT,
    SLOTS,
    TREE,
    V_SCALE,
    D,
    K,
    V,
    clip,
    padded,
)
from cpu_fallback.attention_tiles import BLOCK, SCORES, STATE, mix, score
from cpu_fallback.bind import within
from cpu_fallback.jit import device
from cpu_fallback.kv import line_of, page_of, read_lines
from cpu_fallback.maths import lowest_bit
from cpu_fallback.memory import field, prefetch, read_f32, read_i32, write_f32, write_i64


@device
def block(rec, t, stop, head, start, scratch, queries, sums, state):
    """Attend to the cells start .. start + BLOCK - 1: the tile at once, or token by token.

    Cells are the same for all tokens of a slot up to where a token's tree begins.
    """
    step = stop - t
    for i in range(stop - t):
        sight = scratch + SIGHT * i
        if field(sight, TREE) and field(sight, COMMITTED) < start + BLOCK:
            step = np.int64(1)
    i = np.int64(0)
    while i < stop - t:
        _part(rec, t, stop, i, i + step, head, start, scratch, queries, sums, state)
        i += step


@device
def _part(rec, t, stop, low, high, head, start, scratch, queries, sums, state):
    """Attend from tokens low .. high - 1 of a tile."""
    group, size = field(rec, GROUP), padded(field(rec, D))
    begin, end, alike, committed = np.int64(BLOCK), np.int64(0), True, np.int64(0)
    for i in range(low, high):
        sight = scratch + SIGHT * i
        committed = max(committed, field(sight, COMMITTED))
        first, last = clip(field(sight, BEGIN), start), clip(field(sight, END), start)
        if i > low and (first != begin or last != end):
            alike = False
        if first < last:
            begin, end = min(begin, first), max(end, last)
        else:
            alike = False
    if begin >= end:
        return
    tile, offset, rows = (stop - t) * group, low * group, (high - low) * group
    scores = state + STATE * tile + 4 * tile * size
    panel = scores + SCORES * tile
    lines = panel + 4 * BLOCK * size
    scales = lines + 8 * BLOCK
    tree = field(scratch + SIGHT * low, TREE)
    slot = within(read_i32(field(rec, SLOTS) + 4 * t), field(rec, SEQUENCES))
    cells, nbytes = field(rec, CELLS), field(rec, LINE)
    k_scale, v_scale = field(rec, K_SCALE), field(rec, V_SCALE)
    whole = start % cells + BLOCK <= cells
    straight = whole and start + end <= committed
    keys, values, stride, ahead = panel, panel, 4 * size, np.int64(0)
    scorer, mixer = field(rec, PANEL_SCORE), field(rec, PANEL_MIX)
    in_place = straight and rows <= field(rec, IN_PLACE)
    if in_place:
        line = _line(rec, slot, head, start)
        keys, values = field(rec, K) + line * nbytes, field(rec, V) + line * nbytes
        stride, scorer, mixer = nbytes, field(rec, SCORE), field(rec, MIX)
        if k_scale:
            k_scale += 4 * line
            v_scale += 4 * line
        if start + 2 * BLOCK <= committed:
            lines_ahead = _line(rec, slot, head, start + BLOCK) - line
            ahead = lines_ahead * nbytes
            if k_scale:
                for at in range(4 * lines_ahead, 4 * lines_ahead + SCORES, 64):
                    prefetch(k_scale + at)
                    prefetch(v_scale + at)
    else:
        _list(rec, slot, head, start, begin, end, committed, tree, lines)
        if k_scale:
            _gather(k_scale, lines, begin, end, scales)
            _gather(v_scale, lines, begin, end, scales + SCORES)
            k_scale, v_scale = scales, scales + SCORES
        first, out = lines + 8 * begin, panel + 4 * size * begin
        read_lines(field(rec, READER), field(rec, K), first, end - begin, field(rec, D), out)
    own, weights = state + STATE * offset, scores + SCORES * offset
    query = queries + 4 * offset * size
    score(scorer, query, rows, keys, stride, size, begin, end, weights, ahead)
    for i in range(low, high):
        sight = scratch + SIGHT * i
        first, last = clip(field(sight, BEGIN), start), clip(field(sight, END), start)
        if first < last:
            for row in range(i * group, (i + 1) * group):
                at = state + STATE * row
                weigh(scores + SCORES * row, at, first, last, k_scale, v_scale)
    if not in_place:
        first, out = lines + 8 * begin, panel + 4 * size * begin
        read_lines(field(rec, READER), field(rec, V), first, end - begin, field(rec, D), out)
    step = high - low
    if not alike:
        step = np.int64(1)
    i = low
    while i < high:
        sight = scratch + SIGHT * i
        first, last = clip(field(sight, BEGIN), start), clip(field(sight, END), start)
        if first < last:
            row = i * group
            at, own = sums + 4 * row * size, state + STATE * row
            weights = scores + SCORES * row
            count = step * group
            mix(mixer, at, count, size, own, weights, values, stride, first, last, ahead)
            ahead = np.int64(0)
        i += step


@device
def _line(rec, slot, head, cell):
    size = field(rec, CELLS)
    page = page_of(field(rec, PAGES), field(rec, BLOCKS), size, slot, cell)
    return line_of(within(page, field(rec, POOL)), field(rec, HEADS), size, head, cell)


@device
def _list(rec, slot, head, start, begin, end, committed, tree, lines):
    """Write the lines of cells begin .. end - 1 of a block, looking a page up once."""
    size = field(rec, CELLS)
    done, own = begin, min(end, max(begin, committed - start))
    while done < own:
        cell = start + done
        line = _line(rec, slot, head, cell)
        run = min(own - done, size - cell % size)
        for i in range(run):
            write_i64(lines + 8 * (done + i), line + i)
        done += run
    for _ in range(start + done - committed):
        tree &= tree - 1
    while done < end:
        line = _line(rec, slot, head, committed + lowest_bit(tree))
        write_i64(lines + 8 * done, line)
        tree &= tree - 1
        done += 1


@device
def _gather(scales, lines, begin, end, target):
    for i in range(begin, end):
        write_f32(target + 4 * i, read_f32(scales + 4 * field(lines, i)))
