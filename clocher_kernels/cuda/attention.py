"""Attention over the paged cache: a kernel for few tokens, one for chunks of many.

Both walk blocks of keys with a running maximum and sum (online softmax) for a tile of rows; a row
is a query head of a token, and the heads that share a key/value head share what is loaded. Which
blocks a token's keys are cut into, and in which order they are summed, follows from its own
position and end alone, so its result does not depend on the other tokens of the step. The kernel
for few tokens takes the nodes of a tree's path as if nothing lay between them: what a path gives is
what its tokens give one after another, bit for bit. Where pages are listed it takes tokens of any
number, since neighbours list different pages, and walks the list of each.
"""

from typing import Any

import torch
import triton

from clocher_kernels.cuda.attention_block import work_type
from clocher_kernels.cuda.attention_decode import DECODE_TOKENS, few_tokens
from clocher_kernels.cuda.attention_prefill import many_tokens
from clocher_kernels.cuda.codes import unit
from clocher_kernels.cuda.launch import Device, Launch

_LOG2_E = 1.4426950408889634


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
    listed: torch.Tensor | None = None,
) -> list[Launch]:
    """Lower `ops.attention.attention`.

    `pages` may be cut to the blocks that the step can reach; results do not depend on where.

    Raises:
        UnsupportedOp: pages are listed that are not whole blocks.
    """
    _, heads, page, dim = k_cache.shape
    group = q.shape[1] // dim // heads
    parts = unit(kv_dtype, "pairs") if kv_dtype in ("e4m3", "e5m2") else 1.0
    args = {
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
        "listed": listed,
        "y": y,
    }
    constants: dict[str, Any] = {
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
        "LANES": triton.next_power_of_2(group),
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
    # Neighbours list different pages; an fp32 cache needs more registers than a tile leaves.
    if listed is not None or len(q) <= DECODE_TOKENS or kv_dtype == "f32":
        return few_tokens(args, constants, kv_dtype, device)
    return many_tokens(args, constants, device)


LOWER = {"attention": attention}
