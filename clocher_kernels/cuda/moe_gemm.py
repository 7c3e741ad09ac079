"""Experts for many tokens: pairs of a token and an expert are grouped, and multiplied in tiles.

Four steps: `_group` lists each expert's pairs; words of 4-bit weights get their activations in
another order (`_reorder`); rows of an expert are multiplied by its pairs (`_tile_product`), weights
decoded in registers; down's results are summed for each token (`_sum_choices`). Grids are as large
as any routing needs: programs without a tile end at once. Nothing depends on timing.

A word holds eight weights. As an operand its columns would lie in four threads, so a step of BK
columns is four products instead: the p-th takes elements 2p and 2p + 1 of every word, which stay in
the thread that loaded it. Activations are copied in that order.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.codes import int4_code, mxfp4_value, one_word, to_scale, unit
from clocher_kernels.cuda.dots import await_products
from clocher_kernels.cuda.launch import LEAST_TOKENS, TL_TYPES, Device, Launch, launch
from clocher_kernels.cuda.linear import decoded, operand_type, repeated
from clocher_kernels.cuda.prepack import DeviceTensor, Stored, stored
from clocher_kernels.cuda.scalar import as_activation, gated, or_nan, start
from clocher_kernels.formats.ggml import Ggml
from clocher_kernels.formats.tcq import Tcq

# Each turns a word $1 into elements 2p and 2p + 1, an fp16 pair. mxfp4: the bits that fp16 has for
# the magnitude and the sign, times the pair of factors $2.
_BITS = "and.b32 t, t, 0x8e008e00; mul.f16x2 $0, t, $2; }"
_LOWER = "shr.u32 t, $1, 3; shl.b32 u, $1, 7; lop3.b32 t, t, u, 0x0e0e0e0e, 0xe4; "
_MXFP4 = tl.constexpr(
    (
        "{ .reg .b32 t; mov.b32 t, $1; " + _BITS,
        "{ .reg .b32 t; shl.b32 t, $1, 8; " + _BITS,
        "{ .reg .b32 t, u; " + _LOWER + _BITS,
        "{ .reg .b32 t, u; " + _LOWER + "shl.b32 t, t, 8; " + _BITS,
    )
)
# int4: 1024 + code, less the pair $2 of 1024 + zero point.
_CODES = "lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; sub.f16x2 $0, t, $2; }"
_SHIFTS = ("mov.b32 t, $1; ", *(f"shr.u32 t, $1, {bits}; " for bits in (4, 8, 12)))
_INT4 = tl.constexpr(tuple("{ .reg .b32 t; " + shift + _CODES for shift in _SHIFTS))


@triton.jit
def _group(ids, order, counts, C: tl.constexpr):
    """List the pairs of an expert in order[expert], ascending."""
    start(C.PDL)
    expert = tl.program_id(0)
    count = 0
    for first in range(0, C.P, C.BP):
        pair = first + tl.arange(0, C.BP)
        own = tl.load(ids + pair, pair < C.P, other=-1) == expert
        place = count + tl.cumsum(own.to(tl.int32), 0) - 1
        tl.store(order + expert * C.P + place, pair, own)
        count += tl.sum(own.to(tl.int32), 0)
    tl.store(counts + expert, count)


@triton.jit
def _reorder(x, y, C: tl.constexpr):
    """Copy rows of W pairs: pair 4w + p of a step of 4 BW becomes pair BW p + w; 0 beyond W."""
    start(C.PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * C.BLOCK + tl.arange(0, C.BLOCK)
    inside = at % (4 * C.BW)
    source = at - inside + inside % C.BW * 4 + inside // C.BW
    pair = tl.load(x + row * C.W + source, source < C.W, other=0)
    tl.store(y + row * C.WY + at, pair, at < C.WY)


@triton.jit
def _tile_of(counts, tile, C: tl.constexpr):
    """Return a tile's expert, at least E if there is none, its first pair, and the expert's pairs.

    Experts have their tiles in turn.
    """
    expert = tl.arange(0, C.BE)
    count = tl.load(counts + expert, expert < C.E, other=0)
    ends = tl.cumsum((count + C.BM - 1) // C.BM, 0)
    own = tl.sum((ends <= tile).to(tl.int32), 0)
    before = tl.max(tl.where(ends <= tile, ends, 0), 0)
    return own, (tile - before) * C.BM, tl.sum(tl.where(expert == own, count, 0), 0)


@triton.jit
def _largest_code(scales, row, BLOCKS: tl.constexpr, BN: tl.constexpr, TURN: tl.constexpr):
    """Return the largest of each row's scale codes, int32 [BN]."""
    largest = tl.zeros((BN,), tl.int32)
    for first in range(0, BLOCKS, TURN):
        at = tl.minimum(first + tl.arange(0, TURN), BLOCKS - 1)
        codes = tl.load(scales + row.to(tl.int64)[:, None] * BLOCKS + at[None, :])
        largest = tl.maximum(largest, tl.max(codes.to(tl.int32), 1))
    return largest


