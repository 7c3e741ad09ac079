"""Products of one token that do not read the weights of channels whose codes are zero.

The sums are those of the tiles: int32 over a block of weights, exact and so free of any order, then
scaled and added by the same fmas in the same order. What a zero adds to them is nothing, so both
kernels give the same bits. Two tokens have too few zeros in common: they take the tiles, as more
tokens do, and as one does whose zeros are too few to pay.

A thread lists the live columns of all blocks once for a product. Random rows are nothing that a
core's own prefetcher foresees, so with every four columns that are multiplied, four of the list are
asked for, one line of each, a group of columns further on.

And `drop_small`, which makes such zeros.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from clocher_kernels.errors import ShapeError, UnsupportedOp
from clocher_kernels.formats import Ternary
from clocher_kernels.ops.skip import GROUP, skips_columns
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, cgutils, device, i64, void
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.ops.epilogue import expect, write_rows
from cpu_fallback.ops.linear import SHARES, Tiled, is_filled, multiply_tiles, panels_room, tiled
from cpu_fallback.team.tape import Launch
from cpu_fallback.tiles.byte_dots import bits
from cpu_fallback.tiles.columns import columns_of, interleaved, packed
from cpu_fallback.tiles.layout import LINE
from cpu_fallback.tiles.multiply import plus

_QUAD = 4
_STATE = 64
"""In the scratch, after what `is_filled` keeps: the cursor, how long the list is, the last quad of
it, the scale of a token with ternary weights."""
_BLOCK = 16
"""Bytes of what the scratch knows of a block: its first quad, its last one, the sums' start."""
_ENTRY = 5  # Bytes of a live column in the scratch: i32 place of it in a panel, i8 code
_SIZE = {"f32": 4, "f16": 2, "bf16": 2, "": 0}

_OWN = {
    "skip": "address of the kernel that multiplies a panel",
    "columns": "address of the panels (`tiles.columns`)",
    "record": "bytes of a block of a panel",
    "block": "columns of one",
    "blocks": "of a panel",
    "chunks": "of a panel",
    "wide": "output channels of a panel",
    "panels": "how many",
    "heads": "how many times as long as a column the scales of a block are",
    "run": "columns that are multiplied together",
    "zero": "code of zero",
    "most": "codes that may live where skipping pays",
    "lead": "entries of the list that are asked for ahead of use",
    "longest": "entries there are room for",
}
Skipped = NamedTuple(  # a weight in tiles, and by input channel
    "Skipped",
    [*Tiled.__annotations__.items(), ("factor", float), *((name, int) for name in _OWN)],
)


def _operands(b: Any, lines: list[Any], per: int) -> list[Any]:
    """Emit the operands of four columns of a chunk: 16 channels times 4 columns each.

    With VNNI they stay where they are in their bytes, and sums are too large by that.
    """
    width, mixed = 8 // per, interleaved(b, lines)
    mask = (1 << width) - 1
    if CURRENT.vnni:
        masks = [v.constant(v.BYTES, mask << width * p) for p in range(per)]
        return [b.and_(each, only) for only in masks for each in mixed]
    return [bits(b, each, width * p, mask) for p in range(per) for each in mixed]


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


