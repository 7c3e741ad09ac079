"""Codes to operands of products: bits of bytes, look-ups, the lines of trellises."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from clocher_kernels.formats.tcq import levels
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.tiles import multiply as m
from cpu_fallback.tiles.layout import ROWS

_HALF = ir.VectorType(v.INT8, 32)

Load = Callable[[int], Any]


def bits(b: Any, line: Any, shift: int, mask: int) -> Any:
    """Emit bits of each byte, shifted to the right, or to the left if `shift` is negative.

    Without a shift of bytes the mask removes the neighbour's.
    """
    if CURRENT.neon:
        return m.neon_bits(b, line, shift, mask)
    if shift:
        shorts = b.bitcast(line, ir.VectorType(v.INT16, line.type.count // 2))
        count = v.constant(shorts.type, abs(shift))
        shorts = b.lshr(shorts, count) if shift > 0 else b.shl(shorts, count)
        line = b.bitcast(shorts, line.type)
    return b.and_(line, v.constant(line.type, mask))


def look_up(b: Any, table: Sequence[int], nibbles: Any) -> Any:
    """Emit table[nibble] byte by byte."""
    table = list(table)
    if CURRENT.neon:
        return m.neon_look_up(b, table, nibbles)
    if CURRENT.avx512:
        entries = ir.Constant(v.BYTES.llvm, table * 4)
        return v.call(b, "llvm.x86.avx512.pshuf.b.512", v.BYTES.llvm, entries, nibbles)
    if CURRENT.avx2:
        entries = ir.Constant(_HALF, table * 2)
        if nibbles.type == _HALF:
            return v.call(b, "llvm.x86.avx2.pshuf.b", _HALF, entries, nibbles)
        halves = m.registers(b, nibbles)
        return v.join(b, [v.call(b, "llvm.x86.avx2.pshuf.b", _HALF, entries, h) for h in halves])
    return _steps(b, table, nibbles)


def _steps(b: Any, table: list[int], nibbles: Any) -> Any:
    """Emit table[nibble] without a table: the sum of the steps up to each nibble."""
    value = v.constant(v.BYTES, table[0])
    for i in range(1, 16):
        above = b.icmp_signed(">=", nibbles, v.constant(v.BYTES, i))
        step = v.constant(v.BYTES, table[i] - table[i - 1])
        value = b.add(value, b.select(above, step, v.constant(v.BYTES, 0)))
    return value


def trellis_fields(b: Any, lines: list[Any]) -> list[Any]:
    """Emit what operands of a trellis are looked up by, from the lines of a unit (`Tcq`).

    First the low four bits of indices: of operands 0 and 4 in the halves of a byte, then of 2 and
    6, 1 and 5, 3 and 7; then the lines of what is above them.
    """
    u = b.bitcast(lines[0], v.I32.llvm)

    def before(lag: int) -> Any:
        earlier = v.pick(b, u, [(row - lag) % ROWS for row in range(ROWS)])
        return b.shl(earlier, v.constant(v.I32, [int(row < lag) for row in range(ROWS)]))

    def some(value: Any, mask: int, shift: int = 0) -> Any:
        """Emit bits of bytes, moved to where a mask has them."""
        if shift:
            move = b.shl if shift > 0 else b.lshr
            value = move(value, v.constant(v.I32, abs(shift)))
        return b.and_(value, v.constant(v.I32, mask * 0x01010101))

    z0, z1 = before(2), b.xor(u, b.xor(before(1), before(3)))
    pairs = (
        b.or_(some(z0, 0x55), some(z1, 0xAA, 1)),
        b.or_(some(z0, 0x55, -1), some(z1, 0xAA)),
    )
    nibbles = []
    for odd, pair in enumerate(pairs):
        for later in (0, 1):
            if len(lines) == 2:
                high = some(b.bitcast(lines[1], v.I32.llvm), 0x44, 2 - odd - 2 * later)
            else:
                high = some(b.bitcast(lines[1 + odd], v.I32.llvm), 0xCC, 2 - 2 * later)
            nibbles.append(b.or_(some(pair, 0x33, -2 * later), high))
    return [*(b.bitcast(own, v.BYTES.llvm) for own in nibbles), *lines[3:]]


def trellis_level(b: Any, load: Load, index: int, count: int) -> Any:
    """Emit 64 plus the levels of four columns, of `count` bits each."""
    half, odd = divmod(index, 2)
    nibbles = bits(b, load(2 * odd + half % 2), half // 2 * 4, 15)
    table = [64 + int(level) for level in levels(count)]
    table += [0] * (-len(table) % 16)
    found = [look_up(b, table[at : at + 16], nibbles) for at in range(0, len(table), 16)]
    above = {4: [(4, index)], 5: [(4 + odd, 2 * half), (4 + odd, 2 * half + 1)]}.get(count, [])
    for line, bit in above:
        there = is_set(b, load(line), bit)
        pairs = zip(found[1::2], found[::2], strict=True)
        found = [b.select(there, *pair) for pair in pairs]
    return found[0]


def is_set(b: Any, line: Any, bit: int) -> Any:
    """Emit whether a bit of each byte is set."""
    nothing = v.constant(line.type, 0)
    if CURRENT.avx512 or not CURRENT.avx2:
        return b.icmp_unsigned("!=", b.and_(line, v.constant(line.type, 1 << bit)), nothing)
    # What chooses between registers there looks at the highest bit.
    shorts = b.bitcast(line, ir.VectorType(v.INT16, line.type.count // 2))
    high = b.bitcast(b.shl(shorts, v.constant(shorts.type, 7 - bit)), line.type)
    return b.icmp_signed("<", high, nothing)
