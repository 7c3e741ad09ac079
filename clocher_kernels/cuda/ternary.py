"""int8 activations times ternary weights, bit-identical to the reference.

Products are kept apart from later sums, which the compiler would fuse into one rounding.
"""

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.decode import ternary_digit
from clocher_kernels.cuda.dots import split4
from clocher_kernels.cuda.finish import PLAIN, Tail, finish
from clocher_kernels.cuda.gemv_bits import add_lanes, load_vectors, rows_of
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.quantize import rounded_product
from clocher_kernels.cuda.scalar import start
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.cuda.tiles import gemv_tile

MAX_TOKENS = 8
"""Tokens of a program."""

_WEIGHTS = 64

# $0 = $6 + the dot product of a word of codes 0..2 with 16 int8, four words $2..$5.
_DOT16 = tl.constexpr("""{
.reg .b32 c, t;
and.b32 c, $1, 0x03030303;
dp4a.s32.s32 t, c, $2, $6;
shr.u32 c, $1, 2;
and.b32 c, c, 0x03030303;
dp4a.s32.s32 t, c, $3, t;
shr.u32 c, $1, 4;
and.b32 c, c, 0x03030303;
dp4a.s32.s32 t, c, $4, t;
shr.u32 c, $1, 6;
and.b32 c, c, 0x03030303;
dp4a.s32.s32 $0, c, $5, t;
}""")

# $0 = $5 - the sum of 16 int8: the offset of codes 0..2.
_LESS16 = tl.constexpr("""{
.reg .b32 t, o;
mov.b32 o, 0xffffffff;
dp4a.s32.s32 t, $1, o, $5;
dp4a.s32.s32 t, $2, o, t;
dp4a.s32.s32 t, $3, o, t;
dp4a.s32.s32 $0, $4, o, t;
}""")


@triton.jit
def _load16(q, m, k, inside, K: tl.constexpr):
    """Load columns k .. k + 15 of tokens m as 4 tiles [L, BM, 1] of words, 0 beyond K."""
    if K % 4 == 0:
        at = (k // 4)[:, :, :, None] + tl.arange(0, 4)[None, None, None, :]
        row = q.to(tl.pointer_type(tl.int32), bitcast=True) + (m * (K // 4))[:, :, :, None]
        to = tl.max_contiguous(row + at, (2, 1, 1, 4))
        return split4(tl.load(to, inside[:, :, :, None] & (at < K // 4), other=0))
    else:
        at = k[:, :, :, None] + tl.arange(0, 16)[None, None, None, :]
        row = q + (m * K)[:, :, :, None]
        t = tl.load(row + at, inside[:, :, :, None] & (at < K), other=0).to(tl.int32) & 255
        even, odd = tl.split(t.reshape(t.shape[0], t.shape[1], t.shape[2], 4, 2, 2))
        b0, b2 = tl.split(even)
        b1, b3 = tl.split(odd)
        return split4(b0 | (b1 << 8) | (b2 << 16) | (b3 << 24))


@triton.jit
def _add_word(total, less, word, xs, ASM: tl.constexpr):
    """Add a word's 16 products to `total`; `less` is the part common to all rows."""
    if ASM:
        registers: tl.constexpr = "=r,r,r,r,r,r,r"
        operands = [word, xs[0], xs[1], xs[2], xs[3], total]
        total = tl.inline_asm_elementwise(_DOT16, registers, operands, tl.int32, True, 1)
        operands = [xs[0], xs[1], xs[2], xs[3], less]
        less = tl.inline_asm_elementwise(_LESS16, "=r,r,r,r,r,r", operands, tl.int32, True, 1)
    else:
        for j in tl.static_range(16):
            total += (xs[j // 4] << (24 - j % 4 * 8) >> 24) * ternary_digit(word, j)
    return total, less


@triton.jit
def _linear_ternary(
    x, x_scale, w, multiplier, bias, times, residual, y,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    L: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, R: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
    F: tl.constexpr, ACT: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    BN: tl.constexpr = L // BV * R
    V: tl.constexpr = (K + 63) // 64
    first = tl.program_id(0) * BN
    m = (tl.program_id(1) * BM + tl.arange(0, BM))[None, :, None]
    lane = (tl.arange(0, L) % BV)[:, None, None]
    row = rows_of(first, L, BV, R)[:, None, :]
    # Rows beyond the last one repeat it and are not stored.
    row = (row if N % BN == 0 else tl.minimum(row, N - 1)).to(tl.int64)
    total = tl.zeros((L, BM, R), tl.int32)
    less = tl.zeros((L, BM, 1), tl.int32)
    w += row * (V * 4)
    ahead = load_vectors(w, lane, V)
    start(PDL)
    for turn in range(0, V, BV):
        v = turn + lane
        words = split4(ahead)
        if V > BV:
            ahead = load_vectors(w, v + BV, V)
        for c in tl.static_range(4):
            xs = _load16(x, m, v * 64 + c * 16, m < M, K)
            total, less = _add_word(total, less, words[c], xs, ASM)

    total = add_lanes(total + less, BV).to(tl.float32)
    factor = tl.load(x_scale + m, m < M, other=0.0) * tl.load(multiplier)
    total = rounded_product(total, factor, ASM)
    n = rows_of(first, L // BV, 1, R)[:, None, :]
    inside = (m < M) & (n < N)
    finish(total, bias, times, residual, y, m.to(tl.int64), n, inside, N, F, ACT, CAP)


def linear_ternary(
    *,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: DeviceTensor,
    y: torch.Tensor,
    tail: Tail = PLAIN,
    device: Device,
) -> list[Launch]:
    """Lower `ops.linear.linear` for ternary weights and int8 activations with a scale per token."""
    (m, k), n = x.shape, w.shape[0]
    tile = gemv_tile(
        rows=n,
        vectors=-(-k // _WEIGHTS),
        tokens=min(m, MAX_TOKENS),
        copies=1,
        device=device,
        key=f"{w.format.name}/{n}x{k}",
        most=8 if m <= 2 else 2,  # limited by registers
    )
    sizes = {"M": m, "N": n, "K": k, "BM": tile.tokens, **tile.constants}
    stored = {"w": w.planes["codes"], "multiplier": w.planes["scale"]}
    given = {"x": x, "x_scale": x_scale, **stored, **tail.given("linear", y, n)}
    grid = (triton.cdiv(n, tile.rows), triton.cdiv(m, tile.tokens))
    weights = tile.rows_of_lane * _WEIGHTS
    return [launch(_linear_ternary, grid, device, tile.warps, weights, **sizes, **given)]
