"""Kernels that measure the machine: clock, byte dot products per cycle, read bandwidth, tiles."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from cpu_fallback.bind import share
from cpu_fallback.isa import CURRENT
from cpu_fallback.jit import Kernel, kernel
from cpu_fallback.memory import emit_load, field, store_i32, write_i64
from cpu_fallback.simd import iadd, izero
from cpu_fallback.tile_product import call_product
from cpu_fallback.vector import BYTES, I32, call, constant, i64, op

CHAIN_CYCLES = 32
"""Cycles per step of `chain` on x86: 8 multiplications of latency 3 and ORs of latency 1."""
DOT_ACCUMULATORS = 16
"""Byte dot products per step of `dots`, each 64 products."""

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
    slots = [cgutils.alloca_once_value(b, constant(I32, i)) for i in range(DOT_ACCUMULATORS)]
    with cgutils.for_range(b, count):
        for slot in slots:
            b.store(_dot(b, b.load(slot), line), slot)
    total = b.load(slots[0])
    for slot in slots[1:]:
        total = b.xor(total, b.load(slot))
    return total


def _dot(b: Any, total: Any, line: Any) -> Any:
    if CURRENT.avx512:
        return call(b, "llvm.x86.avx512.vpdpbusd.512", I32.llvm, total, line, line)
    return b.add(total, b.bitcast(line, I32.llvm))


def _dots(count, source, out):
    """Compute count * DOT_ACCUMULATORS independent byte dot products of 64 products each."""
    store_i32(out, _many_dots(count, source))


@op(I32, i64)
def _read_block(b, address):
    lines = [emit_load(b, I32.llvm, b.add(address, ir.Constant(_I64, 64 * i))) for i in range(8)]
    while len(lines) > 1:
        lines = [b.xor(x, y) for x, y in zip(lines[::2], lines[1::2], strict=True)]
    return lines[0]


@kernel
def read(rec, ctl, rank, size, scratch):
    """Read an array, each thread a contiguous share in blocks of 512 bytes.

    Fields: address, blocks.
    """
    first, last = share(field(rec, 1), rank, size)
    total = izero()
    for block in range(first, last):
        total = iadd(total, _read_block(field(rec, 0) + 512 * block))
    store_i32(scratch, total)


def _sweep(product, tiles, tile_bytes, count, repeats, panel, out, units, tokens, ahead):
    """Multiply `count` tiles by a panel, `repeats` times."""
    for _ in range(repeats):
        for tile in range(count):
            call_product(product, tiles + tile * tile_bytes, panel, out, units, tokens, ahead)
    write_i64(out, 0)


chain = Kernel(_chain, types.int64)
dots = Kernel(_dots)
sweep = Kernel(_sweep)
