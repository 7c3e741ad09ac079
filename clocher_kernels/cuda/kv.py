"""The KV cache: a token's cell, its heads on their way in, bounds and lists of pages.

A list of pages depends on its own query alone; the best ones are found by bisecting the scores.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor, float32

from clocher_kernels.cuda.attention_block import pages_seen
from clocher_kernels.cuda.codes import narrow, to_f32, unit
from clocher_kernels.cuda.elementwise import angles_of, turned
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.scalar import or_nan, saturated, start, within
from clocher_kernels.dtypes import LARGEST
from clocher_kernels.errors import ShapeError
from clocher_kernels.ops.selection import LAST_PAGES, WORD


@triton.jit
def tree_length(ancestors):
    """Return the number of bits up to the highest set one; 0 without a tree."""
    rest = ancestors.to(tl.uint64, bitcast=True)
    length = (rest * 0).to(tl.int32)
    for power in tl.static_range(5, -1, -1):
        high = rest >> (1 << power)
        length += tl.where(high != 0, 1 << power, 0)
        rest = tl.where(high != 0, high, rest)
    return length + (rest != 0).to(tl.int32)


@triton.jit
def own_cell(tokens, token, C: tl.constexpr):
    """Return the page of a token's own cell, int64, -1 if there is none, the cell, the position.

    `tokens` are slots, positions, ends, ancestors and pages.
    """
    slots, positions, ends, ancestors, pages = tokens
    # A tree node's own bit is its highest.
    length = tree_length(tl.load(ancestors + token))
    node = tl.load(ends + token) + length - 1
    position = tl.load(positions + token)
    cell = tl.where(length > 0, node, position)
    slot = tl.load(slots + token)
    there = (slot >= 0) & (slot < C.SLOTS) & (cell >= 0) & (cell < C.CELLS)
    page = tl.load(pages + slot * C.PAGES_ROW + cell // C.PAGE, there, other=-1).to(tl.int64)
    return page, cell, position


@triton.jit
def _append(value, cache, scale, cell, C: tl.constexpr):
    """Write one head [1, WIDTH] of one token into its cell; nowhere if that is -1."""
    # In a branch the head would be loaded later, when it is known that it is needed.
    dim = tl.arange(0, C.WIDTH)[None, :]
    kept = dim < tl.where(cell >= 0, C.DIM, 0)
    if C.KV == "i8":
        odd = tl.max((or_nan(value) != value).to(tl.int32)) > 0
        value = tl.where(odd, 0.0, value)
        absmax = tl.max(tl.abs(value))
        step = tl.where(absmax > 0, tl.div_rn(absmax, 127.0), 1.0)
        tl.store(scale + cell, tl.where(odd, float("nan"), step), cell >= 0)
        # Adding 1.5 * 2^23 rounds to an integer, ties to even.
        steps = (tl.div_rn(value, step + tl.zeros_like(value)) + 12582912.0) - 12582912.0
        tl.store(cache + cell * C.DIM + dim, steps.to(tl.int8), kept)
    else:
        if C.KV != "f32":
            value = saturated(value, C.LARGEST)
        tl.store(cache + cell * C.DIM + dim, narrow(value, C.KV), kept)


@triton.jit
def enter_heads(heads, gains, tables, turns, at, cache, head, token, C: tl.constexpr):
    """Norm, rotate and append one key/value head of a token; return its query heads [LANES, WIDTH].

    `heads` are q, k and v; without q there are none. `gains` are those of q and k, `turns` and `at`
    those of `own_turns`, `cache` keys, values and the scales of both.
    """
    (q, k, v), (q_gain, k_gain), (q_turn, k_turn) = heads, gains, turns
    (q_cos, _, k_cos, _), (k_cache, v_cache, k_scale, v_scale) = tables, cache
    one = tl.zeros((1,), tl.int32)
    query = one
    if q is not None:
        row, first = tl.arange(0, C.LANES), q + token * C.Q_ROW + head * C.GROUP * C.DIM
        query = turned(first, row * C.DIM, row < C.GROUP, q_gain, q_cos, q_turn, C)
    key = turned(k + token * C.K_ROW + head * C.DIM, one, one == 0, k_gain, k_cos, k_turn, C)
    value = turned(v + token * C.V_ROW + head * C.DIM, one, one == 0, None, None, None, C)
    _append(key, k_cache, k_scale, at, C)
    _append(value, v_cache, v_scale, at, C)
    return query


@triton.jit
def own_turns(tokens, tables, head, token, C: tl.constexpr):
    """Return the rotations of a token's query and key, and the index of its cell, -1 if none.

    Inputs and tables, cosines and sines of q and of k, are older than the predecessor.
    """
    q_cos, q_sin, k_cos, k_sin = tables
    page, cell, position = own_cell(tokens, token, C)
    turns = angles_of(position, q_cos, q_sin, C), angles_of(position, k_cos, k_sin, C)
    at = (page * C.HEADS + head) * C.PAGE + cell % C.PAGE
    return turns, tl.where((page >= 0) & (page < C.POOL), at, -1)


@triton.jit
def _heads(
    q, k, v, q_gain, k_gain, q_cos, q_sin, k_cos, k_sin, slots, positions, ends, ancestors, pages,
    k_cache, v_cache, k_scale, v_scale, C: tl.constexpr,
):  # fmt: skip
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens, tables = (slots, positions, ends, ancestors, pages), (q_cos, q_sin, k_cos, k_sin)
    turns, at = own_turns(tokens, tables, head, token, C)
    start(C.PDL)
    gains, cache = (q_gain, k_gain), (k_cache, v_cache, k_scale, v_scale)
    query = enter_heads((q, k, v), gains, tables, turns, at, cache, head, token, C)
    if q is not None:
        row, dim = tl.arange(0, C.LANES)[:, None], tl.arange(0, C.WIDTH)[None, :]
        to = q + token * C.Q_ROW + (head * C.GROUP + row) * C.DIM + dim
        tl.debug_barrier()  # other threads read what this overwrites
        tl.store(to, query, (row < C.GROUP) & (dim < C.DIM))


def cache_sizes(pages: Tensor, cache: Tensor, q: Tensor | None = None) -> dict[str, int]:
    """Return the constexprs of a paged cache [pool, heads, page, dim], its page table, queries."""
    pool, heads, page, dim = cache.shape
    group = 0 if q is None else q.shape[1] // (heads * dim)
    sizes = {"PAGES_ROW": pages.stride(0), "SLOTS": pages.shape[0], "POOL": pool}
    sizes |= {"CELLS": pages.shape[1] * page, "HEADS": heads, "PAGE": page, "DIM": dim}
    sizes |= {"GROUP": group, "LANES": triton.next_power_of_2(max(group, 1))}
    sizes |= {"WIDTH": max(triton.next_power_of_2(dim), 16)}
    return sizes | {"Q_ROW": 0 if q is None else q.stride(0)}


def heads_given(
    k: Tensor, v: Tensor, cells: Mapping[str, Tensor], cache_dtype: str, q: Tensor | None = None
) -> dict[str, Any]:
    """Return the arguments of `enter_heads` without norms and rotation."""
    sizes = cache_sizes(cells["pages"], cells["k_cache"], q)
    sizes |= {"K_ROW": k.stride(0), "V_ROW": v.stride(0)}
    kind = {"KV": cache_dtype, "LARGEST": LARGEST.get(cache_dtype, 0.0)}
    return {"q": q, "k": k, "v": v, **cells, **sizes, **kind}


def enter_all(given: Mapping[str, Any], device: Device) -> list[Launch]:
    """Return the launch of `enter_heads`: one program per token and key/value head."""
    return [launch(_heads, (given["HEADS"], len(given["k"])), device, 4, **given)]


def kv_append(
    *, k: Tensor, v: Tensor, cache_dtype: str, device: Device, **cells: Tensor
) -> list[Launch]:
    """Lower `ops.attention.kv_append`."""
    return enter_all(heads_given(k, v, cells, cache_dtype), device)


_LARGEST = tl.constexpr(3.4028234663852886e38)
_TILE = 2048
"""Elements that a program holds at once of a page's keys, or of bounds of one kind."""