@triton.jit
def _pair(word, adjust, P: tl.constexpr, CODE: tl.constexpr, ASM: tl.constexpr):
    """Return elements 2P and 2P + 1 of words [BN, W], fp16 [BN, W, 2]; `adjust`: see _MXFP4."""
    if ASM:
        ASSEMBLY: tl.constexpr = _MXFP4[P] if CODE == "mxfp4" else _INT4[P]
        both = one_word(ASSEMBLY, (word, adjust))
        low, high = both.to(tl.int16), (both >> 16).to(tl.int16)
        return tl.join(low, high).to(tl.float16, bitcast=True)
    else:
        number = adjust.to(tl.int16).to(tl.float16, bitcast=True)
        if CODE == "mxfp4":
            low = mxfp4_value(word, 2 * P) * 6.103515625e-05 * number
            high = mxfp4_value(word, 2 * P + 1) * 6.103515625e-05 * number
        else:
            low = (int4_code(word, 2 * P) + 1024).to(tl.float16) - number
            high = (int4_code(word, 2 * P + 1) + 1024).to(tl.float16) - number
        return tl.join(low, high)


@triton.jit
def _pairs(word, adjust, CODE: tl.constexpr, ASM: tl.constexpr):
    """Return words [BN, W] decoded to fp16 [BN, 8 W], in the order of `_reorder`."""
    even = tl.join(_pair(word, adjust, 0, CODE, ASM), _pair(word, adjust, 2, CODE, ASM))
    odd = tl.join(_pair(word, adjust, 1, CODE, ASM), _pair(word, adjust, 3, CODE, ASM))
    # The dimensions of the join are (row, word, half, p // 2, p % 2).
    wt = tl.join(even, odd).permute(0, 3, 4, 1, 2)
    return wt.reshape(word.shape[0], word.shape[1] * 8)


