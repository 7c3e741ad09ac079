"""The tokens of the largest logits of a row, in one launch.

A program finds the K best of its block, one after another; the one that ends last finds the K best
of those. Where a logit is not finite the best is infinity, and then there are none.
"""

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.sampling import NO_TOKEN, is_last
from clocher_kernels.cuda.sampling_cuts import load_logits
from clocher_kernels.cuda.scalar import start

# Tokens of a program.
_BLOCK = 2048


@triton.jit
def _best(x, token, V: tl.constexpr):
    """Return the largest of some logits, and the lowest of their tokens that has it."""
    top = tl.max(x)
    return top, tl.min(tl.where(x == top, token, V))


@triton.jit
def _top_tokens(
    logits, candidates, tops, firsts, arrivals,
    V: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits, row, token, V, ROW)
    odd = (token < V) & ((tl.abs(x) < float("inf")) == 0)
    x = tl.where(odd, float("inf"), x)
    found = (row * PROGRAMS + part) * K
    for k in tl.static_range(K):
        top, first = _best(x, token, V)
        tl.store(tops + found + k, top)
        tl.store(firsts + found + k, first)
        x = tl.where(token == first, float("-inf"), x)
    if is_last(arrivals + row, PROGRAMS):
        each = tl.arange(0, WIDTH)
        at, inside = row * PROGRAMS * K + each, each < PROGRAMS * K
        best = tl.load(tops + at, inside, other=float("-inf"), cache_modifier=".cg")
        best_of = tl.load(firsts + at, inside, other=V, cache_modifier=".cg")
        faulty = tl.max(best) == float("inf")
        for k in tl.static_range(K):
            top, first = _best(best, best_of, V)
            none = faulty | (top == float("-inf"))
            tl.store(candidates + row * K + k, tl.where(none, NO_TOKEN, first))
            best = tl.where(best_of == first, float("-inf"), best)


def top_tokens(*, logits: torch.Tensor, candidates: torch.Tensor, device: Device) -> list[Launch]:
    """Lower `ops.top_tokens.top_tokens`."""
    (rows, vocabulary), kept = logits.shape, candidates.shape[1]
    programs = triton.cdiv(vocabulary, _BLOCK)
    shape = (rows, programs * kept)
    given = {
        "logits": logits,
        "candidates": candidates,
        "tops": device.scratch("top_tokens_tops", shape, torch.float32),
        "firsts": device.scratch("top_tokens_firsts", shape, torch.int32),
        "arrivals": device.scratch("top_tokens_arrivals", (rows, 1), torch.int32),
    }
    sizes = {"V": vocabulary, "K": kept, "ROW": logits.stride(0), "BLOCK": _BLOCK}
    sizes |= {"PROGRAMS": programs, "WIDTH": triton.next_power_of_2(programs * kept)}
    return [launch(_top_tokens, (programs, rows), device, **given, **sizes)]


LOWER = {"top_tokens": top_tokens}
