"""Rows of a stored weight times tokens: the one fp32 dot product of the back end.

Every dot product is one accumulator of 16 lanes that walks K in steps of 16, the last step masked,
and then the fixed tree sum. Tiles of several rows by several tokens only decide which accumulators
are in registers together, so a result depends neither on the tile nor on the other tokens nor on
the thread.

`product` is a kernel that others call by address. It computes up to 8 rows by up to 64 tokens in
two stages, block of columns by block of columns: decode the rows into a panel that stays in cache,
then multiply the panel with every token. Formats with a fused kernel of their own would put
another kernel of the same signature in its place.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.memory import (
    emit_load,
    emit_load_n,
    emit_store,
    load_f32,
    store_f32,
    write_f32,
)
from cpu_fallback.lanes.simd import emit_fma, hsum, zero
from cpu_fallback.lanes.vector import F32, LANES, i64, op, void
from cpu_fallback.ops.decode_record import PANEL_BYTES, ROWS, decode, weight_at

TOKENS = 64
_VECTOR = 4 * LANES

XS = 0
"""In the scratch of a product: the address of each token's activations, int64 [TOKENS]."""
SUMS = XS + 8 * TOKENS
"""In the scratch of a product: the results, fp32 [TOKENS, ROWS]."""
ACC = SUMS + 4 * TOKENS * ROWS
"""In the scratch of a product: accumulators of 16 lanes, fp32 [TOKENS, ROWS, 16]."""
PANEL = ACC + _VECTOR * TOKENS * ROWS
"""In the scratch of a product: decoded rows."""
SCRATCH = PANEL + PANEL_BYTES
"""Bytes of scratch that a product needs."""

_I64, _VOID = ir.IntType(64), ir.VoidType()

TALL, WIDE = (8, 4) if CURRENT.avx512 else (4, 2) if CURRENT.registers == 8 else (2, 1)
"""Tiles: TALL rows by one token, WIDE by WIDE; the ISAs have 32, 8 and 4 registers of 16 lanes."""


def _emit_tile(b: Any, rows: int, w: Any, pitch: Any, xs: list[Any], k: Any, acc: Any) -> None:
    """Emit acc[t, r] += w[r] * xs[t] over k columns, 16 lanes at a time; acc is [.., ROWS]."""
    tiles = [(t, r) for t in range(len(xs)) for r in range(rows)]
    lines = [b.add(w, b.mul(pitch, ir.Constant(_I64, r))) for r in range(rows)]
    places = [b.add(acc, ir.Constant(_I64, _VECTOR * (t * ROWS + r))) for t, r in tiles]
    whole = b.and_(k, ir.Constant(_I64, -LANES))
    slots = [cgutils.alloca_once(b, F32.llvm) for _ in tiles]
    for slot, place in zip(slots, places, strict=True):
        b.store(emit_load(b, F32.llvm, place), slot)

    def step(offset: Any, load: Any) -> None:
        at = b.mul(offset, ir.Constant(_I64, 4))
        weights = [load(b.add(line, at)) for line in lines]
        for t, x in enumerate(xs):
            activations = load(b.add(x, at))
            for r in range(rows):
                slot = slots[t * rows + r]
                b.store(emit_fma(b, weights[r], activations, b.load(slot)), slot)

    loop = cgutils.for_range_slice(b, ir.Constant(_I64, 0), whole, ir.Constant(_I64, LANES), _I64)
    with loop as (offset, _):
        step(offset, lambda address: emit_load(b, F32.llvm, address))
    tail = b.sub(k, whole)
    with b.if_then(b.icmp_signed(">", tail, ir.Constant(_I64, 0))):
        step(whole, lambda address: emit_load_n(b, F32.llvm, address, tail))
    for slot, place in zip(slots, places, strict=True):
        emit_store(b, b.load(slot), place)


