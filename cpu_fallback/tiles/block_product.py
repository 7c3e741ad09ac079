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
"""

from functools import partial
from itertools import product
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import cgutils
from cpu_fallback.tiles import multiply as m
from cpu_fallback.tiles.byte_dots import NUMBER, Strip, ask, line_of, without_number
from cpu_fallback.tiles.emitter import begin_sums, strip_units
from cpu_fallback.tiles.layout import BLOCK, LINE, OPERANDS, ROWS, UNIT, BlockLayout
from cpu_fallback.tiles.operands import HALF, UNITS, Head, Lines, Parts, kind_of, units_per_sum

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
        self.group, self.per_sum = group, units_per_sum(layout, group)
        self.real = self.kind.real and not (CURRENT.amx and strip)
        self.tiled = CURRENT.amx and strip is not None
        self._sums_bytes = self.kind.factors * (UNITS if group == UNIT else 1) * m.SUMS_BYTES
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
        words = b.udiv(units, v.number(self.per_sum))
        self.scales = b.add(b.add(sums, b.mul(words, self.row)), place)
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
            at = v.emit_at(b, tile, blocks.index, self.layout.lines * LINE)
            head = self.kind.head(Lines(b, at))
            place = v.emit_at(b, start, blocks.index, 2)
            if strip:
                operands = v.emit_at(b, strip.at, blocks.index, 2 * self.kind.half_bytes)
                self.block = strip._replace(at=operands)
                if self.tiled:
                    sums = v.emit_at(b, strip.sums, blocks.index, 2 * self._sums_bytes)
                    self.block = self.block._replace(sums=sums)
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
            if self.tiled:
                sums = v.emit_at(b, self.block.sums, place, self._sums_bytes)
                self.half = self.half._replace(sums=sums)
        part = self.layout.lines // 2 * LINE
        self.next = b.add(v.emit_at(b, at, place, part), self.ahead)
        scales = self._of_half(head.scales, half)
        lows = scales if head.minima is None else self._of_half(head.minima, half)
        units = 1 if self.group == UNIT else UNITS
        for start in range(0, UNITS, units):
            runs = range(start * UNIT // kind.run, (start + units) * UNIT // kind.run)
            sums = self._sums(lines, runs, scales, index)
            unbiased = self.tiled and head.dmin is None
            summed = range(0 if unbiased else start, start + units * (not unbiased), self.per_sum)
            words = [self._of_sum(lows, unit) for unit in summed]
            for t in range(self.tokens):
                low = v.constant(v.I32, 0)
                for unit, own in zip(summed, words, strict=True):
                    at = v.emit_at(b, unit // self.per_sum, index, UNITS // self.per_sum)
                    low = b.add(low, self._low(own, at, t))
                if head.dmin is None and self.real:
                    less = b.fmul(b.sitofp(low, v.F32.llvm), v.constant(v.F32, -kind.bias))
                    sums[t] = b.fadd(sums[t], less)
                elif head.dmin is None and not unbiased:
                    sums[t] = b.sub(sums[t], b.mul(low, v.constant(v.I32, kind.bias)))
                self.add(t, head, sums[t], low, index, v.number(start))

    def add(self, t: int, head: Head, total: Any, low: Any, index: Any, start: Any) -> None:
        """Emit the addition of the sums of units of a half, from `start` on, to a token's."""
        b, slot = self.b, self.totals[t]
        if not self.real:
            total = b.sitofp(total, v.F32.llvm)
        value = b.fmul(total, head.d)
        if head.dmin is not None:
            value = v.emit_fma(b, b.sitofp(low, v.F32.llvm), b.fneg(head.dmin), value)
        if self.group:
            place = b.udiv(b.mul(index, v.number(HALF)), v.number(self.group))
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
        if self.tiled:
            return self._tiled(lines, runs, scales)
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

    def _tiled(self, lines: Lines, runs: range, scales: list[Any]) -> list[Any]:
        """Emit the sums of runs that AMX has stored, or the operands that it multiplies."""
        b, kind, found = self.b, self.kind, []
        assert self.half
        if not self.half.decoded:
            for run in runs:
                words = self._words(scales, run, run, run)
                for column in range(run * kind.run, (run + 1) * kind.run, 4):
                    self._ask(column)
                    code = kind.operand(lines, column, kind.parts[0][0])
                    code = b.sub(code, v.constant(v.BYTES, kind.bias))
                    for part, value in enumerate(self._factors(code, words)):
                        place = kind.first + part * UNITS * OPERANDS + column // 4
                        v.emit_store(b, value, v.behind(b, self.half.at, LINE * place))
        first = runs[0] * kind.run // UNIT * kind.factors * m.SUMS_BYTES
        for t in range(self.tokens):
            at = [
                v.behind(b, self.half.sums, first + m.SUMS_BYTES * p + 4 * ROWS * t) for p in (0, 1)
            ]
            total = v.emit_load(b, v.I32.llvm, at[0])
            if kind.factors > 1:
                high = v.emit_load(b, v.I32.llvm, at[1])
                high = b.shl(high, v.constant(v.I32, kind.shift))
                total = b.add(total, high)
            found.append(total)
        return found

    def _factors(self, codes: Any, words: Any) -> list[Any]:
        """Emit the products of codes and words as bytes, two if they have two factors.

        Unsigned scales are taken apart, of signed products the low seven bits, less 64.
        """
        b, eight, half = self.b, v.constant(v.SHORTS, 8), v.constant(v.SHORTS, 64)
        shorts = b.bitcast(codes, v.SHORTS)
        if not self.kind.signed:  # no product of a byte reaches its neighbour
            low = v.constant(v.SHORTS, (1 << self.kind.shift) - 1)
            parts = [b.and_(words, low), b.lshr(words, v.constant(v.SHORTS, self.kind.shift))]
            parts = [words] if self.kind.factors == 1 else parts
            return [b.bitcast(b.mul(shorts, part), v.BYTES.llvm) for part in parts]
        both = [b.ashr(b.shl(shorts, eight), eight), b.ashr(shorts, eight)]
        both = [b.mul(each, words) for each in both]
        if self.kind.factors == 1:
            return [self._bytes(*both)]
        both = [b.add(each, half) for each in both]
        low = self._bytes(*(b.and_(each, v.constant(v.SHORTS, 127)) for each in both))
        high = self._bytes(*(b.ashr(each, v.constant(v.SHORTS, 7)) for each in both))
        return [b.sub(low, v.constant(v.BYTES, 64)), high]

    def _bytes(self, even: Any, odd: Any) -> Any:
        """Emit bytes of the low halves of even and odd int16."""
        b = self.b
        even = b.and_(even, v.constant(v.SHORTS, 255))
        return b.bitcast(b.or_(even, b.shl(odd, v.constant(v.SHORTS, 8))), v.BYTES.llvm)

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

    def _of_sum(self, dwords: list[Any], unit: int) -> Any:
        """Emit the words of the minima or scales of the units of a sum, from one on."""
        first = unit * UNIT // self.kind.run
        last = (unit + self.per_sum) * UNIT // self.kind.run - 1
        return self._words(dwords, first, last, self.kind.runs + unit)

    def _low(self, words: Any, index: Any, t: int) -> Any:
        """Emit words times the sums of activations."""
        b = self.b
        at = v.emit_at(b, v.behind(b, self.sums, 4 * t), index, self.row)
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
        unit = v.emit_at(b, column // UNIT, index, UNITS)
        at = v.emit_at(b, v.behind(b, self.codes, UNIT * t + column % UNIT), unit, self.line)
        return b.bitcast(v.emit_everywhere(b, v.I32, at), v.BYTES.llvm)

    def _activation_scale(self, place: Any, t: int) -> Any:
        at = v.emit_at(self.b, v.behind(self.b, self.scales, 4 * t), place, self.row)
        return v.emit_everywhere(self.b, v.F32, at)
