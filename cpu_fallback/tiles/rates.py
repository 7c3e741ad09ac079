"""Kernels that measure the machine: clock, products of bytes and of fp32 per cycle, tiles."""

from typing import Any

from llvmlite import ir

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel
from cpu_fallback.lanes.late import cgutils, i64
from cpu_fallback.lanes.memory import emit_load, store_f32, store_i32, write_i64
from cpu_fallback.lanes.simd import emit_fma
from cpu_fallback.lanes.vector import BYTES, F32, I32, constant, op
from cpu_fallback.tiles.multiply import (
    dot,
    emit_run,
    emit_split,
    joined,
    keep_order,
    registers,
)
from cpu_fallback.tiles.tile_product import call_product

CHAIN_CYCLES = 32
"""Cycles per step of `chain` on x86: 8 multiplications of latency 3 and ORs of latency 1."""
DOTS = 24
"""Byte dot products per step of `dots`, each 64 products."""
FMAS = 24
"""Multiply-adds of 16 fp32 lanes per step of `fmas`."""
_RUN = 8
"""How many of them are added in int16, without VNNI."""
_CHAINS = 12 if CURRENT.avx512 else 6
"""Sums that do not wait for each other, with VNNI: 12 registers; the two units of Intel need 10."""
_CHAINED = 4

_I64 = ir.IntType(64)


@op(i64, i64, i64)
def _multiply_chain(b, count, value):
    slot = cgutils.alloca_once_value(b, value)
    with cgutils.for_range(b, count):
        for _ in range(8):
            here = b.load(slot)
            b.store(b.mul(here, b.or_(here, ir.Constant(_I64, 1))), slot)
    return b.load(slot)


def _chain(count, value):
    """Return a number that takes `count` times CHAIN_CYCLES cycles to compute."""
    return _multiply_chain(count, value)


@op(I32, i64, i64)
def _many_dots(b, count, source):
    line = emit_load(b, BYTES.llvm, source)
    add, each = (_add_run, _RUN) if CURRENT.in_shorts else (_add_dot, DOTS // _CHAINS)
    if CURRENT.neon:
        add, each = _add_chain, _CHAINED
    starts = range(DOTS // each)
    slots = [cgutils.alloca_once_value(b, constant(I32, i)) for i in starts]
    with cgutils.for_range(b, count):
        for _ in range(1 if CURRENT.in_shorts else each):
            for slot in slots:
                b.store(add(b, b.load(slot), line), slot)
    total = b.load(slots[0])
    for slot in slots[1:]:
        total = b.xor(total, b.load(slot))
    return total


def _add_run(b: Any, total: Any, line: Any) -> Any:
    """Emit products that are added in int16, as many as fit of 4 bits: the fastest without VNNI."""
    parts = registers(b, line)
    pairs = []
    for _ in range(_RUN):
        keep_order(b, [parts])  # or all products would be one
        pairs.append((joined(b, parts), line))
    return b.add(total, emit_run(b, pairs))


def _add_chain(b: Any, total: Any, line: Any) -> Any:
    """Emit as many products as 32 registers of 4 lanes can hold no sums of at once."""
    for _ in range(_CHAINED):
        total = emit_split(b, total, line, line)
    return total


def _add_dot(b: Any, total: Any, line: Any) -> Any:
    if CURRENT.vnni:
        return dot(b, total, line, line)
    return b.add(total, b.bitcast(line, I32.llvm))


def _dots(count, source, out):
    """Compute count * DOTS independent byte dot products of 64 products each."""
    store_i32(out, _many_dots(count, source))


@op(F32, i64, i64)
def _many_fmas(b, count, source):
    value = emit_load(b, F32.llvm, source)
    slots = [cgutils.alloca_once_value(b, constant(F32, float(i))) for i in range(_CHAINS)]
    with cgutils.for_range(b, count):
        for _ in range(FMAS // _CHAINS):
            for slot in slots:
                b.store(emit_fma(b, value, value, b.load(slot)), slot)
    total = b.load(slots[0])
    for slot in slots[1:]:
        total = b.fadd(total, b.load(slot))
    return total


def _fmas(count, source, out):
    """Compute count * FMAS independent multiply-adds of 16 lanes each."""
    store_f32(out, _many_fmas(count, source))


def _sweep(product, tiles, tile_bytes, count, repeats, panel, out, units, tokens, ahead):
    """Multiply `count` tiles by a panel, `repeats` times."""
    for _ in range(repeats):
        for tile in range(count):
            call_product(product, tiles + tile * tile_bytes, panel, out, units, tokens, ahead)
    write_i64(out, 0)


chain = Kernel(_chain, i64)
dots = Kernel(_dots)
fmas = Kernel(_fmas)
sweep = Kernel(_sweep)
