"""Codes to operands of products: bits of bytes, look-ups, the lines of trellises, ggml's blocks.

What the lines of blocks of 256 columns hold follows from the planes of a type
(`clocher_kernels.formats.ggml_blocks`). A block is multiplied half by half, 128 columns each:
`BlockKind.head` gives its scales once, `operand` those of a run of columns of a half. `BlockLayout`
says which line is which.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from llvmlite import ir

from clocher_kernels.formats.ggml_blocks import PLANES, places_of
from clocher_kernels.formats.tcq import levels
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.tiles import multiply as m
from cpu_fallback.tiles.layout import (
    BLOCK,
    EVENS_FIRST,
    LINE,
    OPERANDS,
    ROWS,
    SIGNED,
    UNIT,
    BlockLayout,
)

_WORDS = ir.VectorType(v.INT8, 32)

Load = Callable[[int], Any]


def bits(b: Any, line: Any, shift: int, mask: int) -> Any:
    """Emit bits of each byte, shifted to the right, or to the left if `shift` is negative.

    Without a shift of bytes the mask removes the neighbour's.
    """
    if CURRENT.neon:
        return m.neon_bits(b, line, shift, mask)
    if shift:
        shorts = b.bitcast(line, ir.VectorType(v.INT16, line.type.count // 2))
        count = v.constant(shorts.type, abs(shift))
        shorts = b.lshr(shorts, count) if shift > 0 else b.shl(shorts, count)
        line = b.bitcast(shorts, line.type)
    return b.and_(line, v.constant(line.type, mask))


def look_up(b: Any, table: Sequence[int], nibbles: Any) -> Any:
    """Emit table[nibble] byte by byte."""
    table = list(table)
    if CURRENT.neon:
        return m.neon_look_up(b, table, nibbles)
    if CURRENT.avx512:
        entries = ir.Constant(v.BYTES.llvm, table * 4)
        return v.call(b, "llvm.x86.avx512.pshuf.b.512", v.BYTES.llvm, entries, nibbles)
    if CURRENT.avx2:
        look = partial(v.call, b, "llvm.x86.avx2.pshuf.b", _WORDS, ir.Constant(_WORDS, table * 2))
        return look(nibbles) if nibbles.type == _WORDS else v.by_pieces(b, 2, look, nibbles)
    return _steps(b, table, nibbles)


def _steps(b: Any, table: list[int], nibbles: Any) -> Any:
    """Emit table[nibble] without a table: the sum of the steps up to each nibble."""
    value = v.constant(v.BYTES, table[0])
    for i in range(1, 16):
        above = b.icmp_signed(">=", nibbles, v.constant(v.BYTES, i))
        step = v.constant(v.BYTES, table[i] - table[i - 1])
        value = b.add(value, b.select(above, step, v.constant(v.BYTES, 0)))
    return value


TRELLIS_ORDER = (0, 4, 2, 6, 1, 5, 3, 7)
"""The order in which operands of a trellis are best multiplied: fields need few registers then."""


def trellis_fields(b: Any, lines: list[Any]) -> list[Any]:
    """Emit what operands of a trellis are looked up by, from the lines of a unit.

    First the four lower bits of places of levels, of an operand in either half of a byte: 0 and 4,
    2 and 6, 1 and 5, 3 and 7. In the second and the fourth line z is above the two bits of m. Then
    the lines of what is above those.
    """
    u = b.bitcast(lines[0], v.I32.llvm)

    def before(lag: int) -> Any:
        earlier = v.pick(b, u, [EVENS_FIRST.index((row - lag) % ROWS) for row in EVENS_FIRST])
        return b.shl(earlier, v.constant(v.I32, [int(row < lag) for row in EVENS_FIRST]))

    def some(value: Any, mask: int, shift: int = 0) -> Any:
        """Emit bits of bytes, moved to where a mask has them."""
        if shift:
            move = b.shl if shift > 0 else b.lshr
            value = move(value, v.constant(v.I32, abs(shift)))
        return b.and_(value, v.constant(v.I32, mask * 0x01010101))

    z0, z1 = before(2), b.xor(u, b.xor(before(1), before(3)))
    pairs = (
        b.or_(some(z0, 0x55), some(z1, 0xAA, 1)),
        b.or_(some(z0, 0x55, -1), some(z1, 0xAA)),
    )
    nibbles = []
    for odd, pair in enumerate(pairs):
        if len(lines) == 2:
            high = some(b.bitcast(lines[1], v.I32.llvm), (0x55, 0xAA)[odd])
        else:
            high = b.bitcast(lines[1 + odd], v.I32.llvm)
        nibbles.append(b.or_(some(pair, 0x33), some(high, 0xCC)))
        nibbles.append(b.or_(some(pair, 0xCC), some(high, 0x33)))
    return [*(b.bitcast(own, v.BYTES.llvm) for own in nibbles), *lines[3:]]


@cache
def _trellis_tables(count: int, above: bool) -> list[list[int]]:
    """Return 64 plus levels by the four lower bits of their places, for each number above these.

    `above`: z is above m. If weights have two bits, m has one, in either of its places.
    """
    most = 1 if count == 2 else 3
    halves = [divmod(nibble, 4) for nibble in range(16)]
    places = [4 * min(m, most) + z for m, z in (half[::-1] if above else half for half in halves)]
    table = [64 + int(level) for level in levels(count)]
    return [[table[at + place] for place in places] for at in range(0, len(table), 16)]


def trellis_level(b: Any, load: Load, index: int, count: int) -> Any:
    """Emit 64 plus the levels of four columns, of `count` bits each."""
    half, odd = divmod(index, 2)
    nibbles = bits(b, load(2 * odd + half % 2), half // 2 * 4, 15)
    found = [look_up(b, table, nibbles) for table in _trellis_tables(count, half % 2 == 1)]
    above = {4: [(4, index)], 5: [(4 + odd, 2 * half), (4 + odd, 2 * half + 1)]}.get(count, [])
    for line, bit in above:
        there = is_set(b, load(line), bit)
        pairs = zip(found[1::2], found[::2], strict=True)
        found = [b.select(there, *pair) for pair in pairs]
    return found[0]


def is_set(b: Any, line: Any, bit: int) -> Any:
    """Emit whether a bit of each byte is set."""
    nothing = v.constant(line.type, 0)
    if CURRENT.avx512 or not CURRENT.avx2:
        return b.icmp_unsigned("!=", b.and_(line, v.constant(line.type, 1 << bit)), nothing)
    # What chooses between registers there looks at the highest bit.
    shorts = b.bitcast(line, ir.VectorType(v.INT16, line.type.count // 2))
    high = b.bitcast(b.shl(shorts, v.constant(shorts.type, 7 - bit)), line.type)
    return b.icmp_signed("<", high, nothing)


class Lines:
    """The lines of the block at an address.

    `half`: which half of its columns is multiplied, 0 or 1, or a value i64 of the code.
    """

    def __init__(self, b: Any, at: Any, half: Any = None) -> None:
        self.b, self._at, self.half = b, at, half

    def line(self, index: int, further: int = 0) -> Any:
        """Emit the load of a line; in the second half, of the one `further` lines on."""
        at = v.behind(self.b, self._at, LINE * index)
        if further:
            at = v.emit_at(self.b, at, self.half, LINE * further)
        return v.emit_load(self.b, v.BYTES.llvm, at)

    def dwords(self, index: int) -> Any:
        """Emit the load of a line as int32 [16]."""
        return self.b.bitcast(self.line(index), v.I32.llvm)


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
