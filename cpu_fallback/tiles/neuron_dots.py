"""Products of lines of neurons (`neurons`) and int8 activations: exact int32 sums, any order.

The digits are unsigned, digit + 1, so every sum is too large by that of the activations.
"""

from typing import Any

from llvmlite import ir

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.late import cgutils, i64, void
from cpu_fallback.lanes.vector import BYTES, I32, INT32, INT64, SHORTS, behind, constant, emit_at
from cpu_fallback.tiles.byte_dots import bits, dots_of
from cpu_fallback.tiles.layout import LINE
from cpu_fallback.tiles.multiply import dot, emit_run, emit_split

AT_ONCE = 8  # columns that `add_columns` takes
SHIFTED = 2 if CURRENT.vnni else 0
"""Sums of `add_columns` for rows 16 p .. 16 p + 15 of each 64 are 2^(p SHIFTED) times too large."""


@v.op(void, i64, i64)
def arrange(b, source, target):
    """Copy 256 activations to 4 registers, as a line of a row is multiplied by them."""
    dwords = v.emit_load(b, ir.VectorType(INT32, 64), source)
    for p in range(4):
        v.emit_store(b, v.pick(b, dwords, range(p, 64, 4)), behind(b, target, LINE * p))


@v.op(i64, i64, i64, i64)
def row_dot(b, row, x, lines):
    """Return the dot product of a row of so many lines and arranged activations."""
    dots = dots_of("ternary", 1)
    sums = dots.begin(b, constant(I32, 0), None)
    with cgutils.for_range(b, lines) as loop:
        line = v.emit_load(b, BYTES.llvm, emit_at(b, row, loop.index, LINE))
        own = emit_at(b, x, loop.index, 4 * LINE)
        pairs = [
            (weights, v.emit_load(b, BYTES.llvm, behind(b, own, LINE * p)), slot)
            for p, (weights, slot) in enumerate(dots.operands(b, line))
        ]
        dots.add(b, pairs, sums)
    return b.sext(v.halve(b, dots.end(b, sums), b.add), INT64)


@v.op(void, i64, i64, i64, i64)
def add_columns(b, columns, codes, sums, lines):
    """Add the products of 8 columns to sums.

    Args:
        b: the builder.
        columns: address of their 8 addresses.
        codes: address of 8 activations, i8.
        sums: address of i32 [256 lines].
        lines: of a column.
    """
    starts = [v.emit_load(b, INT64, behind(b, columns, 8 * i)) for i in range(AT_ONCE)]
    fours = [v.emit_load(b, INT32, behind(b, codes, 4 * g)) for g in range(AT_ONCE // 4)]
    quads = [b.bitcast(v.spread(b, I32, four), BYTES.llvm) for four in fours]
    with cgutils.for_range(b, lines) as loop:
        stored = [v.emit_load(b, BYTES.llvm, emit_at(b, at, loop.index, LINE)) for at in starts]
        dwords = [interleaved(b, stored[4 * g : 4 * g + 4]) for g in range(len(quads))]
        own = emit_at(b, sums, loop.index, 16 * LINE)
        for part in range(4):
            for p in range(4):
                at = behind(b, own, LINE * (4 * part + p))
                pairs = [
                    (_digits(b, four[part], p), x) for four, x in zip(dwords, quads, strict=True)
                ]
                v.emit_store(b, plus(b, v.emit_load(b, I32.llvm, at), pairs), at)


def _digits(b: Any, dwords: Any, place: int) -> Any:
    if SHIFTED:
        return b.and_(dwords, constant(BYTES, 3 << 2 * place))
    return bits(b, dwords, 2 * place, 3)


def plus(b: Any, total: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """Emit a sum plus the products of unsigned and signed bytes that fit in int16 together."""
    if CURRENT.in_shorts:
        return b.add(total, emit_run(b, pairs))
    for weights, x in pairs:
        total = (dot if CURRENT.vnni else emit_split)(b, total, weights, x)
    return total


def interleaved(b: Any, lines: list[Any]) -> list[Any]:
    """Emit dwords of a byte of each of four lines: the v-th are of bytes 16 l + 4 v + d."""
    pairs = [_zipped(b, *lines[i : i + 2], half) for half in (0, 8) for i in (0, 2)]
    shorts = [b.bitcast(pair, SHORTS) for pair in pairs]
    mixed = [_zipped(b, *shorts[i : i + 2], half) for i in (0, 2) for half in (0, 4)]
    return [b.bitcast(four, BYTES.llvm) for four in mixed]


def _zipped(b: Any, first: Any, second: Any, half: int) -> Any:
    """Emit the elements of two vectors in turn, of the first or second half of each 16 bytes."""
    count = first.type.count
    lane = count // 4
    starts = range(half, count, lane)
    places = [i for start in starts for i in range(start, start + lane // 2)]
    return v.shuffle(b, first, second, [i + other for i in places for other in (0, count)])


@v.op(i64, i64, i64)
def nonzero(b, first, second):
    """Return how many of 64 places hold a byte other than zero, at one address or the other."""
    both = b.or_(v.emit_load(b, BYTES.llvm, first), v.emit_load(b, BYTES.llvm, second))
    mask = b.bitcast(b.icmp_unsigned("!=", both, constant(BYTES, 0)), INT64)
    return v.call(b, "llvm.ctpop.i64", INT64, mask)
