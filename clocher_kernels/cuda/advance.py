"""Step the token inputs on, so that a decode step needs no host."""

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.pdl import start


@triton.jit
def _advance(
    sampled,
    rows,
    ids,
    positions,
    ends,
    draws,
    R: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    at = tl.arange(0, BLOCK)
    inside = at < R
    token = tl.load(rows + at, inside, other=0)
    there = inside & (token >= 0) & (token < TOKENS)
    tl.store(ids + token, tl.maximum(tl.load(sampled + at, inside, other=0), 0), there)
    tl.store(positions + token, tl.load(positions + token, there, other=0) + 1, there)
    tl.store(ends + token, tl.load(ends + token, there, other=0) + 1, there)
    tl.store(draws + at, tl.load(draws + at, inside, other=0) + 1, inside)


def advance(
    *,
    sampled: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    ends: torch.Tensor,
    draws: torch.Tensor,
    device: Device,
) -> list[Launch]:
    """Lower `ops.sampling.advance`; a token has at most one row."""
    args = {
        "sampled": sampled,
        "rows": rows,
        "ids": ids,
        "positions": positions,
        "ends": ends,
        "draws": draws,
    }
    count = len(sampled)
    constants = {
        "R": count,
        "TOKENS": len(ids),
        "BLOCK": triton.next_power_of_2(count),
        "PDL": device.pdl,
    }
    return [Launch(_advance, (1,), args, constants, num_warps=1, pdl=device.pdl)]


LOWER = {"advance": advance}
