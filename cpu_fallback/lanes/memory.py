"""Loads and stores by address: scalars, 16-lane vectors, and their first n lanes.

An address is an int64. Kernels get addresses and sizes that were checked when the Plan was bound,
so nothing is checked here, and nothing is read or written past what the caller names: weights are
views of a mapped file, whose last row may end where the mapping does.

Names: `read_*` and `write_*` move one scalar (integers as int64), `load_*` and `store_*` 16 lanes,
`load_*_n` and `store_*_n` the first n lanes, n in 0 .. 16; other lanes load as zero. Alignment is
never assumed.
"""

from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.late import cgutils, f32, i64, void
from cpu_fallback.lanes.vector import BYTES, F32, I32, LANES, call, op, pick

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()


def emit_load(b: Any, kind: ir.Type, address: Any) -> Any:
    """Emit an unaligned load."""
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def emit_store(b: Any, value: Any, address: Any) -> None:
    """Emit an unaligned store."""
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 1


def _masked(element: ir.Type) -> bool:
    """Return whether the ISA has masked loads and stores for elements of this width."""
    return CURRENT.avx512 or (CURRENT.avx2 and _bytes(element) == 4)


def _bytes(element: ir.Type) -> int:
    return 4 if element == _FLOAT else element.width // 8


def _mask(b: Any, lanes: int, count: Any) -> Any:
    wide = ir.VectorType(_I32, lanes)
    one = b.insert_element(
        ir.Constant(wide, ir.Undefined), b.trunc(count, _I32), ir.Constant(_I32, 0)
    )
    return b.icmp_signed("<", ir.Constant(wide, list(range(lanes))), pick(b, one, [0] * lanes))


def _name(kind: ir.VectorType) -> str:
    letter = "f32" if kind.element == _FLOAT else f"i{kind.element.width}"
    return f"v{kind.count}{letter}.p0"


def emit_load_n(b: Any, kind: ir.VectorType, address: Any, count: Any) -> Any:
    """Emit a load of the first `count` elements of a vector, the others zero."""
    element = kind.element
    nothing = ir.Constant(kind, None)
    if _masked(element):
        pointer = b.inttoptr(address, kind.as_pointer())
        mask, align = _mask(b, kind.count, count), ir.Constant(_I32, 1)
        return call(b, f"llvm.masked.load.{_name(kind)}", kind, pointer, align, mask, nothing)
    slot = cgutils.alloca_once(b, kind)
    b.store(nothing, slot)
    _memcpy(
        b,
        slot,
        b.inttoptr(address, _I8.as_pointer()),
        b.mul(count, ir.Constant(_I64, _bytes(element))),
    )
    return b.load(slot)


def emit_store_n(b: Any, value: Any, address: Any, count: Any) -> None:
    """Emit a store of the first `count` elements of a vector."""
    kind, element = value.type, value.type.element
    if _masked(element):
        pointer = b.inttoptr(address, kind.as_pointer())
        mask, align = _mask(b, kind.count, count), ir.Constant(_I32, 1)
        call(b, f"llvm.masked.store.{_name(kind)}", ir.VoidType(), value, pointer, align, mask)
        return
    slot = cgutils.alloca_once(b, kind)
    b.store(value, slot)
    _memcpy(
        b,
        b.inttoptr(address, _I8.as_pointer()),
        slot,
        b.mul(count, ir.Constant(_I64, _bytes(element))),
    )


def _memcpy(b: Any, target: Any, source: Any, size: Any) -> None:
    byte = _I8.as_pointer()
    call(b, "memcpy", byte, b.bitcast(target, byte), b.bitcast(source, byte), size)


@op(f32, i64)
def read_f32(b, address):
    """Return an fp32."""
    return emit_load(b, _FLOAT, address)


@op(i64, i64)
def read_i64(b, address):
    """Return an int64."""
    return emit_load(b, _I64, address)


@op(i64, i64)
def read_i32(b, address):
    """Return an int32."""
    return b.sext(emit_load(b, _I32, address), _I64)


@op(i64, i64)
def read_u16(b, address):
    """Return a uint16."""
    return b.zext(emit_load(b, _I16, address), _I64)


@op(i64, i64)
def read_u8(b, address):
    """Return a uint8."""
    return b.zext(emit_load(b, _I8, address), _I64)


@op(i64, i64)
def read_i8(b, address):
    """Return an int8."""
    return b.sext(emit_load(b, _I8, address), _I64)


@op(void, i64, f32)
def write_f32(b, address, value):
    """Store an fp32."""
    emit_store(b, value, address)


@op(void, i64, i64)
def write_i64(b, address, value):
    """Store an int64."""
    emit_store(b, value, address)


@op(void, i64, i64)
def write_i32(b, address, value):
    """Store the low 32 bits."""
    emit_store(b, b.trunc(value, _I32), address)


@op(void, i64, i64)
def write_u8(b, address, value):
    """Store the low 8 bits."""
    emit_store(b, b.trunc(value, _I8), address)


