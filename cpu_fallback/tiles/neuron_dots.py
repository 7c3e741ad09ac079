"""Products of lines of neurons (`neurons`) and int8 activations: exact int32 sums, any order.

The digits are unsigned, digit + 1, so every sum is too large by that of the activations.
"""

from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.late import cgutils, i64, void
from cpu_fallback.lanes.memory import emit_load, emit_store
from cpu_fallback.lanes.simd import halve
from cpu_fallback.lanes.vector import (
    BYTES,
    I32,
    INT16,
    INT32,
    INT64,
    call,
    constant,
    number,
    op,
    pick,
    spread,
)
from cpu_fallback.tiles.byte_dots import bits, dots_of
from cpu_fallback.tiles.layout import LINE
from cpu_fallback.tiles.multiply import dot, emit_run, emit_split

AT_ONCE = 8
"""Columns that `add_columns` takes."""
SHIFTED = 2 if CURRENT.vnni else 0
"""Sums of `add_columns` for rows 16 p .. 16 p + 15 of each 64 are 2^(p SHIFTED) times too large."""

_SHORTS = ir.VectorType(INT16, 32)


def _place(b: Any, address: Any, index: Any, nbytes: int) -> Any:
    return b.add(address, b.mul(index, number(nbytes)))


def _behind(b: Any, address: Any, nbytes: int) -> Any:
    return b.add(address, number(nbytes))


@op(void, i64, i64)
def arrange(b, source, target):
    """Copy 256 activations to 4 registers, as a line of a row is multiplied by them."""
    dwords = emit_load(b, ir.VectorType(INT32, 64), source)
    for p in range(4):
        emit_store(b, pick(b, dwords, list(range(p, 64, 4))), _behind(b, target, LINE * p))


@op(i64, i64, i64, i64)
def row_dot(b, row, x, lines):
    """Return the dot product of a row and arranged activations."""
    dots = dots_of("ternary", 1)
    sums = dots.begin(b, constant(I32, 0), None)
    with cgutils.for_range(b, lines) as loop:
        line = emit_load(b, BYTES.llvm, _place(b, row, loop.index, LINE))
        own = _place(b, x, loop.index, 4 * LINE)
        pairs = [
            (weights, emit_load(b, BYTES.llvm, _behind(b, own, LINE * p)), slot)
            for p, (weights, slot) in enumerate(dots.operands(b, line))
        ]
        dots.add(b, pairs, sums)
    return b.sext(halve(b, dots.end(b, sums), b.add), INT64)


@op(void, i64, i64, i64, i64)
def add_columns(b, columns, codes, sums, lines):
    """Add the products of 8 columns to sums.

    Args:
        columns: address of their 8 addresses.
        codes: address of 8 activations, i8.
        sums: address of i32 [256 lines].
        lines: of a column.
    """
    starts = [emit_load(b, INT64, _behind(b, columns, 8 * i)) for i in range(AT_ONCE)]
    quads = [
        b.bitcast(spread(b, I32, emit_load(b, INT32, _behind(b, codes, 4 * g))), BYTES.llvm)
        for g in range(AT_ONCE // 4)
    ]
    with cgutils.for_range(b, lines) as loop:
        stored = [emit_load(b, BYTES.llvm, _place(b, at, loop.index, LINE)) for at in starts]
        dwords = [_interleaved(b, stored[4 * g : 4 * g + 4]) for g in range(len(quads))]
        own = _place(b, sums, loop.index, 16 * LINE)
        for v in range(4):
            for p in range(4):
                at = _behind(b, own, LINE * (4 * v + p))
                pairs = [(_digits(b, four[v], p), x) for four, x in zip(dwords, quads, strict=True)]
                emit_store(b, _plus(b, emit_load(b, I32.llvm, at), pairs), at)


def _digits(b: Any, dwords: Any, place: int) -> Any:
    if SHIFTED:
        return b.and_(dwords, constant(BYTES, 3 << 2 * place))
    return bits(b, dwords, 2 * place, 3)


def _plus(b: Any, total: Any, pairs: list[tuple[Any, Any]]) -> Any:
    if CURRENT.in_shorts:
        return b.add(total, emit_run(b, pairs))
    for weights, x in pairs:
        emit = dot if CURRENT.vnni else emit_split
        total = emit(b, total, weights, x)
    return total


def _interleaved(b: Any, lines: list[Any]) -> list[Any]:
    """Emit dwords of a byte of each of four lines: the v-th are of bytes 16 l + 4 v + d."""
    pairs = [_zipped(b, *lines[i : i + 2], half) for half in (0, 8) for i in (0, 2)]
    shorts = [b.bitcast(pair, _SHORTS) for pair in pairs]
    return [
        b.bitcast(_zipped(b, *shorts[i : i + 2], half), BYTES.llvm)
        for i in (0, 2)
        for half in (0, 4)
    ]


def _zipped(b: Any, first: Any, second: Any, half: int) -> Any:
    """Emit the elements of two vectors in turn, of the first or second half of each 16 bytes."""
    count = first.type.count
    lane = count // 4
    order = [
        i + other
        for start in range(half, count, lane)
        for i in range(start, start + lane // 2)
        for other in (0, count)
    ]
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT32, count), order))


@op(i64, i64, i64)
def nonzero(b, first, second):
    """Return how many of 64 places hold a byte other than zero, at one address or the other."""
    both = b.or_(emit_load(b, BYTES.llvm, first), emit_load(b, BYTES.llvm, second))
    mask = b.bitcast(b.icmp_unsigned("!=", both, constant(BYTES, 0)), INT64)
    return call(b, "llvm.ctpop.i64", INT64, mask)
