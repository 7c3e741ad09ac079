"""Moving the dwords of 16 stored rows to lines, for packing."""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.late import i64, void
from cpu_fallback.lanes.memory import emit_load, emit_store
from cpu_fallback.lanes.vector import I32, INT32, op, spread
from cpu_fallback.tiles.layout import LINE, ROWS


@op(i64, i64, i64)
def flip(b, value, mask):
    """Return a dword with the bits of a mask changed."""
    return b.xor(value, mask)


@op(void, i64, i64, i64, i64)
def move_lines(b, source, stride, target, mask):
    """Write 4 lines: word i of each of 16 rows, `stride` bytes apart, flipped, to line i."""
    four = ir.VectorType(INT32, 4)
    rows = [
        emit_load(b, four, b.add(source, b.mul(stride, ir.Constant(stride.type, r))))
        for r in range(ROWS)
    ]
    flips = spread(b, I32, b.trunc(mask, INT32))
    while len(rows) > 4:
        rows = [_joined(b, rows[i], rows[i + 1]) for i in range(0, len(rows), 2)]
    for i in range(4):
        halves = [_picked(b, rows[j], rows[j + 1], range(i, 32, 4)) for j in (0, 2)]
        line = b.xor(_joined(b, *halves), flips)
        emit_store(b, line, b.add(target, ir.Constant(target.type, LINE * i)))


def _joined(b: Any, first: Any, second: Any) -> Any:
    return _picked(b, first, second, range(2 * first.type.count))


def _picked(b: Any, first: Any, second: Any, lanes: Sequence[int]) -> Any:
    order = ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes))
    return b.shuffle_vector(first, second, order)


@device
def read_some(address, end):
    """Return the four bytes at an address, those from `end` on as zeros."""
    if address + 4 <= end:
        return v.read_i32(address)
    value = 0
    for i in range(end - address):
        value += v.read_u8(address + i) << 8 * i
    return value
