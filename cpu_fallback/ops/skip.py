"""Products of one token that do not read the weights of channels whose codes are zero.

The sums are those of the tiles: int32 over a block of weights, exact and so free of any order, then
scaled and added by the same fmas in the same order. What a zero adds to them is nothing, so both
kernels give the same bits. Two tokens have too few zeros in common: they take the tiles, as more
tokens do, and as one does whose zeros are too few to pay.

A thread lists the live columns of all blocks once for a product. Random rows are nothing that a
core's own prefetcher foresees, so with every four columns that are multiplied, four of the list are
asked for, one line of each, a group of columns further on.
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
from cpu_fallback.ops.epilogue import write_rows
from cpu_fallback.ops.linear import SHARES, Tiled, is_filled, multiply_tiles, panels_room, tiled
from cpu_fallback.team.tape import Launch
from cpu_fallback.tiles.columns import columns_of, interleaved, packed
from cpu_fallback.tiles.layout import LINE
from cpu_fallback.tiles.multiply import plus
from cpu_fallback.tiles.operands import bits

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
_OF_COLUMNS = ("record", "block", "blocks", "chunks", "wide", "panels")
Skipped = NamedTuple(  # a weight in tiles, and by input channel
    "Skipped", [*Tiled.__annotations__.items(), ("factor", float), *((name, int) for name in _OWN)]
)


_SHIFTED = {2: 4, 4: 2} if CURRENT.vnni else {2: 0, 4: 0}
"""Codes of a byte -> by how many bits the sums of each of them are too large."""
_WINDOW = 64  # Columns whose lines stay in the first cache while all their chunks are multiplied


def _operand(b: Any, mixed: list[Any], per: int, i: int) -> Any:
    """Emit the i-th operand of four columns of a chunk: 16 channels times 4 columns."""
    width, (p, place) = 8 // per, divmod(i, 4)
    mask = (1 << width) - 1
    if CURRENT.vnni:
        return b.and_(mixed[place], v.constant(v.BYTES, mask << width * p))
    return bits(b, mixed[place], width * p, mask)


class _Cursor:
    """What of the list is asked for next: a line of four rows, then their next one."""

    def __init__(self, b: Any, state: Any, panel: Any, width: Any, last: Any) -> None:
        self._b, self._places, self._panel = b, (state, v.behind(b, state, 8)), panel
        self._width, self._last = width, last
        self._entry, self._line = v.variables(b, (v.emit_load(b, v.INT64, a) for a in self._places))

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


def _emit_columns(
    b: Any, cursor: _Cursor, line: Any, live: tuple[Any, Any, Any, Any], sums: list[Any], per: int
) -> None:
    """Emit the addition of a chunk of some columns of the list; `line` is that of the panel."""
    (entries, codes, begin, end), quads = live, per // 2
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
            fours.append((interleaved(b, lines), x))
        for p, slot in enumerate(sums):
            pairs = [(_operand(b, mixed, per, p), x) for mixed, x in fours]
            b.store(plus(b, b.load(slot), pairs), slot)
        for _ in range(quads):
            cursor.ask()


def _chunk_of(scale: str) -> Any:
    """Return the intrinsic that multiplies a chunk by one group of columns of a token."""
    heads, shifts = 2 * _SIZE[scale], [_SHIFTED[2] * (i // 4) for i in range(8)]

    @v.op(void, *[i64] * 11)
    def chunk(b, panel, blocks, count, entries, codes, place, width, x_scale, total, state, last):
        """Add to totals the products with `count` blocks of columns, times their scale."""
        cursor = _Cursor(b, state, panel, width, last)
        parts = v.variables(b, [v.constant(v.F32, 0.0)] * len(shifts))
        line = v.emit_at(b, panel, place, LINE)
        first = v.emit_at(b, panel, place, 2 * LINE * _SIZE[scale])
        with cgutils.for_range(b, count) as outer:
            here = v.emit_at(b, blocks, outer.index, _BLOCK)
            begin, end, start = (
                v.emit_load(b, v.INT32, v.behind(b, here, 4 * i)) for i in range(3)
            )
            start = v.spread(b, v.I32, start)
            sums = v.variables(b, (b.shl(start, v.constant(v.I32, shift)) for shift in shifts))
            begin, end = b.sext(begin, v.INT64), b.sext(end, v.INT64)
            _emit_columns(b, cursor, line, (entries, codes, begin, end), sums, 2)
            head = b.sub(v.emit_at(b, entries, begin, 4), v.number(4 * heads))
            scales = b.add(first, b.sext(v.emit_load(b, v.INT32, head), v.INT64))
            for i, (part, slot, shift) in enumerate(zip(parts, sums, shifts, strict=True)):
                factor = v.WIDEN[scale].emit(b, v.behind(b, scales, 16 * _SIZE[scale] * i))
                value = b.ashr(b.load(slot), v.constant(v.I32, shift))
                value = b.sitofp(value, v.F32.llvm)
                b.store(v.emit_fma(b, value, factor, b.load(part)), part)
            for _ in range(heads // _QUAD):
                cursor.ask()
        factor = v.emit_everywhere(b, v.F32, x_scale)
        for i, part in enumerate(parts):
            at = v.behind(b, total, 64 * i)
            sum_of = v.emit_fma(b, b.load(part), factor, v.emit_load(b, v.F32.llvm, at))
            v.emit_store(b, sum_of, at)
        cursor.save()

    return chunk


@v.op(void, *[i64] * 10)
def _window(b, panel, begin, end, entries, codes, place, width, total, state, last):
    """Add to totals, int32, the products of a chunk with some columns of ternary digits."""
    cursor = _Cursor(b, state, panel, width, last)
    # More than there are registers for: they stay in memory.
    at = [v.behind(b, total, 64 * i) for i in range(16)]
    sums = [b.inttoptr(slot, v.I32.llvm.as_pointer()) for slot in at]
    line = v.emit_at(b, panel, place, LINE)
    _emit_columns(b, cursor, line, (entries, codes, begin, end), sums, 4)
    cursor.save()


_call_skip = v.caller(10)


@cache
def skip_of(scale: str) -> Kernel:
    """Return the kernel that multiplies a panel, by type of scale; "" is that of ternary digits."""
    chunk = _chunk_of(scale) if scale else None
    shifted, channels = _SHIFTED[4], 4 * LINE

    def grouped(panel, blocks, count, per_group, entries, codes, chunks, x_scale, totals, state):
        last = v.read_i64(state + 24)
        block = 0
        while block < count:  # a range of variable steps might raise
            few = min(per_group, count - block)
            for place in range(chunks):
                here, out = blocks + _BLOCK * block, totals + 8 * LINE * place
                width = LINE * chunks
                args = panel, here, few, entries, codes, place, width, x_scale, out, state, last
                chunk(*args)
            x_scale += 4
            block += few

    def whole(panel, blocks, count, per_group, entries, codes, chunks, x_scale, totals, state):
        last, width = v.read_i64(state + 24), LINE * chunks
        begin, end = v.read_i32(blocks), v.read_i32(blocks + 4)
        for i in range(4 * width // 16):
            start = v.read_i32(blocks + 8) << (shifted * (i >> 2 & 3))
            v.store_i32(totals + 64 * i, v.isplat(start))
        while begin < end:
            stop = min(begin + _WINDOW, end)
            for place in range(chunks):
                out = totals + 4 * channels * place
                _window(panel, begin, stop, entries, codes, place, width, out, state, last)
            begin = stop
        factor = v.splat(v.read_f32(x_scale))
        for i in range(4 * width // 16):
            total = v.sra(v.load_i32(totals + 64 * i), shifted * (i >> 2 & 3))
            v.store_f32(totals + 64 * i, v.mul(v.to_f32(total), factor))

    return Kernel(grouped if scale else whole, name=f"skip.{scale or 'ternary'}")


@device
def _pays(a):
    """Return whether a step skips: it has one token, and few codes that are not zero."""
    if a.M > 1:
        return False
    if a.most >= a.K:
        return True
    dead = np.int64(0)
    for i in range(0, a.K, 16):
        dead += v.popcount(v.mask_bits(v.ieq(v.load_u8_up_to(a.x + i, a.K - i), v.izero())))
    return (a.K + 15 & -16) - dead <= a.most


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
        multiply_tiles(a, scratch, first, last)
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
        skip=skip_of(columns.scale),  # type: ignore[arg-type]
        columns=int(panels.ctypes.data),
        heads=heads,
        run=_QUAD * columns.per // 2,
        zero=1 if ternary else 8,
        most=k // 2 if ternary else k,
        lead=lead,
        longest=longest,
        **{name: getattr(columns, name) for name in _OF_COLUMNS},
    )
    few = _STATE + 64 + 4 * columns.wide + _BLOCK * columns.blocks + _ENTRY * longest + 64
    shares = SHARES if tiles.data.nbytes >= 1 << 17 else 1
    return [call.launch(skip_columns, own, max(few, panels_room(dense)), shares)]


LOWER = {"skip_linear": _skip_linear}
