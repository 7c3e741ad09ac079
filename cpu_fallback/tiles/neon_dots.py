"""Dot products of bytes in tiles on NEON: a line of 16 rows is four registers, multiplied in turn.

A register holds four bytes of each of four rows. `sdot` multiplies it by one dword of a token,
taken out of a register of sixteen activations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cpu_fallback.lanes.memory import emit_load, emit_prefetch
from cpu_fallback.lanes.simd import join, number, pick, quarter
from cpu_fallback.tiles import multiply as neon
from cpu_fallback.tiles.byte_dots import OPERANDS, Dots, Sum, dots_of
from cpu_fallback.tiles.layout import LINE, UNIT

_NBYTES = 16


@dataclass(frozen=True)
class NeonDots(Dots):
    """How the dot products of a unit are emitted."""

    def unit(self, b: Any, lines: Any, codes: Any, sums: Sequence[Sum], ahead: Any) -> None:
        """Emit one unit: add 16 rows times 32 columns of each token to its sum."""
        places = [b.add(lines, number(LINE * i)) for i in range(self.lines)]
        for place in places:
            emit_prefetch(b, b.add(place, ahead), level=1)
        x = [
            [emit_load(b, neon.SIXTEEN, b.add(codes, number(at))) for at in (i, i + 16)]
            for i in range(0, UNIT * len(sums), UNIT)
        ]
        totals = [[quarter(b, b.load(own[0]), q) for q in range(4)] for own in sums]
        for q in range(4):
            at = number(_NBYTES * q)
            line = [emit_load(b, neon.SIXTEEN, b.add(place, at)) for place in places]
            weights = [self.operand(b, line.__getitem__, i)[0] for i in range(OPERANDS)]
            for i, operand in enumerate(weights):
                for own, total in zip(x, totals, strict=True):
                    dwords = b.bitcast(own[i // 4], neon.FOUR)
                    four = b.bitcast(pick(b, dwords, [i % 4] * 4), neon.SIXTEEN)
                    total[q] = neon.emit_sdot(b, total[q], operand, four)
        for own, total in zip(sums, totals, strict=True):
            b.store(join(b, total), own[0])


def neon_dots_of(code: str, tokens: int, number: bool = False) -> NeonDots:
    """Do as `dots_of` does."""
    dots = dots_of(code, tokens, number)
    return NeonDots(dots.code, dots.shifts, dots.top, number=number)
