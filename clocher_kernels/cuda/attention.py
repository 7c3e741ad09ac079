"""Attention over the paged cache (online softmax): a kernel for few tokens, one for prefill chunks.

Blocks and summation order of a token's keys depend on its own position and end alone: a result does
not depend on the batch, and a tree path's equals sequential decoding, bit for bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.attention_block import (
    NEVER,
    attend_block,
    cells_at,
    in_table,
    load_query,
    visible_cells,
    work_type,
    write_heads,
)
from clocher_kernels.cuda.attention_decode import DECODE_TOKENS, few_tokens
from clocher_kernels.cuda.codes import unit
from clocher_kernels.cuda.kv import cache_sizes, tree_length
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.scalar import start, within

_LOG2_E = 1.4426950408889634


def attention(
    *,
    q: torch.Tensor,
    y: torch.Tensor,
    kv_dtype: str,
    scale: float,
    window: int,
    device: Device,
    chunk: int = 0,
    softcap: float = 0.0,
    **tensors: torch.Tensor,
) -> list[Launch]:
    """Lower `ops.attention.attention`; `pages` may be cut to the blocks that the step can reach."""
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    sizes = cache_sizes(tensors["pages"], tensors["k_cache"])
    group = q.shape[1] // sizes["DIM"] // sizes["HEADS"]
    parts = unit(kv_dtype, "pairs") if kv_dtype in ("e4m3", "e5m2") else 1.0
    constants: dict[str, Any] = {
        **sizes,
        "Q_ROW": q.stride(0),
        "Y_ROW": y.stride(0),
        "GROUP": group,
        "LANES": triton.next_power_of_2(group),
        "WIDTH": max(triton.next_power_of_2(sizes["DIM"]), 16),
        "WINDOW": window,
        "CHUNK": chunk,
        "SCALE": scale * _LOG2_E * parts,
        "SOFTCAP": softcap * _LOG2_E,
        "UNIT": parts,
        "KV": kv_dtype,
        "WORK": work_type(kv_dtype, device),
    }
    tensors |= {"q": q, "y": y}
    # Adjacent tokens list different pages; an fp32 cache needs more registers than a tile has.
    if "listed" in tensors or len(q) <= DECODE_TOKENS or kv_dtype == "f32":
        return few_tokens(tensors, constants, device)
    tokens, lanes = len(q), constants["LANES"]
    rows, block, warps = _tile(constants["WIDTH"])
    rows = max(rows, lanes)
    constants |= {"TOKENS": tokens, "ROWS": rows, "BLOCK": block}
    grid = (triton.cdiv(tokens, rows // lanes), constants["HEADS"])
    return [launch(_prefill, grid, device, warps, **tensors, **constants)]


@triton.jit
def _prefill(
    q, slots, positions, ends, ancestors, pages, k_cache, v_cache, k_scale, v_scale, sinks, y,
    TOKENS: tl.constexpr, Q_ROW: tl.constexpr, Y_ROW: tl.constexpr, PAGES_ROW: tl.constexpr,
    SLOTS: tl.constexpr, CELLS: tl.constexpr, POOL: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, UNIT: tl.constexpr,
    KV: tl.constexpr, WORK: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of tokens, slot by slot; blocks that a token does not see add nothing."""
    start(PDL)
    ONE_PAGE: tl.constexpr = PAGE % BLOCK == 0
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
            # Between the windows of distant tokens there may be any cells.
            if WINDOW > 0 or CHUNK > 0:
                seen = tl.max(visible.to(tl.int32), 0) > 0
            cell = cell0 + tl.arange(0, BLOCK)
            at = cells_at(slot_pages, cell0, cell, seen, head, POOL, HEADS, PAGE, ONE_PAGE)
            top, total, acc = attend_block(
                top, total, acc, query, rest, at, seen, visible,
                k_cache, v_cache, k_scale, v_scale,
                DIM, WIDTH, BLOCK, SCALE, SOFTCAP, KV, WORK, ASM,
            )  # fmt: skip
        current = tl.min(tl.where(slot > current, slot, NEVER))

    out = y + token * Y_ROW + (head * GROUP + lane) * DIM
    write_heads(out, top, total, acc, sinks, head * GROUP + lane, live, DIM, UNIT)


def _tile(width: int) -> tuple[int, int, int]:
    """Return (rows, keys per block, warps) for a chunk: what fits in 255 registers."""
    if width > 128:
        return 32, 32, 8
    return (64, 32, 4) if width <= 64 else (64, 16, 8)


LOWER = {"attention": attention}
