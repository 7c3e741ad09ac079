"""Rotary embedding, and heads that are joined or get another size."""

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.bounds import within
from clocher_kernels.cuda.finite import or_nan
from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.pdl import start

_BLOCK = 1024


@triton.jit
def _rope(
    x,
    positions,
    cos,
    sin,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD: tl.constexpr,
    ANGLES: tl.constexpr,
    X_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(1)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < PAIRS
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
    *,
    x: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    head: int = 0,
    device: Device,
) -> list[Launch]:
    """Lower `ops.elementwise.rope`; a thread owns both halves of a pair."""
    half = cos.shape[1]
    head = head or 2 * half
    pairs = x.shape[1] // head * half
    block = min(triton.next_power_of_2(pairs), 512)
    constants = {
        "PAIRS": pairs,
        "HALF": half,
        "HEAD": head,
        "ANGLES": len(cos),
        "X_ROW": x.stride(0),
        "BLOCK": block,
        "PDL": device.pdl,
    }
    args = {"x": x, "positions": positions, "cos": cos, "sin": sin}
    grid = (triton.cdiv(pairs, block), len(x))
    return [Launch(_rope, grid, args, constants, pdl=device.pdl)]


@triton.jit
def _join_heads(
    first,
    second,
    y,
    SIZE: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    APART: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    SECOND_ROW: tl.constexpr,
    Y_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    head, at = column // (LEFT + RIGHT), column % (LEFT + RIGHT)
    left = at < LEFT
    a = tl.load(first + row * FIRST_ROW + head * APART + at, inside & left, other=0.0)
    b = tl.load(second + row * SECOND_ROW + head * RIGHT + at - LEFT, inside & ~left, other=0.0)
    kind = y.dtype.element_ty
    tl.store(y + row * Y_ROW + column, tl.where(left, a.to(kind), b.to(kind)), inside)


def join_heads(
    *, first: torch.Tensor, second: torch.Tensor, y: torch.Tensor, heads: int, device: Device
) -> list[Launch]:
    """Lower `ops.elementwise.join_heads`."""
    size, right = y.shape[1], second.shape[1] // heads
    left = size // heads - right
    constants = {
        "SIZE": size,
        "LEFT": left,
        "RIGHT": right,
        "APART": 0 if first.shape[1] == left else left,
        "FIRST_ROW": first.stride(0),
        "SECOND_ROW": second.stride(0),
        "Y_ROW": y.stride(0),
        "BLOCK": _BLOCK,
        "PDL": device.pdl,
    }
    args = {"first": first, "second": second, "y": y}
    grid = (triton.cdiv(size, _BLOCK), len(y))
    return [Launch(_join_heads, grid, args, constants, pdl=device.pdl)]


@triton.jit
def _resize_heads(
    x,
    y,
    SIZE: tl.constexpr,
    OLD: tl.constexpr,
    NEW: tl.constexpr,
    X_ROW: tl.constexpr,
    Y_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    head, at = column // NEW, column % NEW
    value = tl.load(x + row * X_ROW + head * OLD + at, inside & (at < OLD), other=0.0)
    tl.store(y + row * Y_ROW + column, value.to(y.dtype.element_ty), inside)


def resize_heads(*, x: torch.Tensor, y: torch.Tensor, heads: int, device: Device) -> list[Launch]:
    """Lower `ops.elementwise.resize_heads`."""
    size = y.shape[1]
    constants = {
        "SIZE": size,
        "OLD": x.shape[1] // heads,
        "NEW": size // heads,
        "X_ROW": x.stride(0),
        "Y_ROW": y.stride(0),
        "BLOCK": _BLOCK,
        "PDL": device.pdl,
    }
    grid = (triton.cdiv(size, _BLOCK), len(y))
    return [Launch(_resize_heads, grid, {"x": x, "y": y}, constants, pdl=device.pdl)]


LOWER = {"rope": rope, "join_heads": join_heads, "resize_heads": resize_heads}
