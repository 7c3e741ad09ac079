"""Products of int8 activations and integer weights in tiles, for a matrix.

Each thread has a contiguous range of tiles, so it reads one stream of weights. Tokens come in
blocks whose panels stay in its second-level cache; for each block it reads its tiles once. Up to 8
tokens are one panel.
"""

from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import ShapeError
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.memory import (
    load_f32,
    load_f32_n,
    read_i64,
    store_f32,
    store_f32_n,
    store_u8,
    store_u8_n,
    write_f32,
    write_i64,
)
from cpu_fallback.lanes.record import executes
from cpu_fallback.lanes.simd import (
    absolute,
    add,
    fma,
    hmax,
    hsum,
    maximum,
    minimum,
    mul,
    rint,
    splat,
    to_i32,
    zero,
)
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.team.sync import EPOCH
from cpu_fallback.team.tape import Launch
from cpu_fallback.tiles import panels
from cpu_fallback.tiles.layout import Layout
from cpu_fallback.tiles.panels import Form, fill_token, width
from cpu_fallback.tiles.tile_pack import Tiles, tiles_of
from cpu_fallback.tiles.tile_product import call_product, product_of

_PANELS_BYTES = 384 << 10
_MOST_TOKENS = 128
_KEPT_BYTES = 64 << 20

SUMS = 64
"""In the scratch of a product, after what `is_filled` keeps: the sums, fp32 [16, 16]."""
PANELS = SUMS + 4 * 16 * 16
"""In the scratch of a product: the panels."""
SHARES = 4
"""Shares per thread of a product whose weights are worth it."""
_LARGE = 1 << 17
_LONGEST = 1 << 17

AHEAD = 8192
"""Bytes of weights to ask for ahead of use: what a core's own prefetcher does not keep up with."""


@executes("quantize_blocks")
def quantize_blocks(a, rank, size, scratch):
    """Quantise runs of columns to int8; each thread has a range of tokens."""
    first, last = share(a.M, rank, size)
    _quantize_rows(a, first, last, a.K)


@executes("quantize_experts")
def quantize_experts(a, rank, size, scratch):
    """Quantise the experts' hidden layers; each thread has a range of tokens."""
    first, last = share(a.M, rank, size)
    _quantize_rows(a, first * a.A, last * a.A, a.I)


@device
def _quantize_rows(a, first, last, k):
    """Quantise rows of k columns, in groups; a group of 0 columns is the whole row."""
    for row in range(first, last):
        for g in range(a.B):
            start = g * a.group
            count = k
            if a.group:
                count = min(a.group, k - start)
            x, q = a.x + 4 * (row * k + start), a.q + row * k + start
            write_f32(a.scale + 4 * (row * a.B + g), _quantize(x, q, count))


@device
def _quantize(x, q, count):
    """Quantise a group and return its scale, NaN if a value is NaN or infinite."""
    largest, odd = zero(), zero()
    whole = count & -16
    for i in range(0, whole, 16):
        values = load_f32(x + 4 * i)
        largest, odd = maximum(absolute(values), largest), fma(values, zero(), odd)
    if whole < count:
        values = load_f32_n(x + 4 * whole, count - whole)
        largest, odd = maximum(absolute(values), largest), fma(values, zero(), odd)
    absmax = max(hmax(largest), np.float32(1e-30))
    inverse = splat(np.float32(127) / absmax)
    for i in range(0, whole, 16):
        store_u8(q + i, _code(load_f32(x + 4 * i), inverse))
    if whole < count:
        codes = _code(load_f32_n(x + 4 * whole, count - whole), inverse)
        store_u8_n(q + whole, codes, count - whole)
    return absmax / np.float32(127) + hsum(odd)


@device
def _code(x, inverse):
    low, high = splat(np.float32(-127)), splat(np.float32(127))
    return to_i32(rint(minimum(maximum(mul(x, inverse), low), high)))


@device
def is_filled(rec, ctl, scratch, start):
    """Return whether this thread has made these panels in this launch; from now on it has.

    A launch may be divided into several shares for a thread. Its scratch memory is its own until
    the launch ends.

    Args:
        rec: address of the launch's record.
        ctl: address of the control block.
        scratch: address of the thread's scratch memory.
        start: first token or pair of the panels.
    """
    step = read_i64(ctl + 8 * EPOCH)
    same = read_i64(scratch) == rec and read_i64(scratch + 8) == step
    filled = same and read_i64(scratch + 16) == start
    write_i64(scratch, rec)
    write_i64(scratch + 8, step)
    write_i64(scratch + 16, start)
    return filled


class Tiled(NamedTuple):
    """A weight in tiles, and how the panels that it is multiplied by are made.

    Attributes:
        product: address of the kernel that multiplies a tile by a panel.
        tiles: address of the tiles.
        tile_bytes: of one.
        scales: activation scales of a row of q.
        per_block: tokens or pairs whose panels stay in cache while the tiles are read.
        kept: tokens or pairs whose panels are in the scratch memory at once.
        per_token: bytes of a panel for each.
        ahead: bytes of weights to ask for ahead of use.
        form: how panels are filled.
    """

    product: int
    tiles: int
    tile_bytes: int
    scales: int
    per_block: int
    kept: int
    per_token: int
    ahead: int
    form: Form


@executes("linear_q8", Tiled)
def linear_q8(a, rank, size, scratch):
    """Compute y = (q scale) w^T + bias + residual; each thread has a range of tiles."""
    multiply_tiles(a, rank, size, scratch)


