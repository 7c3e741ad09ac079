"""Tiles of ggml's blocks of 256 columns times tokens: int32 sums of scaled runs.

For each half of a block (with an activation group of 32, for each group of it), row and token

    sum = the sum over runs of scale * (the dot product of codes)           int32, exact
    low = the sum over runs of minimum (or scale) * (the sum of activations)  int32, exact
    value = d * sum - dmin * low                                             fp32
    value = d * (sum - bias * low)                                           without minima

and the result is the sum of value * (the activation scale) in the order of the columns. No sum
reaches 2^28. So neither the number of tokens nor the ISA changes a bit of the result, but for the
generic ISA, whose fma rounds twice.
"""

from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.late import cgutils
from cpu_fallback.lanes.memory import emit_load, emit_store
from cpu_fallback.lanes.simd import emit_fma
from cpu_fallback.lanes.vector import BYTES, F32, FLOAT, I32, INT16, INT32, constant, number, spread
from cpu_fallback.tiles.block_kinds import Head, Lines, kind_of
from cpu_fallback.tiles.layout import BLOCK, LINE, ROWS, UNIT, BlockLayout
from cpu_fallback.tiles.multiply import dot, emit_runs, emit_split, pair_dots, run_length

_SHORTS = ir.VectorType(INT16, 2 * ROWS)
_HALF = BLOCK // 2
_UNITS = _HALF // UNIT
_FEW = 4
"""Tokens for which memory is what limits, and a shift of each sum cheaper than one of each line."""


