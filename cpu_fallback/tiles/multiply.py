"""Products of vectors of bytes and of int16, added in int32, by what the ISA has for them.

A vector of 64 bytes is 16 rows with four columns each, in one register or two.

AMX multiplies 16 rows by 16 tokens by 64 columns in an instruction (Intel's Architecture
Instruction Set Extensions Programming Reference, chapter 3). Lines of operands are a tile of AMX as
they lie, and so are the codes of a panel. Operands that have a bias are signed there, so sums need
no start. They are stored, int32 [16 tokens, 16 rows], for the columns that are summed in int32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, cgutils, device, i64, void
from cpu_fallback.tiles.layout import LINE, ROWS, UNIT

REGISTERS = 1 if CURRENT.avx512 else 2  # Of 64 bytes, with AVX2 and better


def registers(b: Any, vector: Any) -> list[Any]:
    """Emit the registers of a vector of 64 bytes, for AVX2 and better."""
    return v.pieces(b, vector, REGISTERS)


def dot(b: Any, total: Any, weights: Any, x: Any) -> Any:
    """Emit int32 [16] plus four products of unsigned and signed bytes each, for VNNI."""
    return v.by_pieces(b, REGISTERS, partial(register_dot, b), total, weights, x)


def register_dot(b: Any, total: Any, weights: Any, x: Any) -> Any:
    """Emit `dot` of a register."""
    name = f"llvm.x86.avx512.vpdpbusd.{512 // REGISTERS}"
    if llvm.llvm_version_info[0] < 21:
        weights, x = b.bitcast(weights, total.type), b.bitcast(x, total.type)
    return v.call(b, name, total.type, total, weights, x)


_MADD_BYTES = {128: "ssse3.pmadd.ub.sw.128", 256: "avx2.pmadd.ub.sw", 512: "avx512.pmaddubs.w.512"}
_MADD_SHORTS = {128: "sse2.pmadd.wd", 256: "avx2.pmadd.wd", 512: "avx512.pmaddw.d.512"}
"""Bits of a register -> intrinsic."""


def madd_bytes(b: Any, weights: Any, x: Any) -> Any:
    """Emit products of unsigned and signed bytes in a register, added in pairs to int16."""
    count = weights.type.count
    name = f"llvm.x86.{_MADD_BYTES[8 * count]}"
    return v.call(b, name, ir.VectorType(v.INT16, count // 2), weights, x)


def madd_shorts(b: Any, left: Any, right: Any) -> Any:
    """Emit products of int16 in a register, added in pairs to int32."""
    count = left.type.count
    name = f"llvm.x86.{_MADD_SHORTS[16 * count]}"
    return v.call(b, name, ir.VectorType(v.INT32, count // 2), left, right)


def run_length(top: int) -> int:
    """Return how many products of operands up to `top` fit in int16 together."""
    return 32767 // (top * 256)


def plus(b: Any, total: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Emit a sum plus the products of unsigned and signed bytes that fit in int16 together."""
    if CURRENT.in_shorts:
        sums: list[Any] = [None] * REGISTERS
        for weights, x in pairs:
            each = zip(sums, registers(b, weights), registers(b, x), strict=True)
            sums = [add_bytes(b, *one) for one in each]
        return b.add(total, times(b, sums, v.constant(v.SHORTS, 1)))
    for weights, x in pairs:
        total = (dot if CURRENT.vnni else emit_split)(b, total, weights, x)
    return total


def add_bytes(b: Any, total: Any, weights: Any, x: Any) -> Any:
    """Emit int16 plus products of unsigned and signed bytes, of a register; None is nothing."""
    products = madd_bytes(b, weights, x)
    return products if total is None else b.add(total, products)


def add_shorts(b: Any, total: Any, weights: Any, x: Any) -> Any:
    """Emit int32 plus products of int16, of a register."""
    return b.add(total, madd_shorts(b, weights, x))


def times(b: Any, sums: Sequence[Any], factors: Any) -> Any:
    """Emit registers of int16 times factors, int16 [32], added in pairs to int32 [16]."""
    pairs = zip(sums, registers(b, factors), strict=True)
    return v.join(b, [madd_shorts(b, *pair) for pair in pairs])


def add_runs(
    b: Any,
    sums: list[list[list[Any]]],
    places: Sequence[int],
    operands: Callable[[int], list[Any]],
    x: Callable[[int, int], Any],
    add: Callable[..., Any] = add_bytes,
) -> None:
    """Add to sums [parts of operands][tokens][registers] the operands at some places, one by one.

    `operands` emits the parts of the operand at a place, `x` what a token, by its number, has for a
    place, `add` a register of a sum, given the old one and what is multiplied.
    """
    for place in places:
        for weights, rows in zip(operands(place), sums, strict=True):
            for t, own in enumerate(rows):
                each = zip(own, registers(b, weights), registers(b, x(t, place)), strict=True)
                own[:] = [add(b, *one) for one in each]
        if len(places) > 1 and sums[0]:
            keep_order(b, [own for rows in sums for own in rows])


