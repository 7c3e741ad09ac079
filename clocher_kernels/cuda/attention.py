"""Attention over the paged cache: a kernel for few tokens, one for chunks of many.

Both walk blocks of keys with a running maximum and sum (online softmax) for a tile of rows; a row
is a query head of a token, and the heads that share a key/value head share what is loaded. Which
blocks a token's keys are cut into, and in which order they are summed, follows from its own
position and end alone, so its result does not depend on the other tokens of the step.

Source: Dao et al. 2022 (arXiv 2205.14135); split keys: Dao et al. 2023, "Flash-Decoding".
"""

from typing import Any

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.attention_block import (
    NEVER,
    attend_block,
    finish,
    in_table,
    load_query,
    visible_cells,
    work_type,
)
from clocher_kernels.cuda.bounds import within
from clocher_kernels.cuda.codes import unit
from clocher_kernels.cuda.kv import tree_length
from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.pdl import start

DECODE_TOKENS = 32
"""Steps of at most this many tokens split the keys of each token over programs."""

_PER_TOKEN = ("q", "slots", "positions", "ends", "ancestors", "y")
_LOG2_E = 1.4426950408889634


@triton.jit
def _decode(
    q,
    slots,
    positions,
    ends,
    ancestors,
    pages,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    sinks,
    y,
    partial,
    tops,
    totals,
    arrivals,
    Q_ROW: tl.constexpr,
    Y_ROW: tl.constexpr,
    PAGES_ROW: tl.constexpr,
    SLOTS: tl.constexpr,
    CELLS: tl.constexpr,
    POOL: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    SPLITS: tl.constexpr,
    TAKE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UNIT: tl.constexpr,
    KV: tl.constexpr,
    WORK: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from one token to one of at most RUNS runs of its keys; the last to end adds up."""
    start(PDL)
    split, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = within(tl.load(ends + token), CELLS + 1)
    position = within(tl.load(positions + token), CELLS)
    tree = in_table(tl.load(ancestors + token), end, CELLS)
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
    if CHUNK > 0:
        first = tl.maximum(first, position - position % CHUNK)
    last = end + tree_length(tree)
    first_block = first // BLOCK
    blocks = tl.maximum(tl.cdiv(last, BLOCK) - first_block, 1)
    per_split = tl.cdiv(blocks, RUNS)
    splits = tl.cdiv(blocks, per_split)
    if split >= splits:
        return

    row = tl.arange(0, ROWS)
    live = row < GROUP
    mine = live[:, None]
    branch = tl.where(tree != 0, end, NEVER)
    slot_pages = pages + within(tl.load(slots + token), SLOTS) * PAGES_ROW
    heads_at = token * Q_ROW + (head * GROUP + row) * DIM
    query, rest = load_query(q, heads_at, live, DIM, WIDTH, WORK)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)

    begin = (first_block + split * per_split) * BLOCK
    for cell0 in range(begin, tl.minimum(begin + per_split * BLOCK, last), BLOCK):
        visible, seen = visible_cells(
            cell0, mine, first, end, tree, position, first, end, branch, BLOCK, WINDOW, CHUNK
        )
        top, total, acc = attend_block(
            top, total, acc, query, rest, cell0, seen, visible, slot_pages,
            k_cache, v_cache, k_scale, v_scale, head,
            POOL, HEADS, PAGE, DIM, WIDTH, BLOCK, SCALE, SOFTCAP, KV, WORK, ASM,
        )  # fmt: skip

    dim = tl.arange(0, WIDTH)
    out = y + token * Y_ROW + head * GROUP * DIM
    if splits == 1:
        acc = finish(top, total, acc, sinks, head * GROUP + row, live, UNIT)
        tl.store(
            out + row[:, None] * DIM + dim[None, :],
            acc.to(y.dtype.element_ty),
            live[:, None] & (dim < DIM)[None, :],
        )
        return
    # Partial results are [token, head, split, lane].
    pair = token * HEADS + head
    at = (pair * SPLITS + split) * LANES + row
    tl.store(partial + at[:, None] * WIDTH + dim[None, :], acc, live[:, None])
    tl.store(tops + at, top, live)
    tl.store(totals + at, total, live)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == splits - 1:
        tl.store(arrivals + pair, 0)
        _combine(
            pair * SPLITS * LANES, splits, partial, tops, totals, sinks, head * GROUP, out,
            GROUP, LANES, DIM, WIDTH, SPLITS, TAKE, UNIT,
        )  # fmt: skip


@triton.jit
def _combine(
    base,
    splits,
    partial,
    tops,
    totals,
    sinks,
    head0,
    out,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    TAKE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Add up the partial results of all splits, and write the heads of a group.

    They are read from L2, where what other multiprocessors wrote is to be found.
    """
    lane, dim = tl.arange(0, LANES), tl.arange(0, WIDTH)
    live = lane < GROUP
    split = tl.arange(0, SPLITS)[:, None]
    at, done = base + split * LANES + lane[None, :], (split < splits) & live[None, :]
    top = tl.load(tops + at, done, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(totals + at, done, other=0.0, cache_modifier=".cg")
    highest = tl.max(top, 0)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(total * tl.exp2(top - anchor[None, :]), 0)
    acc = tl.zeros((LANES, WIDTH), tl.float32)
    for split0 in tl.static_range(0, SPLITS, TAKE):
        if split0 < splits:
            part = split0 + tl.arange(0, TAKE)[:, None]
            cell, inside = base + part * LANES + lane[None, :], (part < splits) & live[None, :]
            weight = tl.load(tops + cell, inside, other=float("-inf"), cache_modifier=".cg")
            values = tl.load(
                partial + cell[:, :, None] * WIDTH + dim[None, None, :],
                inside[:, :, None],
                other=0.0,
                cache_modifier=".cg",
            )
            acc += tl.sum(values * tl.exp2(weight - anchor[None, :])[:, :, None], 0)
    acc = finish(highest, total, acc, sinks, head0 + lane, live, UNIT)
    tl.store(
        out + lane[:, None] * DIM + dim[None, :],
        acc.to(out.dtype.element_ty),
        live[:, None] & (dim < DIM)[None, :],
    )


@triton.jit
def _prefill(
    q,
    slots,
    positions,
    ends,
    ancestors,
    pages,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    sinks,
    y,
    TOKENS: tl.constexpr,
    Q_ROW: tl.constexpr,
    Y_ROW: tl.constexpr,
    PAGES_ROW: tl.constexpr,
    SLOTS: tl.constexpr,
    CELLS: tl.constexpr,
    POOL: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UNIT: tl.constexpr,
    KV: tl.constexpr,
    WORK: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from a tile of tokens, slot by slot; blocks that a token does not see add nothing."""
    start(PDL)
    # The last tokens of a chunk see the most keys, so they go first.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)
    token, lane = tile * (ROWS // LANES) + row // LANES, row % LANES
    live = (token < TOKENS) & (lane < GROUP)
    slot = tl.where(live, within(tl.load(slots + token, live, other=0), SLOTS), NEVER)
    end = within(tl.load(ends + token, live, other=0), CELLS + 1)
    tree = in_table(tl.load(ancestors + token, live, other=0), end, CELLS)
    position = within(tl.load(positions + token, live, other=0), CELLS)
    first = tl.zeros_like(end)
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    if CHUNK > 0:
        first = tl.maximum(first, position - position % CHUNK)

    heads_at = token * Q_ROW + (head * GROUP + lane) * DIM
    query, rest = load_query(q, heads_at, live, DIM, WIDTH, WORK)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)

    last = end + tree_length(tree)
    current = tl.min(slot)
    while current < NEVER:
        mine = slot == current
        slot_pages = pages + current * PAGES_ROW
        lowest = tl.min(tl.where(mine, first, NEVER))
        highest = tl.max(tl.where(mine, end, 0))
        branch = tl.min(tl.where(mine & (tree != 0), end, NEVER))
        for cell0 in range(lowest // BLOCK * BLOCK, tl.max(tl.where(mine, last, 0)), BLOCK):
            visible, seen = visible_cells(
                cell0, mine[:, None], first[:, None], end[:, None], tree[:, None],
                position[:, None], lowest, highest, branch, BLOCK, WINDOW, CHUNK,
            )  # fmt: skip
            # Between the windows of distant tokens there may be anything.
            if WINDOW > 0 or CHUNK > 0:
                seen = tl.max(visible.to(tl.int32), 0) > 0
            top, total, acc = attend_block(
                top, total, acc, query, rest, cell0, seen, visible, slot_pages,
                k_cache, v_cache, k_scale, v_scale, head,
                POOL, HEADS, PAGE, DIM, WIDTH, BLOCK, SCALE, SOFTCAP, KV, WORK, ASM,
            )  # fmt: skip
        current = tl.min(tl.where(slot > current, slot, NEVER))

    acc = finish(top, total, acc, sinks, head * GROUP + lane, live, UNIT)
    dim = tl.arange(0, WIDTH)
    out = y + token * Y_ROW + (head * GROUP + lane) * DIM
    tl.store(
        out[:, None] + dim[None, :],
        acc.to(y.dtype.element_ty),
        live[:, None] & (dim < DIM)[None, :],
    )


def attention(
    *,
    q: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    ends: torch.Tensor,
    ancestors: torch.Tensor,
    pages: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    y: torch.Tensor,
    kv_dtype: str,
    scale: float,
    window: int,
    device: Device,
    chunk: int = 0,
    softcap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> list[Launch]:
    """Lower `ops.attention.attention`.

    `pages` may be cut to the blocks that the step can reach; results do not depend on where.
    """
    tokens = len(q)
    _, heads, page, dim = k_cache.shape
    group = q.shape[1] // dim // heads
    lanes = triton.next_power_of_2(group)
    parts = unit(kv_dtype, "pairs") if kv_dtype in ("e4m3", "e5m2") else 1.0
    args: dict[str, Any] = {
        "q": q,
        "slots": slots,
        "positions": positions,
        "ends": ends,
        "ancestors": ancestors,
        "pages": pages,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "sinks": sinks,
        "y": y,
    }
    constants = {
        "Q_ROW": q.stride(0),
        "Y_ROW": y.stride(0),
        "PAGES_ROW": pages.stride(0),
        "SLOTS": pages.shape[0],
        "CELLS": pages.shape[1] * page,
        "POOL": k_cache.shape[0],
        "HEADS": heads,
        "GROUP": group,
        "PAGE": page,
        "DIM": dim,
        "LANES": lanes,
        "WIDTH": max(triton.next_power_of_2(dim), 16),
        "WINDOW": window,
        "CHUNK": chunk,
        "SCALE": scale * _LOG2_E * parts,
        "SOFTCAP": softcap * _LOG2_E,
        "UNIT": parts,
        "KV": kv_dtype,
        "WORK": work_type(kv_dtype, device),
        "ASM": device.asm,
        "PDL": device.pdl,
    }
    # An fp32 cache needs more registers than a tile of many rows leaves.
    if tokens > DECODE_TOKENS and kv_dtype != "f32":
        rows, block, warps = _prefill_tile(constants["WIDTH"])
        rows = max(rows, lanes)
        constants |= {"TOKENS": tokens, "ROWS": rows, "BLOCK": block}
        grid = (triton.cdiv(tokens, rows // lanes), heads)
        return [Launch(_prefill, grid, args, constants, num_warps=warps, pdl=device.pdl)]

    width, splits = constants["WIDTH"], _splits(heads)
    block = _decode_block(width, kv_dtype)
    # A window is this many blocks, a tree's cells included; what sees more has longer runs.
    least = min((keys for keys in (window, chunk) if keys), default=0)
    runs = min(splits, triton.cdiv(least + 64 + block - 1, block)) if least else splits
    constants |= {
        "ROWS": max(16, lanes),
        "BLOCK": block,
        "RUNS": runs,
        "SPLITS": splits,
        "TAKE": min(max(8192 // (lanes * width), 1), splits),
    }
    results = DECODE_TOKENS * heads * splits * lanes
    partial = {
        "partial": device.scratch("attention_partial", (results, width), torch.float32),
        "tops": device.scratch("attention_tops", (results,), torch.float32),
        "totals": device.scratch("attention_totals", (results,), torch.float32),
        "arrivals": device.scratch("attention_arrivals", (DECODE_TOKENS * heads,), torch.int32),
    }
    # Blocks beyond the page table cannot be seen, so that their runs need no programs.
    reach = min(runs, triton.cdiv(pages.shape[1] * page, block))
    launches = []
    for begin in range(0, tokens, DECODE_TOKENS):
        some = {n: args[n][begin : begin + DECODE_TOKENS] for n in _PER_TOKEN}
        grid = (reach, heads, len(some["q"]))
        launches.append(
            Launch(_decode, grid, {**args, **some, **partial}, constants, pdl=device.pdl)
        )
    return launches


def _splits(heads: int) -> int:
    """Return into how many runs the keys of a token are split at most.

    About two programs for each multiprocessor of a large GPU, for one token.
    """
    return min(max(triton.next_power_of_2(256 // heads + 1) // 2, 8), 64)


def _decode_block(width: int, kv_dtype: str) -> int:
    """Return the keys of a block for few tokens: at most 16 KB of keys."""
    return min(64, max(16, (4096 if kv_dtype == "f32" else 8192) // width))


def _prefill_tile(width: int) -> tuple[int, int, int]:
    """Return (rows, keys of a block, warps) for a chunk: what 255 registers hold without spilling.

    A tile has more rows if the heads of a group are more.
    """
    if width > 128:
        return 32, 32, 8
    return (64, 32, 4) if width <= 64 else (64, 16, 8)


LOWER = {"attention": attention}