@op(F32, i64)
def load_f32(b, address):
    """Return 16 fp32."""
    return emit_load(b, F32.llvm, address)


@op(F32, i64, i64)
def load_f32_n(b, address, count):
    """Return the first `count` of 16 fp32."""
    return emit_load_n(b, F32.llvm, address, count)


@op(void, i64, F32)
def store_f32(b, address, value):
    """Store 16 fp32."""
    emit_store(b, value, address)


@op(void, i64, F32, i64)
def store_f32_n(b, address, value, count):
    """Store the first `count` of 16 fp32."""
    emit_store_n(b, value, address, count)


@op(I32, i64)
def load_i32(b, address):
    """Return 16 int32."""
    return emit_load(b, I32.llvm, address)


@op(void, i64, I32)
def store_i32(b, address, value):
    """Store 16 int32."""
    emit_store(b, value, address)


@op(I32, i64)
def load_u16(b, address):
    """Return 16 uint16, widened."""
    return b.zext(emit_load(b, ir.VectorType(_I16, LANES), address), I32.llvm)


@op(I32, i64, i64)
def load_u16_n(b, address, count):
    """Return the first `count` of 16 uint16, widened."""
    return b.zext(emit_load_n(b, ir.VectorType(_I16, LANES), address, count), I32.llvm)


@op(I32, i64)
def load_u8(b, address):
    """Return 16 uint8, widened."""
    return b.zext(emit_load(b, ir.VectorType(_I8, LANES), address), I32.llvm)


@op(I32, i64, i64)
def load_u8_n(b, address, count):
    """Return the first `count` of 16 uint8, widened."""
    return b.zext(emit_load_n(b, ir.VectorType(_I8, LANES), address, count), I32.llvm)


@op(I32, i64)
def load_i8(b, address):
    """Return 16 int8, widened."""
    return b.sext(emit_load(b, ir.VectorType(_I8, LANES), address), I32.llvm)


@op(I32, i64, i64)
def load_i8_n(b, address, count):
    """Return the first `count` of 16 int8, widened."""
    return b.sext(emit_load_n(b, ir.VectorType(_I8, LANES), address, count), I32.llvm)


def _nibbles(b: Any, packed: Any) -> Any:
    low = b.and_(packed, ir.Constant(packed.type, [15] * 8))
    high = b.lshr(packed, ir.Constant(packed.type, [4] * 8))
    order = [lane for i in range(8) for lane in (i, 8 + i)]
    mixed = b.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, LANES), order))
    return b.zext(mixed, I32.llvm)


@op(I32, i64)
def load_u4(b, address):
    """Return the 16 nibbles of 8 bytes, the low one of each byte first."""
    return _nibbles(b, emit_load(b, ir.VectorType(_I8, 8), address))


@op(I32, i64, i64)
def load_u4_n(b, address, count):
    """Return the first `count` of 16 nibbles, and one more if the count is odd."""
    size = b.lshr(b.add(count, ir.Constant(_I64, 1)), ir.Constant(_I64, 1))
    return _nibbles(b, emit_load_n(b, ir.VectorType(_I8, 8), address, size))


@op(void, i64, I32)
def store_u16(b, address, value):
    """Store the low 16 bits of each lane."""
    emit_store(b, b.trunc(value, ir.VectorType(_I16, LANES)), address)


@op(void, i64, I32, i64)
def store_u16_n(b, address, value, count):
    """Store the low 16 bits of the first `count` lanes."""
    emit_store_n(b, b.trunc(value, ir.VectorType(_I16, LANES)), address, count)


@op(void, i64, I32)
def store_u8(b, address, value):
    """Store the low 8 bits of each lane."""
    emit_store(b, b.trunc(value, ir.VectorType(_I8, LANES)), address)


@op(void, i64, I32, i64)
def store_u8_n(b, address, value, count):
    """Store the low 8 bits of the first `count` lanes."""
    emit_store_n(b, b.trunc(value, ir.VectorType(_I8, LANES)), address, count)


@op(BYTES, i64)
def load_bytes(b, address):
    """Return 64 bytes."""
    return emit_load(b, BYTES.llvm, address)


@op(BYTES, i64, i64)
def load_bytes_n(b, address, count):
    """Return the first `count` of 64 bytes, the others zero; count in 0 .. 64."""
    return emit_load_n(b, BYTES.llvm, address, count)


@op(void, i64, BYTES)
def store_bytes(b, address, value):
    """Store 64 bytes."""
    emit_store(b, value, address)


def emit_prefetch(b: Any, address: Any, level: int = 2) -> None:
    """Emit a request for a cache line, for reading, into the first or the second cache."""
    one, zero = ir.Constant(_I32, 1), ir.Constant(_I32, 0)
    pointer = b.inttoptr(address, _I8.as_pointer())
    call(b, "llvm.prefetch.p0", ir.VoidType(), pointer, zero, ir.Constant(_I32, 4 - level), one)


@op(void, i64)
def prefetch(b, address):
    """Ask for a cache line, for reading, into the second cache."""
    emit_prefetch(b, address)