class BlockEmitter:
    """Emits the product of one tile with a fixed number of the tokens of a panel.

    `group` is columns per activation scale: 32, 128, or 0 for one per token.
    """

    def __init__(self, b: Any, layout: BlockLayout, group: int, tokens: int) -> None:
        self.b, self.layout, self.tokens = b, layout, tokens
        self.kind = kind_of(layout)
        self.group = group
        run = run_length(self.kind.top)
        self.in_words = CURRENT.in_shorts and run >= 1
        self.run = min(run, self.kind.run // 4)

    def emit(self, tile: Any, panel: Any, out: Any, units: Any, width: Any, first: Any) -> None:
        """Emit everything, for the tokens of a panel from `first` on; `units` are those of K."""
        b = self.b
        self.row, self.line = b.mul(width, number(4)), b.mul(width, number(UNIT))
        place = b.mul(first, number(4))
        sums = b.add(panel, b.mul(units, self.line))
        self.codes = b.add(panel, b.mul(first, number(UNIT)))
        self.sums = b.add(sums, place)
        self.scales = b.add(b.add(sums, b.mul(units, self.row)), place)
        self.totals = [cgutils.alloca_once_value(b, constant(F32, 0.0)) for _ in range(self.tokens)]
        with cgutils.for_range(b, b.udiv(units, number(BLOCK // UNIT))) as blocks:
            size = self.layout.lines * LINE
            at = b.add(tile, b.mul(blocks.index, number(size)))
            head = self.kind.head(Lines(b, at))
            with cgutils.for_range(b, number(2)) as halves:
                half = halves.index
                place = b.add(b.mul(blocks.index, number(2)), half)
                self._half(at, head, place, half)
        totals = [b.load(slot) for slot in self.totals]
        if not self.group:
            totals = [b.fmul(t, self._activation_scale(number(0), i)) for i, t in enumerate(totals)]
        out = b.add(out, b.mul(first, number(4 * ROWS)))
        for i, total in enumerate(totals):
            emit_store(b, total, b.add(out, number(4 * ROWS * i)))

    def _half(self, at: Any, head: Head, index: Any, half: Any) -> None:
        """Emit one half of a block."""
        b, kind = self.b, self.kind
        lines = Lines(b, at, half)
        scales = self._of_half(head.scales, half)
        lows = scales if head.minima is None else self._of_half(head.minima, half)
        units = 1 if self.group == UNIT else _UNITS
        for start in range(0, _UNITS, units):
            runs = range(start * UNIT // kind.run, (start + units) * UNIT // kind.run)
            sums = self._sums(lines, runs, scales, index)
            for t in range(self.tokens):
                low = self._low(lows, range(start, start + units), index, t)
                if head.dmin is None:
                    by = constant(I32, kind.bias)
                    value = b.sitofp(b.sub(sums[t], b.mul(low, by)), F32.llvm)
                    value = b.fmul(value, head.d)
                else:
                    value = b.fmul(b.sitofp(sums[t], F32.llvm), head.d)
                    less = b.fneg(head.dmin)
                    value = emit_fma(b, b.sitofp(low, F32.llvm), less, value)
                total = b.load(self.totals[t])
                if self.group:
                    place = b.udiv(b.mul(index, number(_HALF)), number(self.group))
                    scale = self._activation_scale(b.add(place, number(start)), t)
                    total = emit_fma(b, value, scale, total)
                else:
                    total = b.fadd(total, value)
                b.store(total, self.totals[t])

    def _of_half(self, dwords: list[list[Any]], half: Any) -> list[Any]:
        b = self.b
        first = b.icmp_signed("==", half, number(0))
        return [b.select(first, *pair) for pair in zip(*dwords, strict=True)]

    def _sums(self, lines: Lines, runs: range, scales: list[Any], index: Any) -> list[Any]:
        """Emit the scaled sums of runs of a half for each token."""
        b, kind = self.b, self.kind
        totals, few = [constant(I32, 0)] * self.tokens, self.tokens <= _FEW
        for run in runs:
            if run * kind.run % (UNIT if few else 2 * UNIT) == 0:
                # No instruction, but the compiler would gather the loads of a whole half, which
                # memory answers at half the rate.
                b.fence("acq_rel", "singlethread")
            codes, shift = kind.codes(lines, run, CURRENT.vnni and few)
            pairs = [
                [
                    (weights, self._activations(index, run * kind.run + 4 * i, t))
                    for i, weights in enumerate(codes)
                ]
                for t in range(self.tokens)
            ]
            if self.in_words:
                scale = self._words(scales, run, run)
                for start in range(0, len(codes), self.run):
                    part = [own[start : start + self.run] for own in pairs]
                    found = emit_runs(b, part, scale)
                    totals = [b.add(t, more) for t, more in zip(totals, found, strict=True)]
            else:
                scale = self._byte(scales, run)
                found = [self._scaled(own, scale, shift) for own in pairs]
                totals = [b.add(t, more) for t, more in zip(totals, found, strict=True)]
        return totals

    def _scaled(self, pairs: list[tuple[Any, Any]], scale: Any, shift: int) -> Any:
        """Emit the dot product of a run times its scale."""
        b, total = self.b, constant(I32, 0)
        for weights, x in pairs:
            add = dot if CURRENT.vnni else emit_split
            total = add(b, total, weights, x)
        if shift:
            total = b.ashr(total, constant(I32, shift))
        return b.mul(total, scale)

    def _low(self, dwords: list[Any], units: range, index: Any, t: int) -> Any:
        """Emit the sum of minima or scales of some units, times the sums of activations."""
        b, per_unit = self.b, UNIT // self.kind.run
        total = constant(I32, 0)
        for unit in units:
            first = unit * per_unit
            words = self._words(dwords, first, first + per_unit - 1)
            place = b.mul(b.add(b.mul(index, number(_UNITS)), number(unit)), self.row)
            at = b.add(self.sums, b.add(place, number(4 * t)))
            sums = b.bitcast(spread(b, I32, emit_load(b, INT32, at)), _SHORTS)
            total = b.add(total, pair_dots(b, words, sums))
        return total

    def _byte(self, dwords: list[Any], index: int) -> Any:
        """Emit a byte of each dword as int32 [16]."""
        b, value, place = self.b, dwords[index // 4], 8 * (index % 4)
        if self.kind.signed:
            value = b.shl(value, constant(I32, 24 - place))
            return b.ashr(value, constant(I32, 24))
        return b.and_(b.lshr(value, constant(I32, place)), constant(I32, 255))

    def _words(self, dwords: list[Any], first: int, second: int) -> Any:
        """Emit two bytes of each dword, of the same one, as int16 [32]."""
        b = self.b
        value, nothing = b.bitcast(dwords[first // 4], BYTES.llvm), constant(BYTES, 0)
        zero, order = 4 * ROWS, []
        for lane in range(0, 4 * ROWS, 4):
            for index in (first, second):
                byte = lane + index % 4
                order += [zero, byte] if self.kind.signed else [byte, zero]
        mask = ir.Constant(ir.VectorType(INT32, 4 * ROWS), order)
        words = b.bitcast(b.shuffle_vector(value, nothing, mask), _SHORTS)
        return b.ashr(words, ir.Constant(_SHORTS, [8] * 32)) if self.kind.signed else words

    def _activations(self, index: Any, column: int, t: int) -> Any:
        """Emit four codes of a token in every lane, from a column of a half."""
        b = self.b
        unit = b.add(b.mul(index, number(_UNITS)), number(column // UNIT))
        at = b.add(self.codes, b.add(b.mul(unit, self.line), number(UNIT * t + column % UNIT)))
        return b.bitcast(spread(b, I32, emit_load(b, INT32, at)), BYTES.llvm)

    def _activation_scale(self, place: Any, t: int) -> Any:
        b = self.b
        at = b.add(self.scales, b.add(b.mul(place, self.row), number(4 * t)))
        return spread(b, F32, emit_load(b, FLOAT, at))
