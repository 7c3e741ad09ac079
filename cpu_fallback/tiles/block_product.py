"""Tiles of ggml's blocks of 256 columns times tokens: int32 sums of scaled runs.

For each half of a block (with an activation group of 32, for each group of it), row and token

    sum = the sum over runs of scale * (the dot product of codes)           int32, exact
    low = the sum over runs of minimum (or scale) * (the sum of activations)  int32, exact
    value = d * sum - dmin * low                                             fp32
    value = d * (sum - bias * low)                                           without minima

and the result is the sum of value * (the activation scale) in the order of the columns. No sum
reaches 2^28. With VNNI the first is kept in fp32 where it stays below 2^24: exact too, and fewer
instructions. So neither the number of tokens nor the ISA changes a bit of the result, but for the
generic ISA, whose fma rounds twice.

What the lines of ggml's blocks of 256 columns hold: scales of runs, and unsigned codes.

All of it follows from the planes of a type (`clocher_kernels.formats.ggml_blocks`). A block is
multiplied half by half, 128 columns each: `head` of a kind gives its scales once, `codes` the
operands of a run of columns of a half. `BlockLayout` says which line is which.
"""

from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

from llvmlite import ir

from clocher_kernels.formats.ggml_blocks import PLANES, places_of
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import cgutils
from cpu_fallback.tiles import multiply as m
from cpu_fallback.tiles.byte_dots import (
    NUMBER,
    OPERANDS,
    Lines,
    Strip,
    ask,
    line_of,
    without_number,
)
from cpu_fallback.tiles.layout import BLOCK, LINE, ROWS, SIGNED, UNIT, BlockLayout
from cpu_fallback.tiles.operands import bits, look_up
from cpu_fallback.tiles.tile_product import begin_sums, strip_units


class Head(NamedTuple):
    """The scales of a block."""

    d: Any  # fp32 [16]
    scales: list[list[Any]]  # of each half, dwords of a byte for each run
    dmin: Any = None  # fp32 [16], if there are minima
    minima: list[list[Any]] | None = None  # as the scales


_HALF = BLOCK // 2
UNITS = _HALF // UNIT


Parts = list[tuple[list[int], int]]
"""Parts of operands whose products would not fit in int16: tables, [] for the code itself, and what
each is multiplied by."""


