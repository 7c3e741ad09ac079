"""GEMV for weights of less than a byte, and for those of experts; W is streamed once.

A token's sum has one order whatever the number of tokens. Ternary weights times int8 activations
are bit-identical to the reference: products are kept apart from later sums, which the compiler
would fuse into one rounding.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.codes import one_word, rounded_product, ternary_digit, to_scale
from clocher_kernels.cuda.dots import load_each, split4, vector_dot
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.prepack import vectors_of
from clocher_kernels.cuda.scalar import Linear, finish, finish_gated, paired, part_of, start
from clocher_kernels.cuda.trellis import trellis_rows
from clocher_kernels.cuda.words import scales_of_row

_RESIDENT_WARPS = 20
"""Warps per multiprocessor from which more do not help, as measured on an H200."""

_LANES = (16, 8, 32, 64, 128)
"""Vectors read side by side, at least 128 bytes of a row; fewer reuse activations more."""

_MOST_LANES = 512
"""Lanes of a program; twice as many would leave a thread too few registers."""

_WORTH = {8: 1.0, 4: 0.95, 2: 0.45}
"""Rows of a lane -> relative value: more rows reuse loaded activations more."""

_OF_LOOKED_UP = 10, {4: 1.0, 2: 0.9}
"""The same two for trellises, whose idle lanes look up what others need: an estimate."""

_ROWS = 8
"""Rows of a lane for three tokens and more, as measured on an H200."""


@dataclass(frozen=True, slots=True)
class GemvTile:
    """The tile of a GEMV program: `vectors` adjacent lanes share `rows_of_lane` rows of W."""

    warps: int
    vectors: int
    tokens: int
    rows_of_lane: int

    @property
    def rows(self) -> int:
        """Rows of W of the program."""
        return 32 * self.warps // self.vectors * self.rows_of_lane

    @property
    def constants(self) -> dict[str, int]:
        """The kernels' names of its lanes, vectors and rows of a lane."""
        return {"L": 32 * self.warps, "BV": self.vectors, "R": self.rows_of_lane}

    def grid(self, rows: int, tokens: int) -> tuple[int]:
        """Return the programs for a matrix of some rows and for some tokens."""
        return (triton.cdiv(rows, self.rows) * triton.cdiv(tokens, self.tokens),)


