"""Strips: 512 columns of a tile as the operands that products want, decoded once for many tokens.

A product of four tokens decodes what it reads. Where there are more a strip is decoded to memory
that a core keeps next to it, while it is multiplied by the first four or before, and multiplied by
four after the other. Sums go on from strip to strip in the order of the columns, so the results are
those of `tile_product`, bit for bit.

A strip has a line of 64 bytes for each operand, in the order in which they are multiplied: two
lines of int16 if products are wide. That of a `BlockLayout` has for each half of a block a line of
words for each run of columns, one for each unit's minima, and one for each part of operands.
"""

from functools import cache
from typing import Any

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, i64, void
from cpu_fallback.tiles.block_product import UNITS, BlockEmitter, kind_of
from cpu_fallback.tiles.byte_dots import Strip, dots_of
from cpu_fallback.tiles.layout import LINE, UNIT, BlockLayout, Layout
from cpu_fallback.tiles.tile_product import STRIP, Emitter


def strip_tokens(layout: Layout | BlockLayout, group: int) -> int:
    """Return the tokens from which a layout is multiplied strip by strip; 0 if it never is.

    With VNNI and with the registers of AVX-512 decoding takes less of the time, as of int8.
    """
    if not CURRENT.in_shorts or CURRENT.avx512 or not group:
        return 0
    if isinstance(layout, BlockLayout):
        return 7 if kind_of(layout).top > 15 else 9  # the more there is to decode, the sooner
    return 5 if layout.block and layout.code != "int8" else 0


def stride_of(layout: Layout | BlockLayout) -> int:
    """Return the bytes of the part of a tile that a strip is decoded from."""
    row = LINE if isinstance(layout, Layout) and layout.by_row else 0
    return layout.tile_bytes(STRIP * UNIT) - row


def strip_bytes(layout: Layout | BlockLayout) -> int:
    """Return the bytes of a strip."""
    if isinstance(layout, BlockLayout):
        return STRIP // UNITS * kind_of(layout).half_bytes
    return STRIP * dots_of(layout.code, 1).decoded_bytes


def _pass(layout: Layout | BlockLayout, group: int, tokens: int, decoded: bool) -> Any:
    """Return the product of a strip with some tokens of a panel, from `first` on."""

    @v.op(void, *[i64] * 9)
    def multiply(b, tile, operands, panel, out, units, width, first, start, ahead):
        strip = Strip(operands, start, decoded)
        own: Any = BlockEmitter if isinstance(layout, BlockLayout) else Emitter
        own(b, layout, group, tokens, strip).emit(tile, panel, out, units, width, first, ahead)

    return multiply


@cache
def strip_product_of(layout: Layout | BlockLayout, group: int) -> Kernel:
    """Return the kernel that multiplies a strip by a panel: `call_strip` but for its address.

    `tile` is where the strip begins in it, `start` its first unit; `fresh` says whether the strip
    is to be decoded, for which the panel has to have four tokens. Others are as of `product_of`.
    """
    # Code that also decodes a block would leave the first cache to no other.
    done = 0 if isinstance(layout, BlockLayout) else 4
    decode = _pass(layout, group, done, False)
    four, two = (_pass(layout, group, tokens, True) for tokens in (4, 2))

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

    return Kernel(product, name=f"strip_product.{layout.name}_x{group}")


call_strip = v.caller(9)  # (kernel, tile, strip, panel, out, units, tokens, start, fresh, ahead)
