"""GEMV for few tokens, 8 to a program, and weights of whole bytes: floats, int8, fp8.

A program owns a few rows of W; a thread reads 16 bytes of a row (a chunk) at a time. The summation
order depends on K and the format alone, so a token's result is bit-identical for every M.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.codes import dot, token_factors, unit, weight_factors
from clocher_kernels.cuda.gemv_bits import MAX_TOKENS
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.prepack import DeviceTensor, Stored, stored
from clocher_kernels.cuda.scalar import PLAIN, Tail, finish, finish_gated, paired, part_of, start

MOST_SLICED = 32
"""Tokens of a step that are multiplied in slices of 8, so that each has the bits it has alone."""


@triton.jit
def load_rows(
    w, n0, k,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Load columns k of ROWS rows. Rows beyond N repeat the last one and are not stored."""
    rows = ()
    for r in tl.static_range(ROWS):
        row = w + paired(tl.minimum(n0 + r, N - 1), HALF).to(tl.int64) * K
        if TAIL:
            value = tl.load(row + k, mask=k < K, other=0, eviction_policy="evict_first")
        else:
            value = tl.load(row + k, eviction_policy="evict_first")
        rows = rows + (value,)
    return rows


@triton.jit
def _load_scales(
    scales, n0, k,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    SPAN: tl.constexpr, SCALE_ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    factors = ()
    for r in tl.static_range(ROWS):
        row = paired(tl.minimum(n0 + r, N - 1), HALF) // SCALE_ROWS
        at = scales + row.to(tl.int64) * ((K + SPAN - 1) // SPAN) + k // SPAN
        factors = factors + (tl.load(at, mask=k < K, other=0).to(tl.float32),)
    return factors


@triton.jit
def _turn(
    totals, rows, x, scales, n0, token0, k0,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, LANE: tl.constexpr, BLOCK: tl.constexpr,
    CODE: tl.constexpr, MATH: tl.constexpr, SPAN: tl.constexpr, SCALE_ROWS: tl.constexpr,
    TOKENS: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add BLOCK columns from k0 on to the sums."""
    LANES: tl.constexpr = BLOCK // LANE
    FACTORS: tl.constexpr = 8 if MATH == "pairs" else 1
    k = k0 + tl.arange(0, BLOCK)
    if SPAN > 0:
        first = k0 + tl.arange(0, LANES) * LANE
        factors = _load_scales(scales, n0, first, N, K, ROWS, SPAN, SCALE_ROWS, HALF)
    w = ()
    for r in tl.static_range(ROWS):
        w = w + weight_factors(rows[r], LANES, CODE, MATH, ASM)
    out = ()
    for m in tl.static_range(M):
        # Tokens beyond the last one repeat it and are not stored.
        at = x + (tl.minimum(token0 + m, TOKENS - 1) if TOKENS > M else m) * K + k
        loaded = tl.load(at, mask=k < K, other=0) if TAIL else tl.load(at)
        token = token_factors(loaded, LANES, MATH)
        for r in tl.static_range(ROWS):
            total = totals[m * ROWS + r]
            chunk = dot(w, token, FACTORS * r, LANES, LANE, MATH, ASM)
            if SPAN > 0:
                total = tl.fma(chunk, factors[r], total)
            else:
                total += chunk
            out = out + (total,)
    return out


@triton.jit
def stack(parts, first: tl.constexpr, step: tl.constexpr, count: tl.constexpr):
    """Join `count` (2^n) tensors [L], first, first + step, ..., into [L, 1, 2, 2, ...] in order."""
    level = ()
    for i in tl.static_range(count):
        level = level + (tl.expand_dims(parts[first + i * step], 1),)
    for bit in tl.static_range(1, 8):
        if count >> bit > 0:
            joined = ()
            for i in tl.static_range(count >> bit):
                joined = joined + (tl.join(level[i], level[i + (count >> bit)]),)
            level = joined
    return level[0]


@triton.jit
def multiply_rows(
    x, w, scales, n0, token0,
    M: tl.constexpr, TOKENS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, LANE: tl.constexpr, BLOCK: tl.constexpr,
    CODE: tl.constexpr, MATH: tl.constexpr, SPAN: tl.constexpr, SCALE_ROWS: tl.constexpr,
    HALF: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply M tokens by ROWS rows of W: lanes' sums, not scaled, for each token and row.

    K, LANE, BLOCK and SPAN count loaded elements: weights, or words of four.
    """
    TURNS: tl.constexpr = K // BLOCK

    totals = ()
    for _i in tl.static_range(M * ROWS):
        totals = totals + (tl.zeros((BLOCK // LANE,), tl.float32),)

    # Weights never depend on the predecessor: they are on their way before x is waited for. Eight
    # tokens leave registers for few warps, so they also load the next turn's ahead.
    rows = load_rows(w, n0, tl.arange(0, BLOCK), N, K, ROWS, HALF, TURNS == 0)
    start(PDL)
    if M == 8 and CODE == "float":
        for turn in range(1, TURNS):
            ahead = load_rows(w, n0, turn * BLOCK + tl.arange(0, BLOCK), N, K, ROWS, HALF, False)
            totals = _turn(
                totals, rows, x, scales, n0, token0, (turn - 1) * BLOCK,
                M, N, K, ROWS, LANE, BLOCK, CODE, MATH, SPAN, SCALE_ROWS, TOKENS, HALF, False, ASM,
            )  # fmt: skip
            rows = ahead
        if TURNS > 0 and K % BLOCK != 0:
            tail = load_rows(w, n0, TURNS * BLOCK + tl.arange(0, BLOCK), N, K, ROWS, HALF, True)
            totals = _turn(
                totals, rows, x, scales, n0, token0, (TURNS - 1) * BLOCK,
                M, N, K, ROWS, LANE, BLOCK, CODE, MATH, SPAN, SCALE_ROWS, TOKENS, HALF, False, ASM,
            )  # fmt: skip
            rows = tail
        LAST: tl.constexpr = (K - 1) // BLOCK * BLOCK
        totals = _turn(
            totals, rows, x, scales, n0, token0, LAST,
            M, N, K, ROWS, LANE, BLOCK, CODE, MATH, SPAN, SCALE_ROWS, TOKENS, HALF,
            K % BLOCK != 0, ASM,
        )  # fmt: skip
    else:
        totals = _turn(
            totals, rows, x, scales, n0, token0, 0,
            M, N, K, ROWS, LANE, BLOCK, CODE, MATH, SPAN, SCALE_ROWS, TOKENS, HALF, TURNS == 0, ASM,
        )  # fmt: skip
        for turn in range(1, TURNS):
            k0 = turn * BLOCK
            rows = load_rows(w, n0, k0 + tl.arange(0, BLOCK), N, K, ROWS, HALF, False)
            totals = _turn(
                totals, rows, x, scales, n0, token0, k0,
                M, N, K, ROWS, LANE, BLOCK, CODE, MATH, SPAN, SCALE_ROWS, TOKENS, HALF, False, ASM,
            )  # fmt: skip
        if TURNS > 0 and K % BLOCK != 0:
            k0 = TURNS * BLOCK
            rows = load_rows(w, n0, k0 + tl.arange(0, BLOCK), N, K, ROWS, HALF, True)
            totals = _turn(
                totals, rows, x, scales, n0, token0, k0,
                M, N, K, ROWS, LANE, BLOCK, CODE, MATH, SPAN, SCALE_ROWS, TOKENS, HALF, True, ASM,
            )  # fmt: skip

    return totals


@triton.jit
def row_sums(
    totals, scales, n, inside, m: tl.constexpr,
    ROWS: tl.constexpr, UNIT: tl.constexpr, SPAN: tl.constexpr, SCALE_ROWS: tl.constexpr,
):  # fmt: skip
    """Return token m's scaled sums of rows n."""
    total = tl.reshape(tl.sum(stack(totals, m * ROWS, 1, ROWS), 0), (ROWS,))
    factor = tl.full((ROWS,), UNIT, tl.float32)
    if SPAN == 0 and scales is not None:
        factor *= tl.load(scales + n * SCALE_ROWS, mask=inside, other=0).to(tl.float32)
    return total * factor


@triton.jit
def _gemv(
    x, w, scales, bias, times, residual, y, second, third,
    M: tl.constexpr, TOKENS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, LANE: tl.constexpr, BLOCK: tl.constexpr,
    CODE: tl.constexpr, MATH: tl.constexpr, UNIT: tl.constexpr,
    SPAN: tl.constexpr, SCALE_ROWS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
    F: tl.constexpr, ACT: tl.constexpr, CAP: tl.constexpr,
    N1: tl.constexpr, N2: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    part, token0 = part_of(TOKENS, M)
    n0 = part * ROWS
    totals = multiply_rows(
        x, w, scales, n0, token0,
        M, TOKENS, N, K, ROWS, LANE, BLOCK, CODE, MATH, SPAN, SCALE_ROWS, HALF, ASM, PDL,
    )  # fmt: skip
    n = n0 + tl.arange(0, ROWS)
    inside = n < N
    for m in tl.static_range(M):
        token = token0 + m
        kept = n < tl.where(token < TOKENS, N, 0) if TOKENS > M else inside
        total = row_sums(totals, scales, paired(n, HALF), inside, m, ROWS, UNIT, SPAN, SCALE_ROWS)
        if HALF > 0:
            up, gate = tl.split(total.reshape(ROWS // 2, 2))
            kept, _ = tl.split(kept.reshape(ROWS // 2, 2))
            i = n0 // 2 + tl.arange(0, ROWS // 2)
            finish_gated(up, gate, bias, y, token, i, kept, HALF, ACT, CAP)
        else:
            finish(
                total, bias, times, residual, y, token, n, kept, N, F, ACT, CAP,
                second, third, N1, N2,
            )  # fmt: skip


_ROWS = 4
"""Rows of W of a program."""


def _tile(held: Stored, n: int, k: int, device: Device) -> tuple[int, int]:
    """Return how many weights a thread reads at once, and the warps on each row."""
    # 16 bytes, or less to keep rows aligned and chunks within a group.
    lane, warps = 16 // held.data.element_size(), 1
    while k % lane or held.span % lane:
        lane //= 2
    while warps < 4 and n * warps < 12 * _ROWS * device.sms:
        wider = 2 * warps * 32 * lane
        # The last turn of a row leaves threads idle.
        if -(-k // wider) * wider > 1.15 * k:
            break
        warps *= 2
    return lane, warps


def arithmetic(code: str, x_dtype: torch.dtype, words: bool) -> str:
    """Return "pairs" (packed fp16) or "fp32": e5m2 and bf16 exceed fp16's range."""
    return "pairs" if words and x_dtype == torch.float16 and code in ("int8", "e4m3") else "fp32"


def bytes_tile(
    x: Tensor, w: DeviceTensor, device: Device, tokens: int = MAX_TOKENS
) -> tuple[dict[str, Any], tuple[int], int, int]:
    """Return the arguments of `multiply_rows`, and a launch's grid, warps and weights.

    `tokens`: the most of a program.
    """
    (m, k), n = x.shape, w.shape[0]
    held = stored(w)
    lane, warps = _tile(held, n, k, device)
    math = arithmetic(held.code, x.dtype, lane == 16)
    per = 4 if math == "pairs" else 1
    few = min(m, tokens)
    sizes = {"M": few, "TOKENS": m, "N": n, "K": k // per, "ROWS": _ROWS, "LANE": lane // per}
    sizes["BLOCK"] = lane * 32 * warps // per
    stored_as = {"CODE": held.code, "MATH": math, "UNIT": unit(held.code, math)}
    stored_as |= {"SPAN": held.span // per, "SCALE_ROWS": held.scale_rows}
    given = {"x": x, "w": held.data, "scales": held.scales, **sizes, **stored_as}
    if per == 4:
        given |= {"x": x.view(torch.int64), "w": held.data.view(torch.int32)}
    return given, (triton.cdiv(n, _ROWS) * triton.cdiv(m, few),), warps, _ROWS * lane


def gemv_bytes(
    *,
    x: Tensor,
    w: DeviceTensor,
    y: Tensor,
    tail: Tail = PLAIN,
    device: Device,
) -> list[Launch]:
    """Lower `ops.linear.linear` for few tokens and weights of whole bytes."""
    given, grid, warps, weights = bytes_tile(x, w, device)
    given |= {**tail.given("linear", y, w.shape[0]), **tail.outputs(y, w.shape[0])}
    return [launch(_gemv, grid, device, warps, weights, **given)]
