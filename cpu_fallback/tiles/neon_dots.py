"""Dot products of bytes in tiles on NEON: a line of 16 rows is four registers, multiplied in turn.

A register holds four bytes of each of four rows. `sdot` multiplies it by one dword of a token,
taken out of a register of sixteen activations. With i8mm and four tokens, `smmla` multiplies two
rows by two tokens: the dwords of two operands, interleaved, are eight bytes of each row. Its sums
stand two by two, and are put in order at the end of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.memory import emit_load, emit_prefetch
from cpu_fallback.lanes.simd import INT64, join, number, pick, quarter, shuffle
from cpu_fallback.tiles import multiply as neon
from cpu_fallback.tiles.byte_dots import OPERANDS, Dots, Sum, dots_of
from cpu_fallback.tiles.layout import LINE, UNIT

_PAIR = ir.VectorType(INT64, 2)
_QUARTERS = range(4)
_NBYTES = 16
_FEWEST = 4
"""Tokens from which smmla takes fewer instructions than sdot, for operands are interleaved."""


def _zipped(b: Any, x: Any, y: Any) -> list[Any]:
    """Emit the dwords of two registers in turn: those of the lower halves, and of the upper."""
    return [shuffle(b, x, y, lanes) for lanes in ((0, 4, 1, 5), (2, 6, 3, 7))]


def _unzipped(b: Any, x: Any, y: Any) -> list[Any]:
    return [shuffle(b, x, y, lanes) for lanes in ((0, 2, 4, 6), (1, 3, 5, 7))]


@dataclass(frozen=True)
class NeonDots(Dots):
    """How the dot products of a unit are emitted."""

    # whether tokens are multiplied two by two. The accumulators of two tokens then hold half of the
    # rows of both.
    in_pairs: bool = False

    def arrange(self, b: Any, sums: Sequence[Sum], back: bool = False) -> None:
        """Emit what makes two tokens' sums those of two halves of the rows, or undoes it."""
        if not self.in_pairs:
            return
        for one, other in zip(sums[::2], sums[1::2], strict=True):
            own, others = _quarters(b, one), _quarters(b, other)
            if back:
                parts = own + others
                pairs = [_unzipped(b, *parts[i : i + 2]) for i in range(0, len(parts), 2)]
                own, others = (list(parts) for parts in zip(*pairs, strict=True))
            else:
                zipped = [p for pair in zip(own, others, strict=True) for p in _zipped(b, *pair)]
                own, others = zipped[:4], zipped[4:]
            b.store(join(b, own), one[0])
            b.store(join(b, others), other[0])

    def unit(self, b: Any, lines: Any, codes: Any, sums: Sequence[Sum], ahead: Any) -> None:
        """Emit one unit: add 16 rows times 32 columns of each token to its sum."""
        places = [b.add(lines, number(LINE * i)) for i in range(self.lines)]
        for place in places:
            emit_prefetch(b, b.add(place, ahead), level=1)
        x = [
            [emit_load(b, neon.SIXTEEN, b.add(codes, number(at))) for at in (i, i + 16)]
            for i in range(0, UNIT * len(sums), UNIT)
        ]
        if self.in_pairs:
            x = [_two_by_two(b, *pair) for pair in zip(x[::2], x[1::2], strict=True)]
        totals = [_quarters(b, own) for own in sums]
        for q in _QUARTERS:
            at = number(_NBYTES * q)
            quarter = [emit_load(b, neon.SIXTEEN, b.add(place, at)) for place in places]
            weights = [self.operand(b, quarter.__getitem__, i)[0] for i in range(OPERANDS)]
            add = self._add_pairs if self.in_pairs else self._add_dots
            add(b, weights, x, totals, q)
        for own, total in zip(sums, totals, strict=True):
            b.store(join(b, total), own[0])

    def _add_dots(
        self, b: Any, weights: list[Any], x: list[Any], totals: list[list[Any]], q: int
    ) -> None:
        for i, operand in enumerate(weights):
            for own, total in zip(x, totals, strict=True):
                dwords = b.bitcast(own[i // 4], neon.FOUR)
                four = b.bitcast(pick(b, dwords, [i % 4] * 4), neon.SIXTEEN)
                total[q] = neon.emit_sdot(b, total[q], operand, four)

    def _add_pairs(
        self, b: Any, weights: list[Any], x: list[Any], totals: list[list[Any]], q: int
    ) -> None:
        for i in range(0, len(weights), 2):
            dwords = [b.bitcast(operand, neon.FOUR) for operand in weights[i : i + 2]]
            for half, rows in enumerate(_zipped(b, *dwords)):
                eights = b.bitcast(rows, neon.SIXTEEN)
                for pair, own in enumerate(x):
                    total, place = totals[2 * pair + q // 2], q % 2 * 2 + half
                    total[place] = neon.emit_smmla(b, total[place], eights, own[i // 2])


def _quarters(b: Any, total: Sum) -> list[Any]:
    value = b.load(total[0])
    return [quarter(b, value, q) for q in _QUARTERS]


def _two_by_two(b: Any, one: list[Any], other: list[Any]) -> list[Any]:
    """Emit the activations of a unit of two tokens: eight of each to a register."""
    found = []
    for x, y in zip(one, other, strict=True):
        x, y = b.bitcast(x, _PAIR), b.bitcast(y, _PAIR)
        found += [b.bitcast(shuffle(b, x, y, (i, 2 + i)), neon.SIXTEEN) for i in (0, 1)]
    return found


def neon_dots_of(code: str, tokens: int, number: bool = False) -> NeonDots:
    """Do as `dots_of` does."""
    dots = dots_of(code, tokens, number)
    in_pairs = CURRENT.i8mm and tokens >= _FEWEST
    return NeonDots(dots.code, dots.shifts, dots.top, number=number, in_pairs=in_pairs)