class BlockKind:
    """A type of ggml as tiles hold it.

    `run`: columns that share a scale, 16 or 32; `runs`: of half a block; `bias`: of operands, a
    power of two, 0 if there are minima; `top`: largest operand; `moves`: a second half's codes are
    elsewhere in their bytes than a first one's; `signed`: scales are.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self.about = about = PLANES[layout.kind]
        self.run, self.signed, self.bias = about.run, not about.minima, about.bias
        self._places = places_of(about.codes)
        self._lines = {dword: i for i, dword in enumerate(layout.order)}
        halves = zip(self._places[:_HALF], self._places[_HALF:], strict=True)
        self.moves = any(p[1] != q[1] for pair in halves for p, q in zip(*pair, strict=True))
        self.runs = _HALF // self.run
        self.top = sum(mask << to for *_, mask, to in self._places[0])
        self.parts: Parts = [([], 1)]
        if about.table is not None:
            least = int(about.table.min())
            self.bias = 0 if SIGNED else 1 << (-least - 1).bit_length()
            table = [int(value) + self.bias for value in about.table]
            self.parts = [(table, 1)]
            if CURRENT.in_shorts and not m.run_length(max(table)):
                low, high = [entry & 15 for entry in table], [entry >> 4 for entry in table]
                self.parts = [(low, 1), (high, 16)]
            self.top = max(max(table) for table, _ in self.parts)
        # Whether fp32 holds every sum of half a block: its scales then take an fma, where a product
        # of int32 would take two uops of one port, on Intel that which also shifts
        most = max(sum(mask << to for *_, mask, to in own) for own in places_of(about.scales))
        most = max(most - about.scale_bias, about.scale_bias)
        self.real = CURRENT.vnni and self.top * BLOCK * 64 * most < 1 << 24
        # Of half a block in a strip: words of the scales of runs and of units' minima, operands
        self.first = self.runs + UNITS
        self.half_bytes = (self.first + len(self.parts) * UNITS * OPERANDS) * LINE

    def head(self, lines: Lines) -> Head:
        """Emit the scales of a block."""
        b, about = lines.b, self.about
        both = lines.dwords(self._lines[about.at("d") // 4])

        def f16(dwords: Any) -> Any:
            return v.emit_half(b, b.trunc(dwords, ir.VectorType(v.INT16, ROWS)))

        found = []
        for numbers in filter(None, (about.scales, about.minima)):
            places = places_of(numbers)
            fours = [self._four(lines, places[i : i + 4]) for i in range(0, len(places), 4)]
            half = len(fours) // 2
            found.append([fours[:half], fours[half:]])
        if not about.minima:
            return Head(f16(both), found[0])
        return Head(f16(both), found[0], f16(b.lshr(both, v.constant(v.I32, 16))), found[1])

    def _four(self, lines: Lines, numbers: list[list[tuple[int, int, int, int]]]) -> Any:
        """Emit dwords of a byte for each of four numbers, the bias taken off."""
        b, total = lines.b, None
        for own in zip(*numbers, strict=True):
            byte, shift, mask, to = own[0]
            if own == tuple((byte + i, shift, mask, to) for i in range(4)):
                line = lines.line(self._lines[byte // 4])
                parts = [b.bitcast(bits(b, line, shift - to, mask << to), v.I32.llvm)]
            else:
                parts = []
                for i, (at, first, mask, to) in enumerate(own):
                    value, count = lines.dwords(self._lines[at // 4]), at % 4 * 8 + first
                    count -= 8 * i + to
                    move = b.lshr if count > 0 else b.shl
                    value = move(value, v.constant(v.I32, abs(count)))
                    parts.append(b.and_(value, v.constant(v.I32, mask << 8 * i + to)))
            for part in parts:
                total = part if total is None else b.or_(total, part)
        if self.about.scale_bias:
            less = v.constant(v.BYTES, self.about.scale_bias)
            total = b.bitcast(b.sub(b.bitcast(total, v.BYTES.llvm), less), v.I32.llvm)
        return total

    def code(self, lines: Lines, column: int) -> Any:
        """Emit the codes of four columns of a half."""
        b, total = lines.b, None
        both = zip(self._places[column], self._places[column + _HALF], strict=True)
        for (byte, shift, mask, to), (later, more, *_) in both:
            first = self._lines[byte // 4]
            line = lines.line(first, self._lines[later // 4] - first)
            shift = more if lines.half == 1 else shift
            part = bits(b, line, shift - to, mask << to)
            total = part if total is None else b.or_(total, part)
        return total

    def operand(self, lines: Lines, column: int, table: list[int]) -> Any:
        """Emit an operand of four columns of a half: that of a part."""
        code = self.code(lines, column)
        return look_up(lines.b, table, code) if table else code


@cache
def kind_of(layout: BlockLayout) -> BlockKind:
    """Return the kind of a layout."""
    return BlockKind(layout)


_BOTH = 2  # Tokens whose sums with both parts of operands the registers hold
_FEW = 4  # Tokens for which memory is what limits


class BlockEmitter:
    """Emits the product of one tile with a fixed number of the tokens of a panel.

    Without tokens it decodes a strip. `group`: columns per activation scale, 0 for one per token.
    """

    def __init__(
        self, b: Any, layout: BlockLayout, group: int, tokens: int, strip: Strip | None = None
    ) -> None:
        self.b, self.layout, self.tokens, self.strip = b, layout, tokens, strip
        self.kind = kind_of(layout)
        self.group = group
        self.half: Strip | None = None  # of which half a block is multiplied
        self.run = min(m.run_length(self.kind.top), self.kind.run // 4)

    def emit(
        self, tile: Any, panel: Any, out: Any, units: Any, width: Any, first: Any, ahead: Any
    ) -> None:
        """Emit everything, for the tokens of a panel from `first` on; `units` are those of K.

        Lines of tiles are asked for so many bytes ahead.
        """
        b, self.ahead = self.b, ahead
        self.row, self.line = b.mul(width, v.number(4)), b.mul(width, v.number(UNIT))
        place = b.mul(first, v.number(4))
        sums = b.add(panel, b.mul(units, self.line))
        self.codes = b.add(panel, b.mul(first, v.number(UNIT)))
        self.sums = b.add(sums, place)
        self.scales = b.add(b.add(sums, b.mul(units, self.row)), place)
        self.out = b.add(out, b.mul(first, v.number(4 * ROWS)))
        self.blocks(tile, units)
        totals = [b.load(slot) for slot in self.totals]
        if not self.group:
            totals = [
                b.fmul(t, self._activation_scale(v.number(0), i)) for i, t in enumerate(totals)
            ]
        for i, total in enumerate(totals):
            v.emit_store(b, total, b.add(self.out, v.number(4 * ROWS * i)))

    def blocks(self, tile: Any, units: Any) -> None:
        """Emit the sums of all columns, or of those of a strip."""
        b, strip, start = self.b, self.strip, v.number(0)
        self.totals = begin_sums(b, self.out, self.tokens, strip)
        if strip:
            units = strip_units(b, units, strip.start)
            start = b.udiv(strip.start, v.number(UNITS))
        with cgutils.for_range(b, b.udiv(units, v.number(BLOCK // UNIT))) as blocks:
            size = self.layout.lines * LINE
            at = b.add(tile, b.mul(blocks.index, v.number(size)))
            head = self.kind.head(Lines(b, at))
            place = b.add(start, b.mul(blocks.index, v.number(2)))
            if strip:
                operands = v.emit_at(b, strip.at, blocks.index, 2 * self.kind.half_bytes)
                self.block = strip._replace(at=operands)
            if self.kind.moves and not (strip and strip.decoded):
                for half in (0, 1):
                    self._half(at, head, b.add(place, v.number(half)), half)
            else:
                with cgutils.for_range(b, v.number(2)) as halves:
                    self._half(at, head, b.add(place, halves.index), halves.index)

    def _half(self, at: Any, head: Head, index: Any, half: Any) -> None:
        """Emit one half of a block."""
        b, kind = self.b, self.kind
        lines = Lines(b, at, half)
        place = v.number(half) if isinstance(half, int) else half
        if self.strip:
            operands = v.emit_at(b, self.block.at, place, self.kind.half_bytes)
            self.half = self.block._replace(at=operands)
        part = self.layout.lines // 2 * LINE
        self.next = b.add(v.emit_at(b, at, place, part), self.ahead)
        scales = self._of_half(head.scales, half)
        lows = scales if head.minima is None else self._of_half(head.minima, half)
        units = 1 if self.group == UNIT else UNITS
        for start in range(0, UNITS, units):
            runs = range(start * UNIT // kind.run, (start + units) * UNIT // kind.run)
            sums = self._sums(lines, runs, scales, index)
            words = [self._of_unit(lows, unit) for unit in range(start, start + units)]
            for t in range(self.tokens):
                low = v.constant(v.I32, 0)
                for unit, own in enumerate(words, start):
                    at = b.add(b.mul(index, v.number(UNITS)), v.number(unit))
                    low = b.add(low, self._low(own, at, t))
                if head.dmin is None and kind.real:
                    less = b.fmul(b.sitofp(low, v.F32.llvm), v.constant(v.F32, -kind.bias))
                    sums[t] = b.fadd(sums[t], less)
                elif head.dmin is None:
                    sums[t] = b.sub(sums[t], b.mul(low, v.constant(v.I32, kind.bias)))
                self.add(t, head, sums[t], low, index, v.number(start))

    def add(self, t: int, head: Head, total: Any, low: Any, index: Any, start: Any) -> None:
        """Emit the addition of the sums of units of a half, from `start` on, to a token's."""
        b, slot = self.b, self.totals[t]
        if not self.kind.real:
            total = b.sitofp(total, v.F32.llvm)
        value = b.fmul(total, head.d)
        if head.dmin is not None:
            value = v.emit_fma(b, b.sitofp(low, v.F32.llvm), b.fneg(head.dmin), value)
        if self.group:
            place = b.udiv(b.mul(index, v.number(_HALF)), v.number(self.group))
            scale = self._activation_scale(b.add(place, start), t)
            b.store(v.emit_fma(b, value, scale, b.load(slot)), slot)
        else:
            b.store(b.fadd(b.load(slot), value), slot)

    def _of_half(self, dwords: list[list[Any]], half: Any) -> list[Any]:
        if isinstance(half, int):
            return dwords[half]
        b = self.b
        first = b.icmp_signed("==", half, v.number(0))
        return [b.select(first, *pair) for pair in zip(*dwords, strict=True)]

    def _sums(self, lines: Lines, runs: range, scales: list[Any], index: Any) -> list[Any]:
        """Emit the scaled sums of runs of a half for each token."""
        b, kind = self.b, self.kind
        few, start = self.tokens <= _FEW, v.constant(v.I32, NUMBER if kind.real else 0)
        totals = [v.constant(v.F32 if kind.real else v.I32, 0)] * self.tokens
        for run in runs:
            if run * kind.run % (UNIT if few else 2 * UNIT) == 0:
                # No instruction, but the compiler would gather the loads of a whole half, which
                # memory answers at half the rate.
                b.fence("acq_rel", "singlethread")
            if CURRENT.in_shorts:
                words = self._words(scales, run, run, run)
                self._add_run(lines, run, words, index, totals)
                continue
            columns = range(run * kind.run, (run + 1) * kind.run, 4)
            for column in columns:
                self._ask(column)
            codes = [kind.operand(lines, column, kind.parts[0][0]) for column in columns]
            scale = self._byte(scales, run)
            if kind.real:
                scale = b.sitofp(scale, v.F32.llvm)
            for t in range(self.tokens):
                x = [self.activations(index, column, t) for column in columns]
                total = m.plus(b, start, list(zip(codes, x, strict=True)))
                if kind.real:
                    totals[t] = v.emit_fma(b, without_number(b, total), scale, totals[t])
                else:
                    totals[t] = b.add(totals[t], b.mul(total, scale))
        return totals

    def _add_run(self, lines: Lines, run: int, words: Any, index: Any, totals: list[Any]) -> None:
        """Emit the addition of a run's products, as far as they fit in int16, times its scale."""
        b, kind, first = self.b, self.kind, run * self.kind.run
        passes = [kind.parts] if self.tokens <= _BOTH else [[part] for part in kind.parts]
        for parts, start in product(passes, range(0, kind.run // 4, self.run)):
            sums: list[list[list[Any]]] = [[[None] * m.REGISTERS for _ in totals] for _ in parts]
            m.add_runs(
                b,
                sums,
                range(start, min(start + self.run, kind.run // 4)),
                lambda i, some=parts: self._operands(lines, first + 4 * i, some),
                lambda t, i: self.activations(index, first + 4 * i, t),
            )
            for (_, factor), rows in zip(parts, sums, strict=True):
                by = b.mul(words, v.constant(v.SHORTS, factor))
                for t, own in enumerate(rows):
                    totals[t] = b.add(totals[t], m.times(b, own, by))
            if self.tokens > _BOTH:
                kept = [m.registers(b, total) for total in totals]
                m.keep_order(b, kept)
                totals[:] = [v.join(b, own) for own in kept]

    def _operands(self, lines: Lines, column: int, parts: Parts) -> list[Any]:
        """Emit the operands of four columns of a half."""
        b, kind = self.b, self.kind
        if parts[0] == kind.parts[0]:
            self._ask(column)
        found, first = [], kind.first + column // 4 * len(kind.parts)
        for part in parts:
            make = partial(kind.operand, lines, column, part[0])
            place = first + kind.parts.index(part)
            found.append(line_of(b, self.half, place, v.BYTES.llvm, make))
        return found

    def _ask(self, column: int) -> None:
        """Emit the request for a line ahead, of which four columns of a half have one at most."""
        if column < 2 * self.layout.lines and not (self.strip and self.strip.decoded):
            ask(self.b, v.behind(self.b, self.next, LINE * (column // 4)), self.tokens)

    def _of_unit(self, dwords: list[Any], unit: int) -> Any:
        """Emit the words of the minima or scales of a unit."""
        per_unit = UNIT // self.kind.run
        first = unit * per_unit
        return self._words(dwords, first, first + per_unit - 1, self.kind.runs + unit)

    def _low(self, words: Any, unit: Any, t: int) -> Any:
        """Emit words times the sums of the activations of a unit."""
        b = self.b
        at = b.add(self.sums, b.add(b.mul(unit, self.row), v.number(4 * t)))
        return m.pair_dots(b, words, b.bitcast(v.emit_everywhere(b, v.I32, at), v.SHORTS))

    def _words(self, dwords: list[Any], first: int, second: int, place: int) -> Any:
        """Emit `words`, which a strip has at a place."""
        make = partial(self.words, dwords, first, second)
        return line_of(self.b, self.half, place, v.SHORTS, make)

    def _byte(self, dwords: list[Any], index: int) -> Any:
        """Emit a byte of each dword as int32 [16]."""
        b, value, place = self.b, dwords[index // 4], 8 * (index % 4)
        if self.kind.signed:
            value = b.shl(value, v.constant(v.I32, 24 - place))
            return b.ashr(value, v.constant(v.I32, 24))
        return b.and_(b.lshr(value, v.constant(v.I32, place)), v.constant(v.I32, 255))

    def words(self, dwords: list[Any], first: int, second: int) -> Any:
        """Emit two bytes of each dword, of the same one, as int16 [32]."""
        b = self.b
        value, nothing = b.bitcast(dwords[first // 4], v.BYTES.llvm), v.constant(v.BYTES, 0)
        zero, order = 4 * ROWS, []
        for lane in range(0, 4 * ROWS, 4):
            for index in (first, second):
                byte = lane + index % 4
                order += [zero, byte] if self.kind.signed else [byte, zero]
        words = b.bitcast(v.shuffle(b, value, nothing, order), v.SHORTS)
        return b.ashr(words, ir.Constant(v.SHORTS, [8] * 32)) if self.kind.signed else words

    def activations(self, index: Any, column: int, t: int) -> Any:
        """Emit four codes of a token in every lane, from a column of a half."""
        b = self.b
        unit = b.add(b.mul(index, v.number(UNITS)), v.number(column // UNIT))
        at = b.add(self.codes, b.add(b.mul(unit, self.line), v.number(UNIT * t + column % UNIT)))
        return b.bitcast(v.emit_everywhere(b, v.I32, at), v.BYTES.llvm)

    def _activation_scale(self, place: Any, t: int) -> Any:
        b = self.b
        at = b.add(self.scales, b.add(b.mul(place, self.row), v.number(4 * t)))
        return v.emit_everywhere(b, v.F32, at)
