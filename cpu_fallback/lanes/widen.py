"""Loads of narrow numbers as 16 lanes of fp32, for intrinsics that emit whole loops.

Every value equals that of `clocher_kernels.dtypes`, bit by bit (a NaN's payload aside).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.late import i64
from cpu_fallback.lanes.memory import emit_load, emit_load_n
from cpu_fallback.lanes.vector import F32, I32, LANES, constant, op

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_HALF = ir.VectorType(ir.HalfType(), LANES)
_U16 = ir.VectorType(_I16, LANES)


@dataclass(frozen=True, slots=True)
class Widen:
    """How one kind of number is loaded.

    Attributes:
        bits: of one number.
        element: LLVM type of what is loaded, and how many of it are 16 numbers.
        convert: emits fp32 lanes of what was loaded.
    """

    bits: int
    element: ir.VectorType
    convert: Callable[[Any, Any], Any]

    @property
    def nbytes(self) -> int:
        """Bytes of 16 numbers."""
        return self.bits * LANES // 8

    def emit(self, b: Any, address: Any) -> Any:
        """Emit a load of 16 numbers."""
        return self.convert(b, emit_load(b, self.element, address))

    def emit_n(self, b: Any, address: Any, count: Any) -> Any:
        """Emit a load of the first `count` of 16 numbers; the other lanes are any finite value."""
        if self.bits == 4:
            count = b.lshr(b.add(count, ir.Constant(_I64, 1)), ir.Constant(_I64, 1))
        return self.convert(b, emit_load_n(b, self.element, address, count))


def _same(b: Any, values: Any) -> Any:
    return values


def _bf16(b: Any, codes: Any) -> Any:
    return b.bitcast(b.shl(b.zext(codes, I32.llvm), constant(I32, 16)), F32.llvm)


def _half(b: Any, codes: Any) -> Any:
    if CURRENT.f16c:
        return b.fpext(b.bitcast(codes, _HALF), F32.llvm)
    wide = b.zext(codes, I32.llvm)
    magnitude = b.shl(b.and_(wide, constant(I32, 0x7FFF)), constant(I32, 13))
    # The exponent is 112 too small; multiplying mends that, for subnormals too.
    value = b.fmul(b.bitcast(magnitude, F32.llvm), constant(F32, 2.0**112))
    top = b.icmp_unsigned(">=", magnitude, constant(I32, 0x7C00 << 13))
    special = b.or_(magnitude, constant(I32, 0x7F800000))
    bits = b.select(top, special, b.bitcast(value, I32.llvm))
    sign = b.shl(b.and_(wide, constant(I32, 0x8000)), constant(I32, 16))
    return b.bitcast(b.or_(bits, sign), F32.llvm)


def _e5m2(b: Any, codes: Any) -> Any:
    return _half(b, b.shl(b.zext(codes, _U16), ir.Constant(_U16, [8] * LANES)))


def _e4m3(b: Any, codes: Any) -> Any:
    """Emit the code as an fp16 of 2^-8 times its value, which makes subnormals come out right."""
    wide = b.sext(codes, _U16)
    bits = b.and_(b.shl(wide, ir.Constant(_U16, [7] * LANES)), ir.Constant(_U16, [0xBFFF] * LANES))
    magnitude = b.and_(wide, ir.Constant(_U16, [0x7F] * LANES))
    nan = b.icmp_signed("==", magnitude, ir.Constant(_U16, [0x7F] * LANES))
    bits = b.select(nan, ir.Constant(_U16, [0x7E00] * LANES), bits)
    return b.fmul(_half(b, bits), constant(F32, 256.0))


def _i8(b: Any, codes: Any) -> Any:
    return b.sitofp(b.sext(codes, I32.llvm), F32.llvm)


def _i4(b: Any, packed: Any) -> Any:
    """Emit the 16 nibbles of 8 bytes, the low one of each first, minus 8."""
    wide = b.zext(packed, ir.VectorType(_I16, LANES // 2))
    spread = b.or_(wide, b.shl(wide, ir.Constant(wide.type, [4] * (LANES // 2))))
    pairs = b.and_(spread, ir.Constant(wide.type, [0x0F0F] * (LANES // 2)))
    codes = b.zext(b.bitcast(pairs, ir.VectorType(_I8, LANES)), I32.llvm)
    return b.sitofp(b.sub(codes, constant(I32, 8)), F32.llvm)


WIDEN = {
    "f32": Widen(32, F32.llvm, _same),
    "bf16": Widen(16, _U16, _bf16),
    "f16": Widen(16, _U16, _half),
    "e4m3": Widen(8, ir.VectorType(_I8, LANES), _e4m3),
    "e5m2": Widen(8, ir.VectorType(_I8, LANES), _e5m2),
    "i8": Widen(8, ir.VectorType(_I8, LANES), _i8),
    "i4": Widen(4, ir.VectorType(_I8, LANES // 2), _i4),
}
"""Kind of number -> how it is loaded; i4 is a code of 0 .. 15 minus 8."""


def _loads(kind: str) -> tuple[Any, Any]:
    """Return intrinsics that load 16 numbers, and the first n of 16."""

    def load(b, address):
        return WIDEN[kind].emit(b, address)

    def load_n(b, address, count):
        return WIDEN[kind].emit_n(b, address, count)

    return op(F32, i64)(load), op(F32, i64, i64)(load_n)


load_e4m3, load_e4m3_n = _loads("e4m3")
load_e5m2, load_e5m2_n = _loads("e5m2")
