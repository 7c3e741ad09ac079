"""Products of few tokens with weights that are read straight from memory: no panel in between.

A row is decoded in registers, 16 columns at a time, and multiplied at once. Memory is fastest where
it is read in one stream, so rows come one after the other, or four side by side where a row's bytes
last for too little time: its dot product is a chain of additions, 16 columns in the latency of one.
Every dot product is the same chain of the same operations as in `product`, so the results are the
same bits, and which of the two computed a token nobody can tell.

For more than FEW tokens decoding once into a panel costs less, and the product kernel that the
weight names takes over.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel
from cpu_fallback.lanes.memory import (
    emit_load,
    emit_load_n,
    emit_prefetch,
    emit_store,
    read_i64,
    write_f32,
    write_i64,
)
from cpu_fallback.lanes.simd import emit_fma
from cpu_fallback.lanes.vector import F32, I32, LANES, constant, i64, op, spread, void
from cpu_fallback.ops.bind import BoundCall
from cpu_fallback.ops.decode import DECODERS, first_scale, scale_at, weight_record
from cpu_fallback.ops.decode_record import COLUMNS, PANEL_BYTES, ROWS, Weight, weight_at
from cpu_fallback.ops.product import (
    ACC,
    PANEL,
    WIDE,
    XS,
    clear,
    emit_tokens,
    finish,
    multiply,
    product,
)

FEW = 8
"""Tokens up to which weights are decoded in registers."""
LEAST_GROUP = 64
"""Columns that must share a scale for that to pay."""

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_HALF = ir.VectorType(ir.HalfType(), LANES)
_SHORT = ir.VectorType(_I16, LANES)
_VECTOR = 4 * LANES
_LINE = 64
_LINES = 4  # cache lines that a turn of the loop takes from the rows of a tile, all in all
_TWO = min(2, WIDE)
_AHEAD = 4096  # bytes of a row to ask for ahead of use
_RUNS = PANEL_BYTES // (4 * ROWS)  # of columns with a scale, whose scales fit in the panel

Load = Callable[[Any, ir.VectorType, Any], Any]


def _i64(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _f32(b: Any, load: Load, address: Any) -> Any:
    return load(b, F32.llvm, address)


def _bf16(b: Any, load: Load, address: Any) -> Any:
    codes = b.zext(load(b, _SHORT, address), I32.llvm)
    return b.bitcast(b.shl(codes, constant(I32, 16)), F32.llvm)


def _f16(b: Any, load: Load, address: Any) -> Any:
    return b.fpext(b.bitcast(load(b, _SHORT, address), _HALF), F32.llvm)


def _e5m2(b: Any, load: Load, address: Any) -> Any:
    """An e5m2 code is the upper byte of an fp16."""
    codes = b.zext(load(b, ir.VectorType(_I8, LANES), address), _SHORT)
    half = b.shl(codes, ir.Constant(_SHORT, [8] * LANES))
    return b.fpext(b.bitcast(half, _HALF), F32.llvm)


def _e4m3(b: Any, load: Load, address: Any) -> Any:
    """An e4m3 code shifted into an fp16 is 2^-8 of its value, subnormal ones included.

    The scale makes up for it: powers of two move from one factor to the other without rounding.
    """
    codes = b.sext(load(b, ir.VectorType(_I8, LANES), address), _SHORT)
    half = b.shl(codes, ir.Constant(_SHORT, [7] * LANES))
    half = b.and_(half, ir.Constant(_SHORT, [0xBFFF] * LANES))
    return b.fpext(b.bitcast(half, _HALF), F32.llvm)


def _int8(b: Any, load: Load, address: Any) -> Any:
    codes = b.sext(load(b, ir.VectorType(_I8, LANES), address), I32.llvm)
    return b.sitofp(codes, F32.llvm)


# Kind of code -> how 16 columns are decoded, bytes per column, factor of the scales (0: none).
_KINDS = {
    "f32": (_f32, 4, 0.0),
    "bf16": (_bf16, 2, 0.0),
    "int8": (_int8, 1, 1.0),
}
if CURRENT.f16c:
    _KINDS |= {"f16": (_f16, 2, 0.0), "e4m3": (_e4m3, 1, 256.0), "e5m2": (_e5m2, 1, 1.0)}


def _emit_tile(
    b: Any,
    kind: str,
    rows: int,
    w: Any,
    stride: Any,
    scales: Any,
    run: Any,
    xs: list[Any],
    k: Any,
    left: Any,
    acc: Any,
) -> None:
    """Emit acc[t, r] += decode(w[r]) * xs[t] over k columns; acc is [.., ROWS] vectors.

    Each run of columns has its scales, fp32 [ROWS]. The row has `left` columns from here on; what
    follows it are the rows of the next tile.
    """
    emit_decode, width, scaled = _KINDS[kind]
    tiles = [(t, r) for t in range(len(xs)) for r in range(rows)]
    lines = [b.add(w, b.mul(stride, _i64(r))) for r in range(rows)]
    places = [b.add(acc, _i64(_VECTOR * (t * ROWS + r))) for t, r in tiles]
    slots = [cgutils.alloca_once(b, F32.llvm) for _ in tiles]
    for slot, place in zip(slots, places, strict=True):
        b.store(emit_load(b, F32.llvm, place), slot)
    scale_at = cgutils.alloca_once_value(b, scales)
    lines_each = max(1, _LINES // rows)
    wide = lines_each * _LINE // width
    end = b.mul(left, _i64(width))
    skip = b.mul(stride, _i64(rows - 1))

    def loop(start: Any, stop: Any, step: Any) -> Any:
        return cgutils.for_range_slice(b, start, stop, step, _I64)

    with loop(_i64(0), k, run) as (first, _):
        factors = []
        if scaled:
            at = b.load(scale_at)
            factors = [
                spread(b, F32, emit_load(b, ir.FloatType(), b.add(at, _i64(4 * r))))
                for r in range(rows)
            ]
            b.store(b.add(at, _i64(4 * ROWS)), scale_at)

        def step(r: int, offset: Any, load: Load) -> None:
            weight = emit_decode(b, load, b.add(lines[r], b.mul(offset, _i64(width))))
            if scaled:
                weight = b.fmul(weight, factors[r])
            for t, x in enumerate(xs):
                activations = load(b, F32.llvm, b.add(x, b.mul(offset, _i64(4))))
                slot = slots[t * rows + r]
                b.store(emit_fma(b, weight, activations, b.load(slot)), slot)

        beyond = b.add(first, run)
        last = b.select(b.icmp_signed("<", beyond, k), beyond, k)
        count = b.sub(last, first)
        turns, whole = (b.add(first, b.and_(count, _i64(-n))) for n in (wide, LANES))
        # The processor's own prefetcher stops at the end of every page, and at that of every row.
        with loop(first, turns, _i64(wide)) as (offset, _):
            ahead = b.add(b.mul(offset, _i64(width)), _i64(_AHEAD))
            past = b.icmp_signed(">=", ahead, end)
            ahead = b.add(ahead, b.select(past, skip, _i64(0)))
            for r, line in enumerate(lines):
                for part in range(0, lines_each * _LINE, _LINE):
                    emit_prefetch(b, b.add(line, b.add(ahead, _i64(part))), level=1)
                for part in range(0, wide, LANES):
                    step(r, b.add(offset, _i64(part)), emit_load)
        with loop(turns, whole, _i64(LANES)) as (offset, _):
            for r in range(rows):
                step(r, offset, emit_load)
        tail = b.sub(last, whole)
        with b.if_then(b.icmp_signed(">", tail, _i64(0))):
            for r in range(rows):
                step(r, whole, lambda b, shape, address: emit_load_n(b, shape, address, tail))
    for slot, place in zip(slots, places, strict=True):
        emit_store(b, b.load(slot), place)


def _tile(kind: str, rows: int, tokens: int) -> Any:
    """Return an intrinsic (w, stride, scales, run, xs, k0, k, left, acc) of rows by tokens."""

    def tile(b, w, stride, scales, run, xs, k0, k, left, acc):
        start = b.add(w, b.mul(k0, _i64(_KINDS[kind][1])))
        x = emit_tokens(b, xs, k0, tokens)
        _emit_tile(b, kind, rows, start, stride, scales, run, x, k, left, acc)

    return op(void, i64, i64, i64, i64, i64, i64, i64, i64, i64)(tile)


def _stream(kind: str) -> Kernel:
    """Return the product kernel of a kind of code, called like `product.product`."""
    side = _LINES if _KINDS[kind][1] == 1 else 1
    some, one = _tile(kind, side, 1), _tile(kind, 1, 1)
    wide, two = _tile(kind, WIDE, WIDE), _tile(kind, _TWO, _TWO)
    factor = np.float32(_KINDS[kind][2])
    scaled = bool(factor)

    def stream(weight, expert, row, count, tokens, scratch):
        if tokens > FEW:
            multiply(weight_at(weight).many, weight, expert, row, count, tokens, scratch)
            return
        about = weight_at(weight)
        columns, stride = about.k, about.stride
        w = about.codes + (expert * about.n + row) * stride
        xs, acc, scales = scratch + XS, scratch + ACC, scratch + PANEL
        together = tokens
        if WIDE == 4 and tokens % 4 == 3:  # a fourth costs less than two and one
            write_i64(xs + 8 * tokens, read_i64(xs))
            together += 1
        clear(scratch, together)
        run, most, scale, apart = columns, columns, 0, 0
        if scaled:
            run, scale = min(columns, about.group), first_scale(weight, expert, row)
            most = run * _RUNS
            # Scales change from row to row, or none of the rows of a unit has its own.
            if about.tall == 1:
                apart = about.wide
        k0 = 0
        while k0 < columns:
            left = columns - k0
            k = min(most, left)
            if scaled:
                for i in range((k + run - 1) // run):
                    for r in range(count):
                        value = scale_at(weight, scale + r * apart) * factor
                        write_f32(scales + 4 * (ROWS * i + r), value)
                    scale += 1
            t = 0
            if count == ROWS:
                while t + WIDE <= together:
                    for r in range(0, ROWS, WIDE):
                        at, line = acc + _VECTOR * (t * ROWS + r), w + r * stride
                        wide(line, stride, scales + 4 * r, run, xs + 8 * t, k0, k, left, at)
                    t += WIDE
                while t + _TWO <= tokens:
                    for r in range(0, ROWS, _TWO):
                        at, line = acc + _VECTOR * (t * ROWS + r), w + r * stride
                        two(line, stride, scales + 4 * r, run, xs + 8 * t, k0, k, left, at)
                    t += _TWO
                while t < tokens:
                    for r in range(0, ROWS, side):
                        at, line = acc + _VECTOR * (t * ROWS + r), w + r * stride
                        some(line, stride, scales + 4 * r, run, xs + 8 * t, k0, k, left, at)
                    t += 1
            while t < tokens:
                for r in range(count):
                    at, line = acc + _VECTOR * (t * ROWS + r), w + r * stride
                    one(line, stride, scales + 4 * r, run, xs + 8 * t, k0, k, left, at)
                t += 1
            k0 += k
        finish(scratch, tokens)

    kernel = Kernel(stream)
    kernel.name = f"stream.{kind}"
    return kernel


STREAMS = {kind: _stream(kind) for kind in _KINDS}
"""Kind of code -> product kernel that streams it."""


class Stored(NamedTuple):
    """A weight that is multiplied as it is stored.

    Attributes:
        product: address of its product kernel.
        weight: its record.
    """

    product: int
    weight: Weight


def stored(call: BoundCall) -> Stored:
    """Return what a kernel needs to multiply by the weight `w` of a call.

    Raises:
        UnsupportedOp: there is no decoder for its format.
    """
    w = weight_record(call.spec.name, call.tensor("w"))
    kind = next(kind for kind, decoder in DECODERS.items() if decoder is w.decoder)
    block = call.hints.block_columns(COLUMNS, w.stride, w.k, ROWS)
    streams = kind in STREAMS and w.group >= min(LEAST_GROUP, w.k)
    return Stored(STREAMS[kind] if streams else product, w._replace(many=product, block=block))
