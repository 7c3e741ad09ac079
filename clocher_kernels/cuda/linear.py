"""The `linear` op: GEMV kernels for up to 32 tokens; here, tiles for more, decoded in the kernel.

Weights are the left operand, which tensor cores take from registers: decoded to the activations'
type, scales of groups included. Sums are fp32; ternary weights times int8 activations are exact.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.codes import (
    decode_words,
    in_order,
    mxfp4_value,
    rounded_product,
    to_f16,
    unit,
)
from clocher_kernels.cuda.dots import await_products
from clocher_kernels.cuda.few_tokens import few
from clocher_kernels.cuda.gemv_bytes import MOST_SLICED
from clocher_kernels.cuda.launch import TL_TYPES, Device, Launch, launch
from clocher_kernels.cuda.prepack import DeviceTensor, Stored, stored
from clocher_kernels.cuda.scalar import Linear, Tail, finish, is_last, start
from clocher_kernels.cuda.trellis import trellis_tile
from clocher_kernels.cuda.words import (
    brick_column,
    brick_row,
    load_scales,
    scale_of,
    scaled_words,
    scales_of_row,
    word_code,
)
from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.ops.linear import sums_exactly


@triton.jit
def _digits(w):
    """Decode ternary words [BN, BW] to int8 [BN, BW * 16]."""
    fours = ()
    for g in tl.static_range(4):
        # Four bytes -1, 0 or 1; the sign bit keeps them from borrowing.
        t = (((w >> 2 * g) & 0x03030303 | -2139062144) - 0x01010101) ^ -2139062144
        even = tl.join(t.to(tl.int8), (t >> 16).to(tl.int8))
        odd = tl.join((t >> 8).to(tl.int8), (t >> 24).to(tl.int8))
        fours = fours + (tl.join(even, odd),)
    # (BN, BW, b // 2, b % 2, g % 2, g // 2) of element 4g + b
    both = tl.join(tl.join(fours[0], fours[1]), tl.join(fours[2], fours[3]))
    return both.permute(0, 1, 5, 4, 2, 3).reshape(w.shape[0], w.shape[1] * 16)


@triton.jit
def decoded(held, C: tl.constexpr):
    """Decode loaded weights to [BN, BK] in the operands' type, without scale and zero point."""
    if C.CODE == "digits":
        return _digits(held)
    elif C.CODE == "int4" or C.CODE == "mxfp4" or C.CODE == "ternary":
        return decode_words(held, C.CODE, C.OPERAND)
    elif C.CODE == "float":
        return held.to(C.OPERAND)
    else:
        return to_f16(held, C.CODE, C.ASM).to(C.OPERAND)


@triton.jit
def _scaled(held, above, scale, added, zero, C: tl.constexpr, MINIMA: tl.constexpr):
    """Decode loaded weights to [BN, BK], `above` the bits above their words' (`above_of`).

    Scales, what is added if there are MINIMA, and zero points are [BN, 1], or those of each GRAIN
    columns.
    """
    INT4: tl.constexpr = C.CODE == "int4" and tl.bfloat16 == C.OPERAND and not MINIMA
    if C.ASM and C.GRAIN == 8 and (INT4 or tl.float16 == C.OPERAND):
        scale, added = scale.to(C.OPERAND), added.to(C.OPERAND)
        return scaled_words(held, above, scale, added, zero, C.CODE, MINIMA)
    elif C.GRAIN == 8 and MINIMA:
        v = ()
        for j in tl.static_range(8):
            v = v + ((word_code(held, above, j, C.CODE) - zero) * scale + added,)
        return in_order(v).to(C.OPERAND)
    elif C.GRAIN == 8:
        # Words without inline assembly.
        scale, v = scale.to(C.OPERAND), ()
        for j in tl.static_range(8):
            if C.CODE != "mxfp4":
                v = v + ((word_code(held, above, j, C.CODE) - zero).to(C.OPERAND) * scale,)
            else:
                v = v + (mxfp4_value(held, j).to(C.OPERAND) * scale,)
        return in_order(v)
    else:
        wt = decoded(held, C)
        if C.CODE == "int4":
            wt -= zero.to(C.OPERAND)
        return wt * scale.to(C.OPERAND)


@triton.jit
def repeated(groups, COUNT: tl.constexpr):
    """Repeat what groups of columns have, [BN, G], for each of their COUNT elements."""
    BN: tl.constexpr = groups.shape[0]
    G: tl.constexpr = groups.shape[1]
    return tl.broadcast_to(groups[:, :, None], (BN, G, COUNT)).reshape(BN, G * COUNT)


