"""Tiles times tokens: exact int32 dot products, scaled in fp32 in one fixed order.

`product_of` gives the kernel of a layout and an activation group:

    product(tile, panel, out, units, tokens, ahead)

        tile    address of a tile (`tiles`)
        panel   address of the activations of the tokens (`panels`)
        out     fp32 [tokens, 16], written; on a line
        units   K in units of 32 columns, rounded up
        tokens  1, 2, 3, 4, 6, 8 or 16; for 3 and 6 it may read 64 bytes behind the panel
        ahead   how far ahead of the tile's lines to ask for lines, in bytes

`emitter` and `block_product` say how they are made.

Strips: 512 columns of a tile as the operands that products want, decoded once for many tokens.

A product of few tokens decodes what it reads. Where there are more a strip is decoded to memory
that a core keeps next to it, before or while it is multiplied by the first, and multiplied by four
or 16 after the other. Sums go on from strip to strip in the order of the columns, so the results
are those of `tile_product`, bit for bit.

A strip has a line of 64 bytes for each operand, in the order in which they are multiplied: two
lines of int16 if products are wide. That of a `BlockLayout` has for each half of a block a line of
words for each run of columns, one for each unit's minima, and one for each part of operands. With
AMX the sums of the columns that are summed in int32 follow.
"""

from functools import cache
from typing import Any

from clocher_kernels.formats.tcq import TCQ
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, cgutils, device, i64, void
from cpu_fallback.tiles import multiply as m
from cpu_fallback.tiles.block_product import BlockEmitter
from cpu_fallback.tiles.byte_dots import Strip, dots_of
from cpu_fallback.tiles.emitter import AT_ONCE, STRIP, Emitter, strip_units
from cpu_fallback.tiles.layout import BLOCK, LINE, OPERANDS, UNIT, BlockLayout, Layout
from cpu_fallback.tiles.operands import UNITS, kind_of

TOKENS = (1, 2, 3, 4, 6, 8, 16)


def _pass(layout: Layout | BlockLayout, group: int, tokens: int) -> Any:
    """Return the product of a tile with some tokens of a panel, from `first` on."""

    @v.op(void, *[i64] * 7)
    def multiply(b, tile, panel, out, units, width, first, ahead):
        _emitter(layout)(b, layout, group, tokens).emit(
            tile, panel, out, units, width, first, ahead
        )

    return multiply


def _emitter(layout: Layout | BlockLayout) -> Any:
    return BlockEmitter if isinstance(layout, BlockLayout) else Emitter


def _alone(tokens: int, emit: Any, others: Any) -> Any:
    """Return the product of a panel that has this many tokens in one pass, or what it is else."""

    @device
    def product(tile, panel, out, units, width, ahead):
        if width == tokens:
            emit(tile, panel, out, units, tokens, 0, ahead)
        else:
            others(tile, panel, out, units, width, ahead)

    return product


@cache
def product_of(layout: Layout | BlockLayout, group: int) -> Kernel:
    """Return the kernel for a layout and an activation group: 32, 128 columns, or 0 for all.

    Passes over the tile are as wide as registers hold the sums.
    """
    most = AT_ONCE
    if isinstance(layout, BlockLayout):  # more code, and eight tokens are as fast as sixteen
        most = min(most, 8)
    emit = {t: _pass(layout, group, t) for t in TOKENS if t <= most}
    many, four, two = (emit[min(most, t)] for t in (most, 4, 2))
    even = 8 if most == 6 else 0  # two passes of four, for six and two would take longer

    @device
    def passes(tile, panel, out, units, tokens, ahead):
        first = 0
        while first < tokens:
            left = tokens - first
            if most == 1 or (left > 4 and most > 4 and tokens != even):
                many(tile, panel, out, units, tokens, first, ahead)
                first += most
            elif most == 4 and left == 2:
                two(tile, panel, out, units, tokens, first, ahead)
                first += 2
            else:
                four(tile, panel, out, units, tokens, first, ahead)
                first += 4

    product = passes
    if most == 16:
        product = device(lambda *args: many(*args[:4], 16, 0, args[5]))
    for tokens in reversed({16: TOKENS[:-1], 4: (1, 3), 1: ()}.get(most, (1, 2))):
        product = _alone(tokens, emit[tokens], product)
    return Kernel(product.function, name=f"tile_product.{layout.name}_x{group}")


call_product = v.caller(6)  # (product, tile, panel, out, units, tokens, ahead)


def strip_tokens(layout: Layout | BlockLayout, group: int) -> int:
    """Return the tokens from which a layout is multiplied strip by strip; 0 if it never is.

    With VNNI and with the registers of AVX-512 decoding takes less of the time, as of int8: it pays
    for trellises. AMX multiplies nothing else: it pays from 9 tokens, of few bits from 5; later
    where sums of 32 columns are stored apart, and little is decoded (int8) or there are minima.
    """
    if not group and not (CURRENT.amx and isinstance(layout, Layout)):
        return 0
    if CURRENT.amx:
        if isinstance(layout, BlockLayout):
            return 5 if kind_of(layout).factors == 1 else 9
        twice = layout.block == UNIT and (layout.code == "int8" or layout.offset == "minima")
        return 25 if twice else 5 if layout.code == "ternary" else 9
    if CURRENT.avx512 and CURRENT.vnni:
        return 33 if isinstance(layout, Layout) and layout.code in TCQ else 0
    if CURRENT.avx512 or not CURRENT.in_shorts:
        return 0
    if isinstance(layout, BlockLayout):
        return 7 if kind_of(layout).top > 15 else 9  # the more there is to decode, the sooner
    return 5 if layout.block and layout.code != "int8" else 0