@triton.jit
def _page_bounds(
    slots, positions, ends, ancestors, pages, k_cache, k_scale, bounds, C: tl.constexpr
):
    start(C.PDL)
    head, token = tl.program_id(0), tl.program_id(1)
    page, cell, _ = own_cell((slots, positions, ends, ancestors, pages), token, C)
    if (cell % C.PAGE != C.PAGE - 1) | (page < 0) | (page >= C.POOL):
        return
    line, dim = (page * C.HEADS + head) * C.PAGE, tl.arange(0, C.WIDTH)
    high = tl.full((C.WIDTH,), float("-inf"), tl.float32)
    low = tl.full((C.WIDTH,), float("inf"), tl.float32)
    odd = tl.zeros((C.WIDTH,), tl.int32)
    for first in range(0, C.PAGE, C.ROWS):
        row = first + tl.arange(0, C.ROWS)
        inside = (row < C.PAGE)[:, None] & (dim < C.DIM)[None, :]
        stored = tl.load(k_cache + (line + row)[:, None] * C.DIM + dim[None, :], inside, other=0)
        if C.KV == "e4m3" or C.KV == "e5m2":
            keys = to_f32(stored, C.KV, C.ASM) * C.UNIT
        else:
            keys = stored.to(tl.float32)
        wrong = (tl.abs(keys) < float("inf")).to(tl.int32) ^ 1
        if C.KV == "e4m3":  # has no infinity, and its NaN is decoded as a number
            wrong = ((stored & 0x7F) == 0x7F).to(tl.int32)
        if C.KV == "i8":
            keys *= tl.load(k_scale + line + row, row < C.PAGE, other=0.0)[:, None]
            wrong = (tl.abs(keys) < float("inf")).to(tl.int32) ^ 1
        high = tl.maximum(high, tl.max(tl.where(inside, keys, float("-inf")), 0))
        low = tl.minimum(low, tl.min(tl.where(inside, keys, float("inf")), 0))
        odd = tl.maximum(odd, tl.max(tl.where(inside, wrong, 0), 0))
    at = bounds + (page * C.HEADS + head) * 2 * C.DIM + dim
    tl.store(at, tl.where(odd > 0, float("nan"), high), dim < C.DIM)
    tl.store(at + C.DIM, tl.where(odd > 0, float("nan"), low), dim < C.DIM)