def emit_split(b: Any, total: Any, weights: Any, x: Any) -> Any:
    """Emit the products of any bytes: even and odd ones apart, widened to int16.

    On NEON both are signed, and a product is an instruction.
    """
    if CURRENT.neon:
        return v.by_pieces(b, 4, partial(emit_sdot, b), total, weights, x)
    eight = v.constant(v.SHORTS, 8)
    w, x = b.bitcast(weights, v.SHORTS), b.bitcast(x, v.SHORTS)
    even = (b.and_(w, v.constant(v.SHORTS, 255)), b.ashr(b.shl(x, eight), eight))
    odd = (b.lshr(w, eight), b.ashr(x, eight))
    for left, right in (even, odd):
        total = b.add(total, pair_dots(b, left, right))
    return total


def pair_dots(b: Any, left: Any, right: Any) -> Any:
    """Emit products of int16 [32], added in pairs to int32 [16]."""
    if CURRENT.avx2:
        return v.by_pieces(b, REGISTERS, partial(madd_shorts, b), left, right)
    if CURRENT.neon:
        return _neon_pair_dots(b, left, right)
    products = []
    for first in (0, 1):
        a, c = (b.sext(v.pick(b, x, range(first, 32, 2)), v.I32.llvm) for x in (left, right))
        products.append(b.mul(a, c))
    return b.add(*products)


def keep_order(b: Any, rows: list[list[Any]]) -> None:
    """Let the compiler finish these sums first, or it multiplies by all operands at the same time.

    It would have to keep their products, or all activations, in memory.
    """
    flat = [value for row in rows for value in row]
    kinds = [value.type for value in flat]
    register = "=v" if CURRENT.avx512 else "=x"
    places = ",".join([register] * len(flat) + [str(i) for i in range(len(flat))])
    result = kinds[0] if len(flat) == 1 else ir.LiteralStructType(kinds)
    nothing = ir.InlineAsm(ir.FunctionType(result, kinds), "", places, side_effect=True)
    found = b.call(nothing, flat)
    kept = [found] if len(flat) == 1 else [b.extract_value(found, i) for i in range(len(flat))]
    for row in rows:
        row[:] = [kept.pop(0) for _ in row]


SIXTEEN, FOUR = ir.VectorType(v.INT8, 16), ir.VectorType(v.INT32, 4)
"""A register of NEON as bytes and as dwords."""


def emit_sdot(b: Any, total: Any, weights: Any, x: Any) -> Any:
    """Emit int32 [4] plus four products of signed bytes each, of a register."""
    return v.call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", FOUR, total, weights, x)


def neon_look_up(b: Any, entries: Sequence[int], indices: Any) -> Any:
    """Emit entries[index] of 64 bytes, or of a register; zero for an index above 15."""
    table = ir.Constant(SIXTEEN, list(entries))

    def look(part: Any) -> Any:
        return v.call(b, "llvm.aarch64.neon.tbl1.v16i8", SIXTEEN, table, part)

    return look(indices) if indices.type == SIXTEEN else v.by_pieces(b, 4, look, indices)


def _neon_pair_dots(b: Any, left: Any, right: Any) -> Any:
    """Emit products of int16 [32], added in pairs to int32 [16]."""

    def products(x: Any, y: Any) -> Any:
        halves = []
        for start in (0, 4):
            parts = [v.pick(b, each, list(range(start, start + 4))) for each in (x, y)]
            halves.append(v.call(b, "llvm.aarch64.neon.smull.v4i32", FOUR, *parts))
        return v.call(b, "llvm.aarch64.neon.addp.v4i32", FOUR, *halves)

    return v.by_pieces(b, 4, products, left, right)


def neon_bits(b: Any, vector: Any, shift: int, mask: int) -> Any:
    """Emit bits of each byte, shifted to the right, or to the left if `shift` is negative."""
    count = ir.Constant(vector.type, [abs(shift)] * vector.type.count)
    if shift:
        vector = b.lshr(vector, count) if shift > 0 else b.shl(vector, count)
    left = 0xFF >> shift if shift >= 0 else 0xFF << -shift & 0xFF
    if mask & left == left:  # the shift has removed the others
        return vector
    return b.and_(vector, ir.Constant(vector.type, [mask] * vector.type.count))