@triton.jit
def _multiply(x, source, expert, row, w, scales, zeros, C: tl.constexpr):
    """Multiply rows [BN] of all experts' by the rows [BM] of x: fp32 [BN, BM]."""
    # mxfp4's scales, divided by the row's largest, are exact in fp16.
    SCALED: tl.constexpr = C.CODE == "mxfp4" and C.PAIRED
    w_rows = w + row.to(tl.int64)[:, None] * C.STRIDE
    x_rows = x + source[None, :] * C.KX
    groups = row.to(tl.int64)[:, None] * tl.cdiv(C.K, C.SPAN if C.SPAN > 0 else C.K)
    if SCALED:
        largest = _largest_code(scales, row, C.K // C.SPAN, C.BN, 128)
    total = tl.zeros((C.BN, C.BM), tl.float32)
    for k0 in range(0, C.K, C.BK):
        element = k0 // C.PER + tl.arange(0, C.BK // C.PER)
        held = tl.load(w_rows + element[None, :], (element < C.STRIDE)[None, :], 0)
        k = k0 + tl.arange(0, C.BK)
        xt = tl.load(x_rows + k[:, None], (k < C.KX)[:, None], 0).to(C.OPERAND)
        if C.CODE == "int4":
            zero = tl.full((C.BN, 1), 8, tl.int32)
            if zeros is not None:
                zero = tl.load(zeros + groups + (k0 // C.SPAN if C.SPAN > 0 else 0)).to(tl.int32)
        if SCALED:
            block = tl.minimum(k0 // C.SPAN + tl.arange(0, C.BK // C.SPAN), C.K // C.SPAN - 1)
            code = tl.load(scales + groups + block[None, :]).to(tl.int32) - largest[:, None]
            factor = repeated(tl.maximum(code + 30, 0) * 0x04000400, C.SPAN // C.PER)  # <= 2^15
            wt = _pairs(held, factor, C.CODE, C.ASM).to(C.OPERAND)
        elif C.PAIRED:
            offset = repeated(zero * 0x00010001 + 0x64006400, C.BK // C.PER)
            wt = _pairs(held, offset, C.CODE, C.ASM).to(C.OPERAND)
        else:
            wt = decoded(held, C)
            if C.CODE == "int4":
                wt -= zero.to(C.OPERAND)
        if SCALED or C.SPAN == 0:
            total = tl.dot(wt, xt, total, input_precision="ieee")
        else:
            # Codes are exact in the operands' type; the sum is scaled.
            part = tl.dot(wt, xt, input_precision="ieee")
            total += part * to_scale(tl.load(scales + groups + k0 // C.SPAN), C.CODE)
        await_products(k0, C.WGMMA)
    total *= C.UNIT
    if SCALED:
        total *= to_scale(largest, C.CODE)[:, None] * 0.5
    elif C.SPAN == 0 and scales is not None:
        own = row if C.SCALE_ROWS == 1 else row * 0 + expert
        total *= to_scale(tl.load(scales + own), C.CODE)[:, None]
    return total


@triton.jit
def _tile_product(x, order, counts, factors, w, scales, zeros, bias, y, C: tl.constexpr):
    """Multiply BN rows of an expert by BM of its pairs; A pairs share a row of x.

    With ACT the factors are of x, and y gets hidden values; without, they are of what y gets.
    """
    start(C.PDL)
    expert, first, count = _tile_of(counts, tl.program_id(0), C)
    if expert < C.E:
        # Pairs and rows beyond the last repeat it and are not stored.
        place = first + tl.arange(0, C.BM)
        pair = tl.load(order + expert * C.P + tl.minimum(place, count - 1))
        own = (place < count)[None, :]
        n = tl.arange(0, C.BN)
        if C.ACT != "":
            # Eight gates, then their eight ups: both are in one thread's part of the sums.
            n = n // 16 * 16 + n % 8 * 2 + n // 8 % 2
        n += tl.program_id(1) * C.BN
        row = expert * C.N + tl.minimum(n, C.N - 1)
        total = _multiply(x, pair // C.A, expert, row, w, scales, zeros, C)
        if C.ACT != "" and factors is not None:
            total *= tl.load(factors + pair)[None, :]
        if bias is not None:
            total += tl.load(bias + row)[:, None]
        if C.ACT != "":
            h = or_nan(total).reshape(C.BN // 16, 2, 8, C.BM).permute(0, 2, 3, 1)
            gate, up = tl.split(h.reshape(C.BN // 2, C.BM, 2))
            hidden = as_activation(gated(gate, up, C), y)
            i = tl.program_id(1) * (C.BN // 2) + tl.arange(0, C.BN // 2)[:, None]
            tl.store(y + (pair[None, :] * (C.N // 2) + i), hidden, (i < C.N // 2) & own)
        else:
            if factors is not None:
                total *= tl.load(factors + pair)[None, :]
            tl.store(y + (pair[None, :] * C.N + n[:, None]), total, (n < C.N)[:, None] & own)


@triton.jit
def _sum_choices(x, residual, y, C: tl.constexpr):
    """Sum the A rows of a token in order, and its residual."""
    start(C.PDL)
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * C.BN + tl.arange(0, C.BN)
    total = tl.zeros((C.BN,), tl.float32)
    for a in tl.static_range(C.A):
        total += tl.load(x + (m * C.A + a) * C.N + n, n < C.N, other=0.0)
    if residual is not None:
        total += tl.load(residual + m * C.N + n, n < C.N, other=0.0).to(tl.float32)
    tl.store(y + m * C.N + n, total.to(y.dtype.element_ty), n < C.N)


_BLOCK = 1024
"""Pairs that are listed together; values that a program copies or sums."""


def fits(w: DeviceTensor) -> bool:
    """Return whether tiles take a format: groups of whole operands, no ggml blocks or trellises."""
    return stored(w).span % 16 == 0 and not isinstance(w.format, Ggml | Tcq)


def down(
    x: Tensor,
    ids: Tensor,
    w: DeviceTensor,
    y: Tensor,
    device: Device,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> list[Launch]:
    """Lower `ops.moe.moe_down`."""
    (m, a), n = ids.shape, w.shape[1]
    parts = device.scratch("moe_down", (m * a, n), torch.float32)
    given = {"factors": weights, "bias": bias, "y": parts, "A": 1, "ACT": ""}
    launches = tiles(x.flatten(0, 1), ids, w, device, **given)
    sums = {"x": parts, "residual": residual, "y": y, "A": a, "N": n, "BN": _BLOCK}
    return [*launches, launch(_sum_choices, (m, triton.cdiv(n, _BLOCK)), device, 4, **sums)]


def tiles(x: Tensor, ids: Tensor, w: DeviceTensor, device: Device, **given: Any) -> list[Launch]:
    """Return the launches that list pairs, reorder the rows of x and multiply them."""
    (experts, n, k), pairs, held = w.shape, ids.numel(), stored(w)
    operand = operand_type(x.dtype, device)
    paired = _paired(held, k, operand)
    tile = _tile(held, paired, operand, pairs // experts, device)
    order = device.scratch("moe_order", (experts, pairs), torch.int32)
    counts = device.scratch("moe_counts", (experts,), torch.int32)
    listed = {"ids": ids, "order": order, "counts": counts, "P": pairs, "BP": _BLOCK}
    launches = [launch(_group, (experts,), device, 4, **listed)]
    if paired:
        wide = triton.cdiv(k, tile.bk) * tile.bk
        copy = device.scratch("moe_x", (len(x), wide), x.dtype)
        turned = {"x": x.view(torch.int32), "y": copy.view(torch.int32), "BW": tile.bk // 8}
        turned |= {"W": k // 2, "WY": wide // 2, "BLOCK": _BLOCK}
        grid = (len(x), triton.cdiv(wide // 2, _BLOCK))
        launches.append(launch(_reorder, grid, device, 4, **turned))
        x = copy
    given |= {"x": x, "order": order, "counts": counts, "P": pairs}
    given |= {"E": experts, "BE": triton.next_power_of_2(experts), "N": n, "K": k}
    given |= {"KX": x.shape[1], "BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "PAIRED": paired}
    given |= {**held.given, "UNIT": unit(held.code, "pairs"), "OPERAND": TL_TYPES[operand]}
    most = min(pairs, (pairs + min(experts, pairs) * (tile.bm - 1)) // tile.bm)
    grid = (most, triton.cdiv(n, tile.bn))
    return [*launches, launch(_tile_product, grid, device, tile.warps, 0, tile.stages, **given)]


@dataclass(frozen=True, slots=True)
class _Tile:
    """Pairs, rows and columns of a step, warps and stages of a program."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


def _paired(held: Stored, k: int, operand: torch.dtype) -> bool:
    """Return whether words are decoded by pairs, see `_pairs`."""
    words = held.code == "mxfp4" or (held.code == "int4" and held.span % 64 == 0)
    return words and operand != torch.float32 and k % 8 == 0


def _tile(held: Stored, paired: bool, operand: torch.dtype, pairs: int, device: Device) -> _Tile:
    """Choose a tile for experts with some `pairs` each on average."""
    most = 128 if device.capability == 90 else 64
    bm = min(max(16, triton.next_power_of_2(pairs)), most)
    if operand == torch.float32:
        return _Tile(min(bm, 32), 64, 32 if held.span % 32 == 0 else 16, 4, 1)
    bk = 128 if paired else 64
    scaled = paired and held.code == "mxfp4"
    if scaled and pairs < 8:  # so few that weights are all that is read, as measured on an H200
        return _Tile(LEAST_TOKENS, 64, 256, 4, 3)
    while held.span % bk and not scaled:
        bk //= 2
    # Where sums are scaled, a program holds two of them.
    sums = 1 if scaled or held.span == 0 else 2
    return _Tile(bm, 128, bk, 8 if bm * sums > 64 else 4, 3)