@device
def multiply_tiles(a, rank, size, scratch):
    """Multiply this thread's range of tiles by all tokens."""
    panel = scratch + PANELS
    first, last = share((a.N + 15) >> 4, rank, size)
    if first == last:
        return
    start = 0
    while start < a.M:
        tokens = min(a.kept, a.M - start)
        if not is_filled(a.rec, a.ctl, scratch, start):
            for t in range(0, tokens, 16):
                _fill(a, start + t, min(16, tokens - t), panel + t * a.per_token)
        _multiply(a, scratch, start, tokens, first, last)
        start += tokens


@device
def _multiply(a, scratch, start, tokens, first, last):
    """Multiply a range of tiles by the tokens of the panels, block by block."""
    units = (a.K + 31) >> 5
    sums, panel = scratch + SUMS, scratch + PANELS
    block = 0
    while block < tokens:
        end = min(block + a.per_block, tokens)
        for tile in range(first, last):
            at = a.tiles + tile * a.tile_bytes
            for t in range(block, end, 16):
                count = min(16, end - t)
                here = panel + t * a.per_token
                call_product(a.product, at, here, sums, units, width(count), a.ahead)
                _finish(a, sums, start + t, count, tile * 16)
        block = end


@device
def _fill(a, first, count, panel):
    """Write the panel of up to 16 tokens, the last of them repeated up to its width."""
    wide = width(count)
    for t in range(wide):
        token = first + min(t, count - 1)
        scale = a.scale + 4 * token * a.scales
        fill_token(a.form, a.q + token * a.K, scale, a.K, panel, t, wide)


@device
def _finish(a, sums, first, tokens, row):
    """Write 16 rows of up to 16 tokens, bias and residual added."""
    n, y, bias, residual = a.N, a.y, a.bias, a.residual
    count = min(16, n - row)
    for t in range(tokens):
        value = load_f32(sums + 64 * t)
        at = 4 * ((first + t) * n + row)
        if count == 16:
            if bias:
                value = add(value, load_f32(bias + 4 * row))
            if residual:
                value = add(value, load_f32(residual + at))
            store_f32(y + at, value)
        else:
            if bias:
                value = add(value, load_f32_n(bias + 4 * row, count))
            if residual:
                value = add(value, load_f32_n(residual + at, count))
            store_f32_n(y + at, value, count)


def _quantize_blocks(call: BoundCall) -> list[Launch]:
    check_groups(call, call.dim("K"))
    return [call.launch(quantize_blocks)]


def _quantize_experts(call: BoundCall) -> list[Launch]:
    check_groups(call, call.dim("I"))
    return [call.launch(quantize_experts)]


def check_groups(call: BoundCall, k: int) -> int:
    """Return the activation group of a call, columns per scale or 0.

    Raises:
        ShapeError: the scales are not one for each group.
    """
    group = int(call.attr("group"))
    if group not in (0, 32, 128) or call.dim("B") != (-(-k // group) if group else 1):
        raise ShapeError(
            f"{call.spec.name}: group {group} and {call.dim('B')} scales for {k} columns; expected "
            "group 32, 128 or 0 (all) and a scale for each"
        )
    return group


def panel_sizes(layout: Layout, group: int, k: int, most: int) -> tuple[int, int, int]:
    """Return tokens per block, tokens whose panels are kept, and the bytes of a panel per token.

    Args:
        layout: of the weight's tiles.
        group: columns per activation scale.
        k: columns.
        most: tokens or pairs of a step, at capacity.

    Raises:
        ShapeError: K is so large that a sum might not fit in int32.
    """
    if k > _LONGEST:
        raise ShapeError(f"K = {k}; the integer products take at most {_LONGEST} columns")
    per_token = panels.panel_bytes(layout, group, k)
    block = max(16, min(_MOST_TOKENS, _PANELS_BYTES // per_token // 16 * 16))
    kept = max(block, min(-(-most // 16) * 16, _KEPT_BYTES // per_token // block * block))
    return block, kept, per_token


def tiled(call: BoundCall, group: int, k: int, most: int) -> tuple[Tiled, Tiles]:
    """Return what a kernel needs to multiply by the tiles of `w`, and the tiles.

    Args:
        call: the bound call.
        group: columns per activation scale, 0 for one per token.
        k: columns.
        most: tokens or pairs of a step, at capacity.
    """
    tiles = tiles_of(call.spec.name, call.tensor("w"))
    block, kept, per_token = panel_sizes(tiles.layout, group, k, most)
    return Tiled(
        product=product_of(tiles.layout, group),
        tiles=int(tiles.data.ctypes.data),
        tile_bytes=tiles.tile_bytes,
        scales=-(-k // group) if group else 1,
        per_block=block,
        kept=kept,
        per_token=per_token,
        ahead=call.hints.prefetch_distance(AHEAD),
        form=panels.form_of(tiles.layout, group, tiles.factor),
    ), tiles


def product_launch(call: BoundCall, kernel: Kernel, group: int) -> list[Launch]:
    """Return the launch of a product of q, scale and w."""
    own, tiles = tiled(call, group, call.dim("K"), call.array("q").shape[0])
    shares = SHARES if tiles.data.nbytes >= _LARGE else 1
    return [call.launch(kernel, own, PANELS + own.kept * own.per_token, shares)]


def _linear_q8(call: BoundCall) -> list[Launch]:
    return product_launch(call, linear_q8, check_groups(call, call.dim("K")))


LOWER = {
    "quantize_blocks": _quantize_blocks,
    "quantize_experts": _quantize_experts,
    "linear_q8": _linear_q8,
}
