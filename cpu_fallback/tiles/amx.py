"""Dot products of a strip by AMX: 16 rows by 16 tokens by 64 columns in an instruction.

The lines of a strip are a tile of AMX as they lie, and so are the codes of a panel. Operands are
signed here if they have a bias, so sums need no start. They are stored, int32 [16 tokens, 16
rows] for each run of columns that is summed in int32, and exact as those of other ISAs.

Source: Intel's Architecture Instruction Set Extensions Programming Reference, chapter 3.
"""

from typing import Any

from llvmlite import ir

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import cgutils, void
from cpu_fallback.tiles.layout import LINE, ROWS, UNIT

TOKENS = 16
SUMS_BYTES = 4 * ROWS * TOKENS
"""Bytes of the sums of a run."""
_SUMS, _X, _W, _WIDE_X, _WIDE_W = range(5)
_SHAPES = {
    _SUMS: (TOKENS, 4 * ROWS),
    _X: (TOKENS, UNIT),
    _W: (UNIT // 4, LINE),
    _WIDE_X: (TOKENS, 2 * UNIT),
    _WIDE_W: (UNIT // 2, LINE),
}
"""Tile -> rows, bytes of a row."""


def _tile(index: int) -> Any:
    return ir.Constant(v.INT8, index)


def _load(b: Any, tile: int, at: Any, pitch: int) -> None:
    pointer = b.inttoptr(at, v.INT8.as_pointer())
    v.call(b, "llvm.x86.tileloadd64", v.VOID, _tile(tile), pointer, v.number(pitch))


@v.op(void)
def begin(b):
    """Give tiles their shapes: before products of a thread."""
    if not CURRENT.amx:
        return
    about = bytearray(64)
    about[0] = 1  # the palette
    for tile, (rows, pitch) in _SHAPES.items():
        about[16 + 2 * tile], about[48 + tile] = pitch, rows
    kind = ir.ArrayType(v.INT8, 64)
    shapes = cgutils.global_constant(b.module, "tile_shapes", ir.Constant(kind, about))
    v.call(b, "llvm.x86.ldtilecfg", v.VOID, b.bitcast(shapes, v.INT8.as_pointer()))


@v.op(void)
def end(b):
    """Forget the tiles, or every switch of threads would save them."""
    if CURRENT.amx:
        v.call(b, "llvm.x86.tilerelease", v.VOID)


def emit_dots(b: Any, x: Any, operands: Any, out: Any, units: Any, line: Any, signed: bool) -> None:
    """Emit the sums of units: of one, or of so many, an odd one at the end with zeros behind it.

    `x`: codes i8 of two units, [16, 64], the next two `line` bytes behind them; `signed`: operands
    are.
    """
    x_tile, w_tile, step = (_X, _W, 1) if units is None else (_WIDE_X, _WIDE_W, 2)
    steps = v.number(1) if units is None else b.udiv(b.add(units, v.number(1)), v.number(2))
    v.call(b, "llvm.x86.tilezero", v.VOID, _tile(_SUMS))
    with cgutils.for_range(b, steps) as loop:
        _load(b, x_tile, v.emit_at(b, x, loop.index, line), 2 * UNIT)
        _load(b, w_tile, v.emit_at(b, operands, loop.index, UNIT // 4 * LINE * step), LINE)
        v.call(
            b, f"llvm.x86.tdpbs{'su'[not signed]}d", v.VOID, *map(_tile, (_SUMS, x_tile, w_tile))
        )
    to = b.inttoptr(out, v.INT8.as_pointer())
    v.call(b, "llvm.x86.tilestored64", v.VOID, _tile(_SUMS), to, v.number(4 * ROWS))
