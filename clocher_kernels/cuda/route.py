"""The router of the experts: which of them work for a token, and what their results weigh.

A program is a token. Experts that are equal rank by their number, and none is chosen twice.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.scalar import start
from clocher_kernels.errors import UnsupportedOp

_SCORES = ("chosen", "softmax", "sigmoid")


@triton.jit
def _first_largest(values, free, index, LAST: tl.constexpr):
    """Return the largest of the values that are free, and the first index that has it."""
    largest = tl.max(tl.where(free, values, float("-inf")), axis=0)
    return largest, tl.min(tl.where(free & (values == largest), index, LAST), axis=0)


@triton.jit
def _open_experts(
    ranks, expert, E: tl.constexpr,
    GROUPS: tl.constexpr, TOP: tl.constexpr, BEST: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Return whether each expert is in one of the groups that are chosen from."""
    group = expert // (E // GROUPS)
    number = tl.arange(0, BG)
    best = tl.full((BG,), float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        free = group == g
        total = 0.0
        for _ in tl.static_range(BEST):
            largest, first = _first_largest(ranks, free, expert, E - 1)
            total += largest
            free = free & (expert != first)
        total = tl.where(total == total, total, float("-inf"))  # infinities of both signs
        best = tl.where(number == g, total, best)
    left = number < GROUPS
    chosen = expert < 0
    for _ in tl.static_range(TOP):
        _, first = _first_largest(best, left, number, GROUPS - 1)
        left = left & (number != first)
        chosen = chosen | (group == first)
    return chosen


@triton.jit
def _route(
    logits, bias, ids, weights,
    SCORE: tl.constexpr, NORMAL: tl.constexpr, FACTOR: tl.constexpr,
    GROUPS: tl.constexpr, TOP: tl.constexpr, BEST: tl.constexpr, BG: tl.constexpr,
    E: tl.constexpr, A: tl.constexpr, BE: tl.constexpr, BA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    expert = tl.arange(0, BE)
    choice = tl.arange(0, BA)
    there = expert < E
    start(PDL)
    scores = tl.load(logits + m * E + expert, there, other=0.0).to(tl.float32)
    odd = tl.where(scores < float("inf"), 0, 1)
    scores = tl.where(there, scores, float("-inf"))
    if SCORE == "softmax":
        scores = tl.exp(scores - tl.max(scores, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    if SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    ranks = scores
    if bias is not None:
        ranks += tl.load(bias + expert, there, other=0.0)
    odd = tl.max(tl.where(there & (ranks != ranks), 1, odd), axis=0) > 0
    ranks = tl.where(ranks == ranks, ranks, float("-inf"))
    if GROUPS > 0:
        open = _open_experts(ranks, expert, E, GROUPS, TOP, BEST, BG)
        ranks = tl.where(open, ranks, float("-inf"))

    chosen = tl.zeros((BA,), tl.int32)
    values = tl.full((BA,), float("-inf") if SCORE == "chosen" else 0.0, tl.float32)
    for a in tl.static_range(A):
        value, first = _first_largest(ranks, there, expert, E - 1)
        if bias is not None or GROUPS > 0:
            value = tl.sum(tl.where(expert == first, scores, 0.0), axis=0)
        chosen = tl.where(choice == a, first, chosen)
        values = tl.where(choice == a, value, values)
        there = there & (expert != first)
    if SCORE == "chosen":
        values = tl.exp(values - tl.max(values, axis=0))
    values = tl.where(odd, float("nan"), values)
    if NORMAL:
        values = values / (tl.sum(values, axis=0) + 1e-20)
    at = m * A + choice
    tl.store(ids + at, chosen, choice < A)
    tl.store(weights + at, values * FACTOR, choice < A)


def route(
    *,
    logits: torch.Tensor,
    ids: torch.Tensor,
    score: str = "chosen",
    normalise: bool = False,
    factor: float = 1.0,
    groups: int = 0,
    group_top: int = 0,
    group_best: int = 1,
    device: Device,
    **given: Any,
) -> list[Launch]:
    """Lower `ops.moe.route`.

    Raises:
        UnsupportedOp: scores that it does not know.
    """
    if score not in _SCORES:
        raise UnsupportedOp(f"route: no scores {score!r}; there are {', '.join(_SCORES)}")
    (m, experts), chosen = logits.shape, ids.shape[1]
    chosen_from = {"GROUPS": groups, "TOP": group_top, "BEST": group_best}
    chosen_from |= {"SCORE": score, "NORMAL": normalise or score == "chosen"}
    widths = {"E": experts, "BE": triton.next_power_of_2(experts), "A": chosen}
    widths |= {"BA": triton.next_power_of_2(chosen), "BG": triton.next_power_of_2(max(groups, 1))}
    given |= {"logits": logits, "ids": ids, "FACTOR": float(factor), **chosen_from, **widths}
    return [launch(_route, (m,), device, 1, **given)]


LOWER = {"route": route}
