"""Strips: 512 columns of a tile as the operands that products want, decoded once for many tokens.

A prefill multiplies a tile by hundreds of tokens. A product of a few of them decodes what it reads;
here a strip is decoded to memory that a core keeps next to it, and multiplied by four tokens after
the other. Sums go on from strip to strip in the order of the columns, so the results are those of
`tile_product`, bit for bit.

The strip of a `Layout` is that part of the tile with a line of 64 bytes for each operand, two lines
of int16 if products are wide. That of a `BlockLayout` has for each block of 256 columns

    d, dmin   fp32 [16] each
    units     8 of: for each part of operands the scales of its runs, int16 [16, 2]; minima, or
              scales times minus the bias, int16 [16, 2]; the operands of each part, 8 lines
"""

from functools import cache
from typing import Any

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, cgutils, i64, void
from cpu_fallback.lanes.memory import emit_load, emit_store
from cpu_fallback.lanes.simd import (
    BYTES,
    F32,
    I32,
    INT32,
    SHORTS,
    constant,
    join,
    number,
    spread,
)
from cpu_fallback.tiles.block_product import UNITS, BlockEmitter, BlockKind, Head, Lines, kind_of
from cpu_fallback.tiles.byte_dots import OPERANDS, dots_of
from cpu_fallback.tiles.layout import BLOCK, LINE, UNIT, BlockLayout, Layout
from cpu_fallback.tiles.multiply import REGISTERS, add_runs, keep_order, madd_shorts, registers
from cpu_fallback.tiles.tile_product import STRIP, Emitter, begin_strip, strip_units

TOKENS = 4  # Whose sums the registers hold, beside what they are multiplied by
_BLOCKS = STRIP * UNIT // BLOCK  # Of a strip
_PER_BLOCK = BLOCK // UNIT


def has_strips(layout: Layout | BlockLayout, group: int) -> bool:
    """Return whether a layout is multiplied strip by strip if there are many tokens.

    With VNNI and with the registers of AVX-512 decoding takes less of the time.
    """
    if not CURRENT.in_shorts or CURRENT.avx512 or not group:
        return False
    return isinstance(layout, BlockLayout) or layout.block > 0


def stride_of(layout: Layout | BlockLayout) -> int:
    """Return the bytes of the part of a tile that a strip is decoded from."""
    return layout.tile_bytes(STRIP * UNIT)


def strip_bytes(layout: Layout | BlockLayout) -> int:
    """Return the bytes of a strip."""
    if isinstance(layout, BlockLayout):
        return _BLOCKS * _block_bytes(kind_of(layout))
    added = dots_of(layout.code, 1, plain=True).lines - layout.lines
    return stride_of(layout) + STRIP * added * LINE


