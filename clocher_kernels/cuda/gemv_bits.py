"""GEMV for 1 to 8 tokens and weights of less than a byte; W is streamed once.

A token's sum has one order whatever the number of tokens.
"""

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.dots import split4, to_scale, vector_dot
from clocher_kernels.cuda.finish import PLAIN, Tail, finish
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.scalar import start
from clocher_kernels.cuda.stored import vectors_of
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.cuda.tiles import gemv_tile


@triton.jit
def load_vectors(w, v, V: tl.constexpr):
    """Load vectors v of rows at w: i32 [L, 1, R, 4]; beyond V, where x is 0, the last repeats."""
    at = tl.minimum(v, V - 1)[:, :, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    to = tl.max_contiguous(w[:, :, :, None] + at, (2, 1, 1, 4))
    return tl.load(to, eviction_policy="evict_first")


@triton.jit
def stream_rows(
    x, tokens, row, w, scales, zeros,
    K: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr, WEIGHTS: tl.constexpr,
    PAIRS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
    L: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Multiply rows of W by tokens: partial sums fp32 [L, BM, R].

    BV adjacent lanes share rows. `row` are row numbers [L, 1, R]; w, scales and zeros point to
    whole tensors; the other arguments are those of `vector_dot`.
    """
    V: tl.constexpr = (K + WEIGHTS - 1) // WEIGHTS
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP > 0 else 1
    w += row * (V * 4)
    zero = tl.full((1, 1, 1), 8, tl.int32)
    if GROUP > 0:
        scales += row * GROUPS
    if zeros is not None and GROUP > 0:
        zeros += row * GROUPS
    elif zeros is not None:
        zero = tl.load(zeros + row).to(tl.int32)
    lane = (tl.arange(0, L) % BV)[:, None, None]
    total = tl.zeros((L, BM, R), tl.float32)
    # The next turn's weights are in flight while this turn's are multiplied.
    ahead = load_vectors(w, lane, V)
    start(PDL)
    for first in range(0, V, BV):
        v = first + lane
        words = split4(ahead)
        if V > BV:
            ahead = load_vectors(w, v + BV, V)
        total += vector_dot(
            x, tokens, v * WEIGHTS, words, scales, zeros, zero,
            K, GROUP, FORMAT, WEIGHTS, PAIRS, ASM,
        )  # fmt: skip
    if FORMAT == "mxfp4" and PAIRS == "words":
        total *= 2.0
    return total


@triton.jit
def rows_of(first, L: tl.constexpr, BV: tl.constexpr, R: tl.constexpr):
    """Return the rows of each lane, [L, R], of a program that starts at row `first`."""
    return first + (tl.arange(0, L) // BV * R)[:, None] + tl.arange(0, R)[None, :]


@triton.jit
def add_lanes(total, BV: tl.constexpr):
    """Sum the lanes that share rows: [L, BM, R] -> [L / BV, BM, R]."""
    L: tl.constexpr = total.shape[0]
    return tl.sum(total.reshape(L // BV, BV, total.shape[1], total.shape[2]), axis=1)


@triton.jit
def _gemv_bits(
    x, w, scales, zeros, bias, times, residual, y,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    L: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, R: tl.constexpr,
    FORMAT: tl.constexpr, WEIGHTS: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    PAIRS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
    F: tl.constexpr, ACT: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    BN: tl.constexpr = L // BV * R
    first = tl.program_id(0) * BN
    m = tl.arange(0, BM)[None, :, None]
    # 64-bit row numbers share one address; with eight tokens ptxas would spill.
    row = rows_of(first.to(tl.int64) if BM < 8 else first, L, BV, R)[:, None, :]
    # Rows beyond the last one repeat it and are not stored, so that loads need no mask for them.
    row = (row if N % BN == 0 else tl.minimum(row, N - 1)).to(tl.int64)
    total = stream_rows(
        x + m * K, m < M, row, w, scales, zeros,
        K, GROUP, FORMAT, WEIGHTS, PAIRS, ASM, PDL, L, BV, BM, R,
    )  # fmt: skip

    total = add_lanes(total, BV)
    n = rows_of(first, L // BV, 1, R)[:, None, :]
    rows = n < N
    if GROUP == 0:
        total *= to_scale(tl.load(scales + n * SCALE_ROWS, rows, other=0), FORMAT)
    finish(total, bias, times, residual, y, m, n, (m < M) & rows, N, F, ACT, CAP)


def gemv_bits(
    *,
    x: torch.Tensor,
    w: DeviceTensor,
    y: torch.Tensor,
    tail: Tail = PLAIN,
    device: Device,
) -> list[Launch]:
    """Lower `ops.linear.linear` for up to 8 tokens and int4, mxfp4 or ternary weights."""
    (m, k), n = x.shape, w.shape[0]
    held, key = vectors_of(w), f"{w.format.name}/{n}x{k}"
    vectors = -(-k // held.weights)
    tile = gemv_tile(rows=n, vectors=vectors, tokens=m, copies=1, device=device, key=key)
    sizes = {"M": m, "N": n, "K": k, "BM": tile.tokens, **tile.constants}
    given = {"x": x, **held.given(x, device), **tail.given("linear", y, n)}
    grid, weights = (triton.cdiv(n, tile.rows),), tile.rows_of_lane * held.weights
    return [launch(_gemv_bits, grid, device, tile.warps, weights, **sizes, **given)]
