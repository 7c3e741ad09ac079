"""Mixture of experts: the router, and two kernels over the weights of the experts it chose.

Up to 32 tokens a program multiplies some rows of one token's experts: no gather, sort or reduction
follows, and a token's result does not depend on the batch. More are multiplied in tiles
(`moe_gemm`). Expert ids come from `route` and are not checked.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda import moe_gemm
from clocher_kernels.cuda.codes import to_scale
from clocher_kernels.cuda.gemv_bits import add_lanes, gemv_tile, rows_of, stream_rows
from clocher_kernels.cuda.gemv_bytes import MOST_SLICED, bytes_tile, multiply_rows, row_sums
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.linear import no_codes
from clocher_kernels.cuda.prepack import DeviceTensor, vectors_of
from clocher_kernels.cuda.scalar import (
    Tail,
    as_activation,
    finish,
    gated,
    is_last,
    or_nan,
    part_of,
    start,
)
from clocher_kernels.errors import UnsupportedOp


@triton.jit
def _gate_up(x, ids, factors, w, scales, zeros, bias, y, C: tl.constexpr):
    BN: tl.constexpr = C.L // C.BV * C.R
    pair = tl.program_id(0)
    first = tl.program_id(1) * BN
    start(C.PDL)
    expert = tl.load(ids + pair).to(tl.int64)
    row = rows_of(expert * C.N + first, C.L, C.BV, C.R)[:, None, :]
    # Rows beyond the last one repeat it and are not stored.
    row = row if C.N % BN == 0 else tl.minimum(row, expert * C.N + (C.N - 1))
    here = tl.zeros((1, 1, 1), tl.int32)
    h = stream_rows(x + (pair // C.A) * C.K + here, here == 0, row, w, scales, zeros, C, False)

    h = add_lanes(h, C.BV)
    n = rows_of(first, C.L // C.BV, 1, C.R)[:, None, :]
    inside = n < C.N
    if C.SPAN == 0 and scales is not None:
        at = expert * C.N + n if C.SCALE_ROWS == 1 else expert + tl.zeros_like(n)
        h *= to_scale(tl.load(scales + at, inside, other=0), C.CODE)
    if factors is not None:
        h *= tl.load(factors + pair)
    if bias is not None:
        h += tl.load(bias + expert * C.N + n, inside, other=0.0)
    gate, up = tl.split(or_nan(h).reshape(C.L // C.BV, C.R // 2, 2))
    hidden = gated(gate, up, C)
    i = rows_of(first // 2, C.L // C.BV, 1, C.R // 2)
    at = pair.to(tl.int64) * (C.N // 2) + i
    tl.store(y + at, as_activation(hidden, y), i < C.N // 2)


@triton.jit
def _down(x, ids, weights, w, scales, zeros, bias, residual, y, C: tl.constexpr):
    BN: tl.constexpr = C.L // C.BV * C.R
    m = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BN
    # The choice is older than the predecessor. The chosen experts run in parallel, L lanes each.
    lane = tl.arange(0, C.BA * C.L)[:, None, None]
    chosen = lane // C.L < C.A
    at = m * C.A + lane // C.L
    # Lanes without an expert repeat the last one: others may hold NaN, which times 0 is NaN.
    expert = tl.load(ids + m * C.A + tl.minimum(lane // C.L, C.A - 1)).to(tl.int64)
    factor = chosen.to(tl.float32)
    if weights is not None:
        factor = tl.load(weights + at, chosen, other=0.0)
    row = expert * C.N + (first + lane % C.L // C.BV * C.R) + tl.arange(0, C.R)[None, None, :]
    # Rows beyond the last one repeat it and are not stored.
    row = row if C.N % BN == 0 else tl.minimum(row, expert * C.N + (C.N - 1))
    total = stream_rows(x + at * C.K, chosen, row, w, scales, zeros, C, C.PDL)

    if C.SPAN == 0 and scales is not None:
        factor *= to_scale(tl.load(scales + (row if C.SCALE_ROWS == 1 else expert)), C.CODE)
    total = tl.sum(add_lanes(total * factor, C.BV).reshape(C.BA, C.L // C.BV, C.R), axis=0)
    n = rows_of(first, C.L // C.BV, 1, C.R)
    inside = n < C.N
    if bias is not None:
        for a in tl.static_range(C.A):
            row = tl.load(ids + m * C.A + a).to(tl.int64) * C.N + n
            part = tl.load(bias + row, inside, other=0.0)
            total += part if weights is None else tl.load(weights + m * C.A + a) * part
    at = m * C.N + n
    if residual is not None:
        total += tl.load(residual + at, inside, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), inside)


def _launch(
    kernel: Any, x: Tensor, ids: Tensor, w: DeviceTensor, device: Device, **given: Any
) -> list[Launch]:
    """Return the launch for the chosen experts' rows; tokens come first to share reads."""
    held = vectors_of(w)
    (n, k), chosen = w.shape[1:], ids.shape[1]
    together = given.get("BA", 1)  # experts that a program multiplies side by side
    tile = gemv_tile(
        rows=n,
        vectors=-(-k // held.vector),
        tokens=1,
        copies=chosen,
        device=device,
        beside=together,
        looked_up=held.code.startswith("tcq"),
    )
    sizes = {"A": chosen, "N": n, "K": k, **tile.constants}
    grid = (ids.shape[0] if "BA" in given else ids.numel(), triton.cdiv(n, tile.rows))
    given |= {"x": x, "ids": ids, **sizes, **held.given}
    given["PAIRS"] = held.pairs(x, device, alone=True)
    weights = tile.rows_of_lane * held.vector
    return [launch(kernel, grid, device, tile.warps * together, weights, **given)]


def moe_gate_up(
    *,
    x: Tensor,
    ids: Tensor,
    w: DeviceTensor,
    device: Device,
    act: str = "clamped",
    limit: float = 0.0,
    alpha: float = 0.0,
    x_scale: Tensor | None = None,
    group: int = 0,
    **given: Tensor,
) -> list[Launch]:
    """Lower `ops.moe.moe_gate_up`; UnsupportedOp for int8 x or an unknown activation function."""
    if x_scale is not None:
        raise no_codes("moe_gate_up", w)
    if act not in ("clamped", "silu"):
        raise UnsupportedOp(f"moe_gate_up: no act={act!r}; there are clamped, silu")
    settings = {"ACT": act, "LIMIT": float(limit), "ALPHA": float(alpha)}
    if _in_tiles(ids, w, device):
        return moe_gemm.tiles(x, ids, w, device, A=ids.shape[1], **given, **settings)
    (made,) = _launch(_gate_up, x, ids, w, device, **given, **settings)
    fewer = made.constants["PAIRS"] == "blocks" and device.capability >= 90
    return [replace(made, registers=_REGISTERS) if fewer else made]


_REGISTERS = 80
"""Of a thread that multiplies blocks of mxfp4: a multiprocessor then has 25 warps, not 21."""


def moe_down(
    *,
    x: Tensor,
    ids: Tensor,
    w: DeviceTensor,
    device: Device,
    x_scale: Tensor | None = None,
    group: int = 0,
    **given: Tensor,
) -> list[Launch]:
    """Lower `ops.moe.moe_down`; UnsupportedOp for int8 activations."""
    if x_scale is not None:
        raise no_codes("moe_down", w)
    if _in_tiles(ids, w, device):
        return moe_gemm.down(x, ids, w, device=device, **given)
    return _launch(_down, x, ids, w, device, **given, BA=triton.next_power_of_2(ids.shape[1]))


_MANY = 16
"""Tokens from which tiles are faster, as measured on an H200."""


def _in_tiles(ids: Tensor, w: DeviceTensor, device: Device) -> bool:
    """Return whether experts read their weights once for many tokens; UnsupportedOp, ShapeError."""
    vectors_of(w)
    least = _MANY if device.fast_batch else MOST_SLICED + 1
    return len(ids) >= least and moe_gemm.fits(w)


_SCORES = ("chosen", "softmax", "sigmoid")


@triton.jit
def _first_largest(values, free, index, LAST: tl.constexpr):
    """Return the largest of the free values, and its first index."""
    largest = tl.max(tl.where(free, values, float("-inf")), axis=0)
    return largest, tl.min(tl.where(free & (values == largest), index, LAST), axis=0)


@triton.jit
def _open_experts(ranks, expert, C: tl.constexpr):
    group = expert // (C.E // C.GROUPS)
    number = tl.arange(0, C.BG)
    best = tl.full((C.BG,), float("-inf"), tl.float32)
    for g in tl.static_range(C.GROUPS):
        free = group == g
        total = 0.0
        for _ in tl.static_range(C.BEST):
            largest, first = _first_largest(ranks, free, expert, C.E - 1)
            total += largest
            free = free & (expert != first)
        total = tl.where(total == total, total, float("-inf"))  # infinities of both signs
        best = tl.where(number == g, total, best)
    left = number < C.GROUPS
    chosen = expert < 0
    for _ in tl.static_range(C.TOP):
        _, first = _first_largest(best, left, number, C.GROUPS - 1)
        left = left & (number != first)
        chosen = chosen | (group == first)
    return chosen


@triton.jit
def _route(logits, choice_bias, ids, weights, C: tl.constexpr):
    start(C.PDL)
    _choose(logits, choice_bias, ids, weights, tl.program_id(0), C)


@triton.jit
def _router(
    x, w, scales, bias, times, residual, y, choice_bias, ids, weights, arrivals, C: tl.constexpr
):
    """Score the experts of a token; the last program to end chooses, from scores in L2."""
    part, token = part_of(C.TOKENS, C.M)
    n = part * C.ROWS + tl.arange(0, C.ROWS)
    totals = multiply_rows(x, w, scales, part * C.ROWS, token, C)
    total = row_sums(totals, scales, n, n < C.N, C, 0)
    finish(total, bias, times, residual, y, token, n, n < C.N, C)
    if is_last(arrivals + token, (C.N + C.ROWS - 1) // C.ROWS):
        _choose(y, choice_bias, ids, weights, token, C)


@triton.jit
def _choose(logits, bias, ids, weights, m, C: tl.constexpr):
    """Choose the experts of token m and their weights."""
    expert = tl.arange(0, C.BE)
    choice = tl.arange(0, C.BA)
    there = expert < C.E
    scores = tl.load(logits + m * C.E + expert, there, other=0.0, cache_modifier=".cg")
    scores = scores.to(tl.float32)
    odd = tl.where(scores < float("inf"), 0, 1)
    scores = tl.where(there, scores, float("-inf"))
    if C.SCORE == "softmax":
        scores = tl.exp(scores - tl.max(scores, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    if C.SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    ranks = scores
    if bias is not None:
        ranks += tl.load(bias + expert, there, other=0.0)
    odd = tl.max(tl.where(there & (ranks != ranks), 1, odd), axis=0) > 0
    ranks = tl.where(ranks == ranks, ranks, float("-inf"))
    if C.GROUPS > 0:
        open = _open_experts(ranks, expert, C)
        ranks = tl.where(open, ranks, float("-inf"))

    chosen = tl.zeros((C.BA,), tl.int32)
    values = tl.full((C.BA,), float("-inf") if C.SCORE == "chosen" else 0.0, tl.float32)
    for a in tl.static_range(C.A):
        value, first = _first_largest(ranks, there, expert, C.E - 1)
        if bias is not None or C.GROUPS > 0:
            value = tl.sum(tl.where(expert == first, scores, 0.0), axis=0)
        chosen = tl.where(choice == a, first, chosen)
        values = tl.where(choice == a, value, values)
        there = there & (expert != first)
    if C.SCORE == "chosen":
        values = tl.exp(values - tl.max(values, axis=0))
    values = tl.where(odd, float("nan"), values)
    if C.NORMAL:
        values = values / (tl.sum(values, axis=0) + 1e-20)
    at = m * C.A + choice
    tl.store(ids + at, chosen, choice < C.A)
    tl.store(weights + at, values * C.FACTOR, choice < C.A)


def route(*, logits: Tensor, device: Device, **given: Any) -> list[Launch]:
    """Lower `ops.moe.route`, a program per token; UnsupportedOp for an unknown score."""
    choice = _choice(experts=logits.shape[1], **given)
    return [launch(_route, (len(logits),), device, 1, logits=logits, **choice)]


def router(product: Mapping[str, Any], choice: Mapping[str, Any], device: Device) -> list[Launch]:
    """Lower a linear, with weights of whole bytes, and the `route` that reads its result."""
    x, w = product["x"], product["w"]
    # So few weights are read again for each token.
    given, grid, warps, streamed = bytes_tile(x, w, device, 1)
    given |= Tail(product.get("bias")).given("linear", choice["logits"], w.shape[0])
    given |= _choice(experts=w.shape[0], **{n: v for n, v in choice.items() if n != "logits"})
    given["arrivals"] = device.scratch("router_arrivals", (MOST_SLICED,), torch.int32)
    return [launch(_router, grid, device, warps, streamed, **given)]


def _choice(
    *,
    experts: int,
    ids: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    score: str = "chosen",
    normalise: bool = False,
    factor: float = 1.0,
    groups: int = 0,
    group_top: int = 0,
    group_best: int = 1,
) -> dict[str, Any]:
    """Return the arguments of `_choose` but the scores; UnsupportedOp for an unknown score."""
    if score not in _SCORES:
        raise UnsupportedOp(f"route: no scores {score!r}; there are {', '.join(_SCORES)}")
    given: dict[str, Any] = {"choice_bias": bias, "ids": ids, "weights": weights}
    given |= {"GROUPS": groups, "TOP": group_top, "BEST": group_best, "FACTOR": float(factor)}
    given |= {"SCORE": score, "NORMAL": normalise or score == "chosen"}
    chosen, power = ids.shape[1], triton.next_power_of_2
    given |= {"E": experts, "BE": power(experts), "A": chosen, "BA": power(chosen)}
    return given | {"BG": power(max(groups, 1))}
