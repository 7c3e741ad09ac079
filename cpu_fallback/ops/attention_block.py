"""A tile of attention against one block of cells."""

import numpy as np

from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.maths import lowest_bit
from cpu_fallback.lanes.memory import prefetch, read_f32, read_i32, read_i64, write_f32, write_i64
from cpu_fallback.ops.attention_rows import bend, weigh
from cpu_fallback.ops.attention_sight import SIGHT, clip, padded, sight_at
from cpu_fallback.ops.attention_tiles import BLOCK, SCORES, STATE, mix, score
from cpu_fallback.ops.bind import within
from cpu_fallback.ops.kv import line_of, page_of, read_lines


@device
def block(a, t, stop, head, start, scratch, queries, sums, state):
    """Attend to the cells start .. start + BLOCK - 1: the tile at once, or token by token.

    Cells are the same for all tokens of a slot up to where a token's tree begins.
    """
    step = stop - t
    for i in range(stop - t):
        sight = sight_at(scratch + SIGHT * i)
        if sight.tree and sight.committed < start + BLOCK:
            step = np.int64(1)
    i = np.int64(0)
    while i < stop - t:
        _part(a, t, stop, i, i + step, head, start, scratch, queries, sums, state)
        i += step


@device
def _part(a, t, stop, low, high, head, start, scratch, queries, sums, state):
    """Attend from tokens low .. high - 1 of a tile."""
    group, size = a.group, padded(a.D)
    begin, end, alike, committed = np.int64(BLOCK), np.int64(0), True, np.int64(0)
    for i in range(low, high):
        sight = sight_at(scratch + SIGHT * i)
        committed = max(committed, sight.committed)
        first, last = clip(sight.begin, start), clip(sight.end, start)
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
    tree, slot = sight_at(scratch + SIGHT * low).tree, within(read_i32(a.slots + 4 * t), a.S)
    nbytes = a.line
    k_scale, v_scale = a.k_scale, a.v_scale
    whole = start % a.T + BLOCK <= a.T
    straight = whole and start + end <= committed
    keys, values, stride, ahead = panel, panel, 4 * size, np.int64(0)
    scorer, mixer = a.panel_score, a.panel_mix
    in_place = straight and rows <= a.in_place
    if in_place:
        line = _line(a, slot, head, start)
        keys, values = a.k_cache + line * nbytes, a.v_cache + line * nbytes
        stride, scorer, mixer = nbytes, a.score, a.mix
        if k_scale:
            k_scale += 4 * line
            v_scale += 4 * line
        if start + 2 * BLOCK <= committed:
            lines_ahead = _line(a, slot, head, start + BLOCK) - line
            ahead = lines_ahead * nbytes
            if k_scale:
                for at in range(4 * lines_ahead, 4 * lines_ahead + SCORES, 64):
                    prefetch(k_scale + at)
                    prefetch(v_scale + at)
    else:
        _list(a, slot, head, start, begin, end, committed, tree, lines)
        if k_scale:
            _gather(k_scale, lines, begin, end, scales)
            _gather(v_scale, lines, begin, end, scales + SCORES)
            k_scale, v_scale = scales, scales + SCORES
        first, out = lines + 8 * begin, panel + 4 * size * begin
        read_lines(a.reader, a.k_cache, first, end - begin, a.D, out)
    own, weights = state + STATE * offset, scores + SCORES * offset
    query = queries + 4 * offset * size
    score(scorer, query, rows, keys, stride, size, begin, end, weights, ahead)
    key_scales = k_scale
    if a.softcap:  # which bends what the scales have been applied to
        key_scales = np.int64(0)
    for i in range(low, high):
        sight = sight_at(scratch + SIGHT * i)
        first, last = clip(sight.begin, start), clip(sight.end, start)
        if first < last:
            for row in range(i * group, (i + 1) * group):
                at, line = scores + SCORES * row, state + STATE * row
                if a.softcap:
                    bend(at, first, last, k_scale, a.softcap)
                weigh(at, line, first, last, key_scales, v_scale)
    if not in_place:
        first, out = lines + 8 * begin, panel + 4 * size * begin
        read_lines(a.reader, a.v_cache, first, end - begin, a.D, out)
    step = high - low
    if not alike:
        step = np.int64(1)
    i = low
    while i < high:
        sight = sight_at(scratch + SIGHT * i)
        first, last = clip(sight.begin, start), clip(sight.end, start)
        if first < last:
            row = i * group
            at, own = sums + 4 * row * size, state + STATE * row
            weights = scores + SCORES * row
            count = step * group
            mix(mixer, at, count, size, own, weights, values, stride, first, last, ahead)
            ahead = np.int64(0)
        i += step


@device
def _line(a, slot, head, cell):
    page = page_of(a.pages, a.B, a.T, slot, cell)
    return line_of(within(page, a.P), a.H, a.T, head, cell)


@device
def _list(a, slot, head, start, begin, end, committed, tree, lines):
    """Write the lines of cells begin .. end - 1 of a block, looking a page up once."""
    size = a.T
    done, own = begin, min(end, max(begin, committed - start))
    while done < own:
        cell = start + done
        line = _line(a, slot, head, cell)
        run = min(own - done, size - cell % size)
        for i in range(run):
            write_i64(lines + 8 * (done + i), line + i)
        done += run
    for _ in range(start + done - committed):
        tree &= tree - 1
    while done < end:
        line = _line(a, slot, head, committed + lowest_bit(tree))
        write_i64(lines + 8 * done, line)
        tree &= tree - 1
        done += 1


@device
def _gather(scales, lines, begin, end, target):
    for i in range(begin, end):
        write_f32(target + 4 * i, read_f32(scales + 4 * read_i64(lines + 8 * i)))
