"""Mixture of experts: the router's choice, and two passes over the chosen experts' weights.

A program multiplies some rows of the experts that one token has chosen, so nothing is gathered,
sorted or reduced afterwards, and a token's result does not depend on the other tokens. The experts
are the router's own, which names none that does not exist, so they are not checked again.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.dots import to_scale
from clocher_kernels.cuda.finite import as_activation, or_nan
from clocher_kernels.cuda.gemv_bits import add_lanes, rows_of, stream_rows
from clocher_kernels.cuda.launch import Arg, Device, Launch
from clocher_kernels.cuda.linear import no_codes
from clocher_kernels.cuda.pdl import start
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.cuda.tiles import GemvTile, gemv_tile
from clocher_kernels.cuda.vectors import vectors_of


@triton.jit
def _topk_softmax(
    logits, ids, weights,
    E: tl.constexpr, A: tl.constexpr, BE: tl.constexpr, BA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    expert = tl.arange(0, BE)
    choice = tl.arange(0, BA)
    start(PDL)
    left = tl.load(logits + m * E + expert, expert < E, other=0.0).to(tl.float32)
    odd = tl.max((left != left).to(tl.int32), axis=0) > 0
    left = tl.where(expert < E, left, float("-inf"))
    chosen = tl.zeros((BA,), tl.int32)
    values = tl.full((BA,), float("-inf"), tl.float32)
    for a in tl.static_range(A):
        largest = tl.max(left, axis=0)
        # Of equal logits the first; a NaN among them must not lead out of the array.
        first = tl.min(tl.where(left == largest, expert, E - 1), axis=0)
        chosen = tl.where(choice == a, first, chosen)
        values = tl.where(choice == a, largest, values)
        left = tl.where(expert == first, float("-inf"), left)
    exps = tl.where(odd, float("nan"), tl.exp(values - tl.max(values, axis=0)))
    at = m * A + choice
    tl.store(ids + at, chosen, choice < A)
    tl.store(weights + at, exps / tl.sum(exps, axis=0), choice < A)


def topk_softmax(
    *, logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, device: Device
) -> list[Launch]:
    """Lower `ops.moe.topk_softmax`."""
    (m, experts), chosen = logits.shape, ids.shape[1]
    constants = {
        "E": experts,
        "A": chosen,
        "BE": triton.next_power_of_2(experts),
        "BA": triton.next_power_of_2(chosen),
        "PDL": device.pdl,
    }
    args = {"logits": logits, "ids": ids, "weights": weights}
    return [Launch(_topk_softmax, (m,), args, constants, 1, device.pdl)]


@triton.jit
def _gate_up(
    x, ids, w, scales, zeros, bias, y,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    A: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    L: tl.constexpr, BV: tl.constexpr, R: tl.constexpr,
    FORMAT: tl.constexpr, WEIGHTS: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    PAIRS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    V: tl.constexpr = (K + WEIGHTS - 1) // WEIGHTS
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP > 0 else 1
    BN: tl.constexpr = L // BV * R
    pair = tl.program_id(0)
    first = tl.program_id(1) * BN
    start(PDL)
    expert = tl.load(ids + pair).to(tl.int64)
    row = rows_of(expert * N + first, L, BV, R)[:, None, :]
    # Rows beyond the last one repeat it and are not stored.
    row = row if N % BN == 0 else tl.minimum(row, expert * N + (N - 1))
    zero = tl.full((1, 1, 1), 8, tl.int32)
    if GROUP == 0 and zeros is not None:
        zero = tl.load(zeros + row).to(tl.int32)
    here = tl.zeros((1, 1, 1), tl.int32)
    h = stream_rows(
        x + (pair // A) * K + here, here == 0, w + row * (V * 4),
        scales + row * GROUPS if GROUP > 0 else scales,
        None if zeros is None or GROUP == 0 else zeros + row * GROUPS, zero,
        K, GROUP, FORMAT, WEIGHTS, PAIRS, ASM, False, L, BV, 1, R,
    )  # fmt: skip

    h = add_lanes(h, BV)
    n = rows_of(first, L // BV, 1, R)[:, None, :]
    inside = n < N
    if GROUP == 0 and scales is not None:
        at = expert * N + n if SCALE_ROWS == 1 else expert + tl.zeros_like(n)
        h *= to_scale(tl.load(scales + at, inside, other=0), FORMAT)
    if bias is not None:
        h += tl.load(bias + expert * N + n, inside, other=0.0)
    gate, up = tl.split(or_nan(h).reshape(L // BV, R // 2, 2))
    odd = (gate != gate) | (up != up)
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    hidden = (up + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))
    hidden = tl.where(odd, float("nan"), hidden)  # clamping lost it
    i = rows_of(first // 2, L // BV, 1, R // 2)
    at = pair.to(tl.int64) * (N // 2) + i
    tl.store(y + at, as_activation(hidden, y), i < N // 2)


@triton.jit
def _down(
    x, ids, weights, w, scales, zeros, bias, residual, y,
    A: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BA: tl.constexpr, L: tl.constexpr, BV: tl.constexpr, R: tl.constexpr,
    FORMAT: tl.constexpr, WEIGHTS: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    PAIRS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    V: tl.constexpr = (K + WEIGHTS - 1) // WEIGHTS
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP > 0 else 1
    BN: tl.constexpr = L // BV * R
    m = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BN
    start(PDL)
    # The chosen experts work at the same time, L lanes each.
    lane = tl.arange(0, BA * L)[:, None, None]
    chosen = lane // L < A
    at = m * A + lane // L
    # Lanes without an expert repeat the last one: others may hold NaN, which times 0 is NaN.
    expert = tl.load(ids + m * A + tl.minimum(lane // L, A - 1)).to(tl.int64)
    factor = tl.load(weights + at, chosen, other=0.0)
    row = expert * N + (first + lane % L // BV * R) + tl.arange(0, R)[None, None, :]
    # Rows beyond the last one repeat it and are not stored.
    row = row if N % BN == 0 else tl.minimum(row, expert * N + (N - 1))
    zero = tl.full((1, 1, 1), 8, tl.int32)
    if GROUP == 0 and zeros is not None:
        zero = tl.load(zeros + row).to(tl.int32)
    total = stream_rows(
        x + at * K, chosen, w + row * (V * 4),
        scales + row * GROUPS if GROUP > 0 else scales,
        None if zeros is None or GROUP == 0 else zeros + row * GROUPS, zero,
        K, GROUP, FORMAT, WEIGHTS, PAIRS, ASM, False, BA * L, BV, 1, R,
    )  # fmt: skip

    if GROUP == 0 and scales is not None:
        factor *= to_scale(tl.load(scales + (row if SCALE_ROWS == 1 else expert)), FORMAT)
    total = tl.sum(add_lanes(total * factor, BV).reshape(BA, L // BV, R), axis=0)
    n = rows_of(first, L // BV, 1, R)
    inside = n < N
    if bias is not None:
        for a in tl.static_range(A):
            row = tl.load(ids + m * A + a).to(tl.int64) * N + n
            total += tl.load(weights + m * A + a) * tl.load(bias + row, inside, other=0.0)
    at = m * N + n
    if residual is not None:
        total += tl.load(residual + at, inside, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), inside)


@dataclass(frozen=True, slots=True)
class _Experts:
    """How the experts' rows are streamed: the tile, and what both kernels are given."""

    tile: GemvTile
    constants: dict[str, Any]
    args: dict[str, Arg]
    weights: int


