"""Rows of a stored weight times tokens: the one fp32 dot product of the back end.

Every dot product is one accumulator of 16 lanes that walks K in steps of 16, the last step masked,
and then the fixed tree sum. Tiles of several rows by several tokens only decide which accumulators
are in registers together, so a result depends neither on the tile nor on the other tokens nor on
the thread.

`product` is a kernel that others call by address. It computes some rows by up to TOKENS tokens in
two stages, block of columns by block of columns and 8 rows by 8: decode the rows into a panel that
stays in cache, then multiply the panel with every token. Formats with a fused kernel of their own
would put another kernel of the same signature in its place.

A decoder turns columns k0 .. k1-1 of up to ROWS rows into fp32, PITCH bytes apart in the panel that
it writes; k0 is a multiple of 128, and so is k1 but for the end of the row:

    decoder(weight, expert, row, count, k0, k1, panel) -> address of the first row
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, device, i64, void
from cpu_fallback.lanes.record import reader

ROWS = 8
COLUMNS = 512
PITCH = 4 * COLUMNS
PANEL_BYTES = ROWS * PITCH


class Weight(NamedTuple):
    """What kernels know of a stored weight; addresses and bytes."""

    decoder: int  # kernel that decodes it; called by address, so it comes first
    pitch: int  # from one decoded row to the next
    n: int  # rows
    k: int  # columns
    codes: int  # the stored codes
    stride: int  # from one stored row to the next
    group: int  # columns per scale
    tall: int  # rows per scale
    wide: int = 1  # scales per row of scales
    high: int = 1  # rows of scales per expert
    scales: int = 0  # the scales, 0 if there are none
    zeros: int = 0  # the zero points, 0 if there are none
    scale_kind: int = 0  # entry of `decode._SCALES`
    factor: float = 1.0  # the one scale of the tensor, where `scale_kind` says so
    many: int = 0  # kernel of the product with many tokens (`stream`)
    block: int = 0  # columns that it decodes at a time


weight_at = reader(Weight)  # Read the record at an address


@v.op(i64, i64, i64, i64, i64, i64, i64, i64)
def decode(b, weight, expert, row, count, k0, k1, panel):
    """Call the decoder of a weight and return the address of the decoded rows."""
    decoder = v.emit_load(b, v.INT64, weight)
    return v.call_at(b, decoder, v.INT64, weight, expert, row, count, k0, k1, panel)


TOKENS = 64  # The most that are multiplied at a time
HEIGHT = 64
"""The most rows: their accumulators and a block of columns of all tokens share a second cache."""
_VECTOR = 4 * v.LANES
_LINE = 64

XS = 0  # In the scratch of a product: the address of each token's activations, int64 [TOKENS]
SUMS = XS + 8 * TOKENS
"""In the scratch of a product: the results, fp32 [HEIGHT / ROWS, TOKENS, ROWS]."""
ACC = SUMS + 4 * TOKENS * HEIGHT
"""In the scratch of a product: accumulators, fp32 [HEIGHT / ROWS, TOKENS, ROWS, 16]."""
PANEL = ACC + _VECTOR * TOKENS * HEIGHT  # In the scratch of a product: decoded rows
SCRATCH = PANEL + PANEL_BYTES  # Bytes of scratch that a product needs


PARTS = 1 if CURRENT.avx512 else 2 if CURRENT.avx2 else 4  # Registers of a vector of 16 lanes
HIGH, ACROSS = (8, 3) if CURRENT.registers * PARTS == 32 else (4, 3)
"""Tiles for many tokens, rows by tokens: what 32 or 16 registers hold, with what they multiply."""
TALL = 8 if CURRENT.avx512 else 4 if CURRENT.registers == 8 else 2  # Rows of a tile of one token


def _emit_tile(b: Any, rows: int, w: Any, xs: list[Any], k: Any, acc: Any) -> None:
    """Emit acc[t, r] += w[r] * xs[t] over k columns, 16 lanes at a time; acc is [.., ROWS].

    Many sums walk the columns once for each register of the lanes, whose sums do not meet: so
    there is room for more of them side by side than of whole vectors.
    """
    parts = PARTS if rows * len(xs) > TALL else 1
    lanes = v.LANES // parts
    for part in range(parts):
        begin = v.number(4 * lanes * part)
        lines = [b.add(w, v.number(4 * lanes * part + PITCH * r)) for r in range(rows)]
        tokens = [b.add(x, begin) for x in xs]
        _emit_lanes(b, lines, tokens, k, b.add(acc, begin), lanes, part)


def _emit_lanes(
    b: Any, lines: list[Any], tokens: list[Any], k: Any, acc: Any, lanes: int, part: int
) -> None:
    """Emit the sums of some of the lanes; the addresses are those of the first of them."""
    kind = ir.VectorType(v.F32.llvm.element, lanes)
    rows = len(lines)
    order = [t * ROWS + r for t in range(len(tokens)) for r in range(rows)]
    places = [b.add(acc, v.number(_VECTOR * i)) for i in order]
    slots = v.variables(b, (v.emit_load(b, kind, place) for place in places))

    def step(offset: Any, load: Any) -> None:
        at = b.mul(offset, v.number(4))
        activations = [load(b.add(x, at)) for x in tokens]
        for r, line in enumerate(lines):
            weights = load(b.add(line, at))
            for t, x in enumerate(activations):
                slot = slots[t * rows + r]
                b.store(v.emit_fma(b, weights, x, b.load(slot)), slot)

    whole = b.and_(k, v.number(-v.LANES))
    with v.loop(b, 0, whole, v.LANES) as (offset, _):
        step(offset, lambda address: v.emit_load(b, kind, address))
    left = b.sub(b.sub(k, whole), v.number(lanes * part))
    with b.if_then(b.icmp_signed(">", left, v.number(0))):
        most = v.number(lanes)
        count = b.select(b.icmp_signed("<", left, most), left, most)
        step(whole, lambda address: v.emit_load_n(b, kind, address, count))
    for slot, place in zip(slots, places, strict=True):
        v.emit_store(b, b.load(slot), place)


def emit_tokens(b: Any, xs: Any, k0: Any, tokens: int) -> list[Any]:
    """Emit the addresses of column k0 of the first tokens."""
    start = b.mul(k0, v.number(4))
    addresses = [b.add(xs, v.number(8 * t)) for t in range(tokens)]
    return [b.add(v.emit_load(b, v.INT64, address), start) for address in addresses]


def _tile(rows: int, tokens: int) -> Any:
    """Return an intrinsic (w, xs, k0, k, acc) of rows by tokens."""

    def tile(b, w, xs, k0, k, acc):
        _emit_tile(b, rows, w, emit_tokens(b, xs, k0, tokens), k, acc)

    return v.op(void, *[i64] * 5)(tile)


_high, _tall, _one = _tile(HIGH, ACROSS), _tile(TALL, 1), _tile(1, 1)


@device
def clear(acc, count):
    """Set so many accumulators to zero."""
    nothing = v.zero()
    for i in range(count):
        v.store_f32(acc + _VECTOR * i, nothing)


_ONE = np.float32(1)


@device
def copy_f32(source, target, count, factor=_ONE):
    """Copy fp32 values, times a factor."""
    for i in range(0, count, 16):
        at, n = 4 * i, count - i
        v.store_up_to(target + at, v.mul(v.load_up_to(source + at, n), v.splat(factor)), n)


@device
def _panel(weight, expert, row, count, k0, k1, panel):
    """Decode rows into the panel, also those that need no decoding.

    Where rows lie a power of two apart, a cache has few places for them.
    """
    w, pitch = decode(weight, expert, row, count, k0, k1, panel), weight_at(weight).pitch
    if w != panel:
        for r in range(count):
            copy_f32(w + r * pitch, panel + r * PITCH, k1 - k0)


@device
def _accumulate(w, count, tokens, k0, k, xs, acc, later, stride, size):
    """Add rows w [count, k] times columns k0 .. k0+k-1 of the tokens, count up to ROWS.

    Meanwhile the stored bytes of the next block are asked for: `size` of each row, `stride` apart,
    from `later` on. Memory would keep the decoder waiting, for a block is too short for the
    processor's own prefetcher.
    """
    t = asked = 0
    if count == ROWS:
        while t + ACROSS <= tokens:
            while asked * tokens < size * (t + ACROSS):
                for r in range(ROWS):
                    v.prefetch(later + r * stride + asked)
                asked += _LINE
            for r in range(0, ROWS, HIGH):
                _high(w + r * PITCH, xs + 8 * t, k0, k, acc + _VECTOR * (t * ROWS + r))
            t += ACROSS
        while t < tokens:
            for r in range(0, ROWS, TALL):
                _tall(w + r * PITCH, xs + 8 * t, k0, k, acc + _VECTOR * (t * ROWS + r))
            t += 1
    while t < tokens:
        for r in range(count):
            _one(w + r * PITCH, xs + 8 * t, k0, k, acc + _VECTOR * (t * ROWS + r))
        t += 1


@v.op(v.F32, i64, i64)
def totals(b, first, second):
    """Return what `hsum` gives of each of 8 accumulators here and 8 there."""
    at = [b.add(a, v.number(_VECTOR * r)) for a in (first, second) for r in range(ROWS)]
    return v.emit_totals(b, [v.emit_load(b, v.F32.llvm, each) for each in at])


@device
def finish(acc, sums, tokens):
    """End a product of up to ROWS rows: write the sums of the accumulators."""
    each = _VECTOR * ROWS
    for t in range(0, tokens, 2):
        total = totals(acc + each * t, acc + each * min(t + 1, tokens - 1))
        v.store_f32(sums + 4 * t * ROWS, total)


def _product(weight, expert, row, count, tokens, scratch):
    """Multiply rows of a weight by the tokens whose addresses are at scratch + XS.

    `weight`: address of its record; `expert`: 0 for a matrix; `count`: rows from `row` on, up to
    HEIGHT, by up to TOKENS tokens. Of SCRATCH bytes the results are at scratch + SUMS.
    """
    about = weight_at(weight)
    columns, block, stride = about.k, about.block, about.stride
    codes = about.codes + (expert * about.n + row) * stride
    acc, each = scratch + ACC, _VECTOR * TOKENS
    for r in range(0, count, ROWS):
        clear(acc + each * r, tokens * ROWS)
    size = min(block, columns) * stride // columns
    k0 = 0
    while k0 < columns:
        k1 = min(k0 + block, columns)
        for r in range(0, count, ROWS):
            later = codes + (r + ROWS) * stride
            if r + ROWS < count:
                later += k0 * stride // columns
            elif k1 < columns:
                later = codes + k1 * stride // columns
            high = min(ROWS, count - r)
            w, k, xs, at = scratch + PANEL, k1 - k0, scratch + XS, acc + each * r
            _panel(weight, expert, row + r, high, k0, k1, w)
            _accumulate(w, high, tokens, k0, k, xs, at, later, stride, size)
        k0 = k1
    for r in range(0, count, ROWS):
        finish(acc + each * r, scratch + SUMS + 4 * TOKENS * r, tokens)


product = Kernel(_product)


multiply = v.caller(6)  # (product, weight, expert, row, count, tokens, scratch)
