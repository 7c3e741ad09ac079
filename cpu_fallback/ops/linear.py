"""Matrix products of any format, of fp32 or int8 activations, and embedding rows."""

from typing import Any, NamedTuple

import numpy as np

from clocher_kernels.errors import ShapeError
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT, is_zen
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops import product
from cpu_fallback.ops.bind import BoundCall, share, within
from cpu_fallback.ops.decode import weight_record
from cpu_fallback.ops.epilogue import (
    activation_of,
    add_lora,
    expect,
    finish,
    lora_tiles,
    write_rows,
)
from cpu_fallback.ops.quantize import check_groups
from cpu_fallback.ops.stream import FEW, Stored, stored
from cpu_fallback.team.tape import EPOCH, Launch
from cpu_fallback.tiles import panels
from cpu_fallback.tiles.emitter import STRIP
from cpu_fallback.tiles.layout import Layout
from cpu_fallback.tiles.multiply import begin_tiles, end_tiles
from cpu_fallback.tiles.panels import BEHIND, Form, fill_token, width
from cpu_fallback.tiles.tile_pack import Tiles, tiles_of
from cpu_fallback.tiles.tile_product import (
    call_product,
    call_strip,
    product_of,
    stride_of,
    strip_bytes,
    strip_product_of,
    strip_tokens,
)

_PANELS_BYTES = 384 << 10
_MORE_BYTES = 640 << 10  # The same where tiles are decoded for every block of tokens
_MOST_TOKENS = 128
_KEPT_BYTES = 64 << 20

TILE_SUMS = 64  # In the scratch of a product, after what `is_filled` keeps: the sums, fp32 [16, 16]
PANELS = TILE_SUMS + 4 * 16 * 16  # In the scratch of a product: the panels
SHARES = 4  # Shares per thread of a product whose weights are worth it
_LONGEST = 1 << 17

_AHEAD_OF_FEW_BITS = 4096 if CURRENT.in_shorts else 8192
"""Bytes of weights to ask for ahead of use: what a core's own prefetcher does not keep up with."""
_AHEAD = 4096 if CURRENT.avx512 else _AHEAD_OF_FEW_BITS
"""The same of int8, and of blocks of 256 columns, which are used up more slowly."""
TWOS = int(CURRENT.amx)  # Whether panels that strips are multiplied by are those of AMX
_FEW = 2
_NONE_OF_FEW = is_zen()
"""Whether it is 0 for `_FEW` tokens. Where they wait for memory alone, Zen's own prefetcher draws
up to a fifth faster unless lines are asked for before it does; Intel's takes twice the time.
With 0 those of a unit are asked for as it begins."""


@device
def is_filled(rec, ctl, scratch, start):
    """Return whether this thread has made the panels from token or pair `start` on in this launch.

    From now on it has. A launch may be divided into several shares for a thread, whose scratch
    memory is its own until the launch ends.
    """
    step = v.read_i64(ctl + 8 * EPOCH)
    same = v.read_i64(scratch) == rec and v.read_i64(scratch + 8) == step
    filled = same and v.read_i64(scratch + 16) == start
    v.write_i64(scratch, rec)
    v.write_i64(scratch + 8, step)
    v.write_i64(scratch + 16, start)
    return filled


class Tiled(NamedTuple):
    """A weight in tiles, and how the panels that it is multiplied by are made."""

    product: int  # address of the kernel that multiplies a tile by a panel
    tiles: int  # address of the tiles
    tile_bytes: int  # of one
    scales: int  # activation scales of a row of q
    per_block: int  # tokens or pairs whose panels stay in cache while the tiles are read
    kept: int  # tokens or pairs whose panels are in the scratch memory at once
    per_token: int  # bytes of a panel for each
    ahead: int  # bytes of weights to ask for ahead of use
    ahead_of_few: int  # the same of up to `_FEW` tokens or pairs
    form: Form  # how panels are filled
    activate: int  # address of the activation of the sums, of ops that have one; 0 for none
    from_tokens: int  # how many of a block are multiplied strip by strip
    of_strip: int  # address of the kernel that multiplies a strip; 0 if there are none
    stride: int  # bytes of a tile from strip to strip
    strip_bytes: int  # of a strip
    lora_tiles: int  # see `epilogue.lora_tiles`


def has_codes(call: BoundCall) -> bool:
    """Return whether the activations of a call are int8 codes, with scales. Raises ShapeError."""
    codes, scaled = call.array("x").dtype == np.int8, call.has("x_scale")
    if codes != scaled:
        raise ShapeError(
            f"{call.spec.name}: 'x' is {call.array('x').dtype} and 'x_scale' is "
            f"{'there' if scaled else 'absent'}; expected int8 with scales, or float32 without"
        )
    return codes


