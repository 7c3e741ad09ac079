"""Embedding, RoPE, norms, codes, copies of rows and heads, and the on-device advance of inputs."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.codes import narrow, rounded_product, to_f32, unit
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.prepack import DeviceTensor, stored
from clocher_kernels.cuda.scalar import as_activation, or_nan, start, within
from clocher_kernels.cuda.trellis import trellis_at
from clocher_kernels.cuda.words import (
    brick_column,
    brick_row,
    load_scales,
    scale_of,
    scales_of_row,
)
from clocher_kernels.dtypes import LARGEST
from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.formats.floats import Float, Fp8
from clocher_kernels.formats.ggml import Ggml
from clocher_kernels.formats.integers import Int4, Int8
from clocher_kernels.formats.tcq import Tcq

_BLOCK = 1024


@triton.jit
def _columns(C: tl.constexpr):
    """Return a program's row, its columns, and which of them exist."""
    start(C.PDL)
    at = tl.program_id(0) * C.BLOCK + tl.arange(0, C.BLOCK)
    return tl.program_id(1), at, at < C.SIZE


def _by_columns(kernel: Any, x: Tensor, y: Tensor, device: Device, **given: Any) -> list[Launch]:
    """Return the launch of a kernel whose programs each write some columns of a row of y."""
    rows, size = y.shape
    given |= {"SIZE": size, "X_ROW": x.stride(0), "Y_ROW": y.stride(0), "BLOCK": _BLOCK}
    return [launch(kernel, (triton.cdiv(size, _BLOCK), rows), device, x=x, y=y, **given)]


