"""Products of one token that do not read the weights of channels whose codes are zero.

The sums are those of the tiles: int32 over a block of weights, exact and so free of any order, then
scaled and added by the same fmas in the same order. What a zero adds to them is nothing, so both
kernels give the same bits. Two tokens have too few zeros in common: they take the tiles, as more
tokens do.

A thread lists the live columns of all blocks once for a product. Random rows are nothing that a
core's own prefetcher foresees, so with every four rows that are multiplied, four rows of the list
are asked for, one line of each, a group of columns further on.

And `drop_small`, which makes such zeros.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.ops.skip import skips_columns
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, cgutils, device, i64, void
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.ops.epilogue import expect, write_rows
from cpu_fallback.ops.linear import SHARES, Tiled, is_filled, multiply_tiles, panels_room, tiled
from cpu_fallback.team.tape import Launch
from cpu_fallback.tiles.byte_dots import bits
from cpu_fallback.tiles.layout import LINE
from cpu_fallback.tiles.multiply import plus
from cpu_fallback.tiles.neurons import CHUNK, interleaved, rows_of

_GROUP = 128
_QUAD = 4
_STATE = 64  # In the scratch, after what `is_filled` keeps: the cursor, and how long the list is
_BLOCK = 16
"""Bytes of what the scratch knows of a block: its first quad, its last one, -8 times its codes."""
_ENTRY = 5  # Bytes of a live column in the scratch: i32 place of its row in a panel, i8 code
_SIZE = {"f32": 4, "f16": 2, "bf16": 2}

_OWN = {
    "skip": "address of the kernel that multiplies a panel",
    "rows": "address of the panels",
    "record": "bytes of a block of a panel",
    "block": "columns of one",
    "blocks": "of a panel",
    "chunks": "of a panel",
    "panels": "how many",
    "heads": "how many times as long as a row the scales of a block are",
    "lead": "entries of the list that are asked for ahead of use",
    "longest": "entries there are room for",
}
Skipped = NamedTuple(  # a weight in tiles, and by input channel (`tiles.neurons`)
    "Skipped", [*Tiled.__annotations__.items(), *((name, int) for name in _OWN)]
)
_SHIFTED = 4 if CURRENT.vnni else 0
"""The sums of the second 64 channels of a chunk are 2^_SHIFTED times too large."""


def _operands(b: Any, lines: list[Any]) -> list[Any]:
    """Emit the eight operands of four rows of a chunk: 16 channels times 4 rows each."""
    mixed = interleaved(b, lines)
    low = [bits(b, each, 0, 15) for each in mixed]
    if _SHIFTED:
        return low + [b.and_(each, v.constant(v.BYTES, 240)) for each in mixed]
    return low + [bits(b, each, 4, 15) for each in mixed]


class _Cursor:
    """What of the list is asked for next: a line of four rows, then their next one."""

    def __init__(self, b: Any, state: Any, panel: Any, width: Any, last: Any) -> None:
        self._b, self._places, self._panel = b, (state, v.behind(b, state, 8)), panel
        self._width, self._last = width, last
        self._entry, self._line = (
            cgutils.alloca_once_value(b, v.emit_load(b, v.INT64, at)) for at in self._places
        )

    def ask(self) -> None:
        """Emit a request for four lines, and go on."""
        b, entry, line = self._b, self._b.load(self._entry), self._b.load(self._line)
        at = b.add(self._panel, line)
        for i in range(_QUAD):
            offset = b.sext(v.emit_load(b, v.INT32, v.behind(b, entry, 4 * i)), v.INT64)
            v.emit_prefetch(b, b.add(at, offset))
        line = v.behind(b, line, LINE)
        ended = b.icmp_signed("==", line, self._width)
        b.store(b.select(ended, v.number(0), line), self._line)
        further = b.add(entry, b.select(ended, v.number(4 * _QUAD), v.number(0)))
        past = b.icmp_signed(">", further, self._last)
        b.store(b.select(past, self._last, further), self._entry)

    def save(self) -> None:
        """Emit what keeps it for the next chunk."""
        for slot, place in zip((self._entry, self._line), self._places, strict=True):
            v.emit_store(self._b, self._b.load(slot), place)


def _chunk_of(scale: str) -> Any:
    """Return the intrinsic that multiplies a chunk by one group of columns of a token."""
    heads = 2 * _SIZE[scale]

    @v.op(void, *[i64] * 11)
    def chunk(b, panel, blocks, count, entries, codes, place, width, x_scale, total, state, last):
        """Add to totals [128] the products with `count` blocks of columns, times their scale."""
        cursor = _Cursor(b, state, panel, width, last)
        parts = [cgutils.alloca_once(b, v.F32.llvm) for _ in range(8)]
        sums = [cgutils.alloca_once(b, v.I32.llvm) for _ in range(8)]
        for slot in parts:
            b.store(v.constant(v.F32, 0.0), slot)
        line = v.emit_at(b, panel, place, LINE)
        first = v.emit_at(b, panel, place, CHUNK * _SIZE[scale])
        with cgutils.for_range(b, count) as outer:
            here = v.emit_at(b, blocks, outer.index, _BLOCK)
            begin, end, start = (
                v.emit_load(b, v.INT32, v.behind(b, here, 4 * i)) for i in range(3)
            )
            start = v.spread(b, v.I32, start)
            for i, slot in enumerate(sums):
                b.store(b.shl(start, v.constant(v.I32, _SHIFTED if i >= 4 else 0)), slot)
            begin, end = b.sext(begin, v.INT64), b.sext(end, v.INT64)
            with cgutils.for_range_slice(b, begin, end, v.number(_QUAD), inc=True) as (i, _):
                at = v.emit_at(b, entries, i, 4)
                lines = []
                for r in range(_QUAD):
                    offset = b.sext(v.emit_load(b, v.INT32, v.behind(b, at, 4 * r)), v.INT64)
                    lines.append(v.emit_load(b, v.BYTES.llvm, b.add(line, offset)))
                four = v.emit_load(b, v.INT32, b.add(codes, i))
                x = b.bitcast(v.spread(b, v.I32, four), v.BYTES.llvm)
                for slot, weights in zip(sums, _operands(b, lines), strict=True):
                    b.store(plus(b, b.load(slot), [(weights, x)]), slot)
                cursor.ask()
            head = b.sub(v.emit_at(b, entries, begin, 4), v.number(4 * heads))
            scales = b.add(first, b.sext(v.emit_load(b, v.INT32, head), v.INT64))
            for i, (part, slot) in enumerate(zip(parts, sums, strict=True)):
                factor = v.WIDEN[scale].emit(b, v.behind(b, scales, 16 * _SIZE[scale] * i))
                value = b.load(slot)
                if i >= 4 and _SHIFTED:
                    value = b.ashr(value, v.constant(v.I32, _SHIFTED))
                value = b.sitofp(value, v.F32.llvm)
                b.store(v.emit_fma(b, value, factor, b.load(part)), part)
            for _ in range(heads // _QUAD):
                cursor.ask()
        factor = v.spread(b, v.F32, v.emit_load(b, v.FLOAT, x_scale))
        for i, part in enumerate(parts):
            at = v.behind(b, total, 64 * i)
            sum_of = v.emit_fma(b, b.load(part), factor, v.emit_load(b, v.F32.llvm, at))
            v.emit_store(b, sum_of, at)
        cursor.save()

    return chunk


_call_skip = v.caller(10)


@cache
def skip_of(scale: str) -> Kernel:
    """Return the kernel that multiplies a panel, by type of scale."""
    chunk = _chunk_of(scale)

    def product(panel, blocks, count, per_group, entries, codes, chunks, x_scale, totals, state):
        last = v.read_i64(state + 24)
        block = 0
        while block < count:  # a range of variable steps might raise
            few = min(per_group, count - block)
            for place in range(chunks):
                here, out, width = (
                    blocks + _BLOCK * block,
                    totals + 4 * CHUNK * place,
                    LINE * chunks,
                )
                args = panel, here, few, entries, codes, place, width, x_scale, out, state, last
                chunk(*args)
            x_scale += 4
            block += few

    return Kernel(product, name=f"row_skip.{scale}")


@device
def _list(a, blocks, entries, codes):
    """List the live columns, block by block, and return how many entries there are."""
    row_bytes, n = a.chunks * LINE, 0
    for block in range(a.blocks):
        first, column = block * a.record, block * a.block
        for i in range(a.heads):
            v.write_i32(entries + 4 * n, first + i * row_bytes)
            n += 1
        begin, total = n, 0
        first += a.heads * row_bytes
        for i in range(min(a.block, a.K - column)):
            code = v.read_i8(a.x + column + i)
            v.write_i32(entries + 4 * n, first + i * row_bytes)
            v.write_u8(codes + n, code)
            n += code != 0
            total += code
        while n & 3:
            v.write_i32(entries + 4 * n, first)
            v.write_u8(codes + n, 0)
            n += 1
        here = blocks + _BLOCK * block
        v.write_i32(here, begin)
        v.write_i32(here + 4, n)
        v.write_i32(here + 8, -8 * total)
    return n


@executes("skip_linear", Skipped)
def skip_columns(a, rank, size, scratch):
    """Multiply what few columns take; each thread has a range of panels or tiles."""
    if a.M > 1:
        first, last = share((a.N + 15) >> 4, rank, size)
        multiply_tiles(a, scratch, first, last, expect, write_rows)
        return
    first, last = share(a.panels, rank, size)
    if first == last:
        return
    wide = a.chunks * CHUNK
    state = scratch + _STATE
    totals = state + 64
    blocks = totals + 4 * wide
    entries = blocks + _BLOCK * a.blocks
    codes = entries + 4 * a.longest
    panel_bytes = a.blocks * a.record
    if not is_filled(a.rec, a.ctl, scratch, -1):
        n = _list(a, blocks, entries, codes)
        v.write_i64(state + 16, n)
        for i in range(min(a.lead, n)):  # the next panel's
            v.write_i32(entries + 4 * (n + i), v.read_i32(entries + 4 * i) + panel_bytes)
    n = v.read_i64(state + 16)
    lead = min(a.lead, n)
    for i in range(lead):
        at = a.rows + first * panel_bytes + v.read_i32(entries + 4 * i)
        for line in range(a.chunks):
            v.prefetch(at + LINE * line)
    for panel in range(first, last):
        for i in range(0, wide, 16):
            v.store_f32(totals + 4 * i, v.zero())
        end = n + lead if panel + 1 < last else n
        v.write_i64(state, entries + 4 * min(lead, end - 4))
        v.write_i64(state + 8, 0)
        v.write_i64(state + 24, entries + 4 * (end - 4))
        at, per_group = a.rows + panel * panel_bytes, _GROUP // a.block
        args = at, blocks, a.blocks, per_group, entries, codes, a.chunks, a.x_scale, totals, state
        _call_skip(a.skip, *args)
        row = panel * wide
        for i in range(0, min(wide, a.N - row), 16):
            write_rows(a, totals + 4 * i, 0, 1, row + i)


def by_column(call: BoundCall) -> list[Launch]:
    """Return what multiplies by int4 weights, some of whose columns are not read."""
    tensor = call.tensor("w")
    if not skips_columns(tensor.format):
        raise UnsupportedOp(
            f"skip_linear: no columns of {tensor.format.name} can be skipped; expected symmetric "
            "int4 with a scale for 32, 64 or 128 columns"
        )
    if int(call.attr("group")) != _GROUP:
        raise ShapeError(f"skip_linear: {call.attr('group')} columns per scale; expected {_GROUP}")
    dense, tiles = tiled(call, "K", call.array("x").shape[0])
    rows = rows_of(tensor)
    heads = 2 * _SIZE[rows.scale]
    lead = _GROUP + heads * (_GROUP // rows.block)
    longest = rows.blocks * (heads + rows.block) + lead
    own = Skipped(
        *dense,
        skip=skip_of(rows.scale),  # type: ignore[arg-type]
        rows=int(rows.data.ctypes.data),
        record=rows.record,
        block=rows.block,
        blocks=rows.blocks,
        chunks=rows.chunks,
        panels=rows.panels,
        heads=heads,
        lead=lead,
        longest=longest,
    )
    few = _STATE + 64 + 4 * rows.chunks * CHUNK + _BLOCK * rows.blocks + _ENTRY * longest + 64
    shares = SHARES if tiles.data.nbytes >= 1 << 17 else 1
    return [call.launch(skip_columns, own, max(few, panels_room(dense)), shares)]


@device
def _below(x, k, limit):
    """Return how many magnitudes have bits below a limit."""
    found, bound, one = v.izero(), v.isplat(limit), v.isplat(1)
    for i in range(0, k, 16):
        n = min(16, k - i)
        bits = v.bits_i32(v.absolute(v.load_f32_n(x + 4 * i, n)))
        found = v.iadd(found, v.iselect(v.ilt(bits, bound), one, v.izero()))
    return v.ihsum(found) - (-(-k // 16) * 16 - k) * (limit > 0)


@device
def _kept(x, k, most, least):
    """Return how many channels of a token are kept."""
    total, squares = v.zero(), v.zero()
    for i in range(0, k, 16):
        size = v.absolute(v.load_f32_n(x + 4 * i, min(16, k - i)))
        total, squares = v.add(total, size), v.add(squares, v.mul(size, size))
    sum_of = v.hsum(total)
    width = np.float32(k)
    bottom = width * v.hsum(squares)
    even = np.float32(1)
    if bottom > np.float32(0):
        even = sum_of * sum_of / bottom
    if not even <= np.float32(1):
        even = np.float32(1)
    wanted = (least + (most - least) * even) * width
    count = int(wanted)
    if np.float32(count) < wanted:
        count += 1
    return max(1, min(count, k))


@device
def _limit(x, k, count):
    limit = 0
    for place in range(30, -1, -1):
        higher = limit + (1 << place)
        if k - _below(x, k, higher) >= count:
            limit = higher
    return limit


class Drop(NamedTuple):
    """Nothing besides the contract."""

    given: int


@executes("drop_small", Drop)
def drop_small(a, rank, size, scratch):
    """Copy a token but for what is small; each thread has a range of tokens."""
    first, last = share(a.M, rank, size)
    k = a.K
    for t in range(first, last):
        x, y = a.x + 4 * t * k, a.y + 4 * t * k
        if a.given:
            bound = v.splat(v.read_f32(a.threshold))
            for i in range(0, k, 16):
                n = min(16, k - i)
                values = v.load_f32_n(x + 4 * i, n)
                kept = v.select(v.lt(v.absolute(values), bound), v.zero(), values)
                v.store_f32_n(y + 4 * i, kept, n)
        else:
            low = v.isplat(_limit(x, k, _kept(x, k, a.most, a.least)))
            for i in range(0, k, 16):
                n = min(16, k - i)
                values = v.load_f32_n(x + 4 * i, n)
                small = v.ilt(v.bits_i32(v.absolute(values)), low)
                v.store_f32_n(y + 4 * i, v.select(small, v.zero(), values), n)


def lower_drop_small(call: BoundCall) -> list[Launch]:
    """Return the launch of a call of `drop_small`."""
    return [call.launch(drop_small, Drop(int(call.has("threshold"))))]