def tiled(call: BoundCall, columns: str, most: int) -> tuple[Tiled, Tiles]:
    """Return what a kernel needs to multiply int8 activations by a weight in tiles, and the tiles.

    `columns` is the letter of a row of activations, `most` the tokens or pairs of a step, at
    capacity. Raises ShapeError for a K whose sums might not fit in int32.
    """
    group, k = check_groups(call, columns), call.dim(columns)
    tiles = tiles_of(call.spec.name, call.tensor("w"))
    params = {param.name for param in call.spec.params}
    least = strip_tokens(tiles.layout, group)
    strips = 0 < least <= most
    few_bits = isinstance(tiles.layout, Layout) and tiles.layout.code != "int8"
    ahead = _AHEAD_OF_FEW_BITS if few_bits else _AHEAD
    if k > _LONGEST:
        raise ShapeError(f"K = {k}; the integer products take at most {_LONGEST} columns")
    per_token = panels.panel_bytes(tiles.layout, group, k)
    room = _MORE_BYTES if strips else _PANELS_BYTES
    block = max(16, min(_MOST_TOKENS, room // per_token // 16 * 16))
    kept = max(block, min(-(-most // 16) * 16, _KEPT_BYTES // per_token // block * block))
    return Tiled(
        product=product_of(tiles.layout, group),
        tiles=int(tiles.data.ctypes.data),
        tile_bytes=tiles.tile_bytes,
        scales=-(-k // group) if group else 1,
        per_block=block,
        kept=kept,
        per_token=per_token,
        ahead=call.hints.prefetch_distance(ahead),
        ahead_of_few=call.hints.prefetch_distance(0 if _NONE_OF_FEW else ahead),
        form=panels.form_of(tiles.layout, group, tiles.factor),
        activate=activation_of(call) if "times" in params else 0,  # type: ignore[arg-type]
        from_tokens=least,
        of_strip=strip_product_of(tiles.layout, group) if strips else 0,  # type: ignore[arg-type]
        stride=stride_of(tiles.layout) if strips else 0,
        strip_bytes=strip_bytes(tiles.layout) if strips else 0,
        lora_tiles=lora_tiles(call, v.LANES),
    ), tiles


_SHARES = 16
_FEW_ROWS = 64
_LARGE = 1 << 18  # Weights from which a product takes longer than it takes threads to share it
_LARGE_TILES = 1 << 17  # The same in bytes of tiles


Decoded = NamedTuple(  # a weight as it is stored, and what its sums go through
    "Decoded", [*Stored.__annotations__.items(), ("activate", int), ("lora_tiles", int)]
)


@executes("linear", Decoded)
def linear(a, rank, size, scratch):
    """Multiply fp32 activations; each thread has a range of output rows, or of many tokens."""
    m, n, k, start = a.M, a.N, a.K, np.int64(0)
    first, last = share((n + product.ROWS - 1) // product.ROWS, rank, size)
    if n <= _FEW_ROWS and m >= product.TOKENS:  # the weight costs less to read twice than they do
        first, last = np.int64(0), (n + product.ROWS - 1) // product.ROWS
        start, m = share(m, rank, size)
    while start < m:
        tokens = min(product.TOKENS, m - start)
        for t in range(tokens):
            v.write_i64(scratch + product.XS + 8 * t, a.x + 4 * (start + t) * k)
        kernel, height = a.product, product.ROWS
        if tokens > FEW:
            kernel, height = product.weight_at(a.weight).many, product.HEIGHT
        row, end = first * product.ROWS, min(last * product.ROWS, n)
        while row < end:
            rows = min(height, end - row)
            for r in range(0, rows, product.ROWS):
                expect(a, start, tokens, row + r)
            product.multiply(kernel, a.weight, 0, row, rows, tokens, scratch)
            for r in range(0, rows, product.ROWS):
                sums = scratch + product.SUMS + 4 * product.TOKENS * r
                if a.lora_x:
                    add_lora(a, sums, start, tokens, row + r)
                finish(a, sums, product.ROWS, start, tokens, row + r, min(product.ROWS, rows - r))
            row += rows
        start += tokens


@executes("linear", Tiled)
def linear_of_codes(a, rank, size, scratch):
    """Multiply int8 activations; each thread has a range of tiles."""
    first, last = share((a.N + 15) >> 4, rank, size)
    multiply_tiles(a, scratch, first, last)


@device
def multiply_tiles(a, scratch, first, last):
    """Multiply a range of tiles by all tokens: one stream of weights for each block of tokens."""
    panels_at = scratch + PANELS
    strip = (panels_at + a.kept * a.per_token + BEHIND + 63) & -64
    start = 0
    while start < a.M and first < last:
        tokens = min(a.kept, a.M - start)
        if not is_filled(a.rec, a.ctl, scratch, start):
            for t in range(0, tokens, 16):
                block = min(a.per_block, tokens - t // a.per_block * a.per_block)
                twos = TWOS * in_strips(a, block)
                _fill(a, start + t, min(16, tokens - t), panels_at + t * a.per_token, twos)
        block = 0
        while block < tokens:  # a range of variable steps might raise
            count, panel = min(a.per_block, tokens - block), panels_at + block * a.per_token
            where = scratch, a.tiles, panel, strip
            multiply_block(a, where, count, a.K, first, last, start + block, _ask, _write)
            block += count
        start += tokens


@device
def multiply_block(a, where, count, k, first, last, own, ask, write):
    """Multiply a range of tiles by one block of tokens or pairs.

    `where`: the scratch memory, the tiles, the panels of the block, room for a strip. For up to 16
    tokens, from the t-th on, `ask(a, own, t, tokens, tile)` is called before a product, and after
    it `write(a, own, sums, t, tokens, tile)` with their sums of 16 rows.
    """
    scratch, tiles, panel, strip = where
    strips, units = in_strips(a, count), (k + 31) >> 5
    if strips:
        begin_tiles(count)
    for tile in range(first, last):
        at, sums = tiles + tile * a.tile_bytes, scratch + TILE_SUMS
        if strips:
            sums = strip + a.strip_bytes
            _multiply_strips(a, at, strip, panel, count, units, sums)
        for t in range(0, count, 16):
            tokens, out = min(16, count - t), sums + 64 * t
            ask(a, own, t, tokens, tile)
            if not strips:
                ahead = a.ahead if tokens > _FEW else a.ahead_of_few
                here, out = panel + t * a.per_token, sums
                call_product(a.product, at, here, out, units, width(tokens), ahead)
            write(a, own, out, t, tokens, tile)
    if strips:
        end_tiles()


_ask = device(lambda a, start, t, tokens, tile: expect(a, start + t, tokens, 16 * tile))


@device
def _write(a, start, sums, t, tokens, tile):
    write_rows(a, sums, start + t, tokens, 16 * tile)


@device
def in_strips(a, tokens):
    """Return whether a block of so many tokens or pairs is multiplied strip by strip."""
    return int(a.of_strip != 0 and tokens >= a.from_tokens)


@device
def _multiply_strips(a, tile, strip, panel, count, units, sums):
    """Multiply a tile by the panels of a block, strip by strip; `sums`: fp32 [count, 16]."""
    for unit in range(0, units, STRIP):
        for t in range(0, count, 16):
            here, to = panel + t * a.per_token, sums + 64 * t
            wide, fresh = width(min(16, count - t)), int(t == 0)
            call_strip(a.of_strip, tile, strip, here, to, units, wide, unit, fresh, a.ahead)
        tile += a.stride


@device
def _fill(a, first, count, panel, twos):
    wide = width(count)
    for t in range(wide):
        token = first + min(t, count - 1)
        scale = a.x_scale + 4 * token * a.scales
        fill_token(a.form, a.x + token * a.K, scale, a.K, panel, t, wide, twos)


@executes("embed", weight=product.Weight)
def embed(a, rank, size, scratch):
    """Decode the rows of a table that the ids name; each thread has a range of tokens."""
    first, last = share(a.M, rank, size)
    for t in range(first, last):
        out = a.y + 4 * t * a.K
        token = within(v.read_i32(a.ids + 4 * t), a.V)
        row = product.decode(a.weight, 0, token, 1, 0, a.K, out)
        if row != out or a.scale != np.float32(1):
            product.copy_f32(row, out, a.K, a.scale)


def panels_room(own: Tiled) -> int:
    """Return the bytes of scratch memory that `multiply_tiles` needs."""
    return PANELS + own.kept * own.per_token + BEHIND + 64 + strip_room(own)


def strip_room(a: Any) -> Any:
    """Return the bytes of a strip and of the sums of a block, which follow it; 0 without strips."""
    return a.strip_bytes + 64 * a.per_block if a.of_strip else 0


def _linear(call: BoundCall) -> list[Launch]:
    if has_codes(call):
        own, tiles = tiled(call, "K", call.array("x").shape[0])
        shares = SHARES if tiles.data.nbytes >= _LARGE_TILES else 1
        return [call.launch(linear_of_codes, own, panels_room(own), shares)]
    shares = _SHARES if call.dim("N") * call.dim("K") >= _LARGE else 1
    own = Decoded(*stored(call), activation_of(call), lora_tiles(call, product.ROWS))
    return [call.launch(linear, own, product.SCRATCH, shares)]


LOWER = {
    "linear": _linear,
    "embed": lambda call: [call.launch(embed, (weight_record("embed", call.tensor("table")),))],
}