_RUN = 8  # Products of 4 bits that are added in int16
_SUMS = 12 if CURRENT.avx512 else 3 if CURRENT.in_shorts else 6  # that do not wait for each other


@v.op(void, i64, i64)
def _many_dots(b, count, out):
    line = v.emit_load(b, v.BYTES.llvm, out)
    slots = [cgutils.alloca_once_value(b, v.constant(v.I32, i)) for i in range(_SUMS)]
    with cgutils.for_range(b, count):
        for slot in slots:
            pairs, parts = [], registers(b, line) if CURRENT.avx2 else [line]
            for _ in range(_RUN):
                if CURRENT.in_shorts:
                    keep_order(b, [parts])  # or all products would be one
                pairs.append((v.join(b, parts), line))
            b.store(plus(b, b.load(slot), pairs), slot)
    for i, slot in enumerate(slots):
        v.emit_store(b, b.load(slot), v.behind(b, out, 64 * i))


def _dots(count, out):
    _many_dots(count, out)


dots = Kernel(_dots)  # (turns, address of OUT bytes): adds 8 * OUT products of bytes a turn
OUT = _SUMS * 64


TILE_TOKENS = 16
SUMS_BYTES = 4 * ROWS * TILE_TOKENS
"""Bytes of the sums that AMX stores at a time."""
_TOTALS, _X, _W, _WIDE_X, _WIDE_W = range(5)
_SHAPES = {
    _TOTALS: (0, 4 * ROWS),
    _X: (0, UNIT),
    _W: (UNIT // 4, LINE),
    _WIDE_X: (0, 2 * UNIT),
    _WIDE_W: (UNIT // 2, LINE),
}
"""Tile -> rows, 0 for as many as there are tokens, and bytes of a row."""


def _tile(index: int) -> Any:
    return ir.Constant(v.INT8, index)


def _load_tile(b: Any, tile: int, at: Any, pitch: int) -> None:
    pointer = b.inttoptr(at, v.INT8.as_pointer())
    v.call(b, "llvm.x86.tileloadd64", v.VOID, _tile(tile), pointer, v.number(pitch))


def _begins(tokens: int) -> Any:
    @v.op(void)
    def begin(b):
        if not CURRENT.amx:
            return
        about = bytearray(64)
        about[0] = 1  # the palette
        for tile, (rows, pitch) in _SHAPES.items():
            about[16 + 2 * tile], about[48 + tile] = pitch, rows or tokens
        kind = ir.ArrayType(v.INT8, 64)
        shapes = cgutils.global_constant(b.module, "tile_shapes", ir.Constant(kind, about))
        v.call(b, "llvm.x86.ldtilecfg", v.VOID, b.bitcast(shapes, v.INT8.as_pointer()))

    return begin


_of_eight, _of_more = _begins(8), _begins(TILE_TOKENS)


@device
def begin_tiles(tokens):
    """Give tiles their shapes: before products of a thread, of blocks of so many tokens."""
    if tokens <= 8:  # instructions take half the time
        _of_eight()
    else:
        _of_more()


@v.op(void)
def end_tiles(b):
    """Forget the tiles, or every switch of threads would save them."""
    if CURRENT.amx:
        v.call(b, "llvm.x86.tilerelease", v.VOID)


def tile_dots(b: Any, x: Any, operands: Any, out: Any, units: Any, line: Any, signed: bool) -> None:
    """Emit the sums of units: of one, or of so many, an odd one at the end with zeros behind it.

    `x`: codes i8 of two units, [16, 64], the next two `line` bytes behind them; `signed`: operands
    are.
    """
    x_tile, w_tile, step = (_X, _W, 1) if units is None else (_WIDE_X, _WIDE_W, 2)
    steps = v.number(1) if units is None else b.udiv(b.add(units, v.number(1)), v.number(2))
    v.call(b, "llvm.x86.tilezero", v.VOID, _tile(_TOTALS))
    with cgutils.for_range(b, steps) as loop:
        _load_tile(b, x_tile, v.emit_at(b, x, loop.index, line), 2 * UNIT)
        _load_tile(b, w_tile, v.emit_at(b, operands, loop.index, UNIT // 4 * LINE * step), LINE)
        v.call(
            b, f"llvm.x86.tdpbs{'su'[not signed]}d", v.VOID, *map(_tile, (_TOTALS, x_tile, w_tile))
        )
    to = b.inttoptr(out, v.INT8.as_pointer())
    v.call(b, "llvm.x86.tilestored64", v.VOID, _tile(_TOTALS), to, v.number(4 * ROWS))
