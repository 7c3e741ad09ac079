"""Products of int8 activations and integer weights in tiles, for a matrix.

Each thread has a contiguous range of tiles, so it reads one stream of weights. Tokens come in
blocks whose panels stay in its second-level cache; for each block it reads its tiles once. Up to 8
tokens are one panel.
"""

import numpy as np

from clocher_kernels.errors import ShapeError
from cpu_fallback import panels
from cpu_fallback.bind import BoundCall, bits, counted, share
from cpu_fallback.jit import device, kernel
from cpu_fallback.memory import (
    field,
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
from cpu_fallback.panels import fill_token, width
from cpu_fallback.simd import (
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
from cpu_fallback.sync import EPOCH
from cpu_fallback.tape import Launch
from cpu_fallback.tile_pack import tiles_of
from cpu_fallback.tile_product import call_product, product_of
from cpu_fallback.tiles import Layout

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


@kernel
def quantize_blocks(rec, ctl, rank, size, scratch):
    """Quantise runs of columns to int8; each thread has a range of tokens.

    Fields: M, K, group, B, x, q, scale, rows per token.
    """
    m, k, group, groups = counted(ctl, field(rec, 0)), field(rec, 1), field(rec, 2), field(rec, 3)
    rows = field(rec, 7)
    first, last = share(m, rank, size)
    for row in range(first * rows, last * rows):
        for g in range(groups):
            start = g * group
            count = min(group, k - start)
            x, q = field(rec, 4) + 4 * (row * k + start), field(rec, 5) + row * k + start
            scale = _quantize(x, q, count)
            write_f32(field(rec, 6) + 4 * (row * groups + g), scale)


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
        rec: address of the launch's fields.
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


@kernel
def linear_q8(rec, ctl, rank, size, scratch):
    """Compute y = (q scale) w^T + bias + residual; each thread has a range of tiles.

    Fields: M, N, K, q, scale, B, y, bias, residual, product, tiles, tile bytes, tokens per block,
    tokens whose panels are kept, panel bytes per token, bytes to ask ahead, form of the panels.
    """
    m, n, k = counted(ctl, field(rec, 0)), field(rec, 1), field(rec, 2)
    kept, per_token = field(rec, 13), field(rec, 14)
    panel = scratch + PANELS
    first, last = share((n + 15) >> 4, rank, size)
    if first == last:
        return
    start = 0
    while start < m:
        tokens = min(kept, m - start)
        if not is_filled(rec, ctl, scratch, start):
            for t in range(0, tokens, 16):
                _fill(rec, start + t, min(16, tokens - t), k, panel + t * per_token)
        _multiply(rec, scratch, start, tokens, first, last)
        start += tokens


@device
def _multiply(rec, scratch, start, tokens, first, last):
    """Multiply a range of tiles by the tokens of the panels, block by block."""
    tiles, tile_bytes = field(rec, 10), field(rec, 11)
    per_block, per_token = field(rec, 12), field(rec, 14)
    units = (field(rec, 2) + 31) >> 5
    sums, panel = scratch + SUMS, scratch + PANELS
    block = 0
    while block < tokens:
        end = min(block + per_block, tokens)
        for tile in range(first, last):
            at = tiles + tile * tile_bytes
            for t in range(block, end, 16):
                count = min(16, end - t)
                here = panel + t * per_token
                call_product(field(rec, 9), at, here, sums, units, width(count), field(rec, 15))
                _finish(rec, sums, start + t, count, tile * 16)
        block = end


@device
def _fill(rec, first, count, k, panel):
    """Write the panel of up to 16 tokens, the last of them repeated up to its width."""
    wide = width(count)
    for t in range(wide):
        token = first + min(t, count - 1)
        scale = field(rec, 4) + 4 * token * field(rec, 5)
        fill_token(rec + 128, field(rec, 3) + token * k, scale, k, panel, t, wide)


@device
def _finish(rec, sums, first, tokens, row):
    """Write 16 rows of up to 16 tokens, bias and residual added."""
    n, y, bias, residual = field(rec, 1), field(rec, 6), field(rec, 7), field(rec, 8)
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
    letters = "M K" if call.spec.name == "quantize_blocks" else "M I"
    k = call.dim(letters[-1])
    group = int(call.attr("group")) or k
    rows = call.dim("A") if letters == "M I" else 1
    fields = [call.count("x"), k, group, -(-k // group)]
    fields += [call.address(name) for name in ("x", "q", "scale")]
    check_groups(call, k)
    return [call.launch(quantize_blocks, [*fields, rows])]


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


def _linear_q8(call: BoundCall) -> list[Launch]:
    return product_launch(call, check_groups(call, call.dim("K")))


def product_launch(call: BoundCall, group: int) -> list[Launch]:
    """Return the launch of a product of q, scale and w."""
    n, k = call.dim("N"), call.dim("K")
    tiles = tiles_of(call.spec.name, call.tensor("w"))
    block, kept, per_token = panel_sizes(tiles.layout, group, k, call.array("q").shape[0])
    fields = [
        call.count("q"),
        n,
        k,
        call.address("q"),
        call.address("scale"),
        call.dim("B") if group else 1,
        call.address("y"),
        call.address("bias"),
        call.address("residual"),
        product_of(tiles.layout, group),
        int(tiles.data.ctypes.data),
        tiles.tile_bytes,
        block,
        kept,
        per_token,
        call.hints.prefetch_distance(AHEAD),
        *panels.fields(tiles.layout, group, bits(tiles.factor)),
    ]
    shares = SHARES if tiles.data.nbytes >= _LARGE else 1
    return [call.launch(linear_q8, fields, PANELS + kept * per_token, shares)]


LOWER = {
    "quantize_blocks": _quantize_blocks,
    "quantize_experts": _quantize_blocks,
    "linear_q8": _linear_q8,
}
