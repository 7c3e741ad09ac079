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
from clocher_kernels.cuda.kv import cache_sizes
from clocher_kernels.cuda.launch import Device, Launch

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
    """Lower `ops.attention.attention`.

    `pages` may be cut to the blocks that the step can reach; results do not depend on where.

    Raises:
        UnsupportedOp: pages are listed that are not whole blocks.
    """
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
    # Neighbours list different pages; an fp32 cache needs more registers than a tile leaves.
    if "listed" in tensors or len(q) <= DECODE_TOKENS or kv_dtype == "f32":
        return few_tokens(tensors, constants, device)
    return many_tokens(tensors, constants, device)


LOWER = {"attention": attention}