def _unit_lines(kind: BlockKind) -> int:
    return len(kind.parts) * (UNIT // kind.run + OPERANDS) + 1


def _block_bytes(kind: BlockKind) -> int:
    return LINE * (2 + _PER_BLOCK * _unit_lines(kind))


def _lines_unpacker(layout: Layout) -> Any:
    dots = dots_of(layout.code, 1)
    packed, size = dots.lines * LINE, (OPERANDS << dots.wide) * LINE
    head, period = layout.head, layout.block // UNIT * layout.per_head

    @v.op(void, i64, i64)
    def unit(b, tile, strip):
        def load(line: int) -> Any:
            return emit_load(b, BYTES.llvm, v.behind(b, tile, LINE * line))

        lines = [dots.operand(b, load, i)[0] for i in range(OPERANDS)]
        if dots.wide:
            lines = [part for line in lines for part in dots.widened(b, line)]
        for i, line in enumerate(lines):
            emit_store(b, line, v.behind(b, strip, LINE * i))

    def unpack(tile, strip, units):
        for i in range(units):
            if i % period == 0:
                for at in range(0, head, 64):
                    v.store_i32(strip + at, v.load_i32(tile + at))
                tile += head
                strip += head
            unit(tile, strip)
            tile += packed
            strip += size

    return unpack


def _block_unpacker(layout: BlockLayout) -> Any:
    kind = kind_of(layout)
    packed, size = layout.tile_bytes(BLOCK), _block_bytes(kind)

    @v.op(void, i64, i64)
    def block(b, tile, strip):
        places = iter(range(0, size, LINE))

        def store(value: Any) -> None:
            emit_store(b, value, v.behind(b, strip, next(places)))

        emitter = BlockEmitter(b, layout, 0, 1)
        head = kind.head(Lines(b, tile))
        store(head.d)
        store(constant(F32, 0.0) if head.dmin is None else head.dmin)
        per = UNIT // kind.run
        for unit in range(_PER_BLOCK):
            half, first = divmod(unit, UNITS)
            first *= per
            lines, scales = Lines(b, tile, half), head.scales[half]
            for _, factor in kind.parts:
                for run in range(first, first + per):
                    store(b.mul(emitter.words(scales, run, run), constant(SHORTS, factor)))
            if head.minima is None:
                words = emitter.words(scales, first, first + per - 1)
                store(b.mul(words, constant(SHORTS, -kind.bias)))
            else:
                store(emitter.words(head.minima[half], first, first + per - 1))
            for part in kind.parts:
                for i in range(OPERANDS):
                    store(kind.operands(lines, unit % UNITS * UNIT + 4 * i, [part])[0])

    def unpack(tile, strip, units):
        for i in range(units >> 3):
            block(tile + packed * i, strip + size * i)

    return unpack


@cache
def unpack_of(layout: Layout | BlockLayout) -> Kernel:
    """Return the kernel (part of a tile, strip, units) that decodes."""
    unpacker = _block_unpacker if isinstance(layout, BlockLayout) else _lines_unpacker
    return Kernel(unpacker(layout), name=f"unpack.{layout.name}")  # type: ignore[arg-type]


class _StripEmitter(BlockEmitter):
    """Emits the product of the strip of a `BlockLayout`."""

    def blocks(self, tile: Any, units: Any) -> None:
        """Emit the sums of the columns of the strip."""
        b, step = self.b, self.group // UNIT
        self.unit_bytes = LINE * _unit_lines(self.kind)
        self.totals = begin_strip(b, self.out, self.start, self.tokens)
        count = b.udiv(strip_units(b, units, self.start), number(_PER_BLOCK))
        with cgutils.for_range(b, count) as blocks:
            at = b.add(tile, b.mul(blocks.index, number(_block_bytes(self.kind))))
            d, dmin = (emit_load(b, F32.llvm, v.behind(b, at, LINE * i)) for i in (0, 1))
            head = Head(d, [], dmin if self.kind.about.minima else None)
            before = b.add(self.start, b.mul(blocks.index, number(_PER_BLOCK)))
            with cgutils.for_range(b, number(_PER_BLOCK // step)) as groups:
                first = b.mul(groups.index, number(step))
                here = v.behind(b, v.emit_at(b, at, first, self.unit_bytes), 2 * LINE)
                self._group(here, head, b.add(before, first))

    def _group(self, at: Any, head: Head, first: Any) -> None:
        """Emit the addition of the units from `first` on that share an activation scale."""
        b, kind, step = self.b, self.kind, self.group // UNIT
        slots = [cgutils.alloca_once(b, I32.llvm) for _ in range(self.tokens)]
        for slot in slots:
            b.store(constant(I32, 0), slot)
        with cgutils.for_range(b, number(step)) as units:
            here = v.emit_at(b, at, units.index, self.unit_bytes)
            self._unit(Lines(b, here), b.add(first, units.index), slots)
        place = LINE * len(kind.parts) * (UNIT // kind.run)
        lines = [
            b.bitcast(Lines(b, v.behind(b, at, self.unit_bytes * i + place)).line(0), SHORTS)
            for i in range(step)
        ]
        index = b.udiv(first, number(step))
        for t, slot in enumerate(slots):
            total, low = b.load(slot), constant(I32, 0)
            for i, words in enumerate(lines):
                low = b.add(low, self.low(words, v.behind(b, first, i), t))
            total = total if kind.about.minima else b.add(total, low)
            self.add(t, head, total, low, number(0), index)

    def _unit(self, lines: Lines, unit: Any, slots: list[Any]) -> None:
        """Emit the addition of a unit to the sums of the tokens."""
        b, kind, per = self.b, self.kind, UNIT // self.kind.run
        runs = len(kind.parts) * per
        codes = b.add(self.codes, b.mul(unit, self.line))

        def x(t: int, i: int) -> Any:
            at = v.behind(b, codes, UNIT * t + 4 * i)
            return b.bitcast(spread(b, I32, emit_load(b, INT32, at)), BYTES.llvm)

        totals = [registers(b, b.load(slot)) for slot in slots]
        for part in range(len(kind.parts)):
            first = runs + 1 + OPERANDS * part
            for start in range(0, OPERANDS, self.run):
                found: list[list[Any]] = [[None] * REGISTERS for _ in totals]
                add_runs(
                    b,
                    [found],
                    range(start, min(start + self.run, OPERANDS)),
                    lambda i, first=first: [lines.line(first + i)],
                    x,
                )
                run = part * per + start // (kind.run // 4)
                words = registers(b, b.bitcast(lines.line(run), SHORTS))
                for own, products in zip(totals, found, strict=True):
                    each = zip(own, products, words, strict=True)
                    own[:] = [b.add(total, madd_shorts(b, *pair)) for total, *pair in each]
                keep_order(b, totals)
        for slot, own in zip(slots, totals, strict=True):
            b.store(join(b, own), slot)


@cache
def strip_product_of(layout: Layout | BlockLayout, group: int) -> Kernel:
    """Return the kernel (strip, panel, out, units of K, tokens, first unit of the strip)."""

    @v.op(void, i64, i64, i64, i64, i64, i64, i64)
    def four(b, strip, panel, out, units, width, first, start):
        if isinstance(layout, BlockLayout):
            emitter = _StripEmitter(b, layout, group, TOKENS)
            emitter.start = start
            emitter.emit(strip, panel, out, units, width, first)
        else:
            own = Emitter(b, layout, group, TOKENS, strip=True)
            own.emit(strip, panel, out, units, width, first, start)

    def product(strip, panel, out, units, tokens, start):
        for first in range(0, tokens, 4):
            four(strip, panel, out, units, tokens, first, start)

    return Kernel(product, name=f"strip_product.{layout.name}_x{group}")


call_unpack = v.caller(3)  # (unpack, part of a tile, strip, units)
