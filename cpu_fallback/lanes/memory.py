"""Loads and stores by address: scalars, 16-lane vectors, and their first n lanes.

An address is an int64. Kernels get addresses and sizes that were checked when the Plan was bound,
so nothing is checked here, and nothing is read or written past what the caller names: weights are
views of a mapped file, whose last row may end where the mapping does.

Names: `read_*` and `write_*` move one scalar (integers as int64), `load_*` and `store_*` 16 lanes,
`load_*_n` and `store_*_n` the first n lanes, n in 0 .. 16; other lanes load as zero. u8 and i8 are
widened to int32, and the low bits of int32 stored. Alignment is never assumed.

At the end what packing needs: the words of 16 rows to lines, and nibbles to other places.
"""

from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import VecT, device, f32, i64, void
from cpu_fallback.lanes.simd import *


def emit_load(b: Any, kind: ir.Type, address: Any) -> Any:
    """Emit an unaligned load."""
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def emit_everywhere(b: Any, kind: VecT, address: Any) -> Any:
    """Emit a vector with the number at an address in every lane."""
    return spread(b, kind, emit_load(b, kind.llvm.element, address))


def emit_store(b: Any, value: Any, address: Any) -> None:
    """Emit an unaligned store."""
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 1


def _bytes(element: ir.Type) -> int:
    return 4 if element == FLOAT else element.width // 8


def _masked(b: Any, verb: str, kind: ir.VectorType, count: Any) -> tuple[str, Any, Any] | None:
    """Emit what a masked load or store takes: its name, alignment and mask; None: there is none."""
    if not (CURRENT.avx512 or (CURRENT.avx2 and _bytes(kind.element) == 4)):
        return None
    lanes = ir.VectorType(INT32, kind.count)
    end = spread(b, lanes, b.trunc(count, INT32))
    mask = b.icmp_signed("<", constant(lanes, range(kind.count)), end)
    name = f"llvm.masked.{verb}.v{kind.count}{kind.element.intrinsic_name}.p0"
    return name, ir.Constant(INT32, 1), mask


def _copy(b: Any, target: Any, source: Any, kind: ir.VectorType, count: Any) -> None:
    byte, size = INT8.as_pointer(), b.mul(count, number(_bytes(kind.element)))
    call(b, "memcpy", byte, b.bitcast(target, byte), b.bitcast(source, byte), size)


def emit_load_n(b: Any, kind: ir.VectorType, address: Any, count: Any) -> Any:
    """Emit a load of the first `count` elements of a vector, the others zero."""
    nothing = ir.Constant(kind, None)
    if masked := _masked(b, "load", kind, count):
        name, align, mask = masked
        pointer = b.inttoptr(address, kind.as_pointer())
        return call(b, name, kind, pointer, align, mask, nothing)
    (slot,) = variables(b, [nothing])
    _copy(b, slot, b.inttoptr(address, INT8.as_pointer()), kind, count)
    return b.load(slot)


def emit_store_n(b: Any, value: Any, address: Any, count: Any) -> None:
    """Emit a store of the first `count` elements of a vector."""
    if masked := _masked(b, "store", value.type, count):
        name, align, mask = masked
        pointer = b.inttoptr(address, value.type.as_pointer())
        call(b, name, VOID, value, pointer, align, mask)
        return
    (slot,) = variables(b, [value])
    _copy(b, b.inttoptr(address, INT8.as_pointer()), slot, value.type, count)


def _read(kind: ir.Type, result: Any = i64, signed: bool = False) -> Any:
    """Return the intrinsic that reads a scalar."""

    def read(b: Any, address: Any) -> Any:
        value = emit_load(b, kind, address)
        if result is not i64 or kind == INT64:
            return value
        return b.sext(value, INT64) if signed else b.zext(value, INT64)

    return op(result, i64)(read)


def _write(kind: ir.Type, of: Any = i64) -> Any:
    """Return the intrinsic that writes a scalar, of an int64 the low bits."""

    def write(b: Any, address: Any, value: Any) -> None:
        emit_store(b, value if value.type == kind else b.trunc(value, kind), address)

    return op(void, i64, of)(write)


def _loads(result: VecT, stored: ir.VectorType, widen: str = "") -> tuple[Any, Any]:
    """Return the intrinsics that load a vector, and the first n of it."""

    def wide(b: Any, value: Any) -> Any:
        return getattr(b, widen)(value, result.llvm) if widen else value

    def load(b: Any, address: Any) -> Any:
        return wide(b, emit_load(b, stored, address))

    def load_n(b: Any, address: Any, count: Any) -> Any:
        return wide(b, emit_load_n(b, stored, address, count))

    return op(result, i64)(load), op(result, i64, i64)(load_n)


def _stores(of: VecT, stored: ir.VectorType) -> tuple[Any, Any]:
    """Return the intrinsics that store a vector, and the first n of it."""

    def narrow(b: Any, value: Any) -> Any:
        return value if stored == of.llvm else b.trunc(value, stored)

    def store(b: Any, address: Any, value: Any) -> None:
        emit_store(b, narrow(b, value), address)

    def store_n(b: Any, address: Any, value: Any, count: Any) -> None:
        emit_store_n(b, narrow(b, value), address, count)

    return op(void, i64, of)(store), op(void, i64, of, i64)(store_n)


