"""What the lines of ggml's blocks of 256 columns hold: scales of runs, and unsigned codes.

All of it follows from the planes of a type (`clocher_kernels.formats.ggml_blocks`). A block is
multiplied half by half, 128 columns each: `head` of a kind gives its scales once, `codes` the
operands of a run of columns of a half. `BlockLayout` says which line is which.
"""

from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir

from clocher_kernels.formats.ggml_blocks import PLANES, places_of
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.tiles import multiply as m
from cpu_fallback.tiles.byte_dots import OPERANDS, Lines
from cpu_fallback.tiles.layout import BLOCK, LINE, ROWS, SIGNED, UNIT, BlockLayout
from cpu_fallback.tiles.operands import bits, look_up

HALF = BLOCK // 2
UNITS = HALF // UNIT


class Head(NamedTuple):
    """The scales of a block."""

    d: Any  # fp32 [16]
    scales: list[list[Any]]  # of each half, dwords of a byte for each run
    dmin: Any = None  # fp32 [16], if there are minima
    minima: list[list[Any]] | None = None  # as the scales


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
        halves = zip(self._places[:HALF], self._places[HALF:], strict=True)
        self.moves = any(p[1] != q[1] for pair in halves for p, q in zip(*pair, strict=True))
        self.runs = HALF // self.run
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
        # AMX multiplies products of codes and scales, whose sums need no scale. Where a byte does
        # not hold them there are two factors: of the low bits, and of those from `shift` on.
        largest = self.top if about.minima else max(self.bias, self.top - self.bias)
        self.factors = 1 if largest * most < 128 else 2
        self.shift = 3 if about.minima else 7
        count = self.factors if CURRENT.amx else len(self.parts)
        self.half_bytes = (self.first + count * UNITS * OPERANDS) * LINE

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
        both = zip(self._places[column], self._places[column + HALF], strict=True)
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


def units_per_sum(layout: BlockLayout, group: int) -> int:
    """Return the units of a word of panels: their sums, or those of the halves of one."""
    return 2 if kind_of(layout).run == UNIT and group != UNIT else 1


@cache
def kind_of(layout: BlockLayout) -> BlockKind:
    """Return the kind of a layout."""
    return BlockKind(layout)
