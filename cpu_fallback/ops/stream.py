"""Products of few tokens with weights that are read straight from memory: no panel in between.

A row is decoded in registers, 16 columns at a time, and multiplied at once. Memory is fastest where
it is read in one stream, so rows come one after the other, or two or four side by side where a
row's bytes last too short: a dot product is a chain of additions, 16 columns in the latency of one.
Each is the same chain of operations as in `product`, so both give the same bits. For more than FEW
tokens the product kernel that the weight names, with a panel, costs less.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from clocher_kernels.dtypes import E2M1_VALUES
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, VecT, cgutils, device, i64, void
from cpu_fallback.lanes.simd import F32, FLOAT, I32, INT8, INT16, INT32, INT64, LANES, number
from cpu_fallback.ops import product as panels
from cpu_fallback.ops.bind import BoundCall
from cpu_fallback.ops.decode import DECODERS, first_scale, weight_record
from cpu_fallback.ops.product import (
    ACC,
    COLUMNS,
    PANEL,
    PANEL_BYTES,
    ROWS,
    SUMS,
    XS,
    Weight,
    clear,
    emit_tokens,
    finish,
    multiply,
    weight_at,
)

_WORDS = VecT(INT64, LANES // 2)
_BY_TWO = [lane // 2 + lane % 2 * 8 for lane in range(LANES)]  # two dwords, nibble by nibble
_E2M1 = v.constant(F32, [float(value) for value in E2M1_VALUES])

Load = Callable[[Any, ir.VectorType, Any], Any]
Decode = Callable[[Any, Load, Any, Any], Any]


def _half(b: Any, bits: Any) -> Any:
    n = bits.type.count
    half = b.bitcast(bits, ir.VectorType(ir.HalfType(), n))
    return b.fpext(half, ir.VectorType(FLOAT, n))


def _e5m2(b: Any, load: Load, address: Any, n: int = LANES) -> Any:
    """An e5m2 code is the upper byte of an fp16."""
    shorts = ir.VectorType(INT16, n)
    codes = b.zext(load(b, ir.VectorType(INT8, n), address), shorts)
    return _half(b, b.shl(codes, v.constant(shorts, 8)))


def _e4m3(b: Any, load: Load, address: Any, n: int = LANES) -> Any:
    """An e4m3 code shifted into an fp16 is 2^-8 of its value, subnormal ones included.

    The scale makes up for it: powers of two move from one factor to the other without rounding.
    """
    shorts = ir.VectorType(INT16, n)
    codes = b.sext(load(b, ir.VectorType(INT8, n), address), shorts)
    return _half(b, b.and_(b.shl(codes, v.constant(shorts, 7)), v.constant(shorts, 0xBFFF)))


def _code(b: Any, load: Load, address: Any) -> Any:
    pair = b.bitcast(load(b, ir.VectorType(INT8, 8), address), ir.VectorType(INT32, 2))
    words = v.pick(b, pair, [lane // 8 for lane in range(LANES)])
    shifted = b.lshr(words, v.constant(I32, [lane % 8 * 4 for lane in range(LANES)]))
    return b.and_(shifted, v.constant(I32, 15))


def _int4(b: Any, load: Load, address: Any, own: tuple[Any, Any]) -> Any:
    value = b.fsub(b.sitofp(_code(b, load, address), F32.llvm), own[1])
    return b.fmul(value, own[0])


def _mxfp4(b: Any, load: Load, address: Any, own: tuple[Any, Any]) -> Any:
    return b.fmul(v.emit_lookup(b, _E2M1, _code(b, load, address)), own[0])


def _looked_up(b: Any, load: Load, address: Any, table: Any) -> Any:
    """Emit entries of a run's table of 16, in `_BY_TWO`; of an index its low 4 bits count."""
    word = b.bitcast(load(b, ir.VectorType(INT8, 8), address), INT64)
    words = b.bitcast(v.spread(b, _WORDS, word), I32.llvm)
    shifted = b.lshr(words, v.constant(I32, [lane // 2 * 4 for lane in range(LANES)]))
    return v.emit_lookup(b, table, shifted)


def _int4_table(b: Any, scale: Any, zero: Any) -> Any:
    codes = v.constant(F32, [float(i) for i in range(LANES)])
    return b.fmul(b.fsub(codes, zero), scale)


def _plain(name: str) -> Decode:
    widen = v.WIDEN[name]
    return lambda b, load, address, own: widen.convert(b, load(b, widen.element, address))


def _scaled(decode: Load) -> Decode:
    """Return how a code is decoded that a scale of its run multiplies."""
    return lambda b, load, address, own: b.fmul(decode(b, load, address), own[0])


class Kind(NamedTuple):
    """How a kind of code is read."""

    decode: Decode  # emits 16 columns from an address, given what `run` made
    bits: int  # of a code
    factor: float = 0.0  # of the scales; 0 if there are none
    # emits what all columns of a run need of its scale and zero point
    run: Callable[[Any, Any, Any], Any] = lambda b, scale, zero: (scale, zero)
    order: list[int] | None = None  # which of its 16 columns a lane has; None: its own
    # emits 32 columns at a time, where that takes fewer instructions
    twice: Callable[[Any, Load, Any, int], Any] | None = None

    def arranged(self, b: Any, vector: Any) -> Any:
        """Emit a vector in the order that decoded columns have."""
        return vector if self.order is None else v.pick(b, vector, self.order)

    def restored(self, b: Any, vector: Any) -> Any:
        """Emit a vector that was in that order."""
        if self.order is None:
            return vector
        return v.pick(b, vector, [*map(self.order.index, range(LANES))])

    def nbytes(self, b: Any, columns: Any) -> Any:
        """Emit the bytes of so many columns, an even number if they have 4 bits."""
        if self.bits == 4:
            return b.lshr(columns, v.number(1))
        return b.mul(columns, v.number(self.bits // 8))


KINDS = {
    "f32": Kind(_plain("f32"), 32),
    "bf16": Kind(_plain("bf16"), 16),
    "int8": Kind(lambda b, load, at, own: b.fmul(_plain("i8")(b, load, at, own), own[0]), 8, 1.0),
    "int4": Kind(_int4, 4, 1.0),
    "mxfp4": Kind(_mxfp4, 4, 1.0),
}
if CURRENT.f16c:
    KINDS |= {
        "f16": Kind(_plain("f16"), 16),
        "e4m3": Kind(_scaled(_e4m3), 8, 256.0, twice=_e4m3),
        "e5m2": Kind(_scaled(_e5m2), 8, 1.0, twice=_e5m2),
    }
if CURRENT.avx512:
    KINDS |= {
        "int4": Kind(_looked_up, 4, 1.0, _int4_table, _BY_TWO),
        "mxfp4": Kind(_looked_up, 4, 1.0, lambda b, scale, zero: b.fmul(_E2M1, scale), _BY_TWO),
    }
"""Kind of code -> how it is read."""


FEW = 8  # Tokens up to which weights are decoded in registers
LEAST_GROUP = 32  # Columns that must share a scale, or a multiple of it: fewer do not pay

_VECTOR = 4 * LANES
WIDE = 4 if CURRENT.avx512 else 2 if CURRENT.registers == 8 else 1
"""Tiles for some tokens: rows and tokens."""
_LINE = 64
_SIDE_BITS = 32  # of a column of the rows that lie side by side: one of fp32, four of bytes
_LINES = 4  # cache lines that a turn of the loop takes from the rows of a tile, all in all
_TWO = min(2, WIDE)
_RUNS = PANEL_BYTES // (8 * ROWS)  # of columns with a scale; scales and zeros fit in the panel
_ROW = 4 * _RUNS  # bytes from the scales of a row to those of the next
_ZEROS = PANEL_BYTES // 2  # from a scale to its zero point


class _Tile(NamedTuple):
    """What a tile multiplies: values of LLVM, but for the kind and the rows."""

    kind: str
    rows: int
    w: Any  # address of the first row
    stride: Any  # bytes from one row to the next
    scales: Any  # of each row a scale for each run, fp32, `_ROW` bytes behind those before
    run: Any  # columns that share a scale
    xs: list[Any]  # address of the columns of each token
    k: Any  # columns
    acc: Any  # address of the accumulators, [.., ROWS] vectors


def _emit_tile(b: Any, tile: _Tile) -> None:
    """Emit acc[t, r] += decode(w[r]) * xs[t] over k columns."""
    code, rows, xs = KINDS[tile.kind], tile.rows, tile.xs
    tiles = [(t, r) for t in range(len(xs)) for r in range(rows)]
    lines = [v.emit_at(b, tile.w, number(r), tile.stride) for r in range(rows)]
    places = [v.behind(b, tile.acc, _VECTOR * (t * ROWS + r)) for t, r in tiles]
    slots = [cgutils.alloca_once(b, F32.llvm) for _ in tiles]
    for slot, place in zip(slots, places, strict=True):
        b.store(code.arranged(b, v.emit_load(b, F32.llvm, place)), slot)
    scale_at = cgutils.alloca_once_value(b, tile.scales)
    lines_each = 1 if code.twice else max(1, _LINES // rows)
    in_lines = code.bits > 8 or code.twice
    wide = lines_each * _LINE * 8 // code.bits if in_lines else LEAST_GROUP

    def loop(start: Any, stop: Any, step: Any) -> Any:
        return cgutils.for_range_slice(b, start, stop, step, INT64)

    with loop(number(0), tile.k, tile.run) as (first, _):
        own: list[Any] = [None] * rows
        if code.factor:
            at = b.load(scale_at)
            for r in range(rows):
                scale, zero = (
                    v.spread(b, F32, v.emit_load(b, FLOAT, v.behind(b, at, r * _ROW + part)))
                    for part in (0, _ZEROS)
                )
                own[r] = code.run(b, scale, zero)
            b.store(v.behind(b, at, 4), scale_at)

        def step(r: int, offset: Any, load: Load) -> None:
            address = b.add(lines[r], code.nbytes(b, offset))
            add(r, offset, load, code.decode(b, load, address, own[r]))

        def two_steps(r: int, offset: Any) -> None:
            assert code.twice is not None
            address = b.add(lines[r], code.nbytes(b, offset))
            weights = code.twice(b, v.emit_load, address, 2 * LANES)
            for part in (0, LANES):
                here = v.pick(b, weights, range(part, part + LANES))
                add(r, v.behind(b, offset, part), v.emit_load, b.fmul(here, own[r][0]))

        def add(r: int, offset: Any, load: Load, weight: Any) -> None:
            for t, x in enumerate(xs):
                there = load(b, F32.llvm, v.emit_at(b, x, offset, 4))
                activations = code.arranged(b, there)
                slot = slots[t * rows + r]
                b.store(v.emit_fma(b, weight, activations, b.load(slot)), slot)

        beyond = b.add(first, tile.run)
        last = b.select(b.icmp_signed("<", beyond, tile.k), beyond, tile.k)
        count = b.sub(last, first)
        turns, whole = (b.add(first, b.and_(count, number(-n))) for n in (wide, LANES))
        # The processor's own prefetcher stops at the end of every row, so the rows of the next tile
        # are asked for in one stream.
        with loop(first, turns, number(wide)) as (offset, _):
            done = b.add(tile.stride, code.nbytes(b, offset))
            ahead = b.add(lines[0], b.mul(done, number(rows)))
            for part in range(0, rows * wide * code.bits // 8 if rows > 1 else 0, _LINE):
                v.emit_prefetch(b, v.behind(b, ahead, part))
            for r in range(rows):
                for part in range(0, wide, LANES if code.twice is None else 2 * LANES):
                    if code.twice is None:
                        step(r, v.behind(b, offset, part), v.emit_load)
                    else:
                        two_steps(r, v.behind(b, offset, part))
        with loop(turns, whole, number(LANES)) as (offset, _):
            for r in range(rows):
                step(r, offset, v.emit_load)
        tail = b.sub(last, whole)
        with b.if_then(b.icmp_signed(">", tail, number(0))):
            size = b.lshr(b.add(tail, number(1)), number(1)) if code.bits == 4 else tail

            def part(b: Any, shape: Any, address: Any) -> Any:
                return v.emit_load_n(b, shape, address, tail if shape == F32.llvm else size)

            for r in range(rows):
                step(r, whole, part)
    for slot, place in zip(slots, places, strict=True):
        v.emit_store(b, code.restored(b, b.load(slot)), place)


def _tile(kind: str, rows: int, tokens: int) -> Any:
    """Return an intrinsic (w, stride, scales, run, xs, k0, k, acc) of rows by tokens."""

    def tile(b, w, stride, scales, run, xs, k0, k, acc):
        start = b.add(w, KINDS[kind].nbytes(b, k0))
        x = emit_tokens(b, xs, k0, tokens)
        _emit_tile(b, _Tile(kind, rows, start, stride, scales, run, x, k, acc))

    return v.op(void, *[i64] * 8)(tile)


@device
def _numbers(kind, source, index, count):
    """Return up to 16 scales, fp32, of a kind of `decode._SCALES` that is stored."""
    if kind == 1:
        return v.load_f32_n(source + 4 * index, count)
    if kind == 2:
        return v.from_f16(v.load_u16_n(source + 2 * index, count))
    if kind == 3:
        return v.from_bf16(v.load_u16_n(source + 2 * index, count))
    return v.from_e8m0(v.load_u8_n(source + index, count))


@device
def _fill_runs(weight, index, count, factor, out):
    """Write the scales of `count` runs of a row, times a factor, and their zero points."""
    w = weight_at(weight)
    for i in range(0, count, LANES):
        n, at = min(LANES, count - i), out + 4 * i
        if w.scale_kind == 0:
            v.store_f32_n(at, v.splat(w.factor * factor), n)
        else:
            scales = _numbers(w.scale_kind, w.scales, index + i, n)
            v.store_f32_n(at, v.mul(scales, v.splat(factor)), n)
        if w.zeros:
            zeros = v.to_f32(v.load_u8_n(w.zeros + index + i, n))
            v.store_f32_n(at + _ZEROS, zeros, n)
        else:
            v.store_f32_n(at + _ZEROS, v.splat(np.float32(8)), n)


def _stream(kind: str) -> Kernel:
    """Return the product kernel of a kind of code, called like `product.product`."""
    side = max(1, _SIDE_BITS // KINDS[kind].bits)
    some, one = _tile(kind, side, 1), _tile(kind, 1, 1)
    wide, two = _tile(kind, WIDE, WIDE), _tile(kind, _TWO, _TWO)
    factor = np.float32(KINDS[kind].factor)
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
            v.write_i64(xs + 8 * tokens, v.read_i64(xs))
            together += 1
        clear(acc, together)
        run, most, done = columns, columns, 0
        if scaled:
            run = min(columns, about.group)
            most = run * _RUNS
        k0 = 0
        while k0 < columns:
            k = min(most, columns - k0)
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
                        wide(line, stride, scales + r * _ROW, run, xs + 8 * t, k0, k, at)
                    t += WIDE
                while t + _TWO <= tokens:
                    for r in range(0, ROWS, _TWO):
                        at, line = acc + _VECTOR * (t * ROWS + r), w + r * stride
                        two(line, stride, scales + r * _ROW, run, xs + 8 * t, k0, k, at)
                    t += _TWO
                while t < tokens:
                    for r in range(0, ROWS, side):
                        at, line = acc + _VECTOR * (t * ROWS + r), w + r * stride
                        some(line, stride, scales + r * _ROW, run, xs + 8 * t, k0, k, at)
                    t += 1
            while t < tokens:
                for r in range(count):
                    at, line = acc + _VECTOR * (t * ROWS + r), w + r * stride
                    one(line, stride, scales + r * _ROW, run, xs + 8 * t, k0, k, at)
                t += 1
            k0 += k
        finish(acc, scratch + SUMS, tokens)

    return Kernel(stream, name=f"stream.{kind}")


STREAMS = {kind: _stream(kind) for kind in KINDS}  # Kind of code -> product kernel that streams it


class Stored(NamedTuple):
    """A weight that is multiplied as it is stored."""

    product: int  # address of its product kernel
    weight: Weight


def stored(call: BoundCall) -> Stored:
    """Return what a kernel needs to multiply by the weight `w` of a call.

    Raises:
        UnsupportedOp: there is no decoder for its format.
    """
    w = weight_record(call.spec.name, call.tensor("w"))
    kind = next((kind for kind, decoder in DECODERS.items() if decoder is w.decoder), "")
    block = call.hints.block_columns(COLUMNS, w.stride, w.k, ROWS)
    # A run begins where 16 columns do, and with a whole dword of 4-bit codes.
    streams = kind in STREAMS and (w.group >= w.k or w.group % LEAST_GROUP == 0)
    kernel = STREAMS[kind] if streams else panels.product
    return Stored(kernel, w._replace(many=panels.product, block=block))