_U8, _U16 = ir.VectorType(INT8, LANES), ir.VectorType(INT16, LANES)

read_f32, write_f32 = _read(FLOAT, f32), _write(FLOAT, f32)
read_i64, write_i64 = _read(INT64), _write(INT64)
read_i32, write_i32 = _read(INT32, signed=True), _write(INT32)
read_u16, write_u16 = _read(INT16), _write(INT16)
read_u8, read_i8, write_u8 = _read(INT8), _read(INT8, signed=True), _write(INT8)

load_f32, load_f32_n = _loads(F32, F32.llvm)
load_i32, _ = _loads(I32, I32.llvm)
load_u16, load_u16_n = _loads(I32, _U16, "zext")
load_u8, load_u8_n = _loads(I32, _U8, "zext")
load_i8, load_i8_n = _loads(I32, _U8, "sext")
store_f32, store_f32_n = _stores(F32, F32.llvm)
store_i32, _ = _stores(I32, I32.llvm)
store_u16, store_u16_n = _stores(I32, _U16)
store_u8, store_u8_n = _stores(I32, _U8)


def emit_prefetch(b: Any, address: Any, level: int = 2) -> None:
    """Emit a request for a cache line, for reading, into the first or the second cache."""
    reading, near, data = (ir.Constant(INT32, value) for value in (0, 4 - level, 1))
    pointer = b.inttoptr(address, INT8.as_pointer())
    call(b, "llvm.prefetch.p0", VOID, pointer, reading, near, data)


prefetch = op(void, i64)(emit_prefetch)  # ask for a cache line, into the second cache


def loads_up_to(load: Any, load_n: Any) -> Any:
    """Return the device (address, count) that loads 16 lanes, the first `count` if these are fewer.

    The other lanes are zeros.
    """

    @device
    def up_to(address, count):
        if count >= 16:
            return load(address)
        return load_n(address, count)

    return up_to


def stores_up_to(store: Any, store_n: Any) -> Any:
    """Return the device (address, x, count) that stores them."""

    @device
    def up_to(address, x, count):
        if count >= 16:
            store(address, x)
        else:
            store_n(address, x, count)

    return up_to


load_up_to, load_u8_up_to = loads_up_to(load_f32, load_f32_n), loads_up_to(load_u8, load_u8_n)
store_up_to = stores_up_to(store_f32, store_f32_n)
store_u8_up_to = stores_up_to(store_u8, store_u8_n)


def _transposed(b: Any, rows: Any, place: Any) -> list[Any]:
    """Emit 4 lines: word i of the 16 bytes at a place of each of 16 rows is in line i."""
    four = ir.VectorType(INT32, 4)
    starts = [emit_load(b, INT64, behind(b, rows, 8 * r)) for r in range(LANES)]
    words = [emit_load(b, four, b.add(start, place)) for start in starts]
    while len(words) > 4:
        words = [join(b, words[i : i + 2]) for i in range(0, len(words), 2)]
    halves = [
        [shuffle(b, words[j], words[j + 1], range(i, 32, 4)) for j in (0, 2)] for i in range(4)
    ]
    return [join(b, half) for half in halves]


@op(void, i64, i64, i64, i64)
def move_lines(b, rows, place, target, mask):
    """Write 4 lines of the 16 bytes at a place of each of 16 rows, flipped."""
    flips = spread(b, I32, b.trunc(mask, INT32))
    for i, line in enumerate(_transposed(b, rows, place)):
        emit_store(b, b.xor(line, flips), behind(b, target, 4 * LANES * i))


@op(void, i64, i64, i64)
def move_halves(b, rows, place, target):
    """The same of nibbles of columns i and i + 16, which become neighbours."""

    def shifted(word: Any, bits: int) -> Any:
        return b.lshr(word, constant(I32, bits))

    def near(word: Any) -> Any:
        """Emit the low nibbles of four bytes, in two."""
        for bits, mask in ((0, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
            word = b.and_(b.or_(word, shifted(word, bits)), constant(I32, mask))
        return word

    words = _transposed(b, rows, place)
    for i in range(4):
        low, high = (near(shifted(word, i // 2 * 4)) for word in words[i % 2 * 2 :][:2])
        line = b.or_(low, b.shl(high, constant(I32, 16)))
        emit_store(b, line, behind(b, target, 4 * LANES * i))


@device
def read_some(address, end):
    """Return the four bytes at an address, those from `end` on as zeros."""
    if address + 4 <= end:
        return read_i32(address)
    value = 0
    for i in range(end - address):
        value += read_u8(address + i) << 8 * i
    return value


@device
def neighbours(address, shift):
    """Return nibbles of 8 bytes, low ones or those above, as four bytes."""
    value = read_i64(address) >> shift & 0x0F0F0F0F0F0F0F0F
    value = (value | value >> 4) & 0x00FF00FF00FF00FF
    value = (value | value >> 8) & 0x0000FFFF0000FFFF
    return (value | value >> 16) & 0xFFFFFFFF


@device
def by_operand(word):
    """Return a word whose byte i has bit o where this one has bit 4 o + i."""
    made = 0
    for i in range(4):
        nibbles = word >> i & 0x11111111
        pairs = (nibbles | nibbles >> 3) & 0x03030303
        fours = (pairs | pairs >> 6) & 0x000F000F
        made |= ((fours | fours >> 12) & 255) << 8 * i
    return made
