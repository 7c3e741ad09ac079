"""GEMV for few tokens, 8 to a program, and weights of whole bytes: floats, int8, fp8.

A program owns a few rows of W; a thread reads 16 bytes of a row (a chunk) at a time. The summation
order depends on K and the format alone, so a token's result is bit-identical for every M.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.codes import dot, joined, token_factors, unit, weight_factors
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.prepack import DeviceTensor, Stored, stored
from clocher_kernels.cuda.scalar import Linear, finish, finish_gated, paired, part_of, start

MAX_TOKENS = 8
"""Tokens of a program."""

MOST_SLICED = 32
"""Tokens of a step that are multiplied in slices of 8, so that each has the bits it has alone."""


@triton.jit
def load_rows(w, n0, k, C: tl.constexpr, TAIL: tl.constexpr):
    """Load columns k of ROWS rows. Rows beyond N repeat the last one and are not stored."""
    rows = ()
    for r in tl.static_range(C.ROWS):
        row = w + paired(tl.minimum(n0 + r, C.N - 1), C.HALF).to(tl.int64) * C.K
        if TAIL:
            value = tl.load(row + k, mask=k < C.K, other=0, eviction_policy="evict_first")
        else:
            value = tl.load(row + k, eviction_policy="evict_first")
        rows = rows + (value,)
    return rows


@triton.jit
def _load_scales(scales, n0, k, C: tl.constexpr):
    factors = ()
    for r in tl.static_range(C.ROWS):
        row = paired(tl.minimum(n0 + r, C.N - 1), C.HALF) // C.SCALE_ROWS
        at = scales + row.to(tl.int64) * ((C.K + C.SPAN - 1) // C.SPAN) + k // C.SPAN
        factors = factors + (tl.load(at, mask=k < C.K, other=0).to(tl.float32),)
    return factors


@triton.jit
def _turn(totals, rows, x, scales, n0, token0, k0, C: tl.constexpr, TAIL: tl.constexpr):
    """Add BLOCK columns from k0 on to the sums."""
    LANES: tl.constexpr = C.BLOCK // C.LANE
    FACTORS: tl.constexpr = 8 if C.MATH == "pairs" else 1
    k = k0 + tl.arange(0, C.BLOCK)
    if C.SPAN > 0:
        first = k0 + tl.arange(0, LANES) * C.LANE
        factors = _load_scales(scales, n0, first, C)
    w = ()
    for r in tl.static_range(C.ROWS):
        w = w + weight_factors(rows[r], LANES, C.CODE, C.MATH, C.ASM)
    out = ()
    for m in tl.static_range(C.M):
        # Tokens beyond the last one repeat it and are not stored.
        at = x + (tl.minimum(token0 + m, C.TOKENS - 1) if C.TOKENS > C.M else m) * C.K + k
        loaded = tl.load(at, mask=k < C.K, other=0) if TAIL else tl.load(at)
        token = token_factors(loaded, LANES, C.MATH)
        for r in tl.static_range(C.ROWS):
            total = totals[m * C.ROWS + r]
            chunk = dot(w, token, FACTORS * r, LANES, C.LANE, C.MATH, C.ASM)
            if C.SPAN > 0:
                total = tl.fma(chunk, factors[r], total)
            else:
                total += chunk
            out = out + (total,)
    return out


@triton.jit
def stack(parts, first: tl.constexpr, count: tl.constexpr):
    """Join `count` (2^n) tensors [L] from the `first` on to [L, 1, 2, 2, ...], in order."""
    columns = ()
    for i in tl.static_range(count):
        columns = columns + (tl.expand_dims(parts[first + i], 1),)
    return joined(columns, count)


@triton.jit
def multiply_rows(x, w, scales, n0, token0, C: tl.constexpr):
    """Multiply M tokens by ROWS rows of W: lanes' sums, not scaled, for each token and row.

    K, LANE, BLOCK and SPAN count loaded elements: weights, or words of four.
    """
    TURNS: tl.constexpr = C.K // C.BLOCK

    totals = ()
    for _i in tl.static_range(C.M * C.ROWS):
        totals = totals + (tl.zeros((C.BLOCK // C.LANE,), tl.float32),)

    # Weights never depend on the predecessor: they are on their way before x is waited for. Eight
    # tokens leave registers for few warps, so they also load the next turn's ahead.
    rows = load_rows(w, n0, tl.arange(0, C.BLOCK), C, TURNS == 0)
    start(C.PDL, True)
    if C.M == 8 and C.CODE == "float":
        for turn in range(1, TURNS):
            ahead = load_rows(w, n0, turn * C.BLOCK + tl.arange(0, C.BLOCK), C, False)
            totals = _turn(totals, rows, x, scales, n0, token0, (turn - 1) * C.BLOCK, C, False)
            rows = ahead
        if TURNS > 0 and C.K % C.BLOCK != 0:
            tail = load_rows(w, n0, TURNS * C.BLOCK + tl.arange(0, C.BLOCK), C, True)
            totals = _turn(totals, rows, x, scales, n0, token0, (TURNS - 1) * C.BLOCK, C, False)
            rows = tail
        LAST: tl.constexpr = (C.K - 1) // C.BLOCK * C.BLOCK
        totals = _turn(totals, rows, x, scales, n0, token0, LAST, C, C.K % C.BLOCK != 0)
    else:
        totals = _turn(totals, rows, x, scales, n0, token0, 0, C, TURNS == 0)
        for turn in range(1, TURNS):
            k0 = turn * C.BLOCK
            rows = load_rows(w, n0, k0 + tl.arange(0, C.BLOCK), C, False)
            totals = _turn(totals, rows, x, scales, n0, token0, k0, C, False)
        if TURNS > 0 and C.K % C.BLOCK != 0:
            k0 = TURNS * C.BLOCK
            rows = load_rows(w, n0, k0 + tl.arange(0, C.BLOCK), C, True)
            totals = _turn(totals, rows, x, scales, n0, token0, k0, C, True)

    return totals


@triton.jit
def row_sums(totals, scales, n, inside, C: tl.constexpr, m: tl.constexpr):
    """Return token m's scaled sums of rows n."""
    total = tl.reshape(tl.sum(stack(totals, m * C.ROWS, C.ROWS), 0), (C.ROWS,))
    factor = tl.full((C.ROWS,), C.UNIT, tl.float32)
    if C.SPAN == 0 and scales is not None:
        factor *= tl.load(scales + n * C.SCALE_ROWS, mask=inside, other=0).to(tl.float32)
    return total * factor


