"""Mixture of experts: two passes over the weights of the experts that `route` chose.

A program multiplies some rows of the experts that one token has chosen, so nothing is gathered,
sorted or reduced afterwards, and a token's result does not depend on the other tokens. The experts
are the router's own, which names none that does not exist, so they are not checked again.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.dots import to_scale
from clocher_kernels.cuda.gemv_bits import add_lanes, rows_of, stream_rows
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.linear import no_codes
from clocher_kernels.cuda.scalar import activate, as_activation, or_nan, start
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.cuda.tiles import gemv_tile
from clocher_kernels.cuda.vectors import vectors_of
from clocher_kernels.errors import UnsupportedOp


@triton.jit
def _gate_up(
    x, ids, factors, w, scales, zeros, bias, y,
    ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
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
    if factors is not None:
        h *= tl.load(factors + pair)
    if bias is not None:
        h += tl.load(bias + expert * N + n, inside, other=0.0)
    gate, up = tl.split(or_nan(h).reshape(L // BV, R // 2, 2))
    if ACT == "clamped":
        odd = (gate != gate) | (up != up)
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        hidden = (up + 1.0) * gate / (1.0 + tl.exp(-ALPHA * gate))
        hidden = tl.where(odd, float("nan"), hidden)  # clamping lost it
    else:
        hidden = activate(gate, ACT) * up
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
    factor = chosen.to(tl.float32)
    if weights is not None:
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
            part = tl.load(bias + row, inside, other=0.0)
            total += part if weights is None else tl.load(weights + m * A + a) * part
    at = m * N + n
    if residual is not None:
        total += tl.load(residual + at, inside, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), inside)


def _launch(
    kernel: Any, x: torch.Tensor, ids: torch.Tensor, w: DeviceTensor, device: Device, **given: Any
) -> list[Launch]:
    """Return the launch of a kernel that streams the chosen experts' rows.

    Tokens come first: those that share an expert read its rows at about the same time.
    """
    held = vectors_of(w)
    (n, k), chosen = w.shape[1:], ids.shape[1]
    tile = gemv_tile(rows=n, vectors=-(-k // held.weights), tokens=1, copies=chosen, device=device)
    sizes = {"A": chosen, "N": n, "K": k, **tile.constants}
    together = given.get("BA")  # experts that a program multiplies side by side
    grid = (ids.shape[0] if together else ids.numel(), triton.cdiv(n, tile.rows))
    given |= {"x": x, "ids": ids, **sizes, **held.given(x, device, alone=True)}
    weights = tile.rows_of_lane * held.weights
    return [launch(kernel, grid, device, tile.warps * (together or 1), weights, **given)]


def moe_gate_up(
    *,
    x: torch.Tensor,
    ids: torch.Tensor,
    w: DeviceTensor,
    device: Device,
    act: str = "clamped",
    limit: float = 0.0,
    alpha: float = 0.0,
    x_scale: torch.Tensor | None = None,
    group: int = 0,
    **given: torch.Tensor,
) -> list[Launch]:
    """Lower `ops.moe.moe_gate_up`.

    Raises:
        UnsupportedOp: int8 activations, or an activation that it does not know.
    """
    if x_scale is not None:
        raise no_codes("moe_gate_up", w)
    if act not in ("clamped", "silu"):
        raise UnsupportedOp(f"moe_gate_up: no act={act!r}; there are clamped, silu")
    settings = {"ACT": act, "LIMIT": float(limit), "ALPHA": float(alpha)}
    return _launch(_gate_up, x, ids, w, device, **given, **settings)


def moe_down(
    *,
    x: torch.Tensor,
    ids: torch.Tensor,
    w: DeviceTensor,
    device: Device,
    x_scale: torch.Tensor | None = None,
    group: int = 0,
    **given: torch.Tensor,
) -> list[Launch]:
    """Lower `ops.moe.moe_down`.

    Raises:
        UnsupportedOp: int8 activations.
    """
    if x_scale is not None:
        raise no_codes("moe_down", w)
    return _launch(_down, x, ids, w, device, **given, BA=triton.next_power_of_2(ids.shape[1]))


LOWER = {"moe_gate_up": moe_gate_up, "moe_down": moe_down}