def emit_tokens(b: Any, xs: Any, k0: Any, tokens: int) -> list[Any]:
    """Emit the addresses of column k0 of the first tokens."""
    start = b.mul(k0, ir.Constant(_I64, 4))
    addresses = [b.add(xs, ir.Constant(_I64, 8 * t)) for t in range(tokens)]
    return [b.add(emit_load(b, _I64, address), start) for address in addresses]


@op(void, i64, i64, i64, i64, i64, i64)
def _tall(b, w, pitch, xs, k0, k, acc):
    """Multiply TALL rows by one token."""
    _emit_tile(b, TALL, w, pitch, emit_tokens(b, xs, k0, 1), k, acc)


@op(void, i64, i64, i64, i64, i64, i64)
def _wide(b, w, pitch, xs, k0, k, acc):
    """Multiply WIDE rows by WIDE tokens."""
    _emit_tile(b, WIDE, w, pitch, emit_tokens(b, xs, k0, WIDE), k, acc)


@op(void, i64, i64, i64, i64, i64, i64)
def _one(b, w, pitch, xs, k0, k, acc):
    """Multiply one row by one token."""
    _emit_tile(b, 1, w, pitch, emit_tokens(b, xs, k0, 1), k, acc)


@device
def clear(scratch, tokens):
    """Begin a product: set the accumulators of the tokens to zero."""
    nothing = zero()
    for i in range(tokens * ROWS):
        store_f32(scratch + ACC + _VECTOR * i, nothing)


@device
def accumulate(w, pitch, count, tokens, k0, k, scratch):
    """Add rows w [count, k] times columns k0 .. k0+k-1 of the tokens at scratch + XS."""
    xs, acc = scratch + XS, scratch + ACC
    t = 0
    if count == ROWS:
        while t + WIDE <= tokens:
            for r in range(0, ROWS, WIDE):
                _wide(w + r * pitch, pitch, xs + 8 * t, k0, k, acc + _VECTOR * (t * ROWS + r))
            t += WIDE
        while t < tokens:
            for r in range(0, ROWS, TALL):
                _tall(w + r * pitch, pitch, xs + 8 * t, k0, k, acc + _VECTOR * (t * ROWS + r))
            t += 1
    while t < tokens:
        for r in range(count):
            _one(w + r * pitch, pitch, xs + 8 * t, k0, k, acc + _VECTOR * (t * ROWS + r))
        t += 1


@device
def finish(scratch, tokens):
    """End a product: write the sums of the accumulators to scratch + SUMS."""
    for i in range(tokens * ROWS):
        write_f32(scratch + SUMS + 4 * i, hsum(load_f32(scratch + ACC + _VECTOR * i)))


def _product(weight, expert, row, count, tokens, scratch):
    """Multiply `count` rows of a weight by the tokens whose addresses are at scratch + XS.

    Args:
        weight: address of the weight's record (`decode`).
        expert: 0 for a matrix.
        row: first row.
        count: rows, 1 .. ROWS.
        tokens: 1 .. TOKENS.
        scratch: SCRATCH bytes; the results are at scratch + SUMS, fp32 [tokens, ROWS].
    """
    description = weight_at(weight)
    pitch, columns, block = description.pitch, description.k, description.block
    clear(scratch, tokens)
    k0 = 0
    while k0 < columns:
        k1 = min(k0 + block, columns)
        w = decode(weight, expert, row, count, k0, k1, scratch + PANEL)
        accumulate(w, pitch, count, tokens, k0, k1 - k0, scratch)
        k0 = k1
    finish(scratch, tokens)


product = Kernel(_product)


@op(void, i64, i64, i64, i64, i64, i64, i64)
def multiply(b, kernel, weight, expert, row, count, tokens, scratch):
    """Call the product kernel at an address."""
    kind = ir.FunctionType(_VOID, [_I64] * 6)
    args = [weight, expert, row, count, tokens, scratch]
    b.call(b.inttoptr(kernel, kind.as_pointer()), args)