def _chunk_of(scale: str, per: int) -> Any:
    """Return the intrinsic that multiplies a chunk by one group of columns of a token."""
    heads, quads = per * _SIZE[scale], per // 2
    shifts = [8 // per * (i // 4) if CURRENT.vnni else 0 for i in range(4 * per)]

    @v.op(void, *[i64] * 11)
    def chunk(b, panel, blocks, count, entries, codes, place, width, x_scale, total, state, last):
        """Add to totals the products with `count` blocks of columns, times their scale."""
        cursor = _Cursor(b, state, panel, width, last)
        parts = [cgutils.alloca_once(b, v.F32.llvm) for _ in shifts]
        sums = [cgutils.alloca_once(b, v.I32.llvm) for _ in shifts]
        for slot in parts:
            b.store(v.constant(v.F32, 0.0), slot)
        line = v.emit_at(b, panel, place, LINE)
        first = v.emit_at(b, panel, place, per * LINE * _SIZE[scale])
        with cgutils.for_range(b, count) as outer:
            here = v.emit_at(b, blocks, outer.index, _BLOCK)
            begin, end, start = (
                v.emit_load(b, v.INT32, v.behind(b, here, 4 * i)) for i in range(3)
            )
            start = v.spread(b, v.I32, start)
            for slot, shift in zip(sums, shifts, strict=True):
                b.store(b.shl(start, v.constant(v.I32, shift)), slot)
            begin, end = b.sext(begin, v.INT64), b.sext(end, v.INT64)
            step = v.number(_QUAD * quads)
            with cgutils.for_range_slice(b, begin, end, step, inc=True) as (i, _):
                fours = []
                for q in range(quads):
                    at = v.behind(b, v.emit_at(b, entries, i, 4), 4 * _QUAD * q)
                    lines = []
                    for r in range(_QUAD):
                        offset = b.sext(v.emit_load(b, v.INT32, v.behind(b, at, 4 * r)), v.INT64)
                        lines.append(v.emit_load(b, v.BYTES.llvm, b.add(line, offset)))
                    four = v.emit_load(b, v.INT32, v.behind(b, b.add(codes, i), _QUAD * q))
                    x = b.bitcast(v.spread(b, v.I32, four), v.BYTES.llvm)
                    fours.append([(weights, x) for weights in _operands(b, lines, per)])
                for slot, *pairs in zip(sums, *fours, strict=True):
                    b.store(plus(b, b.load(slot), pairs), slot)
                for _ in range(quads):
                    cursor.ask()
            head = b.sub(v.emit_at(b, entries, begin, 4), v.number(4 * heads))
            for i, (part, slot, shift) in enumerate(zip(parts, sums, shifts, strict=True)):
                value = b.load(slot)
                if shift:
                    value = b.ashr(value, v.constant(v.I32, shift))
                value = b.sitofp(value, v.F32.llvm)
                if scale:
                    scales = b.add(first, b.sext(v.emit_load(b, v.INT32, head), v.INT64))
                    at = v.behind(b, scales, 16 * _SIZE[scale] * i)
                    value = v.emit_fma(b, value, v.WIDEN[scale].emit(b, at), b.load(part))
                b.store(value, part)
            for _ in range(heads // _QUAD):
                cursor.ask()
        factor = v.spread(b, v.F32, v.emit_load(b, v.FLOAT, x_scale))
        for i, part in enumerate(parts):
            at, value = v.behind(b, total, 64 * i), b.load(part)
            if scale:
                value = v.emit_fma(b, value, factor, v.emit_load(b, v.F32.llvm, at))
            else:
                value = b.fmul(value, factor)
            v.emit_store(b, value, at)
        cursor.save()

    return chunk


_call_skip = v.caller(10)


@cache
def skip_of(scale: str, per: int) -> Kernel:
    """Return the kernel that multiplies a panel, by type of scale and codes of a byte."""
    chunk = _chunk_of(scale, per)
    channels = per * LINE

    def product(panel, blocks, count, per_group, entries, codes, chunks, x_scale, totals, state):
        last = v.read_i64(state + 24)
        block = 0
        while block < count:  # a range of variable steps might raise
            few = min(per_group, count - block)
            for place in range(chunks):
                here, out = blocks + _BLOCK * block, totals + 4 * channels * place
                width = LINE * chunks
                args = panel, here, few, entries, codes, place, width, x_scale, out, state, last
                chunk(*args)
            x_scale += 4
            block += few

    return Kernel(product, name=f"skip.{scale or 'ternary'}")


@device
def _pays(a):
    """Return whether a step skips: it has one token, and few codes that are not zero."""
    if a.M > 1:
        return False
    if a.most >= a.K:
        return True
    living, i = np.int64(0), np.int64(0)
    while i + 16 <= a.K:
        dead = v.mask_bits(v.ieq(v.load_i8(a.x + i), v.izero()))
        living += 16 - v.popcount(dead)
        i += 16
    while i < a.K:
        living += v.read_i8(a.x + i) != 0
        i += 1
    return living <= a.most


@device
def _list(a, blocks, entries, codes):
    """List the live columns, block by block, and return how many entries there are."""
    column_bytes, n = a.chunks * LINE, 0
    for block in range(a.blocks):
        first, column = block * a.record, block * a.block
        for i in range(a.heads):
            v.write_i32(entries + 4 * n, first + i * column_bytes)
            n += 1
        begin, total = n, 0
        first += a.heads * column_bytes
        for i in range(min(a.block, a.K - column)):
            code = v.read_i8(a.x + column + i)
            v.write_i32(entries + 4 * n, first + i * column_bytes)
            v.write_u8(codes + n, code)
            n += code != 0
            total += code
        while (n - begin) & (a.run - 1):
            v.write_i32(entries + 4 * n, first)
            v.write_u8(codes + n, 0)
            n += 1
        here = blocks + _BLOCK * block
        v.write_i32(here, begin)
        v.write_i32(here + 4, n)
        v.write_i32(here + 8, -a.zero * total)
    return n


@executes("skip_linear", Skipped)
def skip_columns(a, rank, size, scratch):
    """Multiply what few columns take; each thread has a range of panels or tiles."""
    if not _pays(a):
        first, last = share((a.N + 15) >> 4, rank, size)
        multiply_tiles(a, scratch, first, last, expect, write_rows)
        return
    first, last = share(a.panels, rank, size)
    if first == last:
        return
    state = scratch + _STATE
    totals = state + 64
    blocks = totals + 4 * a.wide
    entries = blocks + _BLOCK * a.blocks
    codes = entries + 4 * a.longest
    panel_bytes = a.blocks * a.record
    if not is_filled(a.rec, a.ctl, scratch, -1):
        n = _list(a, blocks, entries, codes)
        v.write_i64(state + 16, n)
        v.write_f32(state + 32, v.read_f32(a.x_scale) * a.factor)
        for i in range(min(a.lead, n)):  # the next panel's
            v.write_i32(entries + 4 * (n + i), v.read_i32(entries + 4 * i) + panel_bytes)
    n, x_scale, per_group = v.read_i64(state + 16), state + 32, np.int64(1)
    if a.heads:
        x_scale, per_group = a.x_scale, GROUP // a.block
    lead = min(a.lead, n)
    for i in range(lead):
        at = a.columns + first * panel_bytes + v.read_i32(entries + 4 * i)
        for line in range(a.chunks):
            v.prefetch(at + LINE * line)
    for panel in range(first, last):
        for i in range(0, a.wide, 16):
            v.store_f32(totals + 4 * i, v.zero())
        end = n + lead if panel + 1 < last else n
        v.write_i64(state, entries + 4 * max(0, min(lead, end - 4)))
        v.write_i64(state + 8, 0)
        v.write_i64(state + 24, entries + 4 * max(0, end - 4))
        at = a.columns + panel * panel_bytes
        args = at, blocks, a.blocks, per_group, entries, codes, a.chunks, x_scale, totals, state
        _call_skip(a.skip, *args)
        row = panel * a.wide
        for i in range(0, min(a.wide, a.N - row), 16):
            write_rows(a, totals + 4 * i, 0, 1, row + i)


def _skip_linear(call: BoundCall) -> list[Launch]:
    tensor = call.tensor("w")
    if not skips_columns(tensor.format):
        raise UnsupportedOp(
            f"skip_linear: no columns of {tensor.format.name} can be skipped; expected ternary "
            "weights, or symmetric int4 with a scale for 32, 64 or 128 columns"
        )
    ternary, group = isinstance(tensor.format, Ternary), int(call.attr("group"))
    expected = 0 if ternary else GROUP
    if group != expected:
        raise ShapeError(f"skip_linear: {group} columns per scale; expected {expected}")
    # Stored pages go with the tiles: columns are packed first.
    panels, columns = packed(tensor), columns_of(tensor)
    dense, tiles = tiled(call, "K", call.array("x").shape[0])
    heads, k = columns.per * _SIZE[columns.scale], call.dim("K")
    lead = GROUP + heads * (GROUP // columns.block)
    longest = columns.blocks * (heads + columns.block) + lead
    own = Skipped(
        *dense,
        factor=float(tensor.format.multiplier(tensor.planes)) if ternary else 1.0,
        skip=skip_of(columns.scale, columns.per),  # type: ignore[arg-type]
        columns=int(panels.ctypes.data),
        record=columns.record,
        block=columns.block,
        blocks=columns.blocks,
        chunks=columns.chunks,
        wide=columns.wide,
        panels=columns.panels,
        heads=heads,
        run=_QUAD * columns.per // 2,
        zero=1 if ternary else 8,
        most=k // 2 if ternary else k,
        lead=lead,
        longest=longest,
    )
    few = _STATE + 64 + 4 * columns.wide + _BLOCK * columns.blocks + _ENTRY * longest + 64
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


@executes("drop_small")
def drop_small(a, rank, size, scratch):
    """Copy a token but for what is small; each thread has a range of tokens."""
    first, last = share(a.M, rank, size)
    k = a.K
    for t in range(first, last):
        x, y = a.x + 4 * t * k, a.y + 4 * t * k
        if a.threshold:
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


LOWER = {"skip_linear": _skip_linear, "drop_small": lambda call: [call.launch(drop_small)]}
