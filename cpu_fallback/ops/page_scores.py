"""Scores of four pages for four queries at a time, on tiles that stay in registers.

The bounds of a page are 2 D numbers in a row, largest then least; a query beside them is what it
has above zero, then what it has below. Their product is an upper bound of the logits of the query
in the page, and the score of the page is the largest one.
"""

from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.late import i64, void
from cpu_fallback.lanes.memory import emit_load, emit_store
from cpu_fallback.lanes.simd import emit_fma
from cpu_fallback.lanes.vector import F32, INT64, LANES, constant, number, op, pick
from cpu_fallback.ops.attention_tiles import emit_totals

TILE = 4
"""Pages, and rows of queries, of a tile."""
_SIDE = TILE if CURRENT.avx512 else 2
"""Of what is in registers together."""


def _emit_dots(b: Any, queries: list[Any], pages: list[Any], size: Any) -> list[list[Any]]:
    """Emit the 16-lane partial products of every query with every page."""
    entry = b.block
    loop, done = b.append_basic_block("bounds"), b.append_basic_block("bounds.end")
    b.branch(loop)
    b.position_at_end(loop)
    at = b.phi(INT64)
    at.add_incoming(number(0), entry)
    sums = [[b.phi(F32.llvm) for _ in pages] for _ in queries]
    q, p = ([emit_load(b, F32.llvm, b.add(x, at)) for x in some] for some in (queries, pages))
    after = [
        [emit_fma(b, p[j], q[i], sums[i][j]) for j in range(len(pages))]
        for i in range(len(queries))
    ]
    further = b.add(at, number(4 * LANES))
    at.add_incoming(further, loop)
    for before, new in zip(sums, after, strict=True):
        for total, value in zip(before, new, strict=True):
            total.add_incoming(constant(F32, 0.0), entry)
            total.add_incoming(value, loop)
    b.cbranch(b.icmp_signed("<", further, size), loop, done)
    b.position_at_end(done)
    return after


@op(void, i64, i64, i64, i64)
def score_tile(b, queries, places, size, out):
    """Write the scores of four pages; NaN where a bound is not finite.

    Args:
        queries: address of four rows.
        places: address of the addresses of the bounds of the pages.
        size: bytes of a row, and of the bounds of a page, whole vectors.
        out: address of four fp32.
    """
    rows = [b.add(queries, b.mul(size, number(r))) for r in range(TILE)]
    pages = [emit_load(b, INT64, b.add(places, number(8 * page))) for page in range(TILE)]
    parts: list[list[Any]] = [[None] * TILE for _ in range(TILE)]
    for r in range(0, TILE, _SIDE):
        for page in range(0, TILE, _SIDE):
            some = _emit_dots(b, rows[r : r + _SIDE], pages[page : page + _SIDE], size)
            for i, of_row in enumerate(some):
                parts[r + i][page : page + _SIDE] = of_row
    totals = emit_totals(b, [part for of_row in parts for part in of_row])
    by_row = [pick(b, totals, list(range(TILE * r, TILE * r + TILE))) for r in range(TILE)]
    zero = ir.Constant(by_row[0].type, [0.0] * TILE)
    best, odd = by_row[0], b.fmul(by_row[0], zero)
    for row in by_row[1:]:
        best = b.select(b.fcmp_ordered(">", row, best), row, best)
        odd = b.fadd(odd, b.fmul(row, zero))
    emit_store(b, b.fadd(best, odd), out)