@triton.jit
def _embed(x, w, scales, zeros, y, C: tl.constexpr):
    row, at, inside = _columns(C)
    token = within(tl.load(x + row * C.X_ROW), C.ROWS).to(tl.int64)
    WORDS: tl.constexpr = C.CODE == "int4" or C.CODE == "int5" or C.CODE == "int6"
    if WORDS:
        # Codes of a word lie in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits.
        bit = (at % 2 * 4 + at % 8 // 2) * 4
        if C.BRICK > 0:
            to = w + brick_row(token, C.STRIDE, C.BRICK) + brick_column(at // 8, C.BRICK)
        else:
            to = w + token * C.STRIDE + at // 8
        word = tl.load(to, inside, other=0)
        value = (word >> bit) & 15
        if C.ABOVE > 0:
            place = at // 8 * C.ABOVE
            above = tl.load(w + token * C.STRIDE + C.SIZE // 8 + place // 4, inside, other=0)
            value += ((above >> (bit + place % 4)) & (2 * C.ABOVE - 1)) << 4
        value = value.to(tl.float32)
    elif C.BITS > 0:
        value = trellis_at(w, zeros, token, at, inside, C) * C.UNIT
    else:
        to = w + token * C.STRIDE + at
        if C.BRICK > 0:
            to = w + brick_row(token, C.STRIDE, C.BRICK) + brick_column(at, C.BRICK)
        value = to_f32(tl.load(to, inside, other=0), C.CODE, False) * C.UNIT
    if C.SPAN > 0:
        row_at, column = token // C.SCALE_ROWS, tl.minimum(at, C.SIZE - 1)
        # Bricks have the scales of groups in eights, too; one for a row is its only group.
        APART: tl.constexpr = 8 if C.BRICK > 0 else 1
        GROUPS: tl.constexpr = (C.SIZE + C.SPAN - 1) // C.SPAN
        first = brick_row(row_at, GROUPS, 1) if C.BRICK > 0 else row_at * GROUPS
        if WORDS:
            if zeros is None:
                value -= 8 << C.ABOVE
            else:
                value -= tl.load(zeros + first + column // C.SPAN * APART).to(tl.float32)
        scales += first if C.BRICK > 0 else row_at * scales_of_row(scales, C.SIZE, C.SPAN)
        own, head = load_scales(scales, column, C.SPAN, APART)
        factor, added = scale_of(own, head, C.CODE)
        value *= factor
        if own.dtype == tl.int16 or own.dtype == tl.int32:
            value += added
    if C.SCALE != 1.0:
        value *= C.SCALE
    tl.store(y + row * C.Y_ROW + at, value.to(y.dtype.element_ty), inside)


def embed(
    *, ids: Tensor, table: DeviceTensor, y: Tensor, scale: float = 1.0, device: Device
) -> list[Launch]:
    """Lower `ops.elementwise.embed`; UnsupportedOp for ternary and mxfp4."""
    if not isinstance(table.format, Float | Int8 | Fp8 | Int4 | Ggml | Tcq):
        raise UnsupportedOp(
            f"the CUDA back end has no embed for a {table.format.name} table; it has it for float, "
            "int8, fp8, int4, tcq and ggml's formats; convert the embedding to one of them"
        )
    held, (rows, size) = stored(table), table.shape
    given = {
        **held.given,
        "K": size,
        "UNIT": unit(held.code, "fp32"),
        "SCALE": float(scale),
        "ROWS": rows,
    }
    given["SPAN"] = 0 if held.scales is None else held.span or size
    given["SCALE_ROWS"] = held.scale_rows or rows
    return _by_columns(_embed, ids, y, device, **given)


@triton.jit
def _hadamard(x, y, C: tl.constexpr):
    row, at, inside = _columns(C)
    t = tl.load(x + row.to(tl.int64) * C.X_ROW + at, inside, other=0.0).to(tl.float32)
    for _stage in tl.static_range(6):
        # Neighbours meet; what came first moves on to the top, so each bit has its turn.
        low, high = tl.split(t.reshape(C.BLOCK // 64, 32, 2))
        t = tl.join(low + high, low - high).permute(0, 2, 1).reshape(C.BLOCK)
    tl.store(y + row.to(tl.int64) * C.Y_ROW + at, as_activation(t * 0.125, y), inside)


def hadamard(*, x: Tensor, y: Tensor, size: int, device: Device) -> list[Launch]:
    """Lower `ops.elementwise.hadamard`; ShapeError for other blocks than whole ones of 64."""
    if size != 64 or x.shape[-1] % 64:
        raise ShapeError(
            f"hadamard: blocks of {size} in {x.shape[-1]} columns; expected 64 in a multiple of "
            "them"
        )
    return _by_columns(_hadamard, x.flatten(0, -2), y.flatten(0, -2), device)


@triton.jit
def _gather_rows(x, rows, y, C: tl.constexpr):
    row, at, inside = _columns(C)
    token = within(tl.load(rows + row), C.TOKENS)
    value = tl.load(x + token * C.X_ROW + at, inside, other=0.0)
    if x.dtype != y.dtype:
        value = value.to(tl.float32).to(y.dtype.element_ty)
    tl.store(y + row * C.Y_ROW + at, value, inside)


def gather_rows(*, x: Tensor, rows: Tensor, y: Tensor, device: Device) -> list[Launch]:
    """Lower `ops.elementwise.gather_rows`."""
    return _by_columns(_gather_rows, x, y, device, rows=rows, TOKENS=len(x))


@triton.jit
def _join_heads(x, second, y, C: tl.constexpr):
    row, column, inside = _columns(C)
    head, at = column // C.HEAD, column % C.HEAD
    left = at < C.LEFT
    kind = y.dtype.element_ty
    value = tl.load(x + row * C.X_ROW + head * C.APART + at, inside & left, other=0.0).to(kind)
    if second is not None:
        other = second + row * C.SECOND_ROW + head * C.RIGHT + at - C.LEFT
        value = tl.where(left, value, tl.load(other, inside & ~left, other=0.0).to(kind))
    tl.store(y + row * C.Y_ROW + column, value, inside)


def join_heads(
    *, first: Tensor, y: Tensor, heads: int, second: Tensor | None = None, device: Device
) -> list[Launch]:
    """Lower `ops.elementwise.join_heads`."""
    head, apart = y.shape[1] // heads, first.shape[1] // heads
    sizes = {"HEAD": head, "LEFT": min(apart, head), "APART": apart}
    if second is not None:
        sizes["RIGHT"], sizes["SECOND_ROW"] = second.shape[1] // heads, second.stride(0)
        sizes["LEFT"] = head - sizes["RIGHT"]
        sizes["APART"] = 0 if first.shape[1] == sizes["LEFT"] else apart
    return _by_columns(_join_heads, first, y, device, second=second, **sizes)


@triton.jit
def _rope(x, positions, cos, sin, C: tl.constexpr):
    row, pair, inside = _columns(C)
    head, at = pair // C.HALF, pair % C.HALF
    angle = within(tl.load(positions + row), C.ANGLES) * C.HALF + at
    c = tl.load(cos + angle, inside, other=0.0)
    s = tl.load(sin + angle, inside, other=0.0)
    first = x + row * C.X_ROW + head * C.HEAD + at
    a = or_nan(tl.load(first, inside, other=0.0).to(tl.float32))
    b = or_nan(tl.load(first + C.HALF, inside, other=0.0).to(tl.float32))
    tl.store(first, (a * c - b * s).to(x.dtype.element_ty), inside)
    tl.store(first + C.HALF, (b * c + a * s).to(x.dtype.element_ty), inside)


def rope(
    *, x: Tensor, cos: Tensor, head: int = 0, device: Device, **tables: Tensor
) -> list[Launch]:
    """Lower `ops.elementwise.rope`; a thread owns both halves of a pair."""
    half = cos.shape[1]
    head = head or 2 * half
    pairs = x.shape[1] // head * half
    block = min(triton.next_power_of_2(pairs), 512)
    sizes = {"SIZE": pairs, "HALF": half, "HEAD": head, "ANGLES": len(cos), "X_ROW": x.stride(0)}
    grid = (triton.cdiv(pairs, block), len(x))
    return [launch(_rope, grid, device, x=x, cos=cos, **tables, **sizes, BLOCK=block)]


@triton.jit
def angles_of(position, cos, sin, C: tl.constexpr):
    """Return the cosines and sines [1, WIDTH] that rotate heads at `position`, if any."""
    dim = tl.arange(0, C.WIDTH)[None, :]
    if cos is not None:
        at = within(position, C.ANGLES) * C.HALF + dim % C.HALF
        rotates = dim < 2 * C.HALF
        return tl.load(cos + at, rotates, other=1.0), tl.load(sin + at, rotates, other=0.0)
    else:
        return 1.0, 0.0


@triton.jit
def turned(x, heads, live, gain, cos, turn, C: tl.constexpr):
    """Return heads [R, WIDTH] at x + `heads` [R]: normed, rotated by `turn` (`angles_of`).

    `gain` and `cos` may be None: no norm, no rotation. Products are rounded one by one, so every
    kernel that calls this gets the same bits.
    """
    dim = tl.arange(0, C.WIDTH)[None, :]
    inside = live[:, None] & (dim < C.DIM)
    value = tl.load(x + heads[:, None] + dim, inside, other=0.0).to(tl.float32)
    factor = 1.0
    if gain is not None:
        mean_square = tl.sum(value * value, axis=1, keep_dims=True) / C.DIM
        factor = 1.0 / tl.sqrt(or_nan(mean_square) + C.EPS)
        value = value * factor * tl.load(gain + dim, dim < C.DIM, other=0.0)
    if cos is not None:
        rotates = dim < 2 * C.HALF
        other = tl.where(dim < C.HALF, dim + C.HALF, dim - C.HALF)
        partner = tl.load(x + heads[:, None] + other, live[:, None] & rotates, other=0.0)
        partner = partner.to(tl.float32)
        if gain is not None:
            partner = partner * factor * tl.load(gain + other, rotates, other=0.0)
        c, s = turn
        across = or_nan(partner) * tl.where(dim < C.HALF, -s, s)
        value = tl.where(rotates, tl.fma(or_nan(value), c + tl.zeros_like(value), across), value)
    return value


@triton.jit
def _advance(sampled, rows, ids, positions, ends, draws, C: tl.constexpr):
    start(C.PDL)
    at = tl.arange(0, C.BLOCK)
    inside = at < C.R
    token = tl.load(rows + at, inside, other=0)
    there = inside & (token >= 0) & (token < C.TOKENS)
    tl.store(ids + token, tl.maximum(tl.load(sampled + at, inside, other=0), 0), there)
    tl.store(positions + token, tl.load(positions + token, there, other=0) + 1, there)
    tl.store(ends + token, tl.load(ends + token, there, other=0) + 1, there)
    tl.store(draws + at, tl.load(draws + at, inside, other=0) + 1, inside)


def advance(*, sampled: Tensor, device: Device, **inputs: Tensor) -> list[Launch]:
    """Lower `ops.sampling.advance`, so that a decode step needs no host; a token has one row."""
    sizes = {"R": len(sampled), "TOKENS": len(inputs["ids"])}
    block = triton.next_power_of_2(len(sampled))
    return [launch(_advance, (1,), device, 1, sampled=sampled, **inputs, **sizes, BLOCK=block)]


# Adding and subtracting 1.5 * 2^23 rounds an fp32 number to an integer, ties to even.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def _rows(x, gain, residual, y, scale, C: tl.constexpr):
    """Write K values of x: with `gain` their norm, of that codes if there is a CODE."""
    row, first = (tl.program_id(0) // C.GROUPS).to(tl.int64), tl.program_id(0) % C.GROUPS * C.K
    x += row * C.X_ROW + first
    y += row * C.Y_ROW + first
    k = tl.arange(0, C.BLOCK)
    inside = k < C.K
    if gain is not None:
        factor = tl.load(gain + k, inside, other=0.0)
    start(C.PDL, C.EARLY)
    t = tl.load(x + k, inside, other=0.0).to(tl.float32)
    if gain is not None:
        # Squares that overflow must not become zeros.
        t = t * (1.0 / tl.sqrt(or_nan(tl.sum(t * t) / C.K) + C.EPS)) * factor
    if residual is not None:
        t += tl.load(residual + row * C.RESIDUAL_ROW + first + k, inside, other=0.0).to(tl.float32)
    if C.CODE == "":
        tl.store(y + k, as_activation(t, y), inside)
    else:
        # As integers infinities and NaN are larger than numbers.
        largest = tl.max(tl.abs(t).to(tl.int32, bitcast=True))
        odd = largest >= 0x7F800000
        absmax = tl.where(odd, 1.0, tl.maximum(largest.to(tl.float32, bitcast=True), C.FLOOR))
        inverse = tl.div_rn(C.LIMIT, absmax)
        step = tl.where(odd, float("nan"), tl.div_rn(absmax, C.LIMIT))
        t = tl.where(odd, 0.0, rounded_product(t, inverse, C.ASM))
        if C.CODE == "i8":
            code = tl.minimum(tl.maximum((t + _ROUND) - _ROUND, C.LOWEST), C.LIMIT).to(tl.int8)
            tl.store(scale + row, step)
        else:
            # to_f32 divides by the code's unit, 2^8.
            code = to_f32(narrow(t, C.CODE), C.CODE, False) * 256.0 * step
        tl.store(y + k, code, inside)


def _by_row(
    x: Tensor, y: Tensor, scale: Tensor | None, k: int, device: Device, **given: Any
) -> list[Launch]:
    """Return the launch that makes y of x, `k` values at a time."""
    x, y = x.flatten(0, -2), y.flatten(0, -2)
    groups, block = x.shape[1] // k, triton.next_power_of_2(k)
    residual = given.get("residual")
    sizes = {"K": k, "GROUPS": groups, "BLOCK": block, "X_ROW": x.stride(0), "Y_ROW": y.stride(0)}
    sizes["RESIDUAL_ROW"] = 0 if residual is None else residual.stride(0)
    given = {"x": x, "y": y, "scale": scale, **sizes, "CODE": "", **given}
    # Codes of several tokens lose by it, as measured on an H200.
    given["EARLY"] = given["CODE"] == "" or len(x) == 1
    return [launch(_rows, (len(x) * groups,), device, _row_warps(k), **given)]


def _row_warps(k: int) -> int:
    """Return the warps that make a row; they set the order of a norm's sum."""
    return min(max(triton.next_power_of_2(k) // 256, 1), 32)


def rms_norm(
    *,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    eps: float,
    residual: Tensor | None = None,
    device: Device,
) -> list[Launch]:
    """Lower `ops.elementwise.rms_norm`; one program per group."""
    return _by_row(x, y, None, len(weight), device, gain=weight, residual=residual, EPS=eps)


def quantize(
    *,
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    group: int,
    floor: float,
    lowest: int,
    gain: Tensor | None = None,
    eps: float = 0.0,
    device: Device,
) -> list[Launch]:
    """Lower `ops.quantize.quantize` with one scale per token, with `gain` of the norm of x.

    UnsupportedOp for group scales.
    """
    if group:
        raise UnsupportedOp(
            f"quantize: no CUDA kernel has a scale for every {group} columns; expected group 0, "
            "one scale a token; keep these activations 16-bit"
        )
    own = {"CODE": "i8", "LIMIT": 127.0, "FLOOR": floor, "LOWEST": float(lowest)}
    return _by_row(x, q, scale, x.shape[-1], device, **own, gain=gain, EPS=eps)


def fake_quantize(
    *, x: Tensor, y: Tensor, dtype: str, group: int = 0, floor: float = 0.0, device: Device
) -> list[Launch]:
    """Lower `ops.quantize.fake_quantize` to e4m3 with one scale per token; else UnsupportedOp."""
    if dtype != "e4m3" or group:
        raise UnsupportedOp(
            f"fake_quantize: no CUDA kernel rounds to {dtype} in groups of {group}; expected e4m3 "
            "in group 0, one scale a token; keep these activations 16-bit"
        )
    own = {"CODE": dtype, "LIMIT": LARGEST[dtype], "FLOOR": floor}
    return _by_row(x, y, None, x.shape[-1], device, **own)