def gemv_tile(
    *,
    rows: int,
    vectors: int,
    tokens: int,
    copies: int,
    device: Device,
    most: int = 8,
    beside: int = 1,
    looked_up: bool = False,
) -> GemvTile:
    """Choose the tile of y = x W^T for some tokens of a program.

    The tile's `vectors` set the summation order and do not depend on `tokens`. A row of W has
    `vectors` 16-byte vectors; `copies` matrices (experts) meet one token at a time, `beside` of
    them in a program; `most` limits rows of a lane. Weights that are `looked_up` cost more.
    """
    together = 1 << (tokens - 1).bit_length()
    if device.capability == 0:
        # Triton's interpreter costs time per program, whatever its size.
        return GemvTile(1, 8, together, 16)

    warps_enough, worth = _OF_LOOKED_UP if looked_up else (_RESIDENT_WARPS, _WORTH)
    few = [lanes for lanes in _LANES if lanes * beside <= _MOST_LANES or lanes == min(_LANES)]

    def score(cut: tuple[int, int]) -> float:
        lanes, of_lane = cut
        turns = -(-vectors // lanes)
        busy = vectors / (turns * lanes)
        warps = rows * copies * lanes / (32 * of_lane)
        return busy * min(1.0, warps / (device.sms * warps_enough)) * worth[of_lane]

    lanes, of_lane = max(((b, r) for b in few for r in worth), key=score)
    of_lane = min(of_lane if together < 4 else _ROWS, most)
    return GemvTile(max(1, lanes // 32), lanes, together, of_lane)


@triton.jit
def load_vectors(w, v, V: tl.constexpr):
    """Load vectors v of rows at w: i32 [L, 1, R, 4]; beyond V, where x is 0, the last repeats."""
    return _load_words(w, tl.minimum(v, V - 1), 4)


@triton.jit
def _load_words(w, v, COUNT: tl.constexpr):
    at = v[:, :, :, None] * COUNT + tl.arange(0, COUNT)[None, None, None, :]
    to = tl.max_contiguous(w[:, :, :, None] + at, (2, 1, 1, COUNT))
    return tl.load(to, eviction_policy="evict_first")


@triton.jit
def _load_above(w, v, V: tl.constexpr, FORMAT: tl.constexpr):
    """Load the words with the bits above four that vectors v of int5 and int6 have, a tuple."""
    v = tl.minimum(v, V - 1)
    if FORMAT == "int6":
        first, second = tl.split(_load_words(w + V * 4, v, 2))
        return first, second
    else:
        return (load_each(w + V * 4 + v, v < V),)


@triton.jit
def stream_rows(
    x, tokens, row, w, scales, zeros,
    C: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr = False,
):  # fmt: skip
    """Multiply rows of W by tokens: partial sums fp32 [L, BM, R].

    BV adjacent lanes share rows. `row` are row numbers [L, 1, R]; w, scales and zeros (of trellises
    the scales of groups) point to whole tensors; x and tokens are those of `vector_dot`. PDL,
    EARLY: see `start`.
    """
    if C.BITS > 0:
        return trellis_rows(x, tokens, row, w, zeros, C, PDL, EARLY)
    else:
        return _stream_words(x, tokens, row, w, scales, zeros, C, PDL, EARLY)


@triton.jit
def _stream_words(
    x, tokens, row, w, scales, zeros, C: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr
):
    V: tl.constexpr = (C.K + C.WEIGHTS - 1) // C.WEIGHTS
    GROUPS: tl.constexpr = (C.K + C.SPAN - 1) // C.SPAN if C.SPAN > 0 else 1
    # Words of the bits above four follow those of all vectors.
    w += row * (V * 4 + (V * C.ABOVE + 3) // 4 * 4)
    zero = tl.full((1, 1, 1), 8 << C.ABOVE, tl.int32)
    if C.SPAN > 0:
        scales += row * scales_of_row(scales, C.K, C.SPAN)
    if zeros is not None and C.SPAN > 0:
        zeros += row * GROUPS
    elif zeros is not None:
        zero = tl.load(zeros + row).to(tl.int32)
    lane = (tl.arange(0, row.shape[0]) % C.BV)[:, None, None]
    total = tl.zeros((row.shape[0], tokens.shape[1], row.shape[2]), tl.float32)
    # The next turn's weights are in flight while this turn's are multiplied.
    ahead = load_vectors(w, lane, V)
    if C.ABOVE > 0:
        above = _load_above(w, lane, V, C.CODE)
    start(PDL, EARLY)
    for first in range(0, V, C.BV):
        v = first + lane
        words = split4(ahead)
        if V > C.BV:
            ahead = load_vectors(w, v + C.BV, V)
        if C.ABOVE > 0:
            words = words + above
            if V > C.BV:
                above = _load_above(w, v + C.BV, V, C.CODE)
        total += vector_dot(x, tokens, v * C.WEIGHTS, words, scales, zeros, zero, C)
    if C.CODE == "mxfp4" and C.PAIRS == "words":
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
def _gemv_bits(x, w, scales, zeros, bias, times, residual, y, second, third, C: tl.constexpr):
    BN: tl.constexpr = C.L // C.BV * C.R
    part, token0 = part_of(C.M, C.BM)
    first = part * BN
    m = tl.arange(0, C.BM)[None, :, None]
    there = m < C.M - token0 if C.M % C.BM > 0 else m < C.BM
    # 64-bit row numbers share one address; with more tokens ptxas would spill.
    MORE: tl.constexpr = 2 if C.CODE == "int5" or C.CODE == "int6" else 8
    row = rows_of(first.to(tl.int64) if C.BM < MORE else first, C.L, C.BV, C.R)[:, None, :]
    # Rows beyond the last one repeat it and are not stored, so that loads need no mask for them.
    row = paired(row if C.N % BN == 0 else tl.minimum(row, C.N - 1), C.HALF).to(tl.int64)
    total = stream_rows(x + token0 * C.K + m * C.K, there, row, w, scales, zeros, C, C.PDL, True)

    total = add_lanes(total, C.BV)
    n = rows_of(first, C.L // C.BV, 1, C.R)[:, None, :]
    rows = n < C.N
    if C.SPAN == 0:
        scale = tl.load(scales + paired(n, C.HALF) * C.SCALE_ROWS, rows, other=0)
        total *= to_scale(scale, C.CODE)
    _end(total, bias, times, residual, y, second, third, first, token0 + m, n, there & rows, C)


@triton.jit
def _end(total, bias, times, residual, y, second, third, first, m, n, kept, C: tl.constexpr):
    """Write sums [L / BV, BM, R] of the rows from `first` on, gated if there is a HALF."""
    if C.HALF > 0:
        up, gate = tl.split(total.reshape(C.L // C.BV, C.BM, C.R // 2, 2))
        i = rows_of(first // 2, C.L // C.BV, 1, C.R // 2)[:, None, :]
        finish_gated(up, gate, bias, y, m, i, (m < C.M) & (i < C.HALF), C)
    else:
        finish(total, bias, times, residual, y, m, n, kept, C, second, third)


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
        total = one_word(_DOT16, (word,) + xs + (total,))
        less = one_word(_LESS16, xs + (less,))
    else:
        for j in tl.static_range(16):
            total += (xs[j // 4] << (24 - j % 4 * 8) >> 24) * ternary_digit(word, j)
    return total, less


@triton.jit
def _linear_ternary(
    x, x_scale, w, scales, bias, times, residual, y, second, third, C: tl.constexpr
):
    BN: tl.constexpr = C.L // C.BV * C.R
    V: tl.constexpr = (C.K + 63) // 64
    part, token0 = part_of(C.M, C.BM)
    first = part * BN
    m = token0 + tl.arange(0, C.BM)[None, :, None]
    lane = (tl.arange(0, C.L) % C.BV)[:, None, None]
    row = rows_of(first, C.L, C.BV, C.R)[:, None, :]
    # Rows beyond the last one repeat it and are not stored.
    row = paired(row if C.N % BN == 0 else tl.minimum(row, C.N - 1), C.HALF).to(tl.int64)
    total = tl.zeros((C.L, C.BM, C.R), tl.int32)
    less = tl.zeros((C.L, C.BM, 1), tl.int32)
    w += row * (V * 4)
    ahead = load_vectors(w, lane, V)
    start(C.PDL, C.M == 1)
    for turn in range(0, V, C.BV):
        v = turn + lane
        words = split4(ahead)
        if V > C.BV:
            ahead = load_vectors(w, v + C.BV, V)
        for c in tl.static_range(4):
            xs = _load16(x, m, v * 64 + c * 16, m < C.M, C.K)
            total, less = _add_word(total, less, words[c], xs, C.ASM)

    total = add_lanes(total + less, C.BV).to(tl.float32)
    n = rows_of(first, C.L // C.BV, 1, C.R)[:, None, :]
    factor = tl.load(x_scale + m, m < C.M, other=0.0)
    if C.SCALE_ROWS:
        factor *= tl.load(scales + paired(n, C.HALF), n < C.N, other=0.0)
    else:
        factor *= tl.load(scales)
    total = rounded_product(total, factor, C.ASM)
    _end(
        total, bias, times, residual, y, second, third, first, m.to(tl.int64), n,
        (m < C.M) & (n < C.N), C,
    )  # fmt: skip


_MINIMA = (torch.int16, torch.int32)
"""Types of scales with minima, see `prepack`."""


def gemv_bits(p: Linear) -> list[Launch]:
    """Lower `ops.linear.linear` for few tokens and weights of less than a byte.

    int8 activations, with a scale per token, are for ternary weights.
    """
    device, (m, k), n = p.device, p.x.shape, p.w.shape[0]
    held = vectors_of(p.w)
    pairs = held.pairs(p.x, device)
    # One token with eight rows of int4 took a seventh longer on an H200.
    most, tokens = 4 if m == 1 else 8, min(m, 2)
    if p.x_scale is not None:
        most, tokens = 8 if m <= 2 else 2, min(m, 8)
    elif held.code.startswith("tcq"):
        most, tokens = 4 if m <= 2 else 2, min(m, 4)  # what fits registers
    elif pairs and held.code == "int4" and held.scales.dtype not in _MINIMA:
        tokens = min(m, 4)  # what fits registers
    tile = gemv_tile(
        rows=n,
        vectors=-(-k // held.vector),
        tokens=tokens,
        copies=1,
        device=device,
        most=most,
        looked_up=held.code.startswith("tcq"),
    )
    sizes = {"M": m, "N": n, "K": k, "BM": tile.tokens, **tile.constants}
    given = {"x": p.x, **held.given, "PAIRS": pairs}
    given |= p.tail.given("linear", p.y, n)
    kernel = _gemv_bits
    if p.x_scale is not None:
        kernel, given["x_scale"] = _linear_ternary, p.x_scale
    weights = tile.rows_of_lane * held.vector
    return [launch(kernel, tile.grid(n, m), device, tile.warps, weights, **sizes, **given)]
