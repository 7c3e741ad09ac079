"""Attention over the paged cache (online softmax): a kernel for few tokens, one for prefill chunks.

Blocks and summation order of a token's keys depend on its own position and end alone: a result does
not depend on the batch, and a tree path's equals sequential decoding, bit for bit. For few tokens
the keys of each are split over programs; the last to end combines.

Source: Dao et al. 2022 (arXiv 2205.14135); split keys: Dao et al. 2023, "Flash-Decoding".
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.attention_block import (
    NEVER,
    attend_block,
    block_at,
    block_of,
    cells_at,
    combine_splits,
    count_bits,
    fetch_cells,
    in_table,
    in_two,
    listed_cell,
    load_cells,
    load_query,
    load_words,
    most_splits,
    needs_two,
    prompt_tile,
    sees_tree,
    work_type,
    write_heads,
)
from clocher_kernels.cuda.codes import unit
from clocher_kernels.cuda.kv import cache_sizes, enter_heads, own_turns, tree_length
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.scalar import start, within
from clocher_kernels.errors import UnsupportedOp

DECODE_TOKENS = 32
"""Steps of up to this many tokens split the keys of each token over programs."""

_LEAST = 16
_TAKEN = 4096  # numbers of splits that are combined at a time, as measured on an H200
_RUN = 2  # blocks of a window that one program reads, as measured on an H200
_PER_TOKEN = ("q", "slots", "positions", "ends", "ancestors", "listed", "y")


@triton.jit
def _decode(
    q, k, v, q_gain, k_gain, q_cos, q_sin, k_cos, k_sin, slots, positions, ends, ancestors, pages,
    k_cache, v_cache, k_scale, v_scale, sinks, listed, y, partial, tops, totals, arrivals,
    C: tl.constexpr,
):  # fmt: skip
    """Attend from one token to one of at most RUNS runs of its keys; the last to end combines.

    With `k` it is the only token, and its heads are entered first, by all programs alike.
    """
    if listed is not None:
        start(C.PDL)
    split, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = within(tl.load(ends + token), C.CELLS + 1)
    position = within(tl.load(positions + token), C.CELLS)
    tree = in_table(tl.load(ancestors + token), end, C.CELLS)
    length = tree_length(tree)
    last = end + count_bits(tree.to(tl.uint64, bitcast=True))
    first, nearest = 0, 0
    if C.WINDOW > 0 or C.CHUNK > 0:
        # Places are positions, unless a tree node's position contradicts its end: then nodes count.
        keys = position % C.CHUNK + 1 if C.CHUNK > 0 else C.WINDOW
        keys = tl.minimum(keys, C.WINDOW) if C.WINDOW > 0 else keys
        first, nearest = tl.maximum(position - keys + 1, 0), last - keys
        first = tl.where(first >= end, tl.maximum(end, nearest), first)
    first_block = first // C.BLOCK
    blocks = tl.maximum(tl.cdiv(last, C.BLOCK) - first_block, 1)
    if listed is not None:
        # The blocks of listed pages, in their order, less those behind the last cell.
        PARTS: tl.constexpr = C.PAGE // C.BLOCK
        words = listed + (token * C.HEADS + head) * C.WORDS
        first_page, end_page = first // C.PAGE, tl.cdiv(last, C.PAGE)
        word = tl.arange(0, C.WORDS_WIDTH)
        bits = load_words(words, word, first_page, end_page, C.WORDS)
        counts = count_bits(bits)
        upto = tl.cumsum(counts)
        at_end = count_bits(load_words(words, word, end_page - 1, end_page, C.WORDS))
        behind = end_page * PARTS - tl.cdiv(last, C.BLOCK)
        listed_blocks = tl.sum(counts) * PARTS - tl.sum(at_end) * behind
        blocks = tl.maximum(listed_blocks, 1)
    per_split = tl.cdiv(blocks, C.RUNS)
    splits = tl.cdiv(blocks, per_split)
    if split >= splits:
        return

    row = tl.arange(0, C.ROWS)
    live = row < C.GROUP
    mine = live[:, None]
    branch = tl.where(tree != 0, end, NEVER)
    sight, cache = (first, last, end, nearest, tree, length), (k_cache, v_cache, k_scale, v_scale)
    slot_pages = pages + within(tl.load(slots + token), C.SLOTS) * C.PAGES_ROW
    if listed is not None:
        STEP: tl.constexpr = 1
        begin = split * per_split
        stop = tl.minimum(begin + per_split, listed_blocks)
        # The word of the first page, without earlier pages.
        page0 = begin // PARTS
        current = tl.sum((upto <= page0).to(tl.int32))
        left = tl.sum(tl.where(word == current, bits, 0))
        for _ in range(tl.sum(tl.where(word == current, upto - counts, 0)), page0):
            left &= left - 1
    else:
        STEP: tl.constexpr = C.BLOCK
        begin = (first_block + split * per_split) * C.BLOCK
        stop = tl.minimum(begin + per_split * C.BLOCK, last)
    top = tl.full((C.ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((C.ROWS,), tl.float32)
    acc = tl.zeros((C.ROWS, C.WIDTH), tl.float32)
    if k is None:
        if listed is None:
            if C.ASM:
                at, _ = block_at(begin, NEVER, sight, slot_pages, head, C)
                fetch_cells(k_cache, at, C)
                fetch_cells(v_cache, at, C)
            start(C.PDL)
        heads_at = token * C.Q_ROW + (head * C.GROUP + row) * C.DIM
        query = in_two(load_query(q, heads_at, live, C), C.WORK)
    else:
        # Earlier tokens' cells are older than the predecessor: only the own one is read again.
        cell0 = begin
        if listed is not None:
            cell0, current, left = listed_cell(words, current, left, begin, C)
        at, seen = block_at(cell0, branch, sight, slot_pages, head, C)
        k_stored = load_cells(k_cache, at, seen, C)
        if C.ASM:
            fetch_cells(v_cache, at, C)
        tokens, tables = (slots, positions, ends, ancestors, pages), (q_cos, q_sin, k_cos, k_sin)
        turns, own_at = own_turns(tokens, tables, head, token, C)
        if listed is None:
            start(C.PDL)
        gains = q_gain, k_gain
        heads = enter_heads((q, k, v), gains, tables, turns, own_at, cache, head, token, C)
        tl.debug_barrier()
        k_stored = load_cells(k_cache, at, at == own_at.to(tl.int32), C, k_stored)
        # Rows beyond the group repeat it and are not stored.
        heads = tl.broadcast_to(heads[None, :, :], C.ROWS // C.LANES, C.LANES, C.WIDTH)
        query = in_two(heads.reshape(C.ROWS, C.WIDTH), C.WORK)
        top, total, acc = attend_block(
            (top, total, acc), query, k_stored, at, seen, mine & seen[None, :], cache, C
        )
    for place in range(begin if k is None else begin + STEP, stop, STEP):
        cell0 = place
        if listed is not None:
            cell0, current, left = listed_cell(words, current, left, place, C)
        at, seen = block_at(cell0, branch, sight, slot_pages, head, C)
        block = load_cells(k_cache, at, seen, C)
        top, total, acc = attend_block(
            (top, total, acc), query, block, at, seen, mine & seen[None, :], cache, C
        )

    dim = tl.arange(0, C.WIDTH)
    out = y + token * C.Y_ROW + head * C.GROUP * C.DIM
    if splits == 1:
        write_heads(out + row * C.DIM, top, total, acc, sinks, head * C.GROUP + row, live, C)
        return
    # Partial results are [token, head, split, lane].
    pair = token * C.HEADS + head
    at = (pair * C.SPLITS + split) * C.LANES + row
    tl.store(partial + at[:, None] * C.WIDTH + dim[None, :], acc, live[:, None])
    tl.store(tops + at, top, live)
    tl.store(totals + at, total, live)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") == splits - 1:
        tl.store(arrivals + pair, 0)
        combine_splits(
            pair * C.SPLITS * C.LANES, splits, partial, tops, totals, sinks, head * C.GROUP, out, C
        )


def few_tokens(
    tensors: Mapping[str, Any],
    constants: Mapping[str, Any],
    device: Device,
    heads_of: Mapping[str, Any] | None = None,
) -> list[Launch]:
    """Return the launches for few tokens; UnsupportedOp if listed pages are not whole blocks.

    `heads_of`: the arguments of `enter_heads`, for a single token.
    """
    heads, page, lanes, width = (constants[name] for name in ("HEADS", "PAGE", "LANES", "WIDTH"))
    listed, words = tensors.get("listed"), 0
    splits, block = most_splits(heads), block_of(width, constants["KV"])
    if listed is not None:
        words, block = listed.shape[2], min(block, page & -page)
        if block < _LEAST:
            raise UnsupportedOp(
                f"attention: no CUDA kernel reads lists of pages of {page} cells; expected a "
                f"multiple of {_LEAST}; read all pages"
            )
    # A window spans this many blocks, tree cells included; tokens that see more have longer runs.
    least = min((keys for keys in (constants["WINDOW"], constants["CHUNK"]) if keys), default=0)
    runs = min(splits, triton.cdiv(least + 64 + block - 1, _RUN * block)) if least else splits
    own = {
        **(heads_of or {}),
        **constants,
        "ROWS": max(16, lanes),
        "BLOCK": block,
        "RUNS": runs,
        "SPLITS": splits,
        "TAKE": min(max(_TAKEN // (lanes * width), 1), splits),
        "WORDS": words,
        "WORDS_WIDTH": triton.next_power_of_2(max(words, 1)),
    }
    results = DECODE_TOKENS * heads * splits * lanes
    partial = {
        "partial": device.scratch("attention_partial", (results, width), torch.float32),
        "tops": device.scratch("attention_tops", (results,), torch.float32),
        "totals": device.scratch("attention_totals", (results,), torch.float32),
        "arrivals": device.scratch("attention_arrivals", (DECODE_TOKENS * heads,), torch.int32),
    }
    # Blocks beyond the page table are not visible: their runs need no programs.
    reach = min(runs, triton.cdiv(constants["CELLS"], block))
    launches = []
    for begin in range(0, len(tensors["q"]), DECODE_TOKENS):
        some = {
            name: value[begin : begin + DECODE_TOKENS] if name in _PER_TOKEN else value
            for name, value in tensors.items()
        }
        grid = (reach, heads, len(some["q"]))
        launches.append(launch(_decode, grid, device, **{**own, **some, **partial}))
    return launches


_LOG2_E = 1.4426950408889634


def attention(
    *,
    q: Tensor,
    y: Tensor,
    cache_dtype: str,
    scale: float,
    window: int,
    device: Device,
    chunk: int = 0,
    softcap: float = 0.0,
    heads_of: Mapping[str, Any] | None = None,
    **tensors: Tensor,
) -> list[Launch]:
    """Lower `ops.attention.attention`; `pages` may be cut to the blocks that the step can reach."""
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    parts = unit(cache_dtype, "pairs")
    constants: dict[str, Any] = {
        **cache_sizes(tensors["pages"], tensors["k_cache"], q),
        "Y_ROW": y.stride(0),
        "WINDOW": window,
        "CHUNK": chunk,
        "SCALE": scale * _LOG2_E * parts,
        "SOFTCAP": softcap * _LOG2_E,
        "UNIT": parts,
        "KV": cache_dtype,
        "WORK": work_type(cache_dtype, device),
    }
    tensors |= {"q": q, "y": y}
    # Adjacent tokens list different pages; an fp32 cache needs more registers than a tile has.
    if "listed" in tensors or len(q) <= DECODE_TOKENS or cache_dtype == "f32":
        return few_tokens(tensors, constants, device, heads_of)
    lanes = constants["LANES"]
    heads = len(q) * lanes * constants["HEADS"]
    rows, block, warps, stages = prompt_tile(constants["WIDTH"], cache_dtype, heads, device)
    rows = max(rows, lanes)
    constants |= {"TOKENS": len(q), "ROWS": rows, "BLOCK": block}
    constants |= {"TWO": needs_two(y.dtype, constants["WORK"])}
    grid = (triton.cdiv(len(q), rows // lanes), constants["HEADS"])
    return [launch(_prefill, grid, device, warps, 0, stages, **tensors, **constants)]


@triton.jit
def _prefill(
    q, slots, positions, ends, ancestors, pages, k_cache, v_cache, k_scale, v_scale, sinks, y,
    C: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of tokens, slot by slot; blocks that a token does not see add nothing."""
    start(C.PDL)
    ONE_PAGE: tl.constexpr = C.PAGE % C.BLOCK == 0
    LOCAL: tl.constexpr = C.WINDOW > 0 or C.CHUNK > 0
    FEW: tl.constexpr = 16
    # The last tokens of a chunk see the most keys, so they go first.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, C.ROWS)
    token, lane = tile * (C.ROWS // C.LANES) + row // C.LANES, row % C.LANES
    live = (token < C.TOKENS) & (lane < C.GROUP)
    slot = tl.where(live, within(tl.load(slots + token, live, other=0), C.SLOTS), NEVER)
    end = within(tl.load(ends + token, live, other=0), C.CELLS + 1)
    tree = in_table(tl.load(ancestors + token, live, other=0), end, C.CELLS)
    position = within(tl.load(positions + token, live, other=0), C.CELLS)
    first = tl.zeros_like(end)
    if C.WINDOW > 0:
        first = tl.maximum(position - C.WINDOW + 1, 0)
    if C.CHUNK > 0:
        first = tl.maximum(first, position - position % C.CHUNK)

    heads_at = token * C.Q_ROW + (head * C.GROUP + lane) * C.DIM
    given, cache = load_query(q, heads_at, live, C), (k_cache, v_cache, k_scale, v_scale)
    query = in_two(given, C.WORK) if C.TWO else (given.to(C.WORK), None)
    top = tl.full((C.ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((C.ROWS,), tl.float32)
    acc = tl.zeros((C.ROWS, C.WIDTH), tl.float32)

    last = end + tree_length(tree)
    current = tl.min(slot)
    while current < NEVER:
        mine = slot == current
        slot_pages = pages + current * C.PAGES_ROW
        lowest = tl.min(tl.where(mine, first, NEVER))
        if LOCAL:
            # Tokens whose windows overlap the first one; beyond these there may be any cells.
            reach = tl.max(tl.where(mine & (first == lowest), end, 0))
            mine = mine & ((first < reach) | (first == lowest))
        stop = tl.where(mine, end, 0)
        highest = tl.max(stop)
        begin = lowest // C.BLOCK * C.BLOCK
        page = tl.load(slot_pages + tl.minimum(begin, C.CELLS - 1) // C.PAGE)
        for cell0 in range(begin, highest, C.BLOCK):
            cell = cell0 + tl.arange(0, C.BLOCK)
            visible = cell[None, :] < stop[:, None]
            seen = cell < highest
            if LOCAL:
                visible = visible & (cell[None, :] >= first[:, None])
                seen = seen & (cell >= lowest)
            if ONE_PAGE:
                at = (within(page, C.POOL) * C.HEADS + head) * C.PAGE + cell % C.PAGE
                # The next page's number is on its way while this one's keys are multiplied.
                page = tl.load(slot_pages + tl.minimum(cell0 + C.BLOCK, C.CELLS - 1) // C.PAGE)
            else:
                at = cells_at(slot_pages, cell0, cell, seen, head, C, False)
            block = load_cells(k_cache, at, seen, C)
            top, total, acc = attend_block(
                (top, total, acc), query, block, at, seen, visible, cache, C
            )
        # Draft trees come behind the committed cells. Loads of later turns are issued early:
        # without a tree, too, their cells must not overflow.
        branch = tl.min(tl.where(mine & (tree != 0), end, NEVER // 2))
        for cell0 in range(branch // FEW * FEW, tl.max(tl.where(mine, last, 0)), FEW):
            cell = cell0 + tl.arange(0, FEW)
            visible = mine[:, None] & sees_tree(
                cell[None, :], end[:, None], tree[:, None], position[:, None], C.WINDOW, C.CHUNK
            )
            seen = tl.max(visible.to(tl.int32), 0) > 0
            at = cells_at(slot_pages, cell0, cell, seen, head, C, C.PAGE % FEW == 0)
            block = load_cells(k_cache, at, seen, C)
            top, total, acc = attend_block(
                (top, total, acc), query, block, at, seen, visible, cache, C
            )
        slot = tl.where(mine, NEVER, slot)
        current = tl.min(slot)

    out = y + token * C.Y_ROW + (head * C.GROUP + lane) * C.DIM
    write_heads(out, top, total, acc, sinks, head * C.GROUP + lane, live, C)
