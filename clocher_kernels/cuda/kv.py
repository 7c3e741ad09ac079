"""KV cache: the cell of a token's keys and values, and narrowing to the cache's type.

Narrowing is integer arithmetic on fp32 bits: exact on every architecture and in the interpreter,
equal to `dtypes.from_f32`, but f16 saturates (see `ops.attention`).
"""

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.scalar import or_nan, saturated, start
from clocher_kernels.dtypes import LARGEST


@triton.jit
def tree_length(ancestors):
    """Return the number of bits up to the highest set one; 0 without a tree."""
    rest = ancestors.to(tl.uint64, bitcast=True)
    length = (rest * 0).to(tl.int32)
    for power in tl.static_range(5, -1, -1):
        high = rest >> (1 << power)
        length += tl.where(high != 0, 1 << power, 0)
        rest = tl.where(high != 0, high, rest)
    return length + (rest != 0).to(tl.int32)


@triton.jit
def own_cell(
    slots, positions, ends, ancestors, pages, token,
    PAGES_ROW: tl.constexpr, SLOTS: tl.constexpr, CELLS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Return the page of a token's own cell, int64, -1 if there is none, and the cell."""
    # A tree node's own bit is its highest.
    length = tree_length(tl.load(ancestors + token))
    node = tl.load(ends + token) + length - 1
    cell = tl.where(length > 0, node, tl.load(positions + token))
    slot = tl.load(slots + token)
    there = (slot >= 0) & (slot < SLOTS) & (cell >= 0) & (cell < CELLS)
    page = tl.load(pages + slot * PAGES_ROW + cell // PAGE, there, other=-1).to(tl.int64)
    return page, cell


@triton.jit
def _minifloat(x, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, LARGEST: tl.constexpr):
    """Return the codes of fp32 values: nearest even, saturating, as in `dtypes`."""
    BIAS: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    SHIFT: tl.constexpr = 23 - MANTISSA
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    MAGIC: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA + 23)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    nan = magnitude > 0x7F800000
    value = tl.minimum(tl.where(nan, 0, magnitude).to(tl.float32, bitcast=True), LARGEST)
    rounded = value.to(tl.int32, bitcast=True)
    rounded += ((rounded >> SHIFT) & 1) + ((1 << (SHIFT - 1)) - 1)
    normal = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # The sum rounds at the subnormal step, and its last bits are the code.
    subnormal = (value + MAGIC).to(tl.int32, bitcast=True) & ((1 << (MANTISSA + 1)) - 1)
    code = tl.where(value < SMALLEST_NORMAL, subnormal, normal)
    code = tl.where(nan, (1 << (EXPONENT + MANTISSA)) - 1, code)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def narrow(x, KV: tl.constexpr):
    """Round fp32 values to a KV dtype; fp8 as bytes."""
    if KV == "e4m3":
        return _minifloat(x, 4, 3, 448.0).to(tl.uint8)
    elif KV == "e5m2":
        return _minifloat(x, 5, 2, 57344.0).to(tl.uint8)
    elif KV == "bf16":
        bits = x.to(tl.int32, bitcast=True)
        rounded = bits + ((bits >> 16) & 1) + 0x7FFF
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, rounded)
        return (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif KV == "f16":
        # Finite values stay finite; infinity and NaN are kept.
        largest = tl.where(x < 0, -65504.0, 65504.0)
        magnitude = tl.abs(x)
        over = (magnitude > 65504.0) & (magnitude < float("inf"))
        return tl.where(over, largest, x).to(tl.float16)
    else:
        return x


@triton.jit
def _append(x, cache, scale, cell, dim, KV: tl.constexpr, LARGEST: tl.constexpr, DIM: tl.constexpr):
    """Write one head of one token into its cell."""
    value = tl.load(x + dim, dim < DIM, other=0.0).to(tl.float32)
    if KV == "i8":
        odd = tl.max((or_nan(value) != value).to(tl.int32)) > 0
        value = tl.where(odd, 0.0, value)
        absmax = tl.max(tl.abs(value))
        step = tl.where(absmax > 0, tl.div_rn(absmax, 127.0), 1.0)
        tl.store(scale + cell, tl.where(odd, float("nan"), step))
        # Adding 1.5 * 2^23 rounds to an integer, ties to even.
        steps = (tl.div_rn(value, step + tl.zeros_like(value)) + 12582912.0) - 12582912.0
        tl.store(cache + cell * DIM + dim, steps.to(tl.int8), dim < DIM)
    else:
        if KV != "f32":
            value = saturated(value, LARGEST)
        tl.store(cache + cell * DIM + dim, narrow(value, KV), dim < DIM)


@triton.jit
def _kv_append(
    k, v, slots, positions, ends, ancestors, pages, k_cache, v_cache, k_scale, v_scale,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr, PAGES_ROW: tl.constexpr, SLOTS: tl.constexpr,
    CELLS: tl.constexpr, POOL: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, KV: tl.constexpr, LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    head, token = tl.program_id(0), tl.program_id(1)
    page, cell = own_cell(
        slots, positions, ends, ancestors, pages, token, PAGES_ROW, SLOTS, CELLS, PAGE
    )
    if (page < 0) | (page >= POOL):
        return
    at = (page * HEADS + head) * PAGE + cell % PAGE
    dim = tl.arange(0, BLOCK)
    _append(k + token * K_ROW + head * DIM, k_cache, k_scale, at, dim, KV, LARGEST, DIM)
    _append(v + token * V_ROW + head * DIM, v_cache, v_scale, at, dim, KV, LARGEST, DIM)


def cache_sizes(pages: torch.Tensor, cache: torch.Tensor) -> dict[str, int]:
    """Return the constexprs of a paged cache [pool, heads, page, dim] and its page table."""
    pool, heads, page, dim = cache.shape
    sizes = {"PAGES_ROW": pages.stride(0), "SLOTS": pages.shape[0], "POOL": pool}
    sizes |= {"CELLS": pages.shape[1] * page, "HEADS": heads, "PAGE": page, "DIM": dim}
    return sizes


def kv_append(
    *, k: torch.Tensor, v: torch.Tensor, kv_dtype: str, device: Device, **cells: torch.Tensor
) -> list[Launch]:
    """Lower `ops.attention.kv_append`; one program per token and key/value head."""
    sizes = cache_sizes(cells["pages"], cells["k_cache"])
    rows = {"K_ROW": k.stride(0), "V_ROW": v.stride(0)}
    kind = {"KV": kv_dtype, "LARGEST": LARGEST.get(kv_dtype, 0.0)}
    given = {"k": k, "v": v, **cells, **sizes, **rows, **kind}
    grid, block = (sizes["HEADS"], len(k)), triton.next_power_of_2(sizes["DIM"])
    return [launch(_kv_append, grid, device, 1, **given, BLOCK=block)]


LOWER = {"kv_append": kv_append}
