"""The `linear` op for few tokens, on tensor cores: W is streamed once and decoded in registers.

The warps of a program share its rows: each takes every other chunk of columns (`fragments`), and
their sums are added at the end. Where W has few rows programs share them, too: the last one to
finish adds what all have written, in order.

A sum's order follows from the shape and format of W alone: a token's result has the same bits
whatever its neighbours.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.bricks import BRICK_WORDS, in_bricks
from clocher_kernels.cuda.codes import rounded_product
from clocher_kernels.cuda.fragments import fixed_zeros, load_tokens, load_weights, multiply
from clocher_kernels.cuda.gemv_bits import gemv_bits
from clocher_kernels.cuda.gemv_bytes import gemv_bytes
from clocher_kernels.cuda.launch import LEAST_TOKENS, TL_TYPES, VERSION, Device, Launch, launch
from clocher_kernels.cuda.prepack import DeviceTensor, Stored, stored
from clocher_kernels.cuda.scalar import Linear, finish, finish_gated, is_last, paired, start
from clocher_kernels.formats.floats import Float, Fp8
from clocher_kernels.formats.ggml import Ggml
from clocher_kernels.formats.integers import Int8
from clocher_kernels.formats.tcq import Tcq


@triton.jit
def _few(
    x, x_scale, w, scales, zeros, bias, times, residual, y, second, third, sums, arrivals,
    C: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = 4 * C.OWN * C.WARPS
    ALL: tl.constexpr = (C.K + STEP - 1) // STEP
    EACH: tl.constexpr = (ALL + C.PARTS - 1) // C.PARTS
    SUM: tl.constexpr = tl.int32 if x_scale is not None else tl.float32
    n0 = tl.program_id(0) * C.BN
    begin = tl.program_id(1) * EACH
    end = tl.minimum((begin + EACH) * STEP, C.K) if C.PARTS > 1 else C.K
    fixed = fixed_zeros(zeros, n0, C)
    # Weights never depend on the predecessor: they are on their way before x is waited for.
    ahead = ()
    for u in tl.static_range(C.TURNS):
        ahead = ahead + (load_weights(w, scales, zeros, n0, begin + u, end, C),)
    start(C.PDL, C.EARLY)
    total = tl.zeros((C.WARPS, C.BN, C.BM), SUM)
    for step in range(0, (EACH + C.TURNS - 1) // C.TURNS):
        turn = begin + step * C.TURNS
        loaded = ahead
        if EACH > C.TURNS:
            ahead = ()
            for u in tl.static_range(C.TURNS):
                later = load_weights(w, scales, zeros, n0, turn + C.TURNS + u, end, C)
                ahead = ahead + (later,)
        for u in tl.static_range(C.TURNS):
            xs = load_tokens(x, turn + u, end, C)
            total = multiply(total, loaded[u], xs, fixed, C)

    total = tl.sum(total, axis=0).to(tl.float32)
    m = tl.arange(0, C.BM)[None, :]
    r = tl.arange(0, C.BN)[:, None]
    if C.PARTS > 1:
        at = (tl.program_id(0) * C.PARTS * C.BN + r) * C.BM + m
        tl.store(sums + at + tl.program_id(1) * (C.BN * C.BM), total)
        if is_last(arrivals + tl.program_id(0), C.PARTS):
            total = tl.zeros((C.BN, C.BM), tl.float32)
            for p in tl.static_range(C.PARTS):
                total += tl.load(sums + at + p * (C.BN * C.BM), cache_modifier=".cg")
            _end(total, x_scale, scales, bias, times, residual, y, second, third, n0, m, r, C)
    else:
        _end(total, x_scale, scales, bias, times, residual, y, second, third, n0, m, r, C)


@triton.jit
def _end(
    total, x_scale, scales, bias, times, residual, y, second, third, n0, m, r, C: tl.constexpr
):
    """Write sums [BN, BM] of rows n0 + r and tokens m, scaled, gated if there is a HALF."""
    n = n0 + r
    there = m < C.M
    factor = tl.full((1, 1), C.UNIT, tl.float32)
    if C.SPAN == 0 and scales is not None:
        own = tl.load(scales + paired(n, C.HALF) * C.SCALE_ROWS, n < C.N, other=0)
        factor *= own.to(tl.float32)
    if x_scale is not None:
        factor = tl.load(x_scale + m, there, other=0.0) * factor
    total = rounded_product(total, tl.broadcast_to(factor, total.shape), C.ASM)
    m = m.to(tl.int64)
    if C.HALF > 0:
        up, gate = tl.split(total.reshape(C.BN // 2, 2, C.BM).permute(0, 2, 1))
        i = n0 // 2 + tl.arange(0, C.BN // 2)[:, None]
        finish_gated(up, gate, bias, y, m, i, there & (i < C.HALF), C)
    else:
        kept = there & (n < C.N)
        finish(total, bias, times, residual, y, m, n, kept, C, second, third)


@dataclass(frozen=True, slots=True)
class FewTile:
    """The tile of a program.

    `words` of a lane's vector, `warps` and the `parts` that programs cut K into set the order of a
    sum and follow from W alone; `rows` and `turns`, the chunks of a warp that are loaded ahead, do
    not.
    """

    rows: int
    turns: int
    warps: int
    parts: int
    words: int


_WARPS = 4
"""Warps of a program."""
_RESIDENT_WARPS = 16
"""Warps of a multiprocessor, with 16 rows each, that have enough bytes in flight."""
_MOST_PARTS = 8
_PER_SMALL = 8
"""Weights of a word from which two warps are as fast for 8 tokens, faster for more."""
_TURNS = {
    8: ((64, 1, 7), (32, 4, 0)),
    16: ((64, 1, 7), (32, 2, 0)),
    32: ((64, 1, 5), (32, 2, 0)),
}
"""Tokens -> rows of a program, turns loaded ahead (what fits registers), and warps that each
multiprocessor must then have: with more rows tokens are loaded less often. Measured on an H200."""


_BUSY = 8
"""Warps of a multiprocessor, with 32 rows each, that keep it reading bricks."""
_MOST_TURNS = 9
"""Bricks of a warp that may all be on their way before the first is needed."""


def _brick_tile(n: int, chunks: int, m: int, device: Device) -> FewTile:
    """Choose the tile for rows of some bricks, as measured on an H200."""
    wide, busy = triton.cdiv(n, 32), _BUSY * device.sms
    warps, parts = _WARPS, 1
    if 2 * wide >= busy:
        warps = 1 if wide >= 3 * busy and chunks <= 32 else 2
    while warps == _WARPS and parts * warps * _MOST_TURNS < chunks and wide * warps * parts < busy:
        parts *= 2
    each, all_warps = triton.cdiv(chunks, warps * parts), wide * warps * parts
    if m <= 8:
        at_once = each <= _MOST_TURNS and all_warps < busy
        rows, turns = (16, each) if at_once else (32, 2)
    elif m <= 16:
        rows, turns = (64, 2) if warps < _WARPS else (32, 1 if parts > 1 else 4)
    else:
        rows, turns = (64, 1) if 8 * all_warps >= 5 * busy else (32, 2)
    return FewTile(rows, min(turns, each), warps, parts, BRICK_WORDS // 4)


def few_tile(held: Stored, n: int, k: int, m: int, device: Device) -> FewTile | None:
    """Choose the tile for `n` rows, `k` columns and `m` tokens; None if W does not fit any."""
    if held.bricks:
        return _brick_tile(n, k // (BRICK_WORDS * held.per), m, device)
    # A chunk of four vectors lies in one group of columns, and a vector in one row.
    words = 4
    while words > 1 and (held.span % (4 * words * held.per) or held.data.shape[-1] % words):
        words //= 2
    if held.span % (4 * words * held.per) or words * held.per < _FEWEST:
        return None
    every, enough = triton.cdiv(k, 4 * words * held.per * _WARPS), _RESIDENT_WARPS * device.sms
    if held.per >= _PER_SMALL and triton.cdiv(n, 16) * _WARPS // 2 >= enough:
        # Rows enough for all multiprocessors with half the warps.
        return FewTile(64, min(2 if m <= 16 else 1, 2 * every), _WARPS // 2, 1, words)
    parts = 1
    while parts < _MOST_PARTS and every > 4 * parts:
        if triton.cdiv(n, 16) * parts * _WARPS >= enough:
            break
        parts *= 2
    rows, turns = next(
        (rows, turns)
        for rows, turns, warps in _TURNS[tokens_of(m)]
        if triton.cdiv(n, rows) * parts * _WARPS >= warps * device.sms
    )
    return FewTile(rows, min(turns, triton.cdiv(every, parts)), _WARPS, parts, words)


_FEWEST = 8
"""Weights of a lane's vector: two of fp16 are a register of `mma`, which takes two at least."""


