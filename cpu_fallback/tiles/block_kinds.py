"""What the lines of ggml's blocks of 256 columns hold: scales of runs, and unsigned codes.

A block is multiplied half by half, 128 columns each. `head` of a kind gives its scales once,
`codes` the operands of a run of columns of a half. `BlockLayout` says which line is which.

Source: ggml-common.h (block_q4_K and so on), ggml-quants.c (dequantize_row_*).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir

from cpu_fallback.lanes.memory import emit_load
from cpu_fallback.lanes.narrow import emit_half
from cpu_fallback.lanes.vector import BYTES, I32, INT16, INT32, constant, number, spread
from cpu_fallback.tiles.byte_dots import IQ4, bits, look_up
from cpu_fallback.tiles.layout import BIAS, LINE, ROWS


class Lines:
    """The lines of a block.

    Args:
        b: the builder.
        at: address of the block.
        half: which half of its columns is multiplied, 0 or 1 (i64), while `codes` is emitted.
    """

    def __init__(self, b: Any, at: Any, half: Any = None) -> None:
        self.b, self._at, self._half = b, at, half

    def line(self, index: int, per_half: int = 0) -> Any:
        """Emit the load of a line, of one that is `per_half` lines on in the second half."""
        b = self.b
        at = b.add(self._at, number(LINE * index))
        if per_half:
            at = b.add(at, b.mul(self._half, number(LINE * per_half)))
        return emit_load(b, BYTES.llvm, at)

    def dwords(self, index: int) -> Any:
        """Emit the load of a line as int32 [16]."""
        return self.b.bitcast(self.line(index), I32.llvm)

    def high_bits(self, index: int, own: int) -> Any:
        """Emit a line whose bytes have a bit for each of 8 runs, shifted so that of `own` is bit 4.

        Other bits are left over. The second half has bits 4 .. 7.
        """
        b = self.b
        count = spread(b, I32, b.trunc(b.shl(self._half, number(2)), INT32))
        here = b.lshr(self.dwords(index), count)
        return b.bitcast(b.shl(here, constant(I32, 4 - own)), BYTES.llvm)


class Head(NamedTuple):
    """The scales of a block."""

    d: Any  # fp32 [16]
    scales: list[list[Any]]  # of each half, dwords of a byte for each run
    dmin: Any = None  # fp32 [16], if there are minima
    minima: list[list[Any]] | None = None  # as the scales


Codes = tuple[list[Any], int]
"""Operands of a run, four columns of each row each, and by how many bits they stand too high."""


@dataclass(frozen=True)
class Kind:
    """A type of ggml as tiles hold it."""

    run: int  # columns that share a scale: 16 or 32
    top: int  # largest operand
    head: Callable[[Lines], Head]  # emits the scales of a block
    # emits the operands of a run, given its number in the half, and whether the caller is better
    # off with operands that stand too high than with a shift
    codes: Callable[[Lines, int, bool], Codes]
    bias: int = 0  # of operands, a power of two; 0 if there are minima
    signed: bool = False  # whether scales are signed


def _f16(b: Any, dwords: Any, high: bool = False) -> Any:
    if high:
        dwords = b.lshr(dwords, constant(I32, 16))
    return emit_half(b, b.trunc(dwords, ir.VectorType(INT16, ROWS)))


def _picked(b: Any, dwords: Any, shift: int, mask: int) -> Any:
    return b.bitcast(bits(b, b.bitcast(dwords, BYTES.llvm), shift, mask), I32.llvm)


def _less(b: Any, dwords: Any, value: int) -> Any:
    return b.bitcast(b.sub(b.bitcast(dwords, BYTES.llvm), constant(BYTES, value)), I32.llvm)


def _sixes(lines: Lines) -> Head:
    """The head of q4_k and q5_k: 6-bit scales and minima, the last four's high bits elsewhere."""
    b = lines.b
    both, low, middle, high = (lines.dwords(i) for i in range(4))

    def last(first: Any, shift: int) -> Any:
        return b.or_(_picked(b, high, shift, 15), _picked(b, first, 2, 48))

    scales, minima = [
        [[_picked(b, first, 0, 63)], [last(first, shift)]]
        for first, shift in ((low, 0), (middle, 4))
    ]
    return Head(_f16(b, both), scales, _f16(b, both, high=True), minima)


