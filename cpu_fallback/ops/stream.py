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
from cpu_fallback.lanes.jit import Kernel, VecT, device, i64, void
from cpu_fallback.ops import product
from cpu_fallback.ops.bind import BoundCall
from cpu_fallback.ops.decode import DECODERS, first_scale, scales_at, weight_record

_WORDS = VecT(v.INT64, v.LANES // 2)
_BY_TWO = [lane // 2 + lane % 2 * 8 for lane in range(v.LANES)]  # two dwords, nibble by nibble
_E2M1 = v.constant(v.F32, [float(value) for value in E2M1_VALUES])

Load = Callable[[Any, ir.VectorType, Any], Any]
Decode = Callable[..., Any]  # (builder, load, address, what `run` made)


def _e4m3(b: Any, codes: Any) -> Any:
    """Emit 2^-8 of e4m3 codes.

    The scale makes up for it: powers of two move from one factor to the other without rounding.
    """
    return v.emit_half(b, v.emit_e4m3_bits(b, codes))


def _looked_up(b: Any, load: Load, address: Any, table: Any) -> Any:
    """Emit entries of a run's table of 16, in `_BY_TWO`; of an index its low 4 bits count."""
    word = b.bitcast(load(b, ir.VectorType(v.INT8, 8), address), v.INT64)
    words = b.bitcast(v.spread(b, _WORDS, word), v.I32.llvm)
    shifted = b.lshr(words, v.constant(v.I32, [lane // 2 * 4 for lane in range(v.LANES)]))
    return v.emit_lookup(b, table, shifted)


def _int4_table(b: Any, scale: Any, zero: Any) -> Any:
    codes = v.constant(v.F32, [float(i) for i in range(v.LANES)])
    return b.fmul(b.fsub(codes, zero), scale)


def _plain(name: str, convert: Any = None) -> Decode:
    kind, convert = v.WIDEN[name].element, convert or v.WIDEN[name].convert
    return lambda b, load, address, own=None: convert(b, load(b, kind, address))


def _scaled(decode: Callable[[Any, Load, Any], Any]) -> Decode:
    """Return how a code is decoded that a scale of its run multiplies."""
    return lambda b, load, address, own: b.fmul(decode(b, load, address), own[0])


def _int4(b: Any, load: Load, address: Any, own: tuple[Any, Any]) -> Any:
    return b.fmul(b.fsub(_plain("u4")(b, load, address), own[1]), own[0])


class Kind(NamedTuple):
    """How a kind of code is read."""

    decode: Decode  # emits 16 columns from an address, given what `run` made
    bits: int  # of a code
    factor: float = 0.0  # of the scales; 0 if there are none
    # emits what all columns of a run need of its scale and zero point
    run: Callable[[Any, Any, Any], Any] = lambda b, scale, zero: (scale, zero)
    order: list[int] | None = None  # which of its 16 columns a lane has; None: its own
    # emits 32 columns of their codes, where that takes fewer instructions
    twice: Callable[[Any, Any], Any] | None = None

    def arranged(self, b: Any, vector: Any) -> Any:
        """Emit a vector in the order that decoded columns have."""
        return vector if self.order is None else v.pick(b, vector, self.order)

    def restored(self, b: Any, vector: Any) -> Any:
        """Emit a vector that was in that order."""
        if self.order is None:
            return vector
        return v.pick(b, vector, [*map(self.order.index, range(v.LANES))])

    def nbytes(self, b: Any, columns: Any) -> Any:
        """Emit the bytes of so many columns, an even number if they have 4 bits."""
        if self.bits == 4:
            return b.lshr(columns, v.number(1))
        return b.mul(columns, v.number(self.bits // 8))


KINDS = {
    "f32": Kind(_plain("f32"), 32),
    "bf16": Kind(_plain("bf16"), 16),
    "int8": Kind(_scaled(_plain("i8")), 8, 1.0),
    "int4": Kind(_int4, 4, 1.0),
    "mxfp4": Kind(_scaled(_plain("e2m1")), 4, 1.0),
}
if CURRENT.fma:
    KINDS |= {
        "f16": Kind(_plain("f16"), 16),
        "e4m3": Kind(_scaled(_plain("e4m3", _e4m3)), 8, 256.0, twice=_e4m3),
        "e5m2": Kind(_scaled(_plain("e5m2")), 8, 1.0, twice=v.WIDEN["e5m2"].convert),
    }
if CURRENT.avx512:
    KINDS |= {
        "int4": Kind(_looked_up, 4, 1.0, _int4_table, _BY_TWO),
        "mxfp4": Kind(_looked_up, 4, 1.0, lambda b, scale, zero: b.fmul(_E2M1, scale), _BY_TWO),
    }
"""Kind of code -> how it is read."""


FEW = 8  # Tokens up to which weights are decoded in registers
LEAST_GROUP = 32  # Columns that must share a scale, or a multiple of it: fewer do not pay

_VECTOR = 4 * v.LANES
WIDE = 4 if CURRENT.avx512 else 2 if CURRENT.registers == 8 else 1
"""Tiles for some tokens: rows and tokens."""
_LINE = 64
_SIDE_BITS = 32  # of a column of the rows that lie side by side: one of fp32, four of bytes
_LINES = 4  # cache lines that a turn of the loop takes from the rows of a tile, all in all
_TWO = min(2, WIDE)
_RUNS = product.PANEL_BYTES // 8 // product.ROWS  # with scales: these and zeros fill the panel
_ROW = 4 * _RUNS  # bytes from the scales of a row to those of the next
_ZEROS = product.PANEL_BYTES // 2  # from a scale to its zero point


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
    lines = [v.emit_at(b, tile.w, v.number(r), tile.stride) for r in range(rows)]
    places = [v.behind(b, tile.acc, _VECTOR * (t * product.ROWS + r)) for t, r in tiles]
    before = (v.emit_load(b, v.F32.llvm, place) for place in places)
    slots = v.variables(b, (code.arranged(b, sums) for sums in before))
    (scale_at,) = v.variables(b, [tile.scales])
    lines_each = 1 if code.twice else max(1, _LINES // rows)
    in_lines = code.bits > 8 or code.twice
    wide = lines_each * _LINE * 8 // code.bits if in_lines else LEAST_GROUP

    with v.loop(b, 0, tile.k, tile.run) as (first, _):
        own: list[Any] = [None] * rows
        if code.factor:
            at = b.load(scale_at)
            for r in range(rows):
                scale, zero = (
                    v.emit_everywhere(b, v.F32, v.behind(b, at, r * _ROW + part))
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
            codes = v.emit_load(b, ir.VectorType(v.INT8, 2 * v.LANES), address)
            weights = code.twice(b, codes)
            for part in (0, v.LANES):
                here = v.pick(b, weights, range(part, part + v.LANES))
                add(r, v.behind(b, offset, part), v.emit_load, b.fmul(here, own[r][0]))

        def add(r: int, offset: Any, load: Load, weight: Any) -> None:
            for t, x in enumerate(xs):
                there = load(b, v.F32.llvm, v.emit_at(b, x, offset, 4))
                activations = code.arranged(b, there)
                slot = slots[t * rows + r]
                b.store(v.emit_fma(b, weight, activations, b.load(slot)), slot)

        beyond = b.add(first, tile.run)
        last = b.select(b.icmp_signed("<", beyond, tile.k), beyond, tile.k)
        count = b.sub(last, first)
        turns, whole = (b.add(first, b.and_(count, v.number(-n))) for n in (wide, v.LANES))
        # The processor's own prefetcher stops at the end of every row, so the rows of the next tile
        # are asked for in one stream.
        with v.loop(b, first, turns, wide) as (offset, _):
            done = b.add(tile.stride, code.nbytes(b, offset))
            ahead = b.add(lines[0], b.mul(done, v.number(rows)))
            for part in range(0, rows * wide * code.bits // 8 if rows > 1 else 0, _LINE):
                v.emit_prefetch(b, v.behind(b, ahead, part))
            for r in range(rows):
                for part in range(0, wide, v.LANES if code.twice is None else 2 * v.LANES):
                    if code.twice is None:
                        step(r, v.behind(b, offset, part), v.emit_load)
                    else:
                        two_steps(r, v.behind(b, offset, part))
        with v.loop(b, turns, whole, v.LANES) as (offset, _):
            for r in range(rows):
                step(r, offset, v.emit_load)
        tail = b.sub(last, whole)
        with b.if_then(b.icmp_signed(">", tail, v.number(0))):
            size = b.lshr(b.add(tail, v.number(1)), v.number(1)) if code.bits == 4 else tail

            def part(b: Any, shape: Any, address: Any) -> Any:
                return v.emit_load_n(b, shape, address, tail if shape == v.F32.llvm else size)

            for r in range(rows):
                step(r, whole, part)
    for slot, place in zip(slots, places, strict=True):
        v.emit_store(b, code.restored(b, b.load(slot)), place)


def _tiles(kind: str, tall: int, wide: int) -> Any:
    """Return the device that multiplies rows by tokens from t on, in tiles of `tall` by `wide`.

    It returns the next token.
    """

    @v.op(void, *[i64] * 8)
    def tile(b, w, stride, scales, run, xs, k0, k, acc):
        start = b.add(w, KINDS[kind].nbytes(b, k0))
        x = product.emit_tokens(b, xs, k0, wide)
        _emit_tile(b, _Tile(kind, tall, start, stride, scales, run, x, k, acc))

    @device
    def some(t, tokens, rows, w, stride, scales, run, xs, k0, k, acc):
        while t + wide <= tokens:
            for r in range(0, rows, tall):
                at, line = acc + _VECTOR * (t * product.ROWS + r), w + r * stride
                tile(line, stride, scales + r * _ROW, run, xs + 8 * t, k0, k, at)
            t += wide
        return t

    return some


@device
def _fill_runs(weight, index, count, factor, out):
    """Write the scales of `count` runs of a row, times a factor, and their zero points."""
    w = product.weight_at(weight)
    for i in range(0, count, v.LANES):
        n, at = min(v.LANES, count - i), out + 4 * i
        scales = scales_at(weight, index + i, n)
        v.store_f32_n(at, v.mul(scales, v.splat(factor)), n)
        if w.zeros:
            v.store_f32_n(at + _ZEROS, v.to_f32(v.load_u8_n(w.zeros + index + i, n)), n)
        else:
            v.store_f32_n(at + _ZEROS, v.splat(np.float32(8)), n)


def _stream(kind: str) -> Kernel:
    """Return the product kernel of a kind of code, called like `product.product`."""
    side = max(1, _SIDE_BITS // KINDS[kind].bits)
    some, one = _tiles(kind, side, 1), _tiles(kind, 1, 1)
    wide, two = _tiles(kind, WIDE, WIDE), _tiles(kind, _TWO, _TWO)
    factor = np.float32(KINDS[kind].factor)
    scaled = bool(factor)

    def stream(weight, expert, row, count, tokens, scratch):
        if tokens > FEW:
            product.multiply(
                product.weight_at(weight).many, weight, expert, row, count, tokens, scratch
            )
            return
        about = product.weight_at(weight)
        columns, stride = about.k, about.stride
        w = about.codes + (expert * about.n + row) * stride
        xs, acc, scales = scratch + product.XS, scratch + product.ACC, scratch + product.PANEL
        together = tokens
        if WIDE == 4 and tokens % 4 == 3:  # a fourth costs less than two and one
            v.write_i64(xs + 8 * tokens, v.read_i64(xs))
            together += 1
        product.clear(acc, together * product.ROWS)
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
            args, t = (w, stride, scales, run, xs, k0, k, acc), 0
            if count == product.ROWS:
                t = wide(t, together, product.ROWS, *args)
                t = two(t, tokens, product.ROWS, *args)
                t = some(t, tokens, product.ROWS, *args)
            one(t, tokens, count, *args)
            k0 += k
        product.finish(acc, scratch + product.SUMS, tokens)

    return Kernel(stream, name=f"stream.{kind}")


STREAMS = {kind: _stream(kind) for kind in KINDS}  # Kind of code -> product kernel that streams it


class Stored(NamedTuple):
    """A weight that is multiplied as it is stored."""

    product: int  # address of its product kernel
    weight: product.Weight


def stored(call: BoundCall) -> Stored:
    """Return what a kernel needs to multiply by the weight `w` of a call. Raises UnsupportedOp."""
    w = weight_record(call.spec.name, call.tensor("w"))
    kind = next((kind for kind, decoder in DECODERS.items() if decoder is w.decoder), "")
    block = call.hints.block_columns(product.COLUMNS, w.stride, w.k, product.ROWS)
    # A run begins where 16 columns do, and with a whole dword of 4-bit codes.
    streams = kind in STREAMS and (w.group >= w.k or w.group % LEAST_GROUP == 0)
    kernel = STREAMS[kind] if streams else product.product
    return Stored(kernel, w._replace(many=product.product, block=block))