def tokens_of(m: int) -> int:
    """Return the tokens of a tile for m tokens: 8, 16 or 32."""
    return max(LEAST_TOKENS, triton.next_power_of_2(m))


def as_words(w: DeviceTensor) -> Stored | None:
    """Describe weights by 32-bit words; None for odd rows, ggml's blocks and trellises."""
    held = stored(w)
    size = held.data.itemsize
    if held.data.shape[-1] * size % 4 or isinstance(w.format, Ggml | Tcq):
        return None
    code = w.format.dtype if isinstance(w.format, Float) else held.code
    return replace(held, code=code, data=held.data.view(torch.int32), per=held.per * 4 // size)


def operand_of(held: Stored, x: Tensor, device: Device) -> tuple[torch.dtype, int] | None:
    """Return the operands' type and how many of them x is the sum of; None if W loses bits.

    bf16 holds all codes, and a third of an fp32 number.
    """
    if held.code == "f32" or (held.code == "f16" and x.dtype != torch.float16):
        return None
    if x.dtype == torch.int8:
        return torch.int8, 1
    if x.dtype == torch.float16 and held.code != "bf16":
        return torch.float16, 1
    terms = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[x.dtype]
    # Triton's interpreter cannot multiply bf16.
    return torch.bfloat16 if device.asm else torch.float32, terms


_UNITS = {"int8": 128.0, "e4m3": 256.0, "mxfp4": 16384.0}
"""Codes -> what weights that inline assembly decodes to fp16 must be multiplied by."""


_NARROW = 2 if VERSION > (3, 6) else 4
_SEEN = 8  # zero points are bytes


def near_columns(held: Stored, x: Tensor, tile: FewTile) -> int:
    """Return the columns that Triton puts side by side in a lane (`kWidth` of its layouts).

    It follows from the narrowest load that it sees an operand come from, in the same round of a
    loop. With another number columns change lanes on the way, and sums have another order.
    """
    columns = 4 * tile.words * held.per * tile.warps * tile.parts * tile.turns
    seen = held.zeros is not None and (held.span == 0 or columns >= x.shape[1])
    return _SEEN if seen else _NARROW * (2 if x.dtype == torch.int8 else 1)


_EARLY = 8
"""Tokens up to which the successor is released first (`scalar.start`)."""


def few_tokens(p: Linear, tile: FewTile | None = None) -> list[Launch]:
    """Lower `ops.linear.linear` for up to 32 tokens; no launch if the weight fits no tile."""
    x, device, (m, k), n = p.x, p.device, p.x.shape, p.w.shape[0]
    held = as_words(p.w)
    operand = None if held is None else operand_of(held, x, device)
    if held is None or operand is None:
        return []
    tile = tile or few_tile(held, n, k, m, device)
    if tile is None:
        return []
    if operand[1] == 3 and m > 8:
        # The terms of fp32 need registers, too.
        tile = replace(tile, rows=min(tile.rows, 32), turns=1)
    sizes = {"M": m, "N": n, "K": k, "BN": tile.rows, "BM": tokens_of(m), "WARPS": tile.warps}
    sizes |= {"TURNS": tile.turns, "PARTS": tile.parts, "NEAR": near_columns(held, x, tile)}
    sizes |= {"E": tile.words, "OWN": tile.words * held.per, "EARLY": m <= _EARLY}
    packed = device.asm and operand[0] == torch.float16
    given = {"x": x, "x_scale": p.x_scale, **held.given, **sizes}
    given |= {"UNIT": _UNITS.get(held.code, 1.0) if packed else 1.0}
    given |= {"OPERAND": TL_TYPES[operand[0]], "TERMS": operand[1]}
    given |= p.tail.given("linear", p.y, n)
    tiles = triton.cdiv(n, tile.rows)
    if tile.parts > 1:
        size = (tiles * tile.parts * tile.rows * tokens_of(m),)
        given["sums"] = device.scratch("few tokens", size, torch.float32)
        given["arrivals"] = device.scratch("few tokens", (tiles,), torch.int32)
    weights = tile.turns * tile.rows * 4 * tile.words * held.per // 32
    return [launch(_few, (tiles, tile.parts), device, tile.warps, weights, **given)]


_SEVERAL, _SEVERAL_CODES = 5, 3
"""Tokens from which tensor cores are faster, as measured on an H200; of int8 codes."""


def few(p: Linear) -> list[Launch]:
    """Lower a product for up to 32 tokens.

    Bricks meet tensor cores, always. Other weights do if a token's sum may have another order than
    alone, or is exact.
    """
    exact = p.x_scale is not None
    several = len(p.x) >= (_SEVERAL_CODES if exact else _SEVERAL)
    fits = in_bricks(p.w.format, p.w.shape) or (several and (exact or p.device.fast_batch))
    if fits and (launches := few_tokens(p)):
        return launches
    return (gemv_bytes if isinstance(p.w.format, Float | Int8 | Fp8) else gemv_bits)(p)
