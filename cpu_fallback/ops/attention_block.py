"""A tile of attention against one block of cells.

Keys that many rows look at are decoded once and turned once, so lanes are cells. A score is then
what `attention_tiles` makes of it, bit by bit, without a sum across lanes: 16 chains, of which
chain l multiplies the values l, l + 16, .. of a head in their order, added by the tree of
`simd.hsum`. CHAINS of them are in registers for TALL rows and 16 cells; they are next to each other
in the tree, which leaves one vector of them, so nothing is put aside in memory.

    score(queries, rows, columns, _, size, begin, end, scores, _)

Columns are, of 16 cells, `size` vectors in the order in which they are multiplied; then those of
the next 16. The code is as long as a head: loops over the values would put sums aside.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, device, i64, void
from cpu_fallback.ops.attention_rows import SIGHT, bend, clip, request, sight_at, weigh
from cpu_fallback.ops.attention_tiles import BLOCK, SCORES, STATE, emit_now, mix, score
from cpu_fallback.ops.bind import within
from cpu_fallback.ops.kv import line_of, padded, page_of, read_lines

TALL, CHAINS = (4, 4) if CURRENT.avx512 else (2, 2) if CURRENT.registers == 8 else (1, 2)
"""Rows and chains whose sums are in registers."""
LONGEST = 256  # Values of a head, of which there is still code

_VECTOR = 4 * v.LANES
_TREE = [int(f"{leaf:04b}"[::-1], 2) for leaf in range(v.LANES)]
"""The chains in the order in which the tree adds them."""


def _emit_chains(b: Any, rows: list[Any], columns: Any, size: int, leaf: int) -> list[Any]:
    """Emit, for each row and 16 cells, the sum of the chains leaf .. leaf + CHAINS - 1."""
    sums = [[v.constant(v.F32, 0.0)] * CHAINS for _ in rows]
    steps = size // v.LANES
    for step in range(steps):
        first = _VECTOR * (leaf * steps + step * CHAINS)
        places = [v.behind(b, columns, first + _VECTOR * c) for c in range(CHAINS)]
        keys = [v.emit_load(b, v.F32.llvm, place) for place in places]
        for row, own in zip(rows, sums, strict=True):
            for c, key in enumerate(keys):
                at = v.behind(b, row, _VECTOR * step + 4 * _TREE[leaf + c])
                own[c] = v.emit_fma(b, key, v.emit_everywhere(b, v.F32, at), own[c])
    return [emit_now(b, _emit_tree(b, own)) for own in sums]


def _emit_tree(b: Any, vectors: list[Any]) -> Any:
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [b.fadd(x, y) for x, y in pairs]
    return vectors[0]


def _scores(size: int, tall: int) -> Any:
    """Make the operation that scores `tall` rows and 16 cells."""

    @v.op(void, i64, i64, i64)
    def scores(b, queries, columns, out):
        rows = [b.add(queries, v.number(4 * size * r)) for r in range(tall)]
        waiting: list[tuple[int, list[Any]]] = []
        for leaf in range(0, v.LANES, CHAINS):
            count, sums = CHAINS, _emit_chains(b, rows, columns, size, leaf)
            while waiting and waiting[-1][0] == count:
                sums = [b.fadd(x, y) for x, y in zip(waiting.pop()[1], sums, strict=True)]
                count *= 2
            waiting.append((count, sums))
        for r, total in enumerate(waiting[0][1]):
            v.emit_store(b, total, b.add(out, v.number(SCORES * r)))

    return scores


@cache
def score_columns(size: int) -> Kernel:
    """Return the kernel that scores cells for heads of `size` values, whole vectors."""
    some, one = _scores(size, TALL), _scores(size, 1)
    pitch = 4 * size

    def score(queries, rows, columns, _stride, _size, begin, end, scores, _ahead):
        r = begin - begin
        while r + TALL <= rows:
            for c in range(begin & -16, end, 16):
                some(queries + r * pitch, columns + c * pitch, scores + SCORES * r + 4 * c)
            r += TALL
        while r < rows:
            for c in range(begin & -16, end, 16):
                one(queries + r * pitch, columns + c * pitch, scores + SCORES * r + 4 * c)
            r += 1

    return Kernel(score, name=f"attention.score_columns_{size}")


@v.op(void, i64, i64, i64, i64)
def _turn(b, source, pitch, target, steps):
    """Turn 16 values of 16 cells; `steps` is how many such parts a head has.

    Each of four rounds interleaves the upper half of the vectors with the lower one.
    """
    lines = [v.emit_at(b, source, pitch, i) for i in range(v.LANES)]
    vectors = [v.emit_load(b, v.F32.llvm, line) for line in lines]
    half = v.LANES // 2
    parts = [[lane for i in range(at, at + half) for lane in (i, v.LANES + i)] for at in (0, half)]
    masks = [ir.Constant(ir.VectorType(v.INT32, v.LANES), lanes) for lanes in parts]
    for _ in range(4):
        pairs = list(zip(vectors[:half], vectors[half:], strict=True))
        vectors = [b.shuffle_vector(x, y, mask) for x, y in pairs for mask in masks]
    for leaf, value in enumerate(_TREE):
        group, chain = leaf & -CHAINS, leaf % CHAINS
        at = b.add(b.mul(steps, v.number(_VECTOR * group)), v.number(_VECTOR * chain))
        v.emit_store(b, vectors[value], b.add(target, at))


@device
def turn(panel, size, begin, end, columns):
    """Turn the keys of cells begin .. end - 1 of a panel, and those around them to whole 16."""
    pitch, steps = 4 * size, size // v.LANES
    for c in range(begin & -16, end, 16):
        for step in range(steps):
            target = columns + pitch * c + _VECTOR * CHAINS * step
            _turn(panel + pitch * c + _VECTOR * step, pitch, target, steps)


@device
def clear_around(panel, pitch, begin, end):
    """Write zeros around cells begin .. end - 1 of a panel to whole 16, which are scored as well.

    What lay there may be denormal, of which each product takes a hundred cycles and more.
    """
    for at in range(pitch * (begin & -16), pitch * begin, _VECTOR):
        v.store_f32(panel + at, v.zero())
    for at in range(pitch * end, pitch * (end + 15 & -16), _VECTOR):
        v.store_f32(panel + at, v.zero())


TURNED_ROWS = 32  # Rows from which on keys are turned
_AT_ONCE = 16  # Rows of a tile that go through all stages together: they stay in the first cache


@device
def block(a, t, stop, seen, where, memory):
    """Attend to a block of cells: the tile t .. stop - 1 at once, or token by token.

    Cells are the same for all tokens of a slot up to where a token's tree begins.

        where   the head, the first cell, that of the next block, -1 if there is none
        memory  the scratch memory, the queries, the sums, the states of the rows
    """
    start, scratch = where[1], memory[0]
    low, high, step = np.int64(0), stop - t, stop - t
    whole = seen.begin <= start and start + BLOCK <= seen.end
    if not whole:
        while low < high and not _sees(scratch, low, start):
            low += 1
        while low < high and not _sees(scratch, high - 1, start):
            high -= 1
        for i in range(low, high):
            sight = sight_at(scratch + SIGHT * i)
            if sight.tree and sight.committed < start + BLOCK:
                step = np.int64(1)
    while low < high:
        end = min(low + step, high)
        _part(a, t, stop, low, end, whole, seen, where, memory)
        low = end


@device
def _sees(scratch, i, start):
    sight = sight_at(scratch + SIGHT * i)
    return clip(sight.begin, start) < clip(sight.end, start)


@device
def _part(a, t, stop, low, high, whole, seen, where, memory):
    """Attend from tokens low .. high - 1 of a tile; `whole`: each sees all cells, all committed."""
    head, start, after = where
    scratch, queries, sums, state = memory
    group, size = a.group, padded(a.D)
    begin, end, alike, committed = np.int64(0), np.int64(BLOCK), True, seen.end
    if not whole:
        begin, end, alike, committed = _range(scratch, low, high, start)
    if begin >= end:
        return
    tile, rows = (stop - t) * group, (high - low) * group
    scores = state + STATE * tile + 4 * tile * size
    panel = scores + SCORES * tile
    lines = panel + BLOCK * a.pitch
    scales = lines + 8 * BLOCK
    columns = scales + 2 * SCORES
    first, out = lines + 8 * begin, panel + a.pitch * begin
    tree, slot = sight_at(scratch + SIGHT * low).tree, within(v.read_i32(a.slots + 4 * t), a.S)
    nbytes = a.line
    k_scale, v_scale = a.k_scale, a.v_scale
    straight = start % a.T + BLOCK <= a.T and start + end <= committed
    keys, values, stride, ahead = panel, panel, a.pitch, np.int64(0)
    scorer, mixer = a.panel_score, a.panel_mix
    in_place = straight and rows <= a.in_place
    if in_place:
        line = _line(a, slot, head, start)
        keys, values = a.k_cache + line * nbytes, a.v_cache + line * nbytes
        stride, scorer, mixer = nbytes, a.score, a.mix
        if k_scale:
            k_scale += 4 * line
            v_scale += 4 * line
        if after >= 0 and after + BLOCK <= committed:
            lines_ahead = _line(a, slot, head, after) - line
            ahead = lines_ahead * nbytes
            if k_scale:
                for at in range(4 * lines_ahead, 4 * lines_ahead + SCORES, 64):
                    v.prefetch(k_scale + at)
                    v.prefetch(v_scale + at)
    else:
        _list(a, slot, head, start, begin, end, committed, tree, lines)
        if k_scale:
            _gather(k_scale, lines, begin, end, scales)
            _gather(v_scale, lines, begin, end, scales + SCORES)
            k_scale, v_scale = scales, scales + SCORES
        else:
            clear_around(panel, a.pitch, begin, end)
        read_lines(a.reader, a.k_cache, first, end - begin, a.D, out)
    few, key_scales, soon = max(np.int64(1), _AT_ONCE // group), k_scale, values + ahead
    share = piece = later = np.int64(0)
    if a.softcap:  # which bends what the scales have been applied to
        key_scales = np.int64(0)
    if ahead:
        share = BLOCK // 2 * nbytes // (high - low)
    afterwards = not in_place
    if a.columns and afterwards and rows >= TURNED_ROWS:
        turn(panel, size, begin, end, columns)
        read_lines(a.reader, a.v_cache, first, end - begin, a.D, out)
        scorer, keys, afterwards = a.columns, columns, False
        if straight and after >= 0 and after + BLOCK <= committed:
            later = nbytes * _line(a, slot, head, after)
            piece = -(-BLOCK * nbytes * few // (high - low))
    elif afterwards:  # values take the place of the keys, once all rows have their scores
        few = high - low
    while low < high:
        until, row = min(low + few, high), low * group
        query, count = queries + 4 * row * size, (until - low) * group
        request(a.k_cache + later, piece)
        request(a.v_cache + later, piece)
        later += piece
        score(scorer, query, count, keys, stride, size, begin, end, scores, ahead)
        weights = scores - SCORES * row  # row by row; those of `row` are at `scores`
        for i in range(low, until):
            seen_from, seen_to = begin, end
            if not alike:
                sight = sight_at(scratch + SIGHT * i)
                seen_from, seen_to = clip(sight.begin, start), clip(sight.end, start)
            if seen_from < seen_to:
                above, under = i * group, (i + 1) * group
                if a.softcap:
                    for r in range(above, under):
                        at, line = weights + SCORES * r, state + STATE * r
                        bend(at, line, seen_from, seen_to, k_scale, a.softcap)
                both = key_scales, v_scale
                weigh(weights, state, above, under, seen_from, seen_to, both, soon, share)
                soon += share
        if afterwards:
            read_lines(a.reader, a.v_cache, first, end - begin, a.D, out)
        while low < until:
            seen_from, seen_to, step = begin, end, until - low
            if not alike:
                sight, step = sight_at(scratch + SIGHT * low), np.int64(1)
                seen_from, seen_to = clip(sight.begin, start), clip(sight.end, start)
            if seen_from < seen_to:
                r, count = low * group, step * group
                at, own, w = sums + 4 * r * size, state + STATE * r, weights + SCORES * r
                mix(mixer, at, count, size, own, w, values, stride, seen_from, seen_to, ahead)
                ahead = np.int64(0)
            low += step
        ahead = np.int64(0)


@device
def _range(scratch, low, high, start):
    """Return the cells of a block that tokens see, whether all see all, and how many there are."""
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
    return begin, end, alike, committed


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
            v.write_i64(lines + 8 * (done + i), line + i)
        done += run
    for _ in range(start + done - committed):
        tree &= tree - 1
    while done < end:
        line = _line(a, slot, head, committed + v.lowest_bit(tree))
        v.write_i64(lines + 8 * done, line)
        tree &= tree - 1
        done += 1


@device
def _gather(scales, lines, begin, end, target):
    for i in range(begin, end):
        v.write_f32(target + 4 * i, v.read_f32(scales + 4 * v.read_i64(lines + 8 * i)))
