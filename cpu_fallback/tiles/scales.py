"""Stored scales of 16 rows as fp32."""

from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.memory import emit_load
from cpu_fallback.lanes.vector import F32, I32, INT8, INT16, call, constant
from cpu_fallback.tiles.layout import ROWS


def emit_scales(b: Any, kind: str, at: Any) -> Any:
    """Emit 16 stored scales as fp32; they are finite."""
    if kind == "f32":
        return emit_load(b, F32.llvm, at)
    if kind == "e8m0":
        codes = b.zext(emit_load(b, ir.VectorType(INT8, ROWS), at), I32.llvm)
        bits = b.shl(codes, constant(I32, 23))
        least = constant(I32, 1 << 22)
        return b.bitcast(call(b, "llvm.umax.v16i32", I32.llvm, bits, least), F32.llvm)
    codes = emit_load(b, ir.VectorType(INT16, ROWS), at)
    if kind == "f16":
        return emit_f16(b, codes)
    return b.bitcast(b.shl(b.zext(codes, I32.llvm), constant(I32, 16)), F32.llvm)


def emit_f16(b: Any, codes: Any) -> Any:
    """Emit 16 finite fp16 numbers, i16 [16], as fp32."""
    if CURRENT.f16c:
        return b.fpext(b.bitcast(codes, ir.VectorType(ir.HalfType(), ROWS)), F32.llvm)
    codes = b.zext(codes, I32.llvm)
    magnitude = b.shl(b.and_(codes, constant(I32, 0x7FFF)), constant(I32, 13))
    scaled = b.fmul(b.bitcast(magnitude, F32.llvm), constant(F32, 2.0**112))
    sign = b.shl(b.and_(codes, constant(I32, 0x8000)), constant(I32, 16))
    return b.bitcast(b.or_(b.bitcast(scaled, I32.llvm), sign), F32.llvm)
