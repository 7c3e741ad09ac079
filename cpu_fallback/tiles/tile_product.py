"""Tiles times tokens: exact int32 dot products, scaled in fp32 in one fixed order.

`product_of` gives the kernel of a layout and an activation group:

    product(tile, panel, out, units, tokens, ahead)

        tile    address of a tile (`tiles`)
        panel   address of the activations of the tokens (`panels`)
        out     fp32 [tokens, 16], written; on a line
        units   K in units of 32 columns, rounded up
        tokens  1, 2, 3, 4, 6, 8 or 16; for 3 and 6 it may read 64 bytes behind the panel
        ahead   how far ahead of the tile's lines to ask for lines, in bytes

Columns are summed in int32 over the shorter of the weight's block and the activation's group. Such
a sum is converted, and scaled and added with one fma; the sums of a longer block or group likewise.
int32 sums are exact, so neither the number of tokens nor the ISA changes a bit of the result, but
for the generic ISA, whose fma rounds twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, cgutils, i64, void
from cpu_fallback.tiles.byte_dots import NUMBER, NUMBER_F32, Strip, dots_of, is_number
from cpu_fallback.tiles.layout import LINE, ROWS, UNIT, BlockLayout, Layout

TOKENS = (1, 2, 3, 4, 6, 8, 16)

_AT_ONCE = 16 if CURRENT.avx512 else 6 if CURRENT.avx2 else 4 if CURRENT.neon else 1
if CURRENT.in_shorts and not CURRENT.avx512:
    _AT_ONCE = 4  # beside int16 sums
"""Tokens whose sums the registers hold; the rest of a panel takes another pass over the tile."""

_HELD = 2 if CURRENT.in_shorts and not CURRENT.avx512 else _AT_ONCE
"""Tokens whose fp32 sums they hold too."""


class _Pointer:
    """An address that advances as the code goes on."""

    def __init__(self, b: Any, address: Any) -> None:
        self._b = b
        self._slot = cgutils.alloca_once_value(b, address)

    def take(self, nbytes: Any) -> Any:
        """Return the address, and advance it."""
        at = self._b.load(self._slot)
        step = v.number(nbytes) if isinstance(nbytes, int) else nbytes
        self._b.store(self._b.add(at, step), self._slot)
        return at


class Emitter:
    """Emits the product of one tile, or of a strip of it, with some of the tokens of a panel."""

    def __init__(
        self, b: Any, layout: Layout, group: int, tokens: int, strip: Strip | None = None
    ) -> None:
        self.b, self.layout, self.tokens, self.strip = b, layout, tokens, strip
        self.dots = dots_of(layout.code, tokens, is_number(layout, group))
        self.minima = layout.offset == "minima"
        self.wide, self.narrow = layout.block // UNIT, group // UNIT
        periods = [p for p in (self.wide, self.narrow) if p]
        self.block = min(periods, default=0)
        self.group = max(periods) if len(periods) == 2 else 0
        # Registers hold the sums: what is loaded before them would be put aside meanwhile.
        self.late = tokens > _HELD

    def emit(
        self, tile: Any, panel: Any, out: Any, units: Any, width: Any, first: Any, ahead: Any
    ) -> None:
        """Emit everything; of a strip the sums go on from those of the one before."""
        b = self.b
        self.ahead = ahead
        self.weights = _Pointer(b, tile)
        own = v.number(self.dots.code_bytes)
        self.row, self.line = b.mul(width, v.number(4)), b.mul(width, own)
        place = b.mul(first, v.number(4))
        starts = b.add(panel, b.mul(units, self.line))
        scales = b.add(starts, b.mul(self._blocks(units), self.row))
        self.codes = _Pointer(b, b.add(panel, b.mul(first, own)))
        self.starts = _Pointer(b, b.add(starts, place))
        self.scales = _Pointer(b, b.add(scales, place))
        self.head = cgutils.alloca_once_value(b, tile)
        self.index = cgutils.alloca_once_value(b, v.number(0))
        self.out = b.add(out, b.mul(first, v.number(4 * ROWS)))
        whole = units
        if self.strip:
            self.decoded = _Pointer(b, self.strip.at)
            units = self._skip(units, self.strip.start)
        if not self.block:
            sums = self._sums(units)
        elif not self.group:
            sums = self._parts(units, self.block)
        else:
            sums = self._groups(units)
        if not self.narrow:
            sums = [b.fmul(s, x) for s, x in zip(sums, self._activation_scales(), strict=True)]
        if self.layout.by_row:
            rows = v.emit_load(b, v.F32.llvm, self.weights.take(LINE))
            if self.strip:  # they stand behind the last one
                ends = b.icmp_signed("<=", whole, b.add(self.strip.start, v.number(STRIP)))
                rows = b.select(ends, rows, v.constant(v.F32, 1.0))
            sums = [b.fmul(s, rows) for s in sums]
        for i, value in enumerate(sums):
            v.emit_store(b, value, v.behind(b, self.out, 4 * ROWS * i))

    def _skip(self, units: Any, start: Any) -> Any:
        """Emit the step to the unit with which a strip begins; return the units of the strip."""
        b = self.b
        self.codes.take(b.mul(start, self.line))
        for pointer, period in ((self.starts, self.block), (self.scales, self.narrow)):
            pointer.take(b.mul(b.udiv(start, v.number(period)), self.row))
        return strip_units(b, units, start)

    def _blocks(self, units: Any) -> Any:
        if not self.block:
            return v.number(1)
        return self.b.udiv(self.b.add(units, v.number(self.block - 1)), v.number(self.block))

    @contextmanager
    def _steps(self, units: Any, step: int) -> Iterator[Any]:
        """Loop over units in steps; yields the units of the step."""
        b = self.b
        left = cgutils.alloca_once_value(b, units)
        head, body, end = (b.append_basic_block(n) for n in ("units", "units.body", "units.end"))
        b.branch(head)
        b.position_at_end(head)
        rest = b.load(left)
        b.cbranch(b.icmp_signed(">", rest, v.number(0)), body, end)
        b.position_at_end(body)
        more = b.icmp_signed(">", rest, v.number(step))
        yield b.select(more, v.number(step), rest) if step > 1 else v.number(1)
        b.store(b.sub(rest, v.number(step)), left)
        b.branch(head)
        b.position_at_end(end)

    def _zeros(self) -> list[Any]:
        slots = [cgutils.alloca_once(self.b, v.F32.llvm) for _ in range(self.tokens)]
        for slot in slots:
            self.b.store(v.constant(v.F32, 0.0), slot)
        return slots

    def _add(self, slots: list[Any], values: list[Any], scales: list[Any]) -> None:
        for slot, value, scale in zip(slots, values, scales, strict=True):
            self.b.store(v.emit_fma(self.b, value, scale, self.b.load(slot)), slot)

    def _groups(self, units: Any) -> list[Any]:
        """Emit the sum over groups of blocks, or of blocks that have both scales."""
        b = self.b
        totals = begin_sums(b, self.out, self.tokens, self.strip)
        with self._steps(units, self.group) as within:
            if self.block == self.group:
                parts, offset = self._scaled(within)
                if self.minima:
                    added = zip(self.lows, parts, strict=True)
                    parts = [v.emit_fma(b, low, offset, part) for low, part in added]
                self._add(totals, parts, self._activation_scales())
            elif self.wide == self.block:
                self._add(totals, self._parts(within, self.block), self._activation_scales())
            else:
                scale, offset = self._weight_scales()
                parts = self._parts(within, self.block, offset)
                self._add(totals, parts, [scale] * self.tokens)
        return [b.load(slot) for slot in totals]

    def _scaled(self, units: Any) -> tuple[list[Any], Any]:
        """Emit the sums over one block times its scales, and what `_weight_scales` has besides."""
        b = self.b
        if self.late:
            at = self._record()
            ends = self._dots(units, lambda: self._weight_scales(at)[1])
            scale, offset = self._weight_scales(at)
        else:
            scale, offset = self._weight_scales()
            ends = self._dots(units, lambda: offset)
        if not (CURRENT.fma and self.dots.number and self.layout.scale == "f16"):
            return [b.fmul(self.dots.end_f32(b, end), scale) for end in ends], offset
        # The same with one instruction less for each token: `NUMBER` times eleven bits is exact.
        less = b.fmul(scale, v.constant(v.F32, -NUMBER_F32))
        bits = [b.bitcast(self.dots.end(b, end), v.F32.llvm) for end in ends]
        return [v.emit_fma(b, value, scale, less) for value in bits], offset

    def _parts(self, units: Any, block: int, offset: Any = None) -> list[Any]:
        """Emit the sum over blocks, each scaled by the scale that changes with every block."""
        parts = self._zeros()
        with self._steps(units, block) as within:
            if self.wide == block:
                scale, offset = self._weight_scales()
                self._add(parts, self._sums(within, offset), [scale] * self.tokens)
                if self.minima:
                    self._add(parts, self.lows, [offset] * self.tokens)
            else:
                self._add(parts, self._sums(within, offset), self._activation_scales())
        return [self.b.load(slot) for slot in parts]

    def _sums(self, units: Any, offset: Any = None) -> list[Any]:
        """Emit the exact sum over one block, as fp32; `lows` are those of the activations."""
        return [self.dots.end_f32(self.b, total) for total in self._dots(units, lambda: offset)]

    def _begun(self, at: Any, offset: Any) -> list[Any]:
        """Emit what sums begin with."""
        b = self.b
        places = [b.add(at, v.number(4 * i)) for i in range(self.tokens)]
        if self.minima:
            self.lows = [v.emit_everywhere(b, v.F32, place) for place in places]
            starts, offset = [v.constant(v.I32, NUMBER * self.dots.number)] * self.tokens, None
        else:
            starts = [v.emit_everywhere(b, v.I32, place) for place in places]
        return [self.dots.begin(b, start, offset) for start in starts]

    def _dots(self, units: Any, offset: Callable[[], Any]) -> list[Any]:
        """Emit the exact sum over one block; if `late` what it begins with is added at the end."""
        b, at = self.b, self.starts.take(self.row)
        if self.late:
            nothing = v.constant(v.I32, 0)
            sums = [self.dots.begin(b, nothing, None) for _ in range(self.tokens)]
        else:
            sums = self._begun(at, offset())
        one = isinstance(units, ir.Constant)
        with nullcontext() if one else self._steps(units, 1):
            step = self.dots.lines * LINE
            lines = self.weights.take(step)
            codes = self.codes.take(self.line)
            strip = self.strip
            if strip:
                strip = strip._replace(at=self.decoded.take(self.dots.decoded_bytes))
            self.dots.unit(b, lines, codes, sums, self.ahead, strip)
        if self.late:
            for own, start in zip(sums, self._begun(at, offset()), strict=True):
                b.store(b.add(b.load(own[0]), b.load(start[0])), own[0])
        return sums

    def _activation_scales(self) -> list[Any]:
        b = self.b
        at = self.scales.take(self.row)
        places = [b.add(at, v.number(4 * i)) for i in range(self.tokens)]
        return [v.emit_everywhere(b, v.F32, place) for place in places]

    def _record(self) -> Any:
        """Emit the step to the scales of a block; return their address."""
        b, layout = self.b, self.layout
        if layout.per_head == 1:
            return self.weights.take(layout.head)
        index = b.load(self.index)
        b.store(b.add(index, v.number(1)), self.index)
        fresh = b.icmp_signed("==", b.and_(index, v.number(layout.per_head - 1)), v.number(0))
        here = self.weights.take(b.select(fresh, v.number(layout.head), v.number(0)))
        at = b.select(fresh, here, b.add(b.load(self.head), v.number(layout.record)))
        b.store(at, self.head)
        return at

    def _weight_scales(self, at: Any = None) -> tuple[Any, Any]:
        """Emit the scales of a block, fp32, and its zero points, int32, or minima, fp32."""
        b, layout = self.b, self.layout
        at = self._record() if at is None else at
        scale, offset = v.WIDEN[layout.scale], None
        place = b.add(at, v.number(scale.nbytes))
        if self.minima:
            offset = v.WIDEN["f16"].emit(b, place)
        elif layout.offset:
            offset = b.zext(v.emit_load(b, ir.VectorType(v.INT8, ROWS), place), v.I32.llvm)
        return scale.emit(b, at), offset


STRIP = 16  # Units of a strip: whole heads, blocks and groups


def strip_units(b: Any, units: Any, start: Any) -> Any:
    """Emit the units of the strip from a unit on."""
    left, most = b.sub(units, start), v.number(STRIP)
    return b.select(b.icmp_signed("<", left, most), left, most)


def begin_sums(b: Any, out: Any, tokens: int, strip: Strip | None) -> list[Any]:
    """Emit the sums of tokens: zero, or those of the strip before.

    Registers hold the sums of few tokens. Those of more are added to in memory: the compiler would
    put them aside in the same way, and twice.
    """
    fresh, slots = strip and b.icmp_signed("==", strip.start, v.number(0)), []
    for i in range(tokens):
        at = b.inttoptr(v.behind(b, out, 4 * ROWS * i), v.F32.llvm.as_pointer())
        value = v.constant(v.F32, 0.0)
        if strip:
            value = b.select(fresh, value, b.load(at))
        slots.append(at if tokens > _HELD else cgutils.alloca_once(b, v.F32.llvm))
        b.store(value, slots[-1])
    return slots


def _emitter(layout: Layout | BlockLayout, group: int, tokens: int) -> Callable[..., Any]:
    @v.op(void, i64, i64, i64, i64, i64, i64, i64)
    def emit(b, tile, panel, out, units, width, first, ahead):
        from cpu_fallback.tiles.block_product import BlockEmitter

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
    at_once = _AT_ONCE
    if isinstance(layout, BlockLayout):  # more code, and eight tokens are as fast as sixteen
        at_once = min(at_once, 8)
    emit = {t: _emitter(layout, group, t) for t in TOKENS if t <= at_once}
    return Kernel(_product(emit, at_once), name=f"tile_product.{layout.name}_x{group}")


call_product = v.caller(6)  # (product, tile, panel, out, units, tokens, ahead)
