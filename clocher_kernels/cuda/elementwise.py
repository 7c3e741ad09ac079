"""Embedding, RoPE, copies of rows and heads, and the on-device advance of inputs."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.codes import to_f32, unit
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.prepack import DeviceTensor, stored
from clocher_kernels.cuda.scalar import or_nan, start, within
from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats.floats import Float, Fp8
from clocher_kernels.formats.integers import Int4, Int8

_BLOCK = 1024


@triton.jit
def _columns(SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Return a program's row, its columns, and which of them exist."""
    start(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(1), at, at < SIZE


def _by_columns(kernel: Any, x: Tensor, y: Tensor, device: Device, **given: Any) -> list[Launch]:
    """Return the launch of a kernel whose programs each write some columns of a row of y."""
    rows, size = y.shape
    given |= {"SIZE": size, "X_ROW": x.stride(0), "Y_ROW": y.stride(0), "BLOCK": _BLOCK}
    return [launch(kernel, (triton.cdiv(size, _BLOCK), rows), device, x=x, y=y, **given)]


@triton.jit
def _embed(
    x, codes, scales, zeros, y,
    SIZE: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr, X_ROW: tl.constexpr,
    Y_ROW: tl.constexpr, CODE: tl.constexpr, UNIT: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_ROW: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, at, inside = _columns(SIZE, BLOCK, PDL)
    token = within(tl.load(x + row * X_ROW), ROWS).to(tl.int64)
    # Codes 0..15 of a word lie in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits.
    nibble = at // 8 * 8 + at % 2 * 4 + at % 8 // 2
    if CODE == "int4":
        byte = tl.load(codes + token * ROW + nibble // 2, inside, other=0).to(tl.int32)
        value = ((byte >> (nibble % 2 * 4)) & 15).to(tl.float32)
    else:
        value = to_f32(tl.load(codes + token * ROW + at, inside, other=0), CODE, False) * UNIT
    if GROUP > 0:
        scale = token // SCALE_ROWS * SCALE_ROW + at // GROUP
        if CODE == "int4":
            value -= (
                8.0 if zeros is None else tl.load(zeros + scale, inside, other=0).to(tl.float32)
            )
        value *= tl.load(scales + scale, inside, other=0.0).to(tl.float32)
    if SCALE != 1.0:
        value *= SCALE
    tl.store(y + row * Y_ROW + at, value.to(y.dtype.element_ty), inside)


def embed(
    *, ids: Tensor, table: DeviceTensor, y: Tensor, scale: float = 1.0, device: Device
) -> list[Launch]:
    """Lower `ops.elementwise.embed` for floats, int8, fp8 and int4; else UnsupportedOp."""
    if not isinstance(table.format, Float | Int8 | Fp8 | Int4):
        raise UnsupportedOp(
            f"the CUDA back end has no embed for a {table.format.name} table; it has it for float, "
            "int8, fp8 and int4 formats; convert the embedding to one of them"
        )
    held, (rows, size) = stored(table), table.shape
    codes = held.data.view(torch.uint8) if held.code == "int4" else held.data
    # Scales are [rows / SCALE_ROWS, SCALE_ROW]; a column serves GROUP elements.
    group = 0 if held.scales is None else held.span or size
    kind = {"CODE": held.code, "UNIT": unit(held.code, "fp32"), "SCALE": float(scale)}
    kind |= {"GROUP": group, "SCALE_ROWS": held.scale_rows or rows}
    kind["SCALE_ROW"] = triton.cdiv(size, group or size)
    given = {"codes": codes, "scales": held.scales, "zeros": held.zeros, **kind}
    return _by_columns(_embed, ids, y, device, **given, ROW=codes.shape[-1], ROWS=rows)


@triton.jit
def _gather_rows(
    x, rows, y,
    SIZE: tl.constexpr, TOKENS: tl.constexpr, X_ROW: tl.constexpr, Y_ROW: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, at, inside = _columns(SIZE, BLOCK, PDL)
    token = within(tl.load(rows + row), TOKENS)
    value = tl.load(x + token * X_ROW + at, inside, other=0.0)
    if x.dtype != y.dtype:
        value = value.to(tl.float32).to(y.dtype.element_ty)
    tl.store(y + row * Y_ROW + at, value, inside)


def gather_rows(*, x: Tensor, rows: Tensor, y: Tensor, device: Device) -> list[Launch]:
    """Lower `ops.elementwise.gather_rows`."""
    return _by_columns(_gather_rows, x, y, device, rows=rows, TOKENS=len(x))


@triton.jit
def _join_heads(
    x, second, y,
    SIZE: tl.constexpr, HEAD: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    APART: tl.constexpr, X_ROW: tl.constexpr, SECOND_ROW: tl.constexpr, Y_ROW: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, column, inside = _columns(SIZE, BLOCK, PDL)
    head, at = column // HEAD, column % HEAD
    left = at < LEFT
    kind = y.dtype.element_ty
    value = tl.load(x + row * X_ROW + head * APART + at, inside & left, other=0.0).to(kind)
    if second is not None:
        other = second + row * SECOND_ROW + head * RIGHT + at - LEFT
        value = tl.where(left, value, tl.load(other, inside & ~left, other=0.0).to(kind))
    tl.store(y + row * Y_ROW + column, value, inside)


def join_heads(
    *, first: Tensor, y: Tensor, heads: int, second: Tensor | None = None, device: Device
) -> list[Launch]:
    """Lower `ops.elementwise.join_heads`."""
    head, apart = y.shape[1] // heads, first.shape[1] // heads
    sizes = {"HEAD": head, "LEFT": min(apart, head), "APART": apart, "RIGHT": 0, "SECOND_ROW": 0}
    if second is not None:
        sizes["RIGHT"], sizes["SECOND_ROW"] = second.shape[1] // heads, second.stride(0)
        sizes["LEFT"] = head - sizes["RIGHT"]
        sizes["APART"] = 0 if first.shape[1] == sizes["LEFT"] else apart
    return _by_columns(_join_heads, first, y, device, second=second, **sizes)


@triton.jit
def _rope(
    x, positions, cos, sin,
    PAIRS: tl.constexpr, HALF: tl.constexpr, HEAD: tl.constexpr, ANGLES: tl.constexpr,
    X_ROW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, pair, inside = _columns(PAIRS, BLOCK, PDL)
    head, at = pair // HALF, pair % HALF
    angle = within(tl.load(positions + row), ANGLES) * HALF + at
    c = tl.load(cos + angle, inside, other=0.0)
    s = tl.load(sin + angle, inside, other=0.0)
    first = x + row * X_ROW + head * HEAD + at
    a = or_nan(tl.load(first, inside, other=0.0).to(tl.float32))
    b = or_nan(tl.load(first + HALF, inside, other=0.0).to(tl.float32))
    tl.store(first, (a * c - b * s).to(x.dtype.element_ty), inside)
    tl.store(first + HALF, (b * c + a * s).to(x.dtype.element_ty), inside)


def rope(
    *, x: Tensor, cos: Tensor, head: int = 0, device: Device, **tables: Tensor
) -> list[Launch]:
    """Lower `ops.elementwise.rope`; a thread owns both halves of a pair."""
    half = cos.shape[1]
    head = head or 2 * half
    pairs = x.shape[1] // head * half
    block = min(triton.next_power_of_2(pairs), 512)
    sizes = {"PAIRS": pairs, "HALF": half, "HEAD": head, "ANGLES": len(cos), "X_ROW": x.stride(0)}
    grid = (triton.cdiv(pairs, block), len(x))
    return [launch(_rope, grid, device, x=x, cos=cos, **tables, **sizes, BLOCK=block)]


@triton.jit
def turned(
    x, heads, live, gain, positions, cos, sin,
    DIM: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, ANGLES: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """Return heads [R, WIDTH] at x + `heads` [R] of the token at `positions`: normed, rotated.

    `gain` and `cos` may be None: no norm, no rotation. Products are rounded one by one, so every
    kernel that calls this gets the same bits.
    """
    dim = tl.arange(0, WIDTH)[None, :]
    inside = live[:, None] & (dim < DIM)
    value = tl.load(x + heads[:, None] + dim, inside, other=0.0).to(tl.float32)
    factor = 1.0
    if gain is not None:
        mean_square = tl.sum(value * value, axis=1, keep_dims=True) / DIM
        factor = 1.0 / tl.sqrt(or_nan(mean_square) + EPS)
        value = value * factor * tl.load(gain + dim, dim < DIM, other=0.0)
    if cos is not None:
        rotates = dim < 2 * HALF
        other = tl.where(dim < HALF, dim + HALF, dim - HALF)
        angle = within(tl.load(positions), ANGLES) * HALF + dim % HALF
        partner = tl.load(x + heads[:, None] + other, live[:, None] & rotates, other=0.0)
        partner = partner.to(tl.float32)
        if gain is not None:
            partner = partner * factor * tl.load(gain + other, rotates, other=0.0)
        c = tl.load(cos + angle, rotates, other=1.0)
        s = tl.load(sin + angle, rotates, other=0.0)
        across = or_nan(partner) * tl.where(dim < HALF, -s, s)
        value = tl.where(rotates, tl.fma(or_nan(value), c + tl.zeros_like(value), across), value)
    return value


@triton.jit
def _advance(
    sampled, rows, ids, positions, ends, draws,
    R: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    at = tl.arange(0, BLOCK)
    inside = at < R
    token = tl.load(rows + at, inside, other=0)
    there = inside & (token >= 0) & (token < TOKENS)
    tl.store(ids + token, tl.maximum(tl.load(sampled + at, inside, other=0), 0), there)
    tl.store(positions + token, tl.load(positions + token, there, other=0) + 1, there)
    tl.store(ends + token, tl.load(ends + token, there, other=0) + 1, there)
    tl.store(draws + at, tl.load(draws + at, inside, other=0) + 1, inside)


def advance(*, sampled: Tensor, device: Device, **inputs: Tensor) -> list[Launch]:
    """Lower `ops.sampling.advance`, so that a decode step needs no host; a token has one row."""
    sizes = {"R": len(sampled), "TOKENS": len(inputs["ids"])}
    block = triton.next_power_of_2(len(sampled))
    return [launch(_advance, (1,), device, 1, sampled=sampled, **inputs, **sizes, BLOCK=block)]
