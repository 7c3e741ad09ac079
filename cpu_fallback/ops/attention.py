"""Attention over the paged cache.

Tokens that follow each other in a step and belong to one slot make a tile; its rows, the query
heads of its tokens that share a key/value head, walk the cells together, so a key or value is read
once for all of them. Where rows are many, cells are decoded into a panel and the keys are turned
(`attention_block`), which gives the same bits. Cells are numbered as the token sees them: the
committed ones, then its ancestors in the tree. Blocks and spans lie at fixed places of that order
(`attention_rows`), so a result depends neither on the other tokens nor on the threads, and a path
of a speculative tree gives the bits that decoding token by token gives. Cells that are not visible
are not read.

Where pages are listed a tile is one token, for each has lists of its own, and a block that is not
listed is left out as if no token saw it; the others stay where they were.

Steps of a few tokens are divided by span and key/value head: `attend` keeps the sums of each span
in memory that the team shares, and `merge` folds them. In larger steps a thread has whole tiles of
a head and folds as it goes, in the same order.
"""

from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import ShapeError
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops import attention_rows as softmax
from cpu_fallback.ops.attention_block import LONGEST, TURNED_ROWS, block, score_columns
from cpu_fallback.ops.attention_codes import CHUNK, CODES, code_query
from cpu_fallback.ops.attention_tiles import BLOCK, FLOATS, SCORES, STATE
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.ops.kv import kv_of, padded, query_heads
from cpu_fallback.team.tape import Launch

ROWS = 256  # Rows of a tile at most, if the heads of one token are not more
TILE_BYTES = 512 << 10  # Bytes of the rows of a tile at most: they stay in the second cache
LEAST_ROWS = 32  # Rows below which tiles are not divided so that every thread has some
FEW = 8  # Tokens of a step that are divided by span
_IN_PLACE = {"i8": 1 << 30, "f32": TURNED_ROWS - 1, "bf16": 8, "f16": 8, "e5m2": 4, "e4m3": 4}
"""Rows for which cells are decoded where they lie, if lines are whole vectors; for more, they are
decoded once into a panel. Measured with AVX2."""

_SHARES = 4
_HEADER = 64
"""Bytes in front of the sums of a row that `attend` keeps: the largest score and the weight."""


class Tile(NamedTuple):
    """How tiles are made and multiplied; addresses and bytes."""

    group: int  # query heads that share a key/value head
    tokens: int  # of a tile, at most
    line: int  # bytes of a cell of one head
    pitch: int  # bytes of a cell in a panel
    in_place: int  # rows up to which cells are decoded where they lie
    reader: int  # kernel that decodes cells into a panel
    score: int  # kernel of queries and cells as stored
    mix: int  # kernel of weights and cells as stored
    panel_score: int  # kernel of queries and a panel
    panel_mix: int  # kernel of weights and a panel
    columns: int  # kernel of many queries and keys that were turned, 0 if there is none
    kept: int = 0  # memory of the team for the sums of spans


# Return the bytes that a span of a tile needs in shared memory: headers, then sums.
_kept_bytes = device(lambda a, tokens: tokens * a.group * (_HEADER + 4 * padded(a.D)))


@executes("attention", Tile)
def attend(a, rank, size, scratch):
    """Attend tile by tile; each thread has a range of (tile, head, span), or some (tile, head).

    Scratch: the sights of the tokens; of each row the query, its sums in this span and in the spans
    before, its scores, its state; a panel of decoded cells, their lines, their scales, their keys
    turned.
    """
    m, heads, kept = a.M, a.H, a.kept
    few, tokens = m <= FEW, _tokens(a, size)
    first, last = np.int64(0), np.int64(0)
    if few:
        units, t = np.int64(0), np.int64(0)
        while t < m:
            stop = softmax.tile_end(a, t, tokens)
            seen = softmax.look_all(a, t, stop, scratch)
            for head in range(heads):
                units += softmax.load_of(a, t, head, seen.low, seen.high)
            t = stop
        first, last = share(units, rank, size)
    unit, turn, t = np.int64(0), np.int64(0), np.int64(0)
    while t < m:
        stop = softmax.tile_end(a, t, tokens)
        seen = softmax.look_all(a, t, stop, scratch)
        low, high = seen.low, seen.high
        for head in range(heads):
            begin, end, mine = low, high, turn % size == rank
            load = softmax.load_of(a, t, head, low, high)
            if few:
                mine = first - unit < load and last > unit
                if mine:
                    begin = softmax.span_at(a, t, head, low, high, first - unit)
                    end = softmax.span_at(a, t, head, low, high, last - unit)
            if mine:
                skipped = (begin - low) * _kept_bytes(a, stop - t)
                _walk(a, t, stop, head, seen, begin, end, few, kept + skipped, scratch)
            kept += (high - low) * _kept_bytes(a, stop - t)
            unit += load
            turn += 1
        t = stop


