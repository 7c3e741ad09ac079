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

from clocher_kernels.dtypes import E2M1_VALUES
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.memory import (
    emit_load,
    emit_load_n,
    emit_prefetch,
    emit_store,
    load_f32_n,
    load_u8_n,
    load_u16_n,
    read_i64,
    store_f32_n,
    write_i64,
)
from cpu_fallback.lanes.narrow import from_bf16, from_e8m0, from_f16
from cpu_fallback.lanes.simd import emit_fma, emit_lookup, mul, splat, to_f32
from cpu_fallback.lanes.vector import F32, I32, LANES, VecT, constant, i64, op, pick, spread, void
from cpu_fallback.ops.bind import BoundCall
from cpu_fallback.ops.decode import DECODERS, first_scale, weight_record
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
LEAST_GROUP = 32
"""Columns that must share a scale, or a multiple of it: fewer do not pay."""

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_HALF = ir.VectorType(ir.HalfType(), LANES)
_SHORT = ir.VectorType(_I16, LANES)
_WORDS = VecT(_I64, LANES // 2)
_VECTOR = 4 * LANES
_BY_TWO = [lane // 2 + lane % 2 * 8 for lane in range(LANES)]  # two dwords, nibble by nibble
_LINE = 64
_LINES = 4  # cache lines that a turn of the loop takes from the rows of a tile, all in all
_TWO = min(2, WIDE)
_AHEAD = 4096  # bytes of a row to ask for ahead of use
_RUNS = PANEL_BYTES // (8 * ROWS)  # of columns with a scale; scales and zeros fit in the panel
_ROW = 4 * _RUNS  # bytes from the scales of a row to those of the next
_ZEROS = PANEL_BYTES // 2  # from a scale to its zero point

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


def _code(b: Any, load: Load, address: Any) -> Any:
    """Emit 16 lanes with a 4-bit code each."""
    pair = b.bitcast(load(b, ir.VectorType(_I8, 8), address), ir.VectorType(_I32, 2))
    words = pick(b, pair, [lane // 8 for lane in range(LANES)])
    shifted = b.lshr(words, constant(I32, [lane % 8 * 4 for lane in range(LANES)]))
    return b.and_(shifted, constant(I32, 15))


def _scaled(decode: Load) -> "_Decode":
    """Return how a code is decoded that a scale of its run multiplies."""
    return lambda b, load, address, own: b.fmul(decode(b, load, address), own[0])


def _int4(b: Any, load: Load, address: Any, own: tuple[Any, Any]) -> Any:
    value = b.fsub(b.sitofp(_code(b, load, address), F32.llvm), own[1])
    return b.fmul(value, own[0])


def _mxfp4(b: Any, load: Load, address: Any, own: tuple[Any, Any]) -> Any:
    return b.fmul(emit_lookup(b, _E2M1, _code(b, load, address)), own[0])


def _looked_up(b: Any, load: Load, address: Any, table: Any) -> Any:
    """Emit entries of a run's table of 16, in `_BY_TWO`; of an index its low 4 bits count."""
    word = b.bitcast(load(b, ir.VectorType(_I8, 8), address), _I64)
    words = b.bitcast(spread(b, _WORDS, word), I32.llvm)
    shifted = b.lshr(words, constant(I32, [lane // 2 * 4 for lane in range(LANES)]))
    return emit_lookup(b, table, shifted)


def _int4_table(b: Any, scale: Any, zero: Any) -> Any:
    return b.fmul(b.fsub(constant(F32, [float(i) for i in range(LANES)]), zero), scale)


def _mxfp4_table(b: Any, scale: Any, zero: Any) -> Any:
    return b.fmul(_E2M1, scale)


def _plain(b: Any, scale: Any, zero: Any) -> tuple[Any, Any]:
    return scale, zero


_Decode = Callable[[Any, Load, Any, Any], Any]
_E2M1 = constant(F32, [float(value) for value in E2M1_VALUES])


class _Kind(NamedTuple):
    """How a kind of code is read.

    Attributes:
        decode: emits 16 columns from an address, given what `run` made.
        bits: of a code.
        factor: of the scales; 0 if there are none.
        run: emits what all columns of a run need of its scale and zero point.
        order: which of its 16 columns a lane has; None: its own.
    """

    decode: _Decode
    bits: int
    factor: float = 0.0
    run: Callable[[Any, Any, Any], Any] = _plain
    order: list[int] | None = None

    def arranged(self, b: Any, vector: Any) -> Any:
        """Emit a vector in the order that decoded columns have."""
        return vector if self.order is None else pick(b, vector, self.order)

    def restored(self, b: Any, vector: Any) -> Any:
        """Emit a vector that was in that order."""
        return (
            vector
            if self.order is None
            else pick(b, vector, [*map(self.order.index, range(LANES))])
        )

    def nbytes(self, b: Any, columns: Any) -> Any:
        """Emit the bytes of so many columns, an even number if they have 4 bits."""
        if self.bits == 4:
            return b.lshr(columns, _i64(1))
        return b.mul(columns, _i64(self.bits // 8))


def _float(decode: Load) -> _Decode:
    """Return how a code is decoded that has no scale."""
    return lambda b, load, address, own: decode(b, load, address)


_KINDS = {
    "f32": _Kind(_float(_f32), 32),
    "bf16": _Kind(_float(_bf16), 16),
    "int8": _Kind(_scaled(_int8), 8, 1.0),
    "int4": _Kind(_int4, 4, 1.0),
    "mxfp4": _Kind(_mxfp4, 4, 1.0),
}
if CURRENT.f16c:
    _KINDS |= {
        "f16": _Kind(_float(_f16), 16),
        "e4m3": _Kind(_scaled(_e4m3), 8, 256.0),
        "e5m2": _Kind(_scaled(_e5m2), 8, 1.0),
    }
if CURRENT.avx512:
    _KINDS |= {
        "int4": _Kind(_looked_up, 4, 1.0, _int4_table, _BY_TWO),
        "mxfp4": _Kind(_looked_up, 4, 1.0, _mxfp4_table, _BY_TWO),
    }


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

    Each row has a scale for each run of columns, fp32, `_ROW` bytes behind that of the row before.
    The row has `left` columns from here on; what follows it are the rows of the next tile.
    """
    code = _KINDS[kind]
    tiles = [(t, r) for t in range(len(xs)) for r in range(rows)]
    lines = [b.add(w, b.mul(stride, _i64(r))) for r in range(rows)]
    places = [b.add(acc, _i64(_VECTOR * (t * ROWS + r))) for t, r in tiles]
    slots = [cgutils.alloca_once(b, F32.llvm) for _ in tiles]
    for slot, place in zip(slots, places, strict=True):
        b.store(code.arranged(b, emit_load(b, F32.llvm, place)), slot)
    scale_at = cgutils.alloca_once_value(b, scales)
    lines_each = max(1, _LINES // rows)
    wide = lines_each * _LINE * 8 // code.bits if code.bits > 8 else LEAST_GROUP
    end = code.nbytes(b, left)
    skip = b.mul(stride, _i64(rows - 1))

    def loop(start: Any, stop: Any, step: Any) -> Any:
        return cgutils.for_range_slice(b, start, stop, step, _I64)

    with loop(_i64(0), k, run) as (first, _):
        own: list[Any] = [None] * rows
        if code.factor:
            at = b.load(scale_at)
            for r in range(rows):
                scale, zero = (
                    spread(b, F32, emit_load(b, ir.FloatType(), b.add(at, _i64(r * _ROW + part))))
                    for part in (0, _ZEROS)
                )
                own[r] = code.run(b, scale, zero)
            b.store(b.add(at, _i64(4)), scale_at)

        def step(r: int, offset: Any, load: Load) -> None:
            address = b.add(lines[r], code.nbytes(b, offset))
            weight = code.decode(b, load, address, own[r])
            for t, x in enumerate(xs):
                there = load(b, F32.llvm, b.add(x, b.mul(offset, _i64(4))))
                activations = code.arranged(b, there)
                slot = slots[t * rows + r]
                b.store(emit_fma(b, weight, activations, b.load(slot)), slot)

        beyond = b.add(first, run)
        last = b.select(b.icmp_signed("<", beyond, k), beyond, k)
        count = b.sub(last, first)
        turns, whole = (b.add(first, b.and_(count, _i64(-n))) for n in (wide, LANES))
        # The processor's own prefetcher stops at the end of every page, and at that of every row.
        with loop(first, turns, _i64(wide)) as (offset, _):
            ahead = b.add(code.nbytes(b, offset), _i64(_AHEAD))
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
            size = b.lshr(b.add(tail, _i64(1)), _i64(1)) if code.bits == 4 else tail

            def part(b: Any, shape: ir.VectorType, address: Any) -> Any:
                return emit_load_n(b, shape, address, tail if shape == F32.llvm else size)

            for r in range(rows):
                step(r, whole, part)
    for slot, place in zip(slots, places, strict=True):
        emit_store(b, code.restored(b, b.load(slot)), place)


def _tile(kind: str, rows: int, tokens: int) -> Any:
    """Return an intrinsic (w, stride, scales, run, xs, k0, k, left, acc) of rows by tokens."""

    def tile(b, w, stride, scales, run, xs, k0, k, left, acc):
        start = b.add(w, _KINDS[kind].nbytes(b, k0))
        x = emit_tokens(b, xs, k0, tokens)
        _emit_tile(b, kind, rows, start, stride, scales, run, x, k, left, acc)

    return op(void, i64, i64, i64, i64, i64, i64, i64, i64, i64)(tile)


@device
def _numbers(kind, source, index, count):
    """Return up to 16 scales, fp32, of a kind of `decode._SCALES` that is stored."""
    if kind == 1:
        return load_f32_n(source + 4 * index, count)
    if kind == 2:
        return from_f16(load_u16_n(source + 2 * index, count))
    if kind == 3:
        return from_bf16(load_u16_n(source + 2 * index, count))
    return from_e8m0(load_u8_n(source + index, count))


@device
def _fill_runs(weight, index, count, factor, out):
    """Write the scales of `count` runs of a row, times a factor, and their zero points."""
    w = weight_at(weight)
    for i in range(0, count, LANES):
        n, at = min(LANES, count - i), out + 4 * i
        if w.scale_kind == 0:
            store_f32_n(at, splat(w.factor * factor), n)
        else:
            scales = _numbers(w.scale_kind, w.scales, index + i, n)
            store_f32_n(at, mul(scales, splat(factor)), n)
        if w.zeros:
            store_f32_n(at + _ZEROS, to_f32(load_u8_n(w.zeros + index + i, n)), n)
        else:
            store_f32_n(at + _ZEROS, splat(np.float32(8)), n)


def _stream(kind: str) -> Kernel:
    """Return the product kernel of a kind of code, called like `product.product`."""
    side = _LINES if _KINDS[kind].bits <= 8 else 1
    some, one = _tile(kind, side, 1), _tile(kind, 1, 1)
    wide, two = _tile(kind, WIDE, WIDE), _tile(kind, _TWO, _TWO)
    factor = np.float32(_KINDS[kind].factor)
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
        run, most, done = columns, columns, 0
        if scaled:
            run = min(columns, about.group)
            most = run * _RUNS
        k0 = 0
        while k0 < columns:
            left = columns - k0
            k = min(most, left)
            if scaled:
                runs = (k + run - 1) // run
                for r in range(count):
                    index = first_scale(weight, expert, row + r) + done
                    _fill_runs(weight, index, runs, factor, scales + r * _ROW)
                done += runs
            t = 0
            if count == ROWS:
                while t + WIDE <= together:
                    for r in range(0, ROWS, WIDE):
                        at, line = acc + _VECTOR * (t * ROWS + r), w + r * stride
                        wide(line, stride, scales + r * _ROW, run, xs + 8 * t, k0, k, left, at)
                    t += WIDE
                while t + _TWO <= tokens:
                    for r in range(0, ROWS, _TWO):
                        at, line = acc + _VECTOR * (t * ROWS + r), w + r * stride
                        two(line, stride, scales + r * _ROW, run, xs + 8 * t, k0, k, left, at)
                    t += _TWO
                while t < tokens:
                    for r in range(0, ROWS, side):
                        at, line = acc + _VECTOR * (t * ROWS + r), w + r * stride
                        some(line, stride, scales + r * _ROW, run, xs + 8 * t, k0, k, left, at)
                    t += 1
            while t < tokens:
                for r in range(count):
                    at, line = acc + _VECTOR * (t * ROWS + r), w + r * stride
                    one(line, stride, scales + r * _ROW, run, xs + 8 * t, k0, k, left, at)
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
    # A run begins where 16 columns do, and with a whole dword of 4-bit codes.
    streams = kind in STREAMS and (w.group >= w.k or w.group % LEAST_GROUP == 0)
    return Stored(STREAMS[kind] if streams else product, w._replace(many=product, block=block))
