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
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, i64, void
from cpu_fallback.tiles.block_product import BlockEmitter
from cpu_fallback.tiles.emitter import AT_ONCE, Emitter
from cpu_fallback.tiles.layout import BlockLayout, Layout

TOKENS = (1, 2, 3, 4, 6, 8, 16)


def _emitter(layout: Layout | BlockLayout, group: int, tokens: int) -> Callable[..., Any]:
    @v.op(void, i64, i64, i64, i64, i64, i64, i64)
    def emit(b, tile, panel, out, units, width, first, ahead):
        own: Any = BlockEmitter if isinstance(layout, BlockLayout) else Emitter
        own(b, layout, group, tokens).emit(tile, panel, out, units, width, first, ahead)

    return emit


def _product(emit: dict[int, Any], at_once: int) -> Callable[..., None]:
    """Return the product of a panel, in passes over the tile whose sums registers hold."""
    one, two, three, four, six, eight, sixteen = map(emit.get, TOKENS)
    if at_once == 16:

        def product(tile, panel, out, units, tokens, ahead):
            if tokens == 1:
                one(tile, panel, out, units, 1, 0, ahead)
            elif tokens == 2:
                two(tile, panel, out, units, 2, 0, ahead)
            elif tokens == 3:
                three(tile, panel, out, units, 3, 0, ahead)
            elif tokens == 4:
                four(tile, panel, out, units, 4, 0, ahead)
            elif tokens == 6:
                six(tile, panel, out, units, 6, 0, ahead)
            elif tokens == 8:
                eight(tile, panel, out, units, 8, 0, ahead)
            else:
                sixteen(tile, panel, out, units, 16, 0, ahead)

    elif at_once > 4:
        many, most = emit[at_once], at_once
        even = 8 if most == 6 else 0  # two passes of four, for six and two would take longer

        def product(tile, panel, out, units, tokens, ahead):
            if tokens == 1:
                one(tile, panel, out, units, 1, 0, ahead)
            elif tokens == 2:
                two(tile, panel, out, units, 2, 0, ahead)
            else:
                first = 0
                while first < tokens:
                    if tokens - first > 4 and tokens != even:
                        many(tile, panel, out, units, tokens, first, ahead)
                        first += most
                    else:
                        four(tile, panel, out, units, tokens, first, ahead)
                        first += 4

    elif at_once == 4:

        def product(tile, panel, out, units, tokens, ahead):
            if tokens == 1:
                one(tile, panel, out, units, 1, 0, ahead)
            elif tokens == 3:
                three(tile, panel, out, units, 3, 0, ahead)
            else:
                for first in range(0, tokens, 4):
                    if tokens - first == 2:
                        two(tile, panel, out, units, tokens, first, ahead)
                    else:
                        four(tile, panel, out, units, tokens, first, ahead)

    else:

        def product(tile, panel, out, units, tokens, ahead):
            for first in range(tokens):
                one(tile, panel, out, units, tokens, first, ahead)

    return product


@cache
def product_of(layout: Layout | BlockLayout, group: int) -> Kernel:
    """Return the kernel for a layout and an activation group: 32, 128 columns, or 0 for all."""
    at_once = AT_ONCE
    if isinstance(layout, BlockLayout):  # more code, and eight tokens are as fast as sixteen
        at_once = min(at_once, 8)
    emit = {t: _emitter(layout, group, t) for t in TOKENS if t <= at_once}
    return Kernel(_product(emit, at_once), name=f"tile_product.{layout.name}_x{group}")


call_product = v.caller(6)  # (product, tile, panel, out, units, tokens, ahead)