@device
def _tokens(a, size):
    """Return the tokens of a tile at most: fewer in a large step than would leave threads idle."""
    if a.M <= FEW:
        return a.tokens
    return min(a.tokens, max(np.int64(1), LEAST_ROWS // a.group, a.M * a.H // size))


@device
def _ask(a, t, head, rows, queries, states):
    group, d, size = a.group, a.D, padded(a.D)
    for row in range(rows):
        source = a.q + 4 * (((t + row // group) * a.H + head) * group + row % group) * d
        query = queries + 4 * row * size
        if a.k_scale:
            code_query(source, query, d, a.pitch, a.scale, states + STATE * row)
        else:
            softmax.copy_row(source, query, d, a.scale)


@device
def _walk(a, t, stop, head, seen, begin, end, few, kept, scratch):
    """Walk some spans of a tile, and keep the sums of each or fold them."""
    group, d = a.group, a.D
    rows, size = (stop - t) * group, padded(d)
    queries = scratch + softmax.SIGHT * (-(-a.tokens // 2) * 2)
    past = queries + 4 * rows * size
    state = past + 4 * rows * size
    work = state + STATE * rows
    _ask(a, t, head, rows, queries, state)
    if not few:
        for row in range(rows):
            _begin(a, head * group + row % group, state + STATE * row, past, row, size)
    for span in range(begin, end):
        blocks, sums = softmax.listed(a, t, head, span), work
        if few:
            sums = kept + _HEADER * rows
        if blocks:
            for row in range(rows):
                softmax.begin_span(state + STATE * row, sums + 4 * row * size, size)
            for start in range(span * softmax.SPAN, (span + 1) * softmax.SPAN, BLOCK):
                if blocks >> (start // BLOCK % (softmax.SPAN // BLOCK)) & 1:
                    after = softmax.block_after(a, t, head, start)
                    where = head, np.int64(start), after
                    block(a, t, stop, seen, where, (scratch, queries, sums, state))
            for row in range(rows):
                own, sight = state + STATE * row, scratch + softmax.SIGHT * (row // group)
                if few:
                    v.write_f32(kept + _HEADER * row, v.read_f32(own + softmax.TOP))
                    v.write_f32(kept + _HEADER * row + 4, softmax.span_weight(own))
                elif softmax.sees(sight, span):
                    line, total = sums + 4 * row * size, softmax.span_weight(own)
                    softmax.fold(
                        own, past + 4 * row * size, v.read_f32(own + softmax.TOP), total, line, size
                    )
        kept += _kept_bytes(a, stop - t)
    if not few:
        for row in range(rows):
            place = ((t + row // group) * a.H + head) * group + row % group
            line = past + 4 * row * size
            softmax.end_row(state + STATE * row, line, a.y + 4 * place * d, d)


@device
def _begin(a, sink, state, past, row, size):
    top, weight = softmax.LOWEST, np.float32(0)
    if a.sinks:
        top, weight = v.read_f32(a.sinks + 4 * sink), np.float32(1)
    softmax.begin_row(state, top, weight, past + 4 * row * size, size)


@executes("attention", Tile)
def merge(a, rank, size, scratch):
    """Fold what `attend` kept; each thread has some (token, head). Scratch: a row and its state."""
    m, heads, group, d, kept = a.M, a.H, a.group, a.D, a.kept
    if m > FEW:
        return
    width, past = padded(d), scratch + STATE
    sights = past + 4 * width
    turn, t = np.int64(0), np.int64(0)
    while t < m:
        stop = softmax.tile_end(a, t, a.tokens)
        seen = softmax.look_all(a, t, stop, sights)
        low, high = seen.low, seen.high
        rows, nbytes = (stop - t) * group, _kept_bytes(a, stop - t)
        for head in range(heads):
            for row in range(rows):
                turn += 1
                if turn % size == rank:
                    _begin(a, head * group + row % group, scratch, past, 0, width)
                    for span in range(low, high):
                        sight = sights + softmax.SIGHT * (row // group)
                        if softmax.listed(a, t, head, span) and softmax.sees(sight, span):
                            base = kept + (span - low) * nbytes
                            at = base + _HEADER * row
                            sums = base + _HEADER * rows + 4 * row * width
                            softmax.fold(
                                scratch, past, v.read_f32(at), v.read_f32(at + 4), sums, width
                            )
                    place = ((t + row // group) * heads + head) * group + row % group
                    softmax.end_row(scratch, past, a.y + 4 * place * d, d)
            kept += (high - low) * nbytes
        t = stop


def _attention(call: BoundCall) -> list[Launch]:
    kv_heads, d = call.dim("H"), call.dim("D")
    group = query_heads(call, d)
    if call.has("sinks") and call.dim("N") != kv_heads * group:
        raise ShapeError(
            f"attention: {call.dim('N')} sinks; expected one for each of {kv_heads * group} heads"
        )
    kind = str(call.attr("cache_dtype"))
    reader, codes = kv_of(call).reader, kind == "i8"
    own = CODES if codes else FLOATS[kind]
    panels = CODES if codes else FLOATS["f32"]
    chunk, size = CHUNK if codes else v.LANES, -(-d // v.LANES) * v.LANES
    row = 12 * size + STATE + SCORES
    tokens = max(1, min(ROWS, TILE_BYTES // row) // group)
    if call.has("listed"):
        tokens = 1
        if call.dim("T") != BLOCK:
            raise ShapeError(f"attention: pages of {call.dim('T')} cells; listed ones have {BLOCK}")
    pitch = -(-d // chunk) * chunk * (1 if codes else 4)
    capacity = call.array("q").shape[0]
    scratch = softmax.SIGHT * (tokens + 1) + group * tokens * row
    scratch = -(-(scratch + BLOCK * (pitch + 8 + 4 * size) + 2 * SCORES) // 64) * 64
    tile = Tile(
        group=group,
        tokens=tokens,
        line=d * call.array("k_cache").itemsize,
        pitch=pitch,
        in_place=0 if d % chunk else _IN_PLACE[kind],
        reader=reader,
        score=own.score,
        mix=own.mix,
        panel_score=panels.score,
        panel_mix=panels.mix,
        columns=0 if codes or size > LONGEST else score_columns(size),
    )
    spans = -(-call.dim("T") * call.dim("B") // softmax.SPAN) + 1
    kept = min(capacity, FEW) * group * kv_heads * spans * (_HEADER + 4 * size)
    return [
        call.launch(attend, tile, scratch, _SHARES, kept),
        call.launch(merge, tile, scratch, 1, kept),
    ]


LOWER = {"attention": _attention}
