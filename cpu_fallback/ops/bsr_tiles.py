"""Tiles of a block-sparse product: rows of one block row times tokens, in registers throughout.

A result is one accumulator of 16 lanes that walks the stored blocks of its row in order, and each
block in steps of 16 columns, the last one masked; then comes the tree of `simd.hsum`. Blocks with
scales sum their codes first and are added times the scale. Tiles only decide which accumulators are
in registers together, so a result depends neither on the tile nor on the other tokens.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.late import cgutils, i64, void
from cpu_fallback.ops.attention_tiles import emit_totals

AHEAD = 6144
"""Bytes of blocks that are asked for in advance: no multiple of 4096, or lines would collide."""
ACC = 64  # Bytes of an accumulator


# Accumulators that are in registers together: 32, 16 and 16 registers of 16, 8 and 4 lanes.
_MOST = CURRENT.registers // 2


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The stored blocks of a block row, from some row of theirs on; bytes and addresses."""

    codes: Any  # of that row in the first block
    block: Any  # from one block to the next
    row: Any  # from one row to the next
    scales: Any  # of that row in the first block; None without
    scale_block: Any  # from the scales of one block to those of the next
    columns: Any  # their block columns, int32
    count: Any  # how many
    width: Any  # columns of a block
    k: Any  # columns of the matrix


def _emit_tile(
    b: Any, kind: v.Widen, blocks: _Blocks, rows: range, xs: list[Any], places: list[Any]
) -> None:
    """Emit the product of some rows and tokens, added to the accumulators at some places."""
    tiles = [(r, t) for r in range(len(rows)) for t in range(len(xs))]
    sums = [cgutils.alloca_once(b, v.F32.llvm) for _ in tiles]
    parts = [cgutils.alloca_once(b, v.F32.llvm) for _ in tiles] if blocks.scales else sums
    for slot, place in zip(sums, places, strict=True):
        b.store(v.emit_load(b, v.F32.llvm, place), slot)
    with cgutils.for_range_slice(b, v.number(0), blocks.count, v.number(1), v.INT64) as (index, _):
        place = v.emit_load(b, v.INT32, v.emit_at(b, blocks.columns, index, v.number(4)))
        column = b.mul(b.sext(place, v.INT64), blocks.width)
        left = b.sub(blocks.k, column)
        width = b.select(b.icmp_signed("<", left, blocks.width), left, blocks.width)
        whole = b.and_(width, v.number(-v.LANES))
        block = v.emit_at(b, blocks.codes, index, blocks.block)
        lines = [v.emit_at(b, block, blocks.row, v.number(r)) for r in rows]
        tokens = [v.emit_at(b, x, column, v.number(4)) for x in xs]
        if blocks.scales:
            for slot in parts:
                b.store(v.constant(v.F32, 0.0), slot)

        def step(
            c: Any, vectors: int, count: Any, lines: Any = lines, tokens: Any = tokens
        ) -> None:
            """Emit some vectors of columns, row by row: the order in which they lie."""
            starts = [b.add(c, v.number(v.LANES * part)) for part in range(vectors)]
            load = _emit_load if count is None else partial(_emit_load, count=count)
            to = [b.mul(start, v.number(4)) for start in starts]
            x = [[load(b, v.WIDEN["f32"], b.add(token, at)) for at in to] for token in tokens]
            at = b.lshr(b.mul(c, v.number(kind.bits)), v.number(3))
            for r, line in enumerate(lines):
                for part in range(vectors):
                    place = b.add(line, b.add(at, v.number(kind.nbytes * part)))
                    if count is None and len(xs) == 1:
                        v.emit_prefetch(b, b.add(place, v.number(AHEAD)), level=1)
                    w = load(b, kind, place)
                    for t in range(len(xs)):
                        slot = parts[r * len(xs) + t]
                        b.store(v.emit_fma(b, w, x[t][part], b.load(slot)), slot)

        pairs = b.and_(width, v.number(-2 * v.LANES))
        with cgutils.for_range_slice(b, v.number(0), pairs, v.number(2 * v.LANES), v.INT64) as (
            c,
            _,
        ):
            step(c, 2, None)
        with b.if_then(b.icmp_signed("<", pairs, whole)):
            step(pairs, 1, None)
        tail = b.sub(width, whole)
        with b.if_then(b.icmp_signed(">", tail, v.number(0))):
            step(whole, 1, tail)
        if blocks.scales:
            scales = v.emit_at(b, blocks.scales, index, blocks.scale_block)
            for r, row in enumerate(rows):
                scale = v.emit_load(b, v.INT16, v.behind(b, scales, 2 * row))
                bits = b.shl(b.zext(scale, v.INT32), ir.Constant(v.INT32, 16))
                scale = v.spread(b, v.F32, b.bitcast(bits, v.FLOAT))
                for t in range(len(xs)):
                    own = r * len(xs) + t
                    total = v.emit_fma(b, b.load(parts[own]), scale, b.load(sums[own]))
                    b.store(total, sums[own])
    for slot, place in zip(sums, places, strict=True):
        v.emit_store(b, b.load(slot), place)


def _emit_load(b: Any, kind: v.Widen, address: Any, count: Any = None) -> Any:
    return kind.emit(b, address) if count is None else kind.emit_n(b, address, count)


def tile_of(name: str, scaled: bool, rows: int, tokens: int) -> Any:
    """Make the operation that adds rows times tokens to accumulators [rows, tokens]."""
    kind = v.WIDEN[name]
    wide = min(tokens, 4 if CURRENT.avx512 else 2)
    tall = min(rows, _MOST // wide)

    @v.op(void, *[i64] * 12)
    def tile(b, codes, block, row, scales, step, columns, count, width, k, x, pitch, acc):
        blocks = _Blocks(
            codes, block, row, scales if scaled else None, step, columns, count, width, k
        )
        xs = [v.emit_at(b, x, pitch, v.number(t)) for t in range(tokens)]
        for r in range(0, rows, tall):
            for t in range(0, tokens, wide):
                places = [
                    b.add(acc, v.number(ACC * ((r + i) * tokens + t + j)))
                    for i in range(tall)
                    for j in range(wide)
                ]
                _emit_tile(b, kind, blocks, range(r, r + tall), xs[t : t + wide], places)

    return tile


@v.op(void, i64, i64)
def totals(b, acc, out):
    """Write the sums of 16 accumulators."""
    vectors = [v.emit_load(b, v.F32.llvm, b.add(acc, v.number(ACC * i))) for i in range(v.LANES)]
    v.emit_store(b, emit_totals(b, vectors), out)


TILES = {
    "f32": ("f32", False),
    "bf16": ("bf16", False),
    "f16": ("f16", False),
    "int8": ("i8", True),
    "int4": ("i4", True),
}
"""Inner format of the blocks -> kind of number, and whether there are scales."""