@triton.jit
def _gemm(
    x, x_scale, w, scales, zeros, bias, times, residual, y, partial, arrivals, C: tl.constexpr
):
    start(C.PDL)
    # Programs that run together share rows of W; the tokens are in L2.
    m = tl.program_id(0) * C.BM + tl.arange(0, C.BM)
    n = tl.program_id(1) * C.BN + tl.arange(0, C.BN)
    # Rows and tokens beyond the last repeat it and are not stored: loads need no mask for them.
    row = tl.minimum(n, C.N - 1)
    COLUMNS: tl.constexpr = (C.K + C.SPLITS * C.BK - 1) // (C.SPLITS * C.BK) * C.BK
    split = tl.program_id(2)
    begin = split * COLUMNS if C.SPLITS > 1 else 0
    stop = tl.minimum(begin + COLUMNS, C.K) if C.SPLITS > 1 else C.K
    element, k = tl.arange(0, C.BK // C.PER), tl.arange(0, C.BK)
    if C.BRICK > 0:
        own = brick_column(element, C.BRICK) if C.PER == 1 else element
        w_row = w + brick_row(row.to(tl.int64), C.STRIDE, C.BRICK)[:, None] + own[None, :]
    w_at = w + row.to(tl.int64)[:, None] * C.STRIDE + (begin // C.PER + element)[None, :]
    x_at = x + tl.minimum(m, C.M - 1)[None, :] * C.K + (begin + k)[:, None]
    zero = tl.full((1, 1), 8 << C.ABOVE, tl.int32)
    if C.ABOVE > 0:
        # The words with the bits above, each of some words' that lie side by side.
        SHARED: tl.constexpr = 4 // C.ABOVE
        shift = (element % SHARED * C.ABOVE)[None, :]
        at = C.K // C.PER + (begin // C.PER + element) // SHARED
        above_at = w + row.to(tl.int64)[:, None] * C.STRIDE + at[None, :]
    if C.SPAN > 0:
        # The next step's scales are on their way while this one's weights are multiplied.
        WHOLE: tl.constexpr = C.BK % C.SPAN == 0 and C.SPAN % C.GRAIN == 0
        PARTS: tl.constexpr = (
            1 if C.SPAN % C.BK == 0 else (C.BK // C.SPAN if WHOLE else C.BK // C.GRAIN)
        )
        part = tl.arange(0, PARTS)[None, :] * (C.BK // PARTS)
        HELD: tl.constexpr = scales.dtype.element_ty
        MINIMA: tl.constexpr = HELD == tl.int16 or HELD == tl.int32  # noqa: SIM300
        group = (row // C.SCALE_ROWS).to(tl.int64)[:, None]
        APART: tl.constexpr = 8 if C.BRICK > 0 else 1  # scales of a row
        if C.BRICK > 0:
            group = brick_row(group, tl.cdiv(C.K, C.SPAN), 1)
            scales += group
        else:
            scales += group * scales_of_row(scales, C.K, C.SPAN)
            group *= tl.cdiv(C.K, C.SPAN)
        now = tl.minimum(begin + part, C.K - 1)
        scale, head = load_scales(scales, now, C.SPAN, APART)
        if zeros is not None:
            zero = tl.load(zeros + group + now // C.SPAN * APART).to(tl.int32)
    elif zeros is not None and C.BITS == 0:
        zero = tl.load(zeros + row * C.SCALE_ROWS)[:, None].to(tl.int32)

    total = tl.zeros((C.BN, C.BM), tl.float32 if x_scale is None else tl.int32)
    for k0 in range(begin, stop, C.BK):
        if C.BRICK > 0:
            # A step has bricks, or words of one. A hint at what a function returns would be lost.
            first = k0 * 8 if C.PER == 1 else (k0 & -128) + (k0 & 127) // 8
            first = tl.multiple_of(first, C.BK // C.PER)
            held, xt = tl.load(w_row + first), tl.load(x_at)
        elif C.BITS > 0:
            held, xt = trellis_tile(w, zeros, row, k0, C), tl.load(x_at)
        elif C.K % C.BK == 0:
            held, xt = tl.load(w_at), tl.load(x_at)
        else:
            held = tl.load(w_at, (element < C.STRIDE - k0 // C.PER)[None, :], 0)
            xt = tl.load(x_at, (k < C.K - k0)[:, None], 0)
        above = held
        if C.ABOVE > 0:
            above = tl.load(above_at, (element < (C.K - k0) // C.PER)[None, :], 0) >> shift
            above_at += C.BK // C.PER // SHARED
        w_at += C.BK // C.PER
        x_at += C.BK
        if C.SPAN > 0:
            factor, added = scale_of(scale, head, C.CODE)
            factor, added, zeros_of = factor * C.FACTOR, added * C.FACTOR, zero
            if WHOLE and PARTS > 1:
                factor, added = (
                    repeated(factor, C.SPAN // C.GRAIN),
                    repeated(added, C.SPAN // C.GRAIN),
                )
                zeros_of = zero if zeros is None else repeated(zero, C.SPAN // C.GRAIN)
            wt = _scaled(held, above, factor, added, zeros_of, C, MINIMA)
            ahead = tl.minimum(k0 + C.BK + part, C.K - 1)
            scale, head = load_scales(scales, ahead, C.SPAN, APART)
            if zeros is not None:
                zero = tl.load(zeros + group + ahead // C.SPAN * APART).to(tl.int32)
        elif C.CODE == "int4":
            one = tl.full((1, 1), 1.0, tl.float32)
            wt = _scaled(held, held, one, one, zero, C, False)
        else:
            wt = decoded(held, C)
        if x_scale is None:
            total = tl.dot(wt, xt.to(C.OPERAND), total, input_precision="ieee")
        else:
            total = tl.dot(wt, xt, total, out_dtype=tl.int32)
        await_products(k0, C.WGMMA)

    if C.SPLITS > 1:
        # The last program to end adds up the sums of all, in their order.
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        inside = tl.arange(0, C.BN)[:, None] * C.BM + tl.arange(0, C.BM)[None, :]
        at = partial + tile * (C.SPLITS * C.BN * C.BM) + inside
        tl.store(at + split * (C.BN * C.BM), total)
        if not is_last(arrivals + tile, C.SPLITS):
            return
        total = tl.load(at, cache_modifier=".cg")
        for other in range(1, C.SPLITS):
            total += tl.load(at + other * (C.BN * C.BM), cache_modifier=".cg")

    factor = tl.full((1, 1), C.UNIT, tl.float32)
    if C.SPAN == 0 and scales is not None:
        factor *= tl.load(scales + row * C.SCALE_ROWS).to(tl.float32)[:, None]
    if x_scale is not None:
        factor *= tl.load(x_scale + tl.minimum(m, C.M - 1))[None, :]
    total = rounded_product(total.to(tl.float32), factor, C.ASM)
    n = n[:, None]
    if C.BM > 128:
        # In two halves: what the epilogue reads must fit in registers beside the sums.
        total, second = tl.split(total.reshape(C.BN, 2, C.BM // 2).permute(0, 2, 1))
        m = tl.program_id(0) * C.BM + tl.arange(0, C.BM // 2)
        late = m.to(tl.int64)[None, :] + C.BM // 2
        finish(second, bias, times, residual, y, late, n, (n < C.N) & (late < C.M), C)
    m = m.to(tl.int64)[None, :]
    finish(total, bias, times, residual, y, m, n, (n < C.N) & (m < C.M), C)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of W and tokens of a program, its warps, and how fast it is, relative, an estimate.

    `splits` programs share the columns of a tile; `step` columns are multiplied at a time.
    """

    rows: int
    tokens: int
    warps: int
    speed: float
    step: int = 64
    stages: int = 3
    splits: int = 1


_TILES = (
    Tile(128, 256, 8, 1.0),
    Tile(128, 128, 8, 0.9),
    Tile(64, 128, 4, 0.7),
    Tile(64, 64, 4, 0.5),
    Tile(64, 32, 4, 0.35),
)
_LEAST_COLUMNS = 1024  # of a split
_ADDING = 550  # columns: what adding up the sums of a split costs, an estimate


def _tile(operand: torch.dtype, m: int, n: int, k: int, device: Device) -> Tile:
    """Return the tile of a program: for tensor cores that with which the last one ends first."""
    if operand == torch.float32:
        return Tile(64, min(max(16, triton.next_power_of_2(m)), 32), 4, 1.0, 32, 1)

    def cost(tile: Tile) -> float:
        programs = triton.cdiv(m, tile.tokens) * triton.cdiv(n, tile.rows) * tile.splits
        if tile.splits > 1 and (k < tile.splits * _LEAST_COLUMNS or programs > device.sms):
            return float("inf")
        columns = k / tile.splits / tile.speed + (_ADDING if tile.splits > 1 else 0)
        return triton.cdiv(programs, device.sms) * tile.rows * tile.tokens * columns

    # Other architectures have too little shared memory for the first one.
    known = _TILES if device.capability in (90, 100) else _TILES[1:]
    best = min((replace(t, splits=s) for t in known for s in (1, 2, 4, 8)), key=cost)
    return replace(best, step=128) if operand == torch.int8 else best


def operand_type(x_dtype: torch.dtype, device: Device) -> torch.dtype:
    """Return the type of matmul operands: that of the activations."""
    # Triton's interpreter cannot multiply bf16.
    return torch.float32 if x_dtype == torch.bfloat16 and not device.asm else x_dtype


def _units(held: Stored, operand: torch.dtype, device: Device) -> dict[str, float]:
    """Return FACTOR, which the scales of groups are multiplied by, and UNIT, which sums are.

    They keep scaled fp16 weights in range: normal from 2^-20 to 1023, or for mxfp4 to 2^22 and
    exact from 2^-18.
    """
    own = unit(held.code, "pairs")
    if not held.span:
        return {"FACTOR": 1.0, "UNIT": own}
    if operand != torch.float16:
        return {"FACTOR": own, "UNIT": 1.0}
    if held.code == "mxfp4":
        return {"FACTOR": 2.0**8 if device.asm else 2.0**-6, "UNIT": 2.0**6}
    return {"FACTOR": own * 2.0**6, "UNIT": 2.0**-6}


def gemm(p: Linear) -> list[Launch]:
    """Lower `ops.linear.linear` for any number of tokens; int8 ones meet ternary weights."""
    x, x_scale, device, (m, k), n = p.x, p.x_scale, p.device, p.x.shape, p.w.shape[0]
    held = stored(p.w)
    operand = operand_type(x.dtype, device)
    tile = _tile(operand, m, n, k, device)
    sizes = {"M": m, "N": n, "K": k, "BM": tile.tokens, "BN": tile.rows, "BK": tile.step}
    sizes |= {"SPLITS": tile.splits}
    given = {"x": x, "x_scale": x_scale, **held.given, **sizes}
    given |= p.tail.given("linear", p.y, n)
    if x_scale is not None:
        given["CODE"] = "digits"
    elif held.code.startswith("tcq"):
        given["CODE"] = "float"  # after `trellis_tile`
    given |= {"OPERAND": TL_TYPES[operand], **_units(held, operand, device)}
    given["GRAIN"] = held.per if held.span % held.per == 0 else 1
    grid = (triton.cdiv(m, tile.tokens), triton.cdiv(n, tile.rows), tile.splits)
    if tile.splits > 1:
        largest = _TILES[0].rows * _TILES[0].tokens
        partial = device.scratch("gemm_partial", (device.sms * largest,), torch.float32)
        given["partial"] = partial if x_scale is None else partial.view(torch.int32)
        given["arrivals"] = device.scratch("gemm_arrivals", (device.sms,), torch.int32)
    return [launch(_gemm, grid, device, tile.warps, 0, tile.stages, **given)]


def linear(
    *,
    x: Tensor,
    w: DeviceTensor,
    y: Tensor,
    x_scale: Tensor | None = None,
    group: int = 0,
    device: Device,
    **after: Any,
) -> list[Launch]:
    """Lower `ops.linear.linear`; `after` are the fields of `Tail`.

    Up to `MOST_SLICED` tokens a result is bit-identical in any batch. UnsupportedOp for int8
    activations with group scales or non-ternary weights, and for unknown activation functions.
    """
    if x_scale is not None and not sums_exactly(w.format, group):
        raise no_codes("linear", w)
    if "lora_x" in after:
        raise UnsupportedOp(
            "linear: no CUDA kernel adds lora_x; multiply it by a linear of its own"
        )
    call = Linear(x, w, y, device, x_scale, Tail(**after))
    return (few if len(x) <= MOST_SLICED else gemm)(call)


def no_codes(op: str, w: DeviceTensor) -> UnsupportedOp:
    """Return the error for int8 activations without a kernel for the weight's format."""
    return UnsupportedOp(
        f"{op}: no CUDA kernel multiplies int8 activations by the format {w.format.name}; expected "
        "ternary weights of a linear, and one scale a token; keep these activations 16-bit"
    )