def _experts(x: torch.Tensor, ids: torch.Tensor, w: DeviceTensor, device: Device) -> _Experts:
    held = vectors_of(w)
    (n, k), chosen = w.shape[1:], ids.shape[1]
    tile = gemv_tile(rows=n, vectors=-(-k // held.weights), tokens=1, copies=chosen, device=device)
    constants = {
        "A": chosen,
        "N": n,
        "K": k,
        "L": 32 * tile.warps,
        "BV": tile.vectors,
        "R": tile.rows_of_lane,
        "FORMAT": held.kind,
        "WEIGHTS": held.weights,
        "GROUP": held.group,
        "SCALE_ROWS": held.scale_rows,
        "PAIRS": held.pairs(x, device, alone=True),
        "ASM": device.asm,
        "PDL": device.pdl,
    }
    args: dict[str, Arg] = {"w": held.words, "scales": held.scales, "zeros": held.zeros}
    return _Experts(tile, constants, args, tile.rows_of_lane * held.weights)


def moe_gate_up(
    *,
    x: torch.Tensor,
    ids: torch.Tensor,
    w: DeviceTensor,
    y: torch.Tensor,
    limit: float,
    alpha: float,
    x_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    group: int = 0,
    device: Device,
) -> list[Launch]:
    """Lower `ops.moe.moe_gate_up`.

    Raises:
        UnsupportedOp: int8 activations.
    """
    if x_scale is not None:
        raise no_codes("moe_gate_up", w)
    experts = _experts(x, ids, w, device)
    args = {"x": x, "ids": ids, **experts.args, "bias": bias, "y": y}
    constants = {**experts.constants, "LIMIT": float(limit), "ALPHA": float(alpha)}
    # Tokens come first: those that share an expert read its rows at about the same time.
    grid = (ids.numel(), triton.cdiv(w.shape[1], experts.tile.rows))
    warps = experts.tile.warps
    return [Launch(_gate_up, grid, args, constants, warps, device.pdl, experts.weights)]


def moe_down(
    *,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w: DeviceTensor,
    y: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    group: int = 0,
    device: Device,
) -> list[Launch]:
    """Lower `ops.moe.moe_down`.

    Raises:
        UnsupportedOp: int8 activations.
    """
    if x_scale is not None:
        raise no_codes("moe_down", w)
    experts = _experts(x, ids, w, device)
    together = triton.next_power_of_2(ids.shape[1])
    args = {"x": x, "ids": ids, "weights": weights, **experts.args}
    args |= {"bias": bias, "residual": residual, "y": y}
    constants = {**experts.constants, "BA": together}
    grid = (ids.shape[0], triton.cdiv(w.shape[1], experts.tile.rows))
    warps = experts.tile.warps * together
    return [Launch(_down, grid, args, constants, warps, device.pdl, experts.weights)]


LOWER = {"topk_softmax": topk_softmax, "moe_gate_up": moe_gate_up, "moe_down": moe_down}