def page_bounds(
    *, pages: Tensor, k_cache: Tensor, cache_dtype: str, device: Device, **cells: Tensor
) -> list[Launch]:
    """Lower `ops.selection.page_bounds`; a program whose token completes no page does nothing."""
    sizes = cache_sizes(pages, k_cache)
    kind = {"UNIT": unit(cache_dtype, "fp32"), "KV": cache_dtype}
    given = {"pages": pages, "k_cache": k_cache, **cells, **sizes, **kind}
    grid, rows = (sizes["HEADS"], len(cells["slots"])), max(_TILE // sizes["WIDTH"], 1)
    return [launch(_page_bounds, grid, device, **given, ROWS=rows)]


@triton.jit
def _score_pages(q, slots, ends, ancestors, pages, bounds, scores, C: tl.constexpr):
    """Write the scores of ROWS pages for a token and a key/value head, [token, head, page]."""
    start(C.PDL)
    begin, head, token = tl.program_id(0) * C.ROWS, tl.program_id(1), tl.program_id(2)
    old = pages_seen(ends, ancestors, token, C.BLOCKS * C.PAGE, C.PAGE) - C.LAST
    if (old <= C.FIRST) | (begin >= old):
        return
    number, dim = begin + tl.arange(0, C.ROWS), tl.arange(0, C.WIDTH)
    there = number < old
    slot_pages = pages + within(tl.load(slots + token), C.SLOTS) * C.PAGES_ROW
    page = within(tl.load(slot_pages + number, there, other=0), C.POOL).to(tl.int64)
    at = bounds + ((page * C.HEADS + head) * 2 * C.DIM)[:, None] + dim[None, :]
    inside = there[:, None] & (dim < C.DIM)[None, :]
    high, low = tl.load(at, inside, other=0.0), tl.load(at + C.DIM, inside, other=0.0)
    best = tl.full((C.ROWS,), -_LARGEST, tl.float32)
    for row in range(0, C.GROUP):
        query = tl.load(
            q + token * C.Q_ROW + (head * C.GROUP + row) * C.DIM + dim, dim < C.DIM, other=0.0
        )
        query = (query * C.SCALE)[None, :]
        larger = tl.maximum(query * high, query * low, propagate_nan=tl.PropagateNan.ALL)
        score = tl.sum(larger, 1)
        best = tl.maximum(best, tl.where(tl.abs(score) <= _LARGEST, score, _LARGEST))
    # Negative zero is no less than zero.
    best = tl.where(best == 0.0, 0.0, best)
    tl.store(scores + (token * C.HEADS + head) * C.BLOCKS + number, best, there)


@triton.jit
def _ranked(score):
    """Return uint32 in the order of fp32."""
    bits = score.to(tl.uint32, bitcast=True)
    return tl.where(bits < 0x80000000, bits | 0x80000000, ~bits)


@triton.jit
def _cut(rank, weight, goal, BITS: tl.constexpr):
    """Return the highest rank whose pages, with all above, weigh `goal`; 0 if none."""
    way = tl.arange(0, 1 << BITS).to(tl.uint32)
    cut = tl.min(way)
    for turn in range(0, 32 // BITS):
        tried = cut + (way << (32 - BITS - turn * BITS))
        weighs = tl.sum(tl.where(rank[None, :] >= tried[:, None], weight[None, :], 0), 1)
        cut = tl.max(tl.where(weighs >= goal, tried, cut))
    return cut


@triton.jit
def _choice(scores, number, old, C: tl.constexpr):
    """Return which of the pages 0 .. old - 1 are listed by score; the first ones always are."""
    there = number < tl.where(old > C.FIRST, old, 0)
    score = tl.load(scores + number, there, other=-_LARGEST)
    highest = tl.max(score)
    if C.COUNT > 0:
        among = there & (number >= C.FIRST)
        rank = _ranked(score)
        cut = _cut(rank, among.to(tl.int32), C.COUNT, C.BITS)
        above, equal = among & (rank > cut), among & (rank == cut)
        left = C.COUNT - tl.sum(above.to(tl.int32))
        return above | (equal & (tl.cumsum(equal.to(tl.int32)) <= left))
    elif C.MARGIN > 0:
        return there & (score >= highest - C.MARGIN)
    elif C.MASS > 0:
        rank = _ranked(score)
        weight = tl.where(there, tl.exp(score - highest), 0.0)
        goal = tl.sum(weight) * C.MASS
        return there & (rank >= _cut(rank, weight, goal, C.BITS))
    else:
        return number < 0


@triton.jit
def _list_pages(ends, ancestors, scores, listed, counts, C: tl.constexpr):
    """Write the page list of a token and a key/value head, and its length."""
    start(C.PDL)
    head, token = tl.program_id(0), tl.program_id(1)
    pair = token * C.HEADS + head
    seen = pages_seen(ends, ancestors, token, C.BLOCKS * C.PAGE, C.PAGE)
    number, old = tl.arange(0, C.WIDTH), tl.maximum(seen - C.LAST, 0)
    chosen = (number < seen) & ((number < C.FIRST) | (number >= old))
    if scores is not None:
        chosen |= _choice(scores + pair * C.BLOCKS, number, old, C)
    # A shortened page table leaves words over.
    bits = chosen.to(tl.int64) << (number % 64).to(tl.int64)
    word, rest = tl.arange(0, C.WIDTH // 64), tl.arange(0, C.REST)
    out = listed + pair * C.WORDS
    tl.store(out + word, tl.sum(tl.reshape(bits, (C.WIDTH // 64, 64)), 1), word < C.WORDS)
    tl.store(out + rest, tl.zeros((C.REST,), tl.int64), (rest >= C.WIDTH // 64) & (rest < C.WORDS))
    at = counts + pair * 2
    tl.store(at, tl.load(at) + tl.sum(chosen.to(tl.int64)))
    tl.store(at + 1, tl.load(at + 1) + seen)


def select_pages(
    *,
    q: Tensor,
    pages: Tensor,
    listed: Tensor,
    cells: int,
    scale: float,
    device: Device,
    first: int = 1,
    last: int = LAST_PAGES,
    budget: int = 0,
    margin: float = 0.0,
    mass: float = 0.0,
    bounds: Tensor | None = None,
    **tokens_of: Tensor,
) -> list[Launch]:
    """Lower `ops.selection.select_pages`; `pages` may be cut to the blocks in reach."""
    tokens, blocks = len(q), pages.shape[1]
    _, heads, words = listed.shape
    if words * WORD < blocks:
        raise ShapeError(
            f"select_pages: 'listed' has {words} words; {blocks} pages need {-(-blocks // WORD)}"
        )
    common = {"BLOCKS": blocks, "HEADS": heads, "PAGE": cells, "FIRST": first, "LAST": last}
    seen = {name: tokens_of[name] for name in ("ends", "ancestors")}
    launches, scores = [], None
    if bounds is not None:
        dim = bounds.shape[3]
        group = q.shape[1] // (heads * dim)
        if not group or q.shape[1] != group * heads * dim:
            raise ShapeError(
                f"select_pages: 'q' has {q.shape[1]} columns; expected a multiple of {heads} "
                f"key/value heads x {dim}"
            )
        width = triton.next_power_of_2(dim)
        rows = max(_TILE // width, 1)
        scores = device.scratch("page_scores", (tokens, heads, blocks), float32)
        pool = {"PAGES_ROW": pages.stride(0), "SLOTS": pages.shape[0], "POOL": bounds.shape[0]}
        sizes = {"GROUP": group, "DIM": dim, "WIDTH": width, "ROWS": rows}
        given = {"q": q, "slots": tokens_of["slots"], **seen, "pages": pages, "bounds": bounds}
        given |= {"scores": scores, "Q_ROW": q.stride(0), "SCALE": scale, **common, **pool, **sizes}
        grid = (triton.cdiv(blocks, rows), heads, tokens)
        launches.append(launch(_score_pages, grid, device, **given))
    width = max(triton.next_power_of_2(blocks), WORD)
    bits, warps = (4, 4) if width <= 512 else (2, 8) if width <= 4096 else (1, 16)
    sizes = {"WIDTH": width, "WORDS": words, "REST": triton.next_power_of_2(words)}
    rule = {"COUNT": budget - first - last, "MARGIN": margin, "MASS": mass, "BITS": bits}
    given = {**seen, "scores": scores, "listed": listed, "counts": tokens_of["counts"]}
    given |= {**common, **sizes, **rule}
    return [*launches, launch(_list_pages, (heads, tokens), device, warps, **given)]
