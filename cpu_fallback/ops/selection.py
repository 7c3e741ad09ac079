"""Bounds of the keys of pages, and the lists of pages that tokens read.

A (token, key/value head) belongs to one thread, so a list depends on nothing but its own query and
the pages that it scores. What the best pages are is found without sorting: scores are bisected for
the lowest one that is still listed, 32 passes over a few hundred numbers.
"""

import numpy as np

from clocher_kernels.errors import ShapeError
from clocher_kernels.ops.selection import WORD
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.attention_rows import copy_row
from cpu_fallback.ops.attention_tiles import FLOATS, SCORES, score
from cpu_fallback.ops.bind import BoundCall, share, within
from cpu_fallback.ops.kv import kv_of, own_line, padded, page_of, query_heads, read_lines
from cpu_fallback.team.tape import Launch

_LARGEST = np.float32(np.finfo(np.float32).max)
_AHEAD = 8
_PAGES = 16  # That are scored together
_SHARES = 4


@executes("page_bounds", reader=int)
def page_bounds(a, rank, size, scratch):
    """Bound the keys of pages that are full now; each thread has a range of (token, head).

    `reader` reads lines of the cache's dtype.
    """
    begin, end = share(a.M * a.H, rank, size)
    for unit in range(begin, end):
        line = own_line(a, unit // a.H, unit % a.H)
        if line >= 0 and line % a.T == a.T - 1:
            _bound(a, line - a.T + 1, a.bounds + 8 * (line // a.T) * a.D, scratch)


@device
def _bound(a, line, bounds, scratch):
    """Write the bounds of the T lines from one on. Scratch: their numbers, and a panel."""
    cells, d, pitch = a.T, a.D, 4 * padded(a.D)
    panel = scratch + 8 * cells
    for i in range(cells):
        v.write_i64(scratch + 8 * i, line + i)
    read_lines(a.reader, a.k_cache, scratch, cells, d, panel)
    for i in range(0, d, 16):
        high, low, odd = v.splat(-_LARGEST), v.splat(_LARGEST), v.zero()
        for cell in range(cells):
            if a.k_scale:  # a panel of codes
                step = v.splat(v.read_f32(a.k_scale + 4 * (line + cell)))
                x = v.mul(v.to_f32(v.load_i8(panel + cell * ((d + 31) & -32) + i)), step)
            else:
                x = v.load_f32(panel + cell * pitch + 4 * i)
            high, low, odd = v.maximum(x, high), v.minimum(x, low), v.fma(x, v.zero(), odd)
        n = min(16, d - i)
        v.store_f32_n(bounds + 4 * i, v.add(high, odd), n)
        v.store_f32_n(bounds + 4 * (d + i), v.add(low, odd), n)


@executes("select_pages", group=int, scorer=int)
def select_pages(a, rank, size, scratch):
    """List pages; each thread has a range of (token, head).

    `group`: query heads of a key/value head; `scorer`: kernel of queries and fp32 cells.
    Scratch: the queries of a group, what is above zero and then what is below; the bounds of some
    pages, and their scores for each query; of each page its score and its weight.
    """
    begin, end = share(a.M * a.H, rank, size)
    for unit in range(begin, end):
        t, head = unit // a.H, unit % a.H
        cells, tree = a.B * a.cells, v.read_i64(a.ancestors + 8 * t)
        shown = within(v.read_i32(a.ends + 4 * t), cells + 1)
        if cells - shown < 64:
            tree &= _below(cells - shown)
        seen = (shown + v.popcount(tree) + a.cells - 1) // a.cells
        old, list_at, listed = max(seen - a.last, 0), a.listed + 8 * unit * a.W, np.int64(0)
        for word in range(a.W):
            always = _run(0, min(a.first, seen), word) | _run(old, seen, word)
            v.write_i64(list_at + 8 * word, always)
        if a.bounds and old > a.first:
            _choose(a, t, head, old, list_at, scratch)
        for word in range(a.W):
            listed += v.popcount(v.read_i64(list_at + 8 * word))
        count = a.counts + 16 * unit
        v.write_i64(count, v.read_i64(count) + listed)
        v.write_i64(count + 8, v.read_i64(count + 8) + seen)


@device
def _below(n):
    """Return a word whose lowest n bits are set."""
    if n >= 64:
        return np.int64(-1)
    return (np.int64(1) << n) - 1


@device
def _run(begin, end, word):
    """Return the bits of pages begin .. end - 1 in a word."""
    start = 64 * word
    return _below(max(end - start, 0)) & ~_below(max(begin - start, 0))


@device
def _choose(a, t, head, old, list_at, scratch):
    """Add to a list what is chosen of the pages 0 .. old - 1 for their scores."""
    scores = scratch + 8 * (a.group + _PAGES) * padded(a.D) + SCORES * a.group
    weights = scores + 4 * padded(a.B)
    _score(a, t, head, old, scratch, scores)
    begin, left, top = np.int64(0), np.int64(old), v.splat(-_LARGEST)
    for i in range(0, old, 16):
        top = v.maximum(v.load_f32(scores + 4 * i), top)
    highest = v.hmax(top)
    cut = highest - a.margin
    if a.budget > 0:
        begin, left = np.int64(a.first), a.budget - a.first - a.last
        if left <= 0:
            return
        _weigh(scores, weights, begin, old, highest, False)
        cut = -_LARGEST
        if left < old - begin:
            cut = _cut(scores, weights, old, highest, np.float32(left))
            left -= _above(scores, begin, old, cut)
    elif a.mass > np.float32(0):
        _weigh(scores, weights, begin, old, highest, True)
        goal = a.mass * _sum(scores, weights, old, -_LARGEST)
        cut = _cut(scores, weights, old, highest, goal)
    elif a.margin <= np.float32(0):
        return
    for word in range((old + 63) // 64):
        above, equal = _compared(scores, begin, old, cut, word)
        while equal and left > 0:
            above |= equal & -equal
            equal &= equal - 1
            left -= 1
        v.write_i64(list_at + 8 * word, v.read_i64(list_at + 8 * word) | above)


@device
def _score(a, t, head, old, queries, scores):
    """Write the scores of the pages 0 .. old - 1, then the lowest number up to a whole vector.

    A score is that of attention, of the two halves of a query and the bounds of a page.
    """
    d, width, group = a.D, padded(a.D), a.group
    for row in range(group):
        source = a.q + 4 * ((t * a.H + head) * group + row) * d
        target = queries + 8 * row * width
        for i in range(0, d, 16):
            x = v.mul(v.load_f32_n(source + 4 * i, min(16, d - i)), v.splat(a.scale))
            odd = v.fma(x, v.zero(), v.zero())  # `maximum` and `minimum` lose what is NaN
            v.store_f32(target + 4 * i, v.add(v.maximum(x, v.zero()), odd))
            v.store_f32(target + 4 * (width + i), v.minimum(x, v.zero()))
    panel = queries + 8 * group * width
    found, slot = panel + 8 * _PAGES * width, within(v.read_i32(a.slots + 4 * t), a.S)
    for first in range(0, old, _PAGES):
        count = min(_PAGES, old - first)
        for i in range(count):
            asked = _bounds_of(a, slot, min(first + i + _AHEAD, old - 1), head)
            for at in range(0, 8 * d, 64):
                v.prefetch(asked + at)
            bounds, line = _bounds_of(a, slot, first + i, head), panel + 8 * i * width
            copy_row(bounds, line, d, np.float32(1))
            copy_row(bounds + 4 * d, line + 4 * width, d, np.float32(1))
        score(a.scorer, queries, group, panel, 8 * width, 2 * width, 0, count, found, 0)
        best, most = v.splat(-_LARGEST), v.splat(_LARGEST)
        for row in range(group):
            x = v.load_f32(found + SCORES * row)
            best = v.maximum(v.select(v.le(v.absolute(x), most), x, most), best)
        best = v.select(v.first(count), v.add(best, v.zero()), v.splat(-_LARGEST))
        v.store_f32(scores + 4 * first, best)


@device
def _bounds_of(a, slot, page, head):
    stored = within(page_of(a.pages, a.B, np.int64(1), slot, page), a.P)
    return a.bounds + 8 * (stored * a.H + head) * a.D


@device
def _weigh(scores, weights, begin, old, highest, falling):
    """Write what each page counts: 1, or e^score; 0 before the first and after the last."""
    for i in range(0, old, 16):
        x = v.splat(np.float32(1))
        if falling:
            x = v.exp_falling(v.sub(v.load_f32(scores + 4 * i), v.splat(highest)))
        if old - i < 16:
            x = v.select(v.first(old - i), x, v.zero())
        if begin > i:
            x = v.select(v.first(min(begin - i, 16)), v.zero(), x)
        v.store_f32(weights + 4 * i, x)


@device
def _sum(scores, weights, old, cut):
    """Return what the pages of a score count together that is not below a cut."""
    total, bar = v.zero(), v.splat(cut)
    for i in range(0, old, 16):
        x = v.select(v.le(bar, v.load_f32(scores + 4 * i)), v.load_f32(weights + 4 * i), v.zero())
        total = v.add(total, x)
    return v.hsum(total)


@device
def _cut(scores, weights, old, highest, goal):
    """Return the highest score whose pages, with all that are above, count at least so much."""
    low, high = _rank(-_LARGEST), _rank(highest)
    while low < high:
        middle = low + (high - low + 1) // 2
        if _sum(scores, weights, old, _ranked(middle)) >= goal:
            low = middle
        else:
            high = middle - 1
    return _ranked(low)


@device
def _rank(x):
    """Return an integer that is larger for larger fp32."""
    bits = v.bits_of(x)
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


# Return the fp32 of a rank.
_ranked = device(lambda rank: v.float_of(rank if rank >= 0 else rank ^ 0x7FFFFFFF))


@device
def _compared(scores, begin, old, cut, word):
    """Return the pages of a word that are above a cut, and those that are on it."""
    above, equal, bar = np.int64(0), np.int64(0), v.splat(cut)
    for i in range(64 * word, min(64 * word + 64, old), 16):
        x = v.load_f32(scores + 4 * i)
        above |= v.mask_bits(v.lt(bar, x)) << (i - 64 * word)
        equal |= v.mask_bits(v.eq(bar, x)) << (i - 64 * word)
    within_run = _run(begin, old, word)
    return above & within_run, equal & within_run


@device
def _above(scores, begin, old, cut):
    found = np.int64(0)
    for word in range((old + 63) // 64):
        found += v.popcount(_compared(scores, begin, old, cut, word)[0])
    return found


def _page_bounds(call: BoundCall) -> list[Launch]:
    cells, d = call.dim("T"), call.dim("D")
    scratch = cells * (8 + 4 * (-(-d // 16) * 16))
    return [call.launch(page_bounds, (kv_of(call).reader,), scratch)]


def _select_pages(call: BoundCall) -> list[Launch]:
    heads, width, blocks = call.dim("H"), call.dim("F"), call.dim("B")
    d = call.dim("D") if call.has("bounds") else width // heads
    group = query_heads(call, d)
    if call.dim("W") < -(-blocks // WORD):
        raise ShapeError(
            f"select_pages: 'listed' has {call.dim('W')} words; {blocks} pages need "
            f"{-(-blocks // WORD)}"
        )
    query, scores = (-(-size // 16) * 16 for size in (d, blocks))
    scratch = 8 * (group + _PAGES) * query + SCORES * group + 8 * scores
    return [call.launch(select_pages, (group, FLOATS["f32"].score), scratch, _SHARES)]


LOWER = {"page_bounds": _page_bounds, "select_pages": _select_pages}