def _q4_k(lines: Lines, run: int, too_high: bool) -> Codes:
    found = [lines.line(4 + run // 2 * 8 + i, 16) for i in range(8)]
    if run % 2 and too_high:
        return [lines.b.and_(line, constant(BYTES, 0xF0)) for line in found], 4
    return [bits(lines.b, line, run % 2 * 4, 15) for line in found], 0


def _q5_k(lines: Lines, run: int, _: bool) -> Codes:
    b, codes = lines.b, []
    for i in range(8):
        low = bits(b, lines.line((4, 20)[run // 2] + i, (24, 16)[run // 2]), run % 2 * 4, 15)
        high = b.and_(lines.high_bits(12 + i, run), constant(BYTES, 16))
        codes.append(b.or_(low, high))
    return codes, 0


def _q6_k_head(lines: Lines) -> Head:
    scales = [[lines.dwords(1 + 2 * half + i) for i in (0, 1)] for half in (0, 1)]
    return Head(_f16(lines.b, lines.dwords(0)), scales)


def _q6_k(lines: Lines, run: int, _: bool) -> Codes:
    b, codes, quarter = lines.b, [], run // 2
    first = 5 + run % 2 * 8
    lows = 21 + run % 2 * 4 if quarter % 2 else first
    for i in range(4):
        low = bits(b, lines.line(lows + i, 24), quarter // 2 * 4, 15)
        codes.append(b.or_(low, bits(b, lines.line(first + 4 + i, 24), 2 * quarter - 4, 48)))
    return codes, 0


def _q3_k_head(lines: Lines) -> Head:
    b = lines.b
    first, second, high = (lines.dwords(1 + i) for i in range(3))
    scales = [
        [
            _less(b, b.or_(_picked(b, low, 4 * half, 15), _picked(b, high, shift, 48)), 32)
            for low, shift in ((first, 4 * half - 4), (second, 4 * half - 2))
        ]
        for half in (0, 1)
    ]
    return Head(_f16(b, lines.dwords(0)), scales)


def _q3_k(lines: Lines, run: int, _: bool) -> Codes:
    b, codes, quarter = lines.b, [], run // 2
    first = 4 + run % 2 * 8
    for i in range(4):
        low = bits(b, lines.line(first + i, 16 - run % 2 * 4), 2 * quarter, 3)
        high = bits(b, lines.high_bits(first + 4 + i, quarter), 2, 4)
        codes.append(b.or_(low, high))
    return codes, 0


def _q2_k_head(lines: Lines) -> Head:
    b = lines.b
    both = lines.dwords(0)
    own = [[lines.dwords(1 + 2 * half + i) for i in (0, 1)] for half in (0, 1)]
    scales, minima = [
        [[_picked(b, dwords, shift, 15) for dwords in half] for half in own] for shift in (0, 4)
    ]
    return Head(_f16(b, both), scales, _f16(b, both, high=True), minima)


def _q2_k(lines: Lines, run: int, _: bool) -> Codes:
    found = [lines.line(5 + run % 2 * 4 + i, 8) for i in range(4)]
    return [bits(lines.b, line, run // 2 * 2, 3) for line in found], 0


def _iq4_xs_head(lines: Lines) -> Head:
    b = lines.b
    both, low = lines.dwords(0), lines.dwords(1)
    scales = []
    for half in (0, 1):
        # Four nibbles, and four pairs of bits, are spread to a byte each.
        nibbles = b.and_(b.lshr(low, constant(I32, 16 * half)), constant(I32, 0xFFFF))
        pairs = b.and_(b.lshr(both, constant(I32, 16 + 8 * half)), constant(I32, 0xFF))
        for count, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F)):
            wide = b.or_(nibbles, b.shl(nibbles, constant(I32, count)))
            nibbles = b.and_(wide, constant(I32, mask))
        for count, mask in ((12, 0x000F000F), (6, 0x03030303)):
            wide = b.or_(pairs, b.shl(pairs, constant(I32, count)))
            pairs = b.and_(wide, constant(I32, mask))
        scales.append([_less(b, b.or_(nibbles, b.shl(pairs, constant(I32, 4))), 32)])
    return Head(_f16(b, both), scales)


def _iq4_xs(lines: Lines, run: int, _: bool) -> Codes:
    b = lines.b
    found = [lines.line(2 + 4 * run + i, 16) for i in range(4)]
    nibbles = [bits(b, line, shift, 15) for shift in (0, 4) for line in found]
    return [look_up(b, IQ4, nibble) for nibble in nibbles], 0


KINDS = {
    "q4_k": Kind(32, 15, _sixes, _q4_k),
    "q5_k": Kind(32, 31, _sixes, _q5_k),
    "q6_k": Kind(16, 63, _q6_k_head, _q6_k, bias=32, signed=True),
    "q3_k": Kind(16, 7, _q3_k_head, _q3_k, bias=4, signed=True),
    "q2_k": Kind(16, 3, _q2_k_head, _q2_k),
    "iq4_xs": Kind(32, max(IQ4), _iq4_xs_head, _iq4_xs, bias=BIAS["iq4"], signed=True),
}
"""Name -> kind, for every `BlockLayout`."""
