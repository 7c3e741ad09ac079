"""Products of vectors of bytes and of int16, added in int32, by what the ISA has for them.

A vector of 64 bytes is 16 rows with four columns each, in one register or two.
"""

from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.simd import (
    I32,
    INT8,
    INT16,
    INT32,
    SHORTS,
    call,
    constant,
    each_quarter,
    join,
    pick,
)

REGISTERS = 1 if CURRENT.avx512 else 2  # Of 64 bytes, with AVX2 and better


def registers(b: Any, vector: Any) -> list[Any]:
    """Emit the registers of a vector of 64 bytes, for AVX2 and better."""
    size = vector.type.count // REGISTERS
    return [pick(b, vector, range(at, at + size)) for at in range(0, size * REGISTERS, size)]


def dot(b: Any, total: Any, weights: Any, x: Any) -> Any:
    """Emit int32 [16] plus four products of unsigned and signed bytes each, for VNNI."""
    parts = zip(*(registers(b, value) for value in (total, weights, x)), strict=True)
    return join(b, [register_dot(b, *part) for part in parts])


def register_dot(b: Any, total: Any, weights: Any, x: Any) -> Any:
    """Emit `dot` of a register."""
    name = f"llvm.x86.avx512.vpdpbusd.{512 // REGISTERS}"
    if llvm.llvm_version_info[0] < 21:
        weights, x = b.bitcast(weights, total.type), b.bitcast(x, total.type)
    return call(b, name, total.type, total, weights, x)


def madd_bytes(b: Any, weights: Any, x: Any) -> Any:
    """Emit products of unsigned and signed bytes in a register, added in pairs to int16."""
    name = "512.pmaddubs.w.512" if CURRENT.avx512 else "2.pmadd.ub.sw"
    result = ir.VectorType(INT16, weights.type.count // 2)
    return call(b, f"llvm.x86.avx{name}", result, weights, x)


def madd_shorts(b: Any, left: Any, right: Any) -> Any:
    """Emit products of int16 in a register, added in pairs to int32."""
    name = "512.pmaddw.d.512" if CURRENT.avx512 else "2.pmadd.wd"
    return call(b, f"llvm.x86.avx{name}", ir.VectorType(INT32, left.type.count // 2), left, right)


def run_length(top: int) -> int:
    """Return how many products of operands up to `top` fit in int16 together, for `emit_runs`."""
    return 32767 // (top * 256)


def emit_run(b: Any, pairs: Sequence[tuple[Any, ...]]) -> Any:
    """Emit one sum of `emit_runs`."""
    return emit_runs(b, [pairs])[0]


def emit_runs(b: Any, runs: Sequence[Sequence[tuple[Any, ...]]], factors: Any = None) -> list[Any]:
    """Emit sums of products whose partial sums fit in int16, for AVX2 and better.

    One register of rows is done for all sums before the other, so that unsigned operands that they
    share stay in registers.

    Args:
        b: the builder.
        runs: unsigned and signed operands of each sum.
        factors: int16 [32] that the partial sums are multiplied by, 1 if there are none.
    """
    by = registers(b, constant(SHORTS, 1) if factors is None else factors)
    found: list[list[Any]] = []
    for half, factor in enumerate(by):
        found.append([])
        for pairs in runs:
            total = None
            for weights, x, *_ in pairs:
                products = madd_bytes(b, registers(b, weights)[half], registers(b, x)[half])
                total = products if total is None else b.add(total, products)
            found[-1].append(madd_shorts(b, total, factor))
    return [join(b, list(halves)) for halves in zip(*found, strict=True)]


def emit_split(b: Any, total: Any, weights: Any, x: Any) -> Any:
    """Emit the products of any bytes: even and odd ones apart, widened to int16.

    On NEON both are signed, and a product is an instruction.
    """
    if CURRENT.neon:
        return _neon_dot(b, total, weights, x)
    eight = constant(SHORTS, 8)
    w, x = b.bitcast(weights, SHORTS), b.bitcast(x, SHORTS)
    even = (b.and_(w, constant(SHORTS, 255)), b.ashr(b.shl(x, eight), eight))
    odd = (b.lshr(w, eight), b.ashr(x, eight))
    for left, right in (even, odd):
        total = b.add(total, pair_dots(b, left, right))
    return total


def pair_dots(b: Any, left: Any, right: Any) -> Any:
    """Emit products of int16 [32], added in pairs to int32 [16]."""
    if CURRENT.avx2:
        pairs = zip(registers(b, left), registers(b, right), strict=True)
        return join(b, [madd_shorts(b, *pair) for pair in pairs])
    if CURRENT.neon:
        return _neon_pair_dots(b, left, right)
    products = []
    for first in (0, 1):
        a, c = (b.sext(pick(b, x, range(first, 32, 2)), I32.llvm) for x in (left, right))
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


SIXTEEN, EIGHT, FOUR = ir.VectorType(INT8, 16), ir.VectorType(INT16, 8), ir.VectorType(INT32, 4)
"""A register of NEON as bytes, shorts and dwords."""


def emit_sdot(b: Any, total: Any, weights: Any, x: Any) -> Any:
    """Emit int32 [4] plus four products of signed bytes each, of a register."""
    return call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", FOUR, total, weights, x)


def emit_table(b: Any, entries: Sequence[int], indices: Any) -> Any:
    """Emit entries[index] of a register of bytes; zero for an index above 15."""
    table = ir.Constant(SIXTEEN, list(entries))
    return call(b, "llvm.aarch64.neon.tbl1.v16i8", SIXTEEN, table, indices)


def _neon_dot(b: Any, total: Any, weights: Any, x: Any) -> Any:
    """Emit int32 [16] plus four products of signed bytes each."""
    return each_quarter(b, lambda *parts: emit_sdot(b, *parts), total, weights, x)


def neon_look_up(b: Any, entries: Sequence[int], indices: Any) -> Any:
    """Emit entries[index] of 64 bytes, or of a register."""
    if indices.type == SIXTEEN:
        return emit_table(b, entries, indices)
    return each_quarter(b, lambda part: emit_table(b, entries, part), indices)


def _neon_pair_dots(b: Any, left: Any, right: Any) -> Any:
    """Emit products of int16 [32], added in pairs to int32 [16]."""

    def products(x: Any, y: Any) -> Any:
        halves = []
        for start in (0, 4):
            parts = [pick(b, v, list(range(start, start + 4))) for v in (x, y)]
            halves.append(call(b, "llvm.aarch64.neon.smull.v4i32", FOUR, *parts))
        return call(b, "llvm.aarch64.neon.addp.v4i32", FOUR, *halves)

    return each_quarter(b, products, left, right)


def neon_bits(b: Any, vector: Any, shift: int, mask: int) -> Any:
    """Emit bits of each byte, shifted to the right, or to the left if `shift` is negative."""
    count = ir.Constant(vector.type, [abs(shift)] * vector.type.count)
    if shift:
        vector = b.lshr(vector, count) if shift > 0 else b.shl(vector, count)
    left = 0xFF >> shift if shift >= 0 else 0xFF << -shift & 0xFF
    if mask & left == left:  # the shift has removed the others
        return vector
    return b.and_(vector, ir.Constant(vector.type, [mask] * vector.type.count))