def stride_of(layout: Layout | BlockLayout) -> int:
    """Return the bytes of the part of a tile that a strip is decoded from."""
    row = LINE if isinstance(layout, Layout) and layout.by_row else 0
    return layout.tile_bytes(STRIP * UNIT) - row


def operand_bytes(layout: Layout | BlockLayout) -> int:
    """Return the bytes of the operands of a strip."""
    if isinstance(layout, BlockLayout):
        return STRIP // UNITS * kind_of(layout).half_bytes
    return STRIP * dots_of(layout.code, 1).decoded_bytes


def strip_bytes(layout: Layout | BlockLayout) -> int:
    """Return the bytes of a strip, and of the sums that AMX stores of it."""
    parts = kind_of(layout).factors if isinstance(layout, BlockLayout) else 1
    return operand_bytes(layout) + STRIP * parts * m.SUMS_BYTES * CURRENT.amx


def _strip_pass(layout: Layout | BlockLayout, group: int, tokens: int, decoded: bool) -> Any:
    """Return the product of a strip with some tokens of a panel, from `first` on."""

    @v.op(void, *[i64] * 9)
    def multiply(b, tile, operands, panel, out, units, width, first, start, ahead):
        strip = Strip(operands, start, decoded, v.behind(b, operands, operand_bytes(layout)))
        emitter = _emitter(layout)(b, layout, group, tokens, strip)
        emitter.emit(tile, panel, out, units, width, first, ahead)

    return multiply


@cache
def strip_product_of(layout: Layout | BlockLayout, group: int) -> Kernel:
    """Return the kernel that multiplies a strip by a panel: `call_strip` but for its address.

    `tile` is where the strip begins in it, `start` its first unit; `fresh` says whether the strip
    is to be decoded, for which the panel has to have four tokens, or any number with AVX-512.
    Others are as of `product_of`.
    """
    name = f"strip_product.{layout.name}_x{group}"
    if CURRENT.avx512:
        return Kernel(_decoded_product(layout, group), name=name)
    # Code that also decodes a block would leave the first cache to no other.
    done = 0 if isinstance(layout, BlockLayout) else 4
    decode = _strip_pass(layout, group, done, False)
    four, two = (_strip_pass(layout, group, tokens, True) for tokens in (4, 2))

    def product(tile, strip, panel, out, units, tokens, start, fresh, ahead):
        first = 0
        if fresh:
            decode(tile, strip, panel, out, units, tokens, first, start, ahead)
            first = done
        while first < tokens:
            if tokens - first == 2:
                two(tile, strip, panel, out, units, tokens, first, start, ahead)
            else:
                four(tile, strip, panel, out, units, tokens, first, start, ahead)
            first += 4

    return Kernel(product, name=name)


def _dots(layout: Layout | BlockLayout, group: int) -> Any:
    """Return the sums of a strip and a panel by AMX."""
    first, skip, parts, signed = 0, UNITS * OPERANDS * LINE, 1, True
    columns = layout.block if isinstance(layout, Layout) else BLOCK // 2
    block = min((p // UNIT for p in (columns, group) if p), default=STRIP)
    if isinstance(layout, BlockLayout):
        kind = kind_of(layout)
        first, skip, signed = LINE * kind.first, kind.half_bytes, kind.signed
        parts = kind.factors

    @v.op(void, *[i64] * 5)
    def dots(b, strip, panel, units, width, start):
        line, left = b.mul(width, v.number(2 * UNIT)), strip_units(b, units, start)
        codes = v.emit_at(b, panel, b.udiv(start, v.number(2)), line)
        out = v.behind(b, strip, operand_bytes(layout))
        blocks = b.udiv(b.add(left, v.number(block - 1)), v.number(block))
        with cgutils.for_range(b, blocks) as loop:
            unit = b.mul(loop.index, v.number(block))
            own = b.sub(left, unit)
            own = b.select(b.icmp_signed("<", own, v.number(block)), own, v.number(block))
            x = v.emit_at(b, codes, b.udiv(unit, v.number(2)), line)
            x = v.emit_at(b, x, b.urem(unit, v.number(2)), UNIT)
            place = v.emit_at(b, v.behind(b, strip, first), b.udiv(unit, v.number(UNITS)), skip)
            place = v.emit_at(b, place, b.urem(unit, v.number(UNITS)), OPERANDS * LINE)
            for part in range(parts):
                w = v.behind(b, place, part * UNITS * OPERANDS * LINE)
                to = v.emit_at(b, out, loop.index, parts * m.SUMS_BYTES)
                to = v.behind(b, to, part * m.SUMS_BYTES)
                m.tile_dots(b, x, w, to, None if block == 1 else own, line, signed)

    return dots


def _decoded_product(layout: Layout | BlockLayout, group: int) -> Any:
    """Return the product of a strip that is decoded apart, by AMX if there is that."""
    decode = _strip_pass(layout, group, 0, False)
    eight, sixteen = (_strip_pass(layout, group, tokens, True) for tokens in (8, 16))
    dots = _dots(layout, group) if CURRENT.amx else v.op(void, *[i64] * 5)(lambda b, *_: None)

    def product(tile, strip, panel, out, units, tokens, start, fresh, ahead):
        if fresh:
            decode(tile, strip, panel, out, units, tokens, 0, start, ahead)
        dots(strip, panel, units, tokens, start)
        if tokens > 8:
            sixteen(tile, strip, panel, out, units, tokens, 0, start, ahead)
        else:
            eight(tile, strip, panel, out, units, tokens, 0, start, ahead)

    return product


call_strip = v.caller(9)  # (kernel, tile, strip, panel, out, units, tokens, start, fresh, ahead)
