"""NEON's own instructions, for vectors of 64 bytes: four registers of 16.

Bytes are signed on both sides of a product: NEON multiplies unsigned bytes by signed ones only with
i8mm, and every operand of a tile fits seven bits or is stored signed (`tiles.layout`).
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.vector import BYTES, F32, I32, INT8, INT16, INT32, call, constant, pick

SIXTEEN, EIGHT, FOUR = ir.VectorType(INT8, 16), ir.VectorType(INT16, 8), ir.VectorType(INT32, 4)
"""A register as bytes, shorts and dwords."""


def quarter(b: Any, vector: Any, q: int) -> Any:
    """Emit one of the four registers of a vector."""
    count = vector.type.count // 4
    return pick(b, vector, list(range(q * count, (q + 1) * count)))


def join(b: Any, parts: Sequence[Any]) -> Any:
    """Emit the vector of some registers, a power of two of them."""
    while len(parts) > 1:
        count = parts[0].type.count
        lanes = ir.Constant(ir.VectorType(INT32, 2 * count), list(range(2 * count)))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [b.shuffle_vector(low, high, lanes) for low, high in pairs]
    return parts[0]


def _each(b: Any, emit: Callable[..., Any], *vectors: Any) -> Any:
    return join(b, [emit(*(quarter(b, v, q) for v in vectors)) for q in range(4)])


def emit_sdot(b: Any, total: Any, weights: Any, x: Any) -> Any:
    """Emit int32 [4] plus four products of signed bytes each, of a register."""
    return call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", FOUR, total, weights, x)


def emit_smmla(b: Any, total: Any, weights: Any, x: Any) -> Any:
    """Emit int32 [2, 2] plus signed bytes [2, 8] times the transpose of signed bytes [2, 8]."""
    return call(b, "llvm.aarch64.neon.smmla.v4i32.v16i8", FOUR, total, weights, x)


def emit_table(b: Any, entries: Sequence[int], indices: Any) -> Any:
    """Emit entries[index] of a register of bytes; zero for an index above 15."""
    table = ir.Constant(SIXTEEN, list(entries))
    return call(b, "llvm.aarch64.neon.tbl1.v16i8", SIXTEEN, table, indices)


def dot(b: Any, total: Any, weights: Any, x: Any) -> Any:
    """Emit int32 [16] plus four products of signed bytes each."""
    return _each(b, lambda *parts: emit_sdot(b, *parts), total, weights, x)


def look_up(b: Any, entries: Sequence[int], indices: Any) -> Any:
    """Emit entries[index] of 64 bytes, or of a register."""
    if indices.type == SIXTEEN:
        return emit_table(b, entries, indices)
    return _each(b, lambda part: emit_table(b, entries, part), indices)


def look_up_f32(b: Any, table: Any, index: Any) -> Any:
    """Emit table[index] of 16 lanes: the four bytes of each entry, from four registers."""
    spread = b.mul(index, constant(I32, 0x04040404))
    places = b.bitcast(b.add(spread, constant(I32, 0x03020100)), BYTES.llvm)
    entries = [quarter(b, b.bitcast(table, BYTES.llvm), q) for q in range(4)]
    name = "llvm.aarch64.neon.tbl4.v16i8"
    found = _each(b, lambda part: call(b, name, SIXTEEN, *entries, part), places)
    return b.bitcast(found, F32.llvm)


def pair_dots(b: Any, left: Any, right: Any) -> Any:
    """Emit products of int16 [32], added in pairs to int32 [16]."""

    def products(x: Any, y: Any) -> Any:
        halves = []
        for start in (0, 4):
            parts = [pick(b, v, list(range(start, start + 4))) for v in (x, y)]
            halves.append(call(b, "llvm.aarch64.neon.smull.v4i32", FOUR, *parts))
        return call(b, "llvm.aarch64.neon.addp.v4i32", FOUR, *halves)

    return _each(b, products, left, right)


def bits(b: Any, vector: Any, shift: int, mask: int) -> Any:
    """Emit bits of each byte, shifted to the right, or to the left if `shift` is negative."""
    count = ir.Constant(vector.type, [abs(shift)] * vector.type.count)
    if shift:
        vector = b.lshr(vector, count) if shift > 0 else b.shl(vector, count)
    left = 0xFF >> shift if shift >= 0 else 0xFF << -shift & 0xFF
    if mask & left == left:  # the shift has removed the others
        return vector
    return b.and_(vector, ir.Constant(vector.type, [mask] * vector.type.count))
