"""Dot products of bytes in tiles: 16 rows times 32 columns of one or more tokens, in int32.

`dots_of` chooses how the bytes of a line become unsigned operands, by code, ISA and number of
tokens. A running sum is a list of int32 accumulators whose values are weighted by powers of two,
so that operands need not be shifted into place when there are few tokens to share the work, and the
dot products of few tokens do not wait for each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from clocher_kernels.dtypes import E2M1_VALUES
from clocher_kernels.formats.ggml_blocks import IQ4_VALUES
from clocher_kernels.formats.tcq import TCQ
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.tiles import multiply as m
from cpu_fallback.tiles.layout import BIAS, LINE, LINES, OPERANDS, UNIT, Layout
from cpu_fallback.tiles.operands import (
    TRELLIS_ORDER,
    Load,
    bits,
    look_up,
    trellis_fields,
    trellis_level,
)

_FP4 = [int(2 * value) + BIAS["fp4"] for value in E2M1_VALUES]
IQ4 = [int(value) + BIAS["iq4"] for value in IQ4_VALUES]
"""Operand of each code of iq4_nl and iq4_xs."""
_TABLES = {"fp4": _FP4, "iq4": IQ4}

NUMBER = 0x4B400000
"""The bits of 1.5 * 2^23 as fp32. An integer below 2^22 added to them is that number plus it."""
NUMBER_F32 = 1.5 * 2**23
_NUMBERS = 128  # Columns whose sum is below 2^22, whatever the code


def ask(b: Any, line: Any, tokens: int) -> None:
    """Emit a request for a line, into the second cache for one or two tokens, else into the first.

    Few tokens are bound by memory, and the second cache has room for more requests.
    """
    v.emit_prefetch(b, line, level=2 if tokens <= 2 else 1)


class Strip(NamedTuple):
    """Columns of a tile that are decoded once for several passes."""

    at: Any  # address of their operands, or of a unit's
    start: Any  # the unit of the tile with which they begin
    decoded: bool  # whether an earlier pass has written the operands; else this one does
    sums: Any = None  # address of the sums that AMX has stored


def line_of(b: Any, strip: Strip | None, place: int, kind: Any, make: Callable[[], Any]) -> Any:
    """Emit a line that is made and written to a strip, or loaded if that was done."""
    at = strip and v.behind(b, strip.at, LINE * place)
    if strip and strip.decoded:
        return v.emit_load(b, kind, at)
    value = make()
    if strip:
        v.emit_store(b, value, at)
    return value


Sum = list[Any]  # Slots of int32 accumulators, one for each of `Dots.shifts`


@dataclass(frozen=True)
class Dots:
    """How the dot products of a unit are emitted."""

    code: str  # of the layout
    shifts: tuple[int, ...]  # accumulator i holds 2^shifts[i] times its part of the sum
    top: int  # largest unsigned operand
    # whether bytes are multiplied as int16, and activations have to be (`is_wide`)
    wide: bool = False
    # whether sums are kept plus `NUMBER`, which starts are without zero points
    number: bool = False

    @property
    def lines(self) -> int:
        """Lines of a unit."""
        return LINES[self.code]

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the operands of a unit."""
        return (OPERANDS << self.wide) * LINE

    @property
    def code_bytes(self) -> int:
        """Bytes of the activations of a token for a unit."""
        return UNIT << self.wide

    def begin(self, b: Any, start: Any, zeros: Any) -> Sum:
        """Emit the accumulators of a block, the bias taken off in advance.

        `start`: -bias times the sum of the activations, nothing if there are minima; with zero
        points `zeros`, int32, the low 16 bits of the negative sum, lane by lane.
        """
        if zeros is not None:
            # Zero point times negative sum: int16 products, whose high halves are zero.
            pairs = m.pair_dots(b, b.bitcast(zeros, v.SHORTS), b.bitcast(start, v.SHORTS))
            start = b.add(pairs, v.constant(v.I32, NUMBER * self.number))
        return v.variables(b, [start, *[v.constant(v.I32, 0)] * (len(self.shifts) - 1)])

    def unit(
        self,
        b: Any,
        lines: Any,
        codes: Any,
        sums: Sequence[Sum],
        ahead: Any,
        strip: Strip | None = None,
    ) -> None:
        """Emit one unit: add 16 rows times 32 columns of each token to its sum.

        `lines` and `codes` are addresses; lines are asked for so many bytes ahead. The operands are
        written to a strip, or are there.
        """
        for i in range(0 if strip and strip.decoded else self.lines):
            ask(b, b.add(v.behind(b, lines, LINE * i), ahead), len(sums))

        load = self._loads(b, lines, bool(strip and strip.decoded))

        def x(token: int, place: int) -> Any:
            at = b.add(codes, v.number(self.code_bytes * token + 4 * place))
            spread = v.emit_everywhere(b, v.I32, at)
            return b.bitcast(spread, v.SHORTS if self.wide else v.BYTES.llvm)

        if CURRENT.in_shorts or (CURRENT.vnni and m.REGISTERS > 1 and len(self.shifts) == 1):
            self._unit_in_registers(b, load, x, sums, strip)
            return
        if strip:
            own = self._loads(b, strip.at, decoded=True)
            operands = [(own(i), 0) for i in range(OPERANDS)]
        else:
            operands = [self.operand(b, load, i) for i in range(OPERANDS)]
        # Dot products of one token wait for each other: those of the others go between.
        for i, t in product(range(OPERANDS), range(len(sums))):
            weights, slot = operands[i]
            at = sums[t][slot if any(self.shifts) else i % len(self.shifts)]
            b.store(m.plus(b, b.load(at), [(weights, x(t, i))]), at)

    def _loads(self, b: Any, lines: Any, decoded: bool = False) -> Load:
        """Return what emits the lines of a unit, of a trellis its fields."""

        def load(line: int) -> Any:
            return v.emit_load(b, v.BYTES.llvm, v.behind(b, lines, LINE * line))

        if self.code not in TCQ or decoded:
            return load
        return trellis_fields(b, [load(line) for line in range(self.lines)]).__getitem__

    def decode(self, b: Any, lines: Any, to: Any, less: Any, ahead: Any) -> None:
        """Emit the operands of a unit, less bytes [64], to a strip."""
        for i in range(self.lines):
            ask(b, b.add(v.behind(b, lines, LINE * i), ahead), OPERANDS)
        load = self._loads(b, lines)
        for i in range(OPERANDS):
            value = b.sub(self.operand(b, load, i)[0], less)
            v.emit_store(b, value, v.behind(b, to, LINE * i))

    def _unit_in_registers(
        self, b: Any, load: Load, x: Any, sums: Sequence[Sum], strip: Strip | None
    ) -> None:
        """Emit a unit whose operands are decoded one by one, each multiplied by all tokens.

        Without VNNI products are added in int16 as far as they fit. Those of a byte would not: even
        and odd bytes are multiplied as int16.
        """
        in_words = self.wide or CURRENT.vnni
        count = OPERANDS << self.wide
        run = count if in_words else m.run_length(self.top)
        add = m.register_dot if CURRENT.vnni else m.add_shorts if self.wide else m.add_bytes

        weights = cache(lambda index: self.operand(b, load, index)[0])

        def operands(place: int) -> list[Any]:
            if not self.wide:
                return [line_of(b, strip, place, v.BYTES.llvm, lambda: weights(place))]

            def half() -> Any:
                return self.widened(b, weights(place // 2))[place % 2]

            return [line_of(b, strip, place, v.SHORTS, half)]

        # Of five bits, whose operands take four tables, fields wait in memory all the same.
        order: Sequence[int] = TRELLIS_ORDER if TCQ.get(self.code, 5) < 5 else range(count)
        for start in range(0, count, run):
            found: list[list[Any]] = [[None] * m.REGISTERS for _ in sums]
            if in_words:
                found = [m.registers(b, b.load(own[0])) for own in sums]
            m.add_runs(b, [found], order[start : start + run], operands, x, add)
            for total, own in zip(sums, found, strict=True):
                value = v.join(b, own) if in_words else m.times(b, own, v.constant(v.SHORTS, 1))
                b.store(value if in_words else b.add(b.load(total[0]), value), total[0])

    def widened(self, b: Any, line: Any) -> list[Any]:
        """Emit the even and the odd bytes of an operand as int16."""
        shorts = b.bitcast(line, v.SHORTS)
        even = b.and_(shorts, v.constant(shorts.type, 255))
        return [even, b.lshr(shorts, v.constant(shorts.type, 8))]

    def end_f32(self, b: Any, total: Sum) -> Any:
        """Emit the sum of a block as fp32, to nearest."""
        value = self.end(b, total)
        if not self.number:
            return b.sitofp(value, v.F32.llvm)
        return without_number(b, value)

    def end(self, b: Any, total: Sum) -> Any:
        """Emit the sum of a block, plus `NUMBER` if that is added."""
        value = b.load(total[0])
        for slot, shift in zip(total[1:], self.shifts[1:], strict=True):
            part = b.load(slot)
            if shift:
                part = b.ashr(part, v.constant(v.I32, shift))
            value = b.add(value, part)
        return value

    def operand(self, b: Any, load: Load, index: int) -> tuple[Any, int]:
        """Emit an operand of a unit in the order of the activations, from lines that `load` emits.

        Return it, and which accumulator it is for.
        """
        if self.code == "int8":
            return load(index), 0
        if self.code in TCQ:
            return trellis_level(b, load, index, TCQ[self.code]), 0
        if self.code == "ternary":
            line, p = divmod(index, 4)
            if len(self.shifts) == 4:
                return b.and_(load(line), v.constant(v.BYTES, 3 << 2 * p)), p
            return bits(b, load(line), 2 * p, 3), 0
        if self.code in ("int4", "fp4"):
            line, part = divmod(index, 2)
        else:
            part, line = divmod(index, 4)
        if len(self.shifts) == 2:
            return b.and_(load(line), v.constant(v.BYTES, (15, 240)[part])), part
        value = bits(b, load(line), 4 * part, 15)
        if self.code == "q5":
            value = b.or_(value, bits(b, load(4), index - 4, 16))
        table = _TABLES.get(self.code)
        return look_up(b, table, value) if table else value, 0


@dataclass(frozen=True)
class NeonDots(Dots):
    """How they are emitted on NEON: a line is four registers of four rows, multiplied in turn.

    `sdot` multiplies one by a dword of a token, out of a register of sixteen activations.
    """

    def unit(
        self,
        b: Any,
        lines: Any,
        codes: Any,
        sums: Sequence[Sum],
        ahead: Any,
        strip: Strip | None = None,
    ) -> None:
        """Emit one unit: add 16 rows times 32 columns of each token to its sum."""
        places = [b.add(lines, v.number(LINE * i)) for i in range(self.lines)]
        for place in places:
            ask(b, b.add(place, ahead), len(sums))
        x = [
            [v.emit_load(b, m.SIXTEEN, b.add(codes, v.number(at))) for at in (i, i + 16)]
            for i in range(0, UNIT * len(sums), UNIT)
        ]
        totals = [v.pieces(b, b.load(own[0]), 4) for own in sums]
        whole = [v.emit_load(b, v.BYTES.llvm, place) for place in places]
        if self.code in TCQ:
            whole = trellis_fields(b, whole)
        quarters = zip(*(v.pieces(b, each, 4) for each in whole), strict=True)
        for q, line in enumerate(quarters):
            weights = [self.operand(b, line.__getitem__, i)[0] for i in range(OPERANDS)]
            for i, operand in enumerate(weights):
                for own, total in zip(x, totals, strict=True):
                    dwords = b.bitcast(own[i // 4], m.FOUR)
                    four = b.bitcast(v.pick(b, dwords, [i % 4] * 4), m.SIXTEEN)
                    total[q] = m.emit_sdot(b, total[q], operand, four)
        for own, total in zip(sums, totals, strict=True):
            b.store(v.join(b, total), own[0])


def without_number(b: Any, total: Any) -> Any:
    """Emit as fp32 an int32 sum that is kept plus `NUMBER`."""
    return b.fsub(b.bitcast(total, v.F32.llvm), v.constant(v.F32, NUMBER_F32))


def is_wide(code: str) -> bool:
    """Return whether a code is multiplied as int16, its panels holding even and odd ones apart."""
    return CURRENT.in_shorts and code in ("int8", "iq4")


def is_number(layout: Layout, group: int) -> bool:
    """Return whether the sums of blocks are kept plus `NUMBER`: to fp32 by a subtraction.

    A conversion would need the units that multiply.
    """
    return 0 < min(layout.block or _NUMBERS + 1, group or _NUMBERS + 1) <= _NUMBERS


def dots_of(code: str, tokens: int, number: bool = False) -> Dots:
    """Return how the dot products of a code are emitted with so many tokens of a pass."""
    tables = {code: max(table) for code, table in _TABLES.items()}
    tables |= dict.fromkeys(TCQ, 127)
    top = {"int4": 15, "q4": 15, "q5": 31, "int8": 255, "ternary": 2, **tables}[code]
    shifts: tuple[int, ...] = (0,)
    if CURRENT.vnni and tokens <= (4 if CURRENT.avx512 else 2):
        several = {**dict.fromkeys(TCQ, (0, 0)), "ternary": (0, 2, 4, 6), "int8": (0, 0)}
        shifts = (0, 4) if code in ("int4", "q4") else several.get(code, shifts)
    made = NeonDots if CURRENT.neon else Dots
    return made(code, shifts, top, is_wide(code), number)
