"""What the lines of ggml's blocks of 256 columns hold: scales of runs, and unsigned codes.

All of it follows from the planes of a type (`clocher_kernels.formats.ggml_blocks`). A block is
multiplied half by half, 128 columns each: `head` of a kind gives its scales once, `codes` the
operands of a run of columns of a half. `BlockLayout` says which line is which.
"""

from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir

from clocher_kernels.formats.ggml_blocks import PLANES, places_of
from cpu_fallback.lanes.memory import emit_load
from cpu_fallback.lanes.narrow import emit_half
from cpu_fallback.lanes.vector import BYTES, I32, INT16, INT32, constant, number, spread
from cpu_fallback.tiles.byte_dots import bits, look_up
from cpu_fallback.tiles.layout import BLOCK, LINE, ROWS, SIGNED, BlockLayout


class Lines:
    """The lines of a block.

    Args:
        b: the builder.
        at: address of the block.
        half: which half of its columns is multiplied, 0 or 1 (i64), while `codes` is emitted.
    """

    def __init__(self, b: Any, at: Any, half: Any = None) -> None:
        self.b, self._at, self._half = b, at, half

    def line(self, index: int, further: int = 0, shifted: int = 0) -> Any:
        """Emit the load of a line.

        In the second half it is the one `further` lines on, shifted to the right by so many bits.
        """
        b = self.b
        at = b.add(self._at, number(LINE * index))
        if further:
            at = b.add(at, b.mul(self._half, number(LINE * further)))
        line = emit_load(b, BYTES.llvm, at)
        if not shifted:
            return line
        count = spread(b, I32, b.trunc(b.mul(self._half, number(shifted)), INT32))
        return b.bitcast(b.lshr(b.bitcast(line, I32.llvm), count), BYTES.llvm)

    def dwords(self, index: int) -> Any:
        """Emit the load of a line as int32 [16]."""
        return self.b.bitcast(self.line(index), I32.llvm)


class Head(NamedTuple):
    """The scales of a block."""

    d: Any  # fp32 [16]
    scales: list[list[Any]]  # of each half, dwords of a byte for each run
    dmin: Any = None  # fp32 [16], if there are minima
    minima: list[list[Any]] | None = None  # as the scales


Codes = tuple[list[Any], int]
"""Operands of a run, four columns of each row each, and by how many bits they stand too high."""


class BlockKind:
    """A type of ggml as tiles hold it.

    Attributes:
        run: columns that share a scale: 16 or 32.
        bias: of operands, a power of two; 0 if there are minima.
        top: largest operand.
        signed: whether scales are signed.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self.about = about = PLANES[layout.kind]
        self.run, self.signed, self.bias = about.run, not about.minima, about.bias
        self._places = places_of(about.codes)
        self._lines = {dword: i for i, dword in enumerate(layout.order)}
        self.top = sum(mask << to for *_, mask, to in self._places[0])
        self._table: list[int] = []
        if about.table is not None:
            least = int(about.table.min())
            self.bias = 0 if SIGNED else 1 << (-least - 1).bit_length()
            self._table = [int(value) + self.bias for value in about.table]
            self.top = max(self._table)

    def head(self, lines: Lines) -> Head:
        """Emit the scales of a block."""
        b, about = lines.b, self.about
        both = lines.dwords(self._lines[about.at("d") // 4])

        def f16(dwords: Any) -> Any:
            return emit_half(b, b.trunc(dwords, ir.VectorType(INT16, ROWS)))

        found = []
        for numbers in filter(None, (about.scales, about.minima)):
            places = places_of(numbers)
            fours = [self._four(lines, places[i : i + 4]) for i in range(0, len(places), 4)]
            half = len(fours) // 2
            found.append([fours[:half], fours[half:]])
        if not about.minima:
            return Head(f16(both), found[0])
        return Head(f16(both), found[0], f16(b.lshr(both, constant(I32, 16))), found[1])

    def _four(self, lines: Lines, numbers: list[list[tuple[int, int, int, int]]]) -> Any:
        """Emit dwords of a byte for each of four numbers, the bias taken off."""
        b, total = lines.b, None
        for own in zip(*numbers, strict=True):
            byte, shift, mask, to = own[0]
            if own == tuple((byte + i, shift, mask, to) for i in range(4)):
                line = lines.line(self._lines[byte // 4])
                parts = [b.bitcast(bits(b, line, shift - to, mask << to), I32.llvm)]
            else:
                parts = []
                for i, (at, first, mask, to) in enumerate(own):
                    value, count = lines.dwords(self._lines[at // 4]), at % 4 * 8 + first
                    count -= 8 * i + to
                    move = b.lshr if count > 0 else b.shl
                    value = move(value, constant(I32, abs(count)))
                    parts.append(b.and_(value, constant(I32, mask << 8 * i + to)))
            for part in parts:
                total = part if total is None else b.or_(total, part)
        if self.about.scale_bias:
            less = constant(BYTES, self.about.scale_bias)
            total = b.bitcast(b.sub(b.bitcast(total, BYTES.llvm), less), I32.llvm)
        return total

    def codes(self, lines: Lines, run: int, too_high: bool) -> Codes:
        """Emit the operands of a run, given its number in the half.

        `too_high`: the caller is better off with operands that stand too high than with a shift.
        """
        b, operands = lines.b, []
        columns = range(run * self.run, (run + 1) * self.run, 4)
        kept = 4 if too_high and not self._table and self._shifts(columns[0]) == [4] else 0
        for column in columns:
            total = None
            both = zip(self._places[column], self._places[column + BLOCK // 2], strict=True)
            for (byte, shift, mask, to), (later, more, *_) in both:
                first = self._lines[byte // 4]
                line = lines.line(first, self._lines[later // 4] - first, more - shift)
                to += kept
                part = bits(b, line, shift - to, mask << to)
                total = part if total is None else b.or_(total, part)
            operands.append(look_up(b, self._table, total) if self._table else total)
        return operands, kept

    def _shifts(self, column: int) -> list[int]:
        return [shift - to for _, shift, _, to in self._places[column]]


@cache
def kind_of(layout: BlockLayout) -> BlockKind:
    """Return the kind of a layout."""
    return BlockKind(layout)
