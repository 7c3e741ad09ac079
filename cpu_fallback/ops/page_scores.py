"""Scores of four pages for four queries at a time, on tiles that stay in registers.

The bounds of a page are 2 D numbers in a row, largest then least; a query beside them is what it
has above zero, then what it has below. Their product is an upper bound of the logits of the query
in the page, and the score of the page is the largest one.
"""

from typing import Any

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.late import i64, void
from cpu_fallback.lanes.vector import F32, INT64, LANES, behind, constant, emit_at, number
from cpu_fallback.ops.attention_tiles import emit_sums, emit_totals

TILE = 4  # Pages, and rows of queries, of a tile
_SIDE = TILE if CURRENT.avx512 else 2  # Of what is in registers together


def _emit_dots(b: Any, queries: list[Any], pages: list[Any], size: Any) -> list[Any]:
    """Emit the 16-lane partial products of every query with every page."""

    def add(at: Any, sums: list[Any]) -> list[Any]:
        q, p = ([v.emit_load(b, F32.llvm, b.add(x, at)) for x in some] for some in (queries, pages))
        pairs = [(x, y) for x in q for y in p]
        return [v.emit_fma(b, y, x, total) for (x, y), total in zip(pairs, sums, strict=True)]

    starts = [constant(F32, 0.0)] * (len(queries) * len(pages))
    return emit_sums(b, starts, (number(0), size, 4 * LANES), add)


@v.op(void, i64, i64, i64, i64)
def score_tile(b, queries, places, size, out):
    """Write the scores of four pages; NaN where a bound is not finite.

    Args:
        b: the builder.
        queries: address of four rows.
        places: address of the addresses of the bounds of the pages.
        size: bytes of a row, and of the bounds of a page, whole vectors.
        out: address of four fp32.
    """
    rows = [emit_at(b, queries, number(r), size) for r in range(TILE)]
    pages = [v.emit_load(b, INT64, behind(b, places, 8 * page)) for page in range(TILE)]
    parts: dict[tuple[int, int], Any] = {}
    for r in range(0, TILE, _SIDE):
        for page in range(0, TILE, _SIDE):
            some = _emit_dots(b, rows[r : r + _SIDE], pages[page : page + _SIDE], size)
            at = [(r + i, page + j) for i in range(_SIDE) for j in range(_SIDE)]
            parts.update(zip(at, some, strict=True))
    totals = emit_totals(b, [parts[r, page] for r in range(TILE) for page in range(TILE)])
    by_row = [v.pick(b, totals, range(TILE * r, TILE * r + TILE)) for r in range(TILE)]
    zero = constant(by_row[0].type, 0.0)
    best, odd = by_row[0], b.fmul(by_row[0], zero)
    for row in by_row[1:]:
        best = b.select(b.fcmp_ordered(">", row, best), row, best)
        odd = b.fadd(odd, b.fmul(row, zero))
    v.emit_store(b, b.fadd(best, odd), out)