@triton.jit
def _gemv(x, w, scales, bias, times, residual, y, second, third, C: tl.constexpr):
    part, token0 = part_of(C.TOKENS, C.M)
    n0 = part * C.ROWS
    totals = multiply_rows(x, w, scales, n0, token0, C)
    n = n0 + tl.arange(0, C.ROWS)
    inside = n < C.N
    for m in tl.static_range(C.M):
        token = token0 + m
        kept = n < tl.where(token < C.TOKENS, C.N, 0) if C.TOKENS > C.M else inside
        total = row_sums(totals, scales, paired(n, C.HALF), inside, C, m)
        if C.HALF > 0:
            up, gate = tl.split(total.reshape(C.ROWS // 2, 2))
            kept, _ = tl.split(kept.reshape(C.ROWS // 2, 2))
            i = n0 // 2 + tl.arange(0, C.ROWS // 2)
            finish_gated(up, gate, bias, y, token, i, kept, C)
        else:
            finish(total, bias, times, residual, y, token, n, kept, C, second, third)


def _rows(tokens: int, size: int) -> int:
    """Return the rows of W of a program for weights of `size` bytes, as measured on an H200."""
    return 2 if tokens == 1 and size > 1 else 4


def _tile(held: Stored, n: int, k: int, device: Device) -> tuple[int, int]:
    """Return how many weights a thread reads at once, and the warps on each row."""
    # 16 bytes, or less to keep rows aligned and chunks within a group.
    lane, warps = 16 // held.data.element_size(), 1
    while k % lane or held.span % lane:
        lane //= 2
    while warps < 4 and n * warps < 48 * device.sms:
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
    rows = _rows(few, held.data.itemsize)
    sizes = {"M": few, "TOKENS": m, "N": n, "K": k // per, "ROWS": rows, "LANE": lane // per}
    sizes["BLOCK"] = lane * 32 * warps // per
    given = {"x": x, **held.given, **sizes, "SPAN": held.span // per}
    given |= {"MATH": math, "UNIT": unit(held.code, math)}
    if per == 4:
        given |= {"x": x.view(torch.int64), "w": held.data.view(torch.int32)}
    return given, (triton.cdiv(n, rows) * triton.cdiv(m, few),), warps, rows * lane


def gemv_bytes(p: Linear) -> list[Launch]:
    """Lower `ops.linear.linear` for few tokens and weights of whole bytes."""
    given, grid, warps, weights = bytes_tile(p.x, p.w, p.device)
    given |= p.tail.given("linear", p.y, p.w.shape[0])
    return [launch(_gemv, grid, p.device, warps, weights, **given)]
