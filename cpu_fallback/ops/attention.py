"""Attention over the paged cache.

Tokens that follow each other in a step and belong to one slot make a tile; its rows, the query
heads of its tokens that share a key/value head, walk the cells together, so a key or value is read
once for all of them. Cells are numbered as the token sees them: the committed ones, then its
ancestors in the tree. Blocks and spans lie at fixed places of that order (`attention_rows`), so a
result depends neither on the other tokens nor on the threads, and a path of a speculative tree
gives the bits that decoding token by token gives. Cells that are not visible are not read.

Steps of a few tokens are divided by key/value head and span: `attend` keeps the sums of each span
in memory that the team shares, and `merge` folds them. In larger steps a thread has whole tiles of
a head and folds as it goes, in the same order.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import ShapeError
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.memory import read_f32, write_f32
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.attention_block import block
from cpu_fallback.ops.attention_rows import (
    LOWEST,
    SPAN,
    TOP,
    begin_row,
    begin_span,
    copy_row,
    end_row,
    fold,
    span_weight,
)
from cpu_fallback.ops.attention_sight import SIGHT, look_all, padded, sees, tile_end
from cpu_fallback.ops.attention_tiles import BLOCK, PRODUCTS, SCORES, STATE
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.ops.kv import kv_dtype
from cpu_fallback.team.tape import Launch

ROWS = 32
"""Rows of a tile, if the heads of one token are not more."""
FEW = 8
"""Tokens of a step that are divided by span."""
PANEL_ROWS = 8
"""Rows for which cells are decoded where they lie; for more, they are decoded once into a panel."""

_SHARES = 4
_HEADER = 64
"""Bytes in front of the sums of a row that `attend` keeps: the largest score and the weight."""


class Tile(NamedTuple):
    """How tiles are made and multiplied; addresses and bytes.

    Attributes:
        group: query heads that share a key/value head.
        tokens: of a tile, at most.
        line: bytes of a cell of one head.
        in_place: rows up to which cells are decoded where they lie.
        reader: kernel that decodes cells into a panel.
        score: kernel of queries and cells as stored.
        mix: kernel of weights and cells as stored.
        panel_score: kernel of queries and a panel.
        panel_mix: kernel of weights and a panel.
        kept: memory of the team for the sums of spans.
    """

    group: int
    tokens: int
    line: int
    in_place: int
    reader: int
    score: int
    mix: int
    panel_score: int
    panel_mix: int
    kept: int = 0


@device
def _kept_bytes(a, tokens):
    """Return the bytes that a span of a tile needs in shared memory: headers, then sums."""
    return tokens * a.group * (_HEADER + 4 * padded(a.D))


@executes("attention", Tile)
def attend(a, rank, size, scratch):
    """Attend tile by tile; each thread has a range of (tile, head, span), or some (tile, head).

    Scratch: the sights of the tokens; of each row the query, its sums in this span and in the spans
    before, its scores, its state; a panel of decoded cells, their lines, their scales.
    """
    m, heads, kept = a.M, a.H, a.kept
    few = m <= FEW
    first, last = np.int64(0), np.int64(0)
    if few:
        units, t = np.int64(0), np.int64(0)
        while t < m:
            stop = tile_end(a, t)
            low, high = look_all(a, t, stop, scratch)
            units += heads * (high - low)
            t = stop
        first, last = share(units, rank, size)
    unit, turn, t = np.int64(0), np.int64(0), np.int64(0)
    while t < m:
        stop = tile_end(a, t)
        low, high = look_all(a, t, stop, scratch)
        for head in range(heads):
            begin, end, mine = low, high, turn % size == rank
            if few:
                begin = min(max(low + first - unit, low), high)
                end = min(max(low + last - unit, low), high)
                mine = begin < end
            if mine:
                skipped = (begin - low) * _kept_bytes(a, stop - t)
                _walk(a, t, stop, head, begin, end, few, kept + skipped, scratch)
            kept += (high - low) * _kept_bytes(a, stop - t)
            unit += high - low
            turn += 1
        t = stop


@device
def _walk(a, t, stop, head, begin, end, few, kept, scratch):
    """Walk some spans of a tile, and keep the sums of each or fold them."""
    group, d = a.group, a.D
    rows, size = (stop - t) * group, padded(d)
    queries = scratch + SIGHT * (-(-a.tokens // 2) * 2)
    past = queries + 4 * rows * size
    state = past + 4 * rows * size
    work = state + STATE * rows
    for row in range(rows):
        place = ((t + row // group) * a.H + head) * group + row % group
        query = queries + 4 * row * size
        copy_row(a.q + 4 * place * d, query, d, a.scale)
        if not few:
            _begin(a, head * group + row % group, state + STATE * row, past, row, size)
    for span in range(begin, end):
        sums = work
        if few:
            sums = kept + _HEADER * rows
        for row in range(rows):
            begin_span(state + STATE * row, sums + 4 * row * size, size)
        for start in range(span * SPAN, (span + 1) * SPAN, BLOCK):
            block(a, t, stop, head, start, scratch, queries, sums, state)
        for row in range(rows):
            own, sight = state + STATE * row, scratch + SIGHT * (row // group)
            if few:
                write_f32(kept + _HEADER * row, read_f32(own + TOP))
                write_f32(kept + _HEADER * row + 4, span_weight(own))
            elif sees(sight, span):
                line, total = sums + 4 * row * size, span_weight(own)
                fold(own, past + 4 * row * size, read_f32(own + TOP), total, line, size)
        kept += _kept_bytes(a, stop - t)
    if not few:
        for row in range(rows):
            place = ((t + row // group) * a.H + head) * group + row % group
            line = past + 4 * row * size
            end_row(state + STATE * row, line, a.y + 4 * place * d, d)


@device
def _begin(a, sink, state, past, row, size):
    top, weight = LOWEST, np.float32(0)
    if a.sinks:
        top, weight = read_f32(a.sinks + 4 * sink), np.float32(1)
    begin_row(state, top, weight, past + 4 * row * size, size)


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
        stop = tile_end(a, t)
        low, high = look_all(a, t, stop, sights)
        rows, nbytes = (stop - t) * group, _kept_bytes(a, stop - t)
        for head in range(heads):
            for row in range(rows):
                turn += 1
                if turn % size == rank:
                    _begin(a, head * group + row % group, scratch, past, 0, width)
                    for span in range(low, high):
                        if sees(sights + SIGHT * (row // group), span):
                            base = kept + (span - low) * nbytes
                            at = base + _HEADER * row
                            sums = base + _HEADER * rows + 4 * row * width
                            fold(scratch, past, read_f32(at), read_f32(at + 4), sums, width)
                    place = ((t + row // group) * heads + head) * group + row % group
                    end_row(scratch, past, a.y + 4 * place * d, d)
            kept += (high - low) * nbytes
        t = stop


def _attention(call: BoundCall) -> list[Launch]:
    kv_heads, d, width = call.dim("H"), call.dim("D"), call.dim("F")
    group = width // (kv_heads * d)
    if width != group * kv_heads * d or not group:
        raise ShapeError(
            f"attention: 'q' has {width} columns; expected a multiple of {kv_heads} key/value "
            f"heads x {d}"
        )
    if call.has("sinks") and call.dim("N") != kv_heads * group:
        raise ShapeError(
            f"attention: {call.dim('N')} sinks; expected one for each of {kv_heads * group} heads"
        )
    kind, tokens = str(call.attr("kv_dtype")), max(1, ROWS // group)
    kernels = kv_dtype(call)
    panels = PRODUCTS["f32"]
    products = PRODUCTS[kind]
    tile = Tile(
        group=group,
        tokens=tokens,
        line=d * call.array("k_cache").itemsize,
        in_place=_rows_in_place(kind, d),
        reader=kernels.reader,
        score=products.score,
        mix=products.mix,
        panel_score=panels.score,
        panel_mix=panels.mix,
    )
    capacity, size = call.array("q").shape[0], -(-d // 16) * 16
    rows = group * tokens
    scratch = SIGHT * (tokens + 1) + rows * (12 * size + STATE + SCORES)
    scratch += BLOCK * (4 * size + 8) + 2 * SCORES
    spans = -(-call.dim("T") * call.dim("B") // SPAN) + 1
    kept = min(capacity, FEW) * group * kv_heads * spans * (_HEADER + 4 * size)
    both = call.launch(attend, tile, scratch), call.launch(merge, tile, scratch)
    return [
        replace(launch, shared=kept, shares=shares)
        for launch, shares in zip(both, (_SHARES, 1), strict=True)
    ]


def _rows_in_place(kind: str, d: int) -> int:
    """Return how many rows make it worth to decode cells once, into a panel."""
    if d % 16:
        return 0
    return 1 << 30 if kind == "f32" else PANEL_ROWS


LOWER = {"attention": _attention}
