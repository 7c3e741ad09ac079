"""Block-sparse rows: products over the stored blocks only.

Threads divide the stored blocks, not the rows: a unit is up to TALL rows of a block row, and weighs
as much as the blocks it has. Tokens go in chunks whose activations stay in cache, so the blocks are
read once for up to CHUNK tokens.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats.bsr import Bsr
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, device, i64, void
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.bind import BoundCall
from cpu_fallback.ops.epilogue import activation_of, finish
from cpu_fallback.ops.product import clear, totals
from cpu_fallback.team.tape import Launch

AHEAD = 6144
"""Bytes of blocks that are asked for in advance: no multiple of 4096, or lines would collide."""
ACC = 64  # Bytes of an accumulator


# Accumulators that are in registers together: 32, 16 and 16 registers of 16, 8 and 4 lanes.
_MOST = CURRENT.registers // 2


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The stored blocks of a block row, from some row of theirs on; bytes and addresses."""

    codes: Any  # of that row in the first block
    block: Any  # from one block to the next
    row: Any  # from one row to the next
    scales: Any  # of that row in the first block; None without
    scale_block: Any  # from the scales of one block to those of the next
    columns: Any  # their block columns, int32
    count: Any  # how many
    width: Any  # columns of a block
    k: Any  # columns of the matrix


def _emit_tile(
    b: Any, kind: v.Widen, blocks: _Blocks, rows: range, xs: list[Any], places: list[Any]
) -> None:
    """Emit the product of some rows and tokens, added to the accumulators at some places."""
    sums = parts = v.variables(b, (v.emit_load(b, v.F32.llvm, place) for place in places))
    with v.loop(b, 0, blocks.count, 1) as (index, _):
        place = v.emit_load(b, v.INT32, v.emit_at(b, blocks.columns, index, 4))
        column = b.mul(b.sext(place, v.INT64), blocks.width)
        left = b.sub(blocks.k, column)
        width = b.select(b.icmp_signed("<", left, blocks.width), left, blocks.width)
        whole = b.and_(width, v.number(-v.LANES))
        block = v.emit_at(b, blocks.codes, index, blocks.block)
        lines = [v.emit_at(b, block, blocks.row, r) for r in rows]
        tokens = [v.emit_at(b, x, column, 4) for x in xs]
        if blocks.scales:
            parts = v.variables(b, [v.constant(v.F32, 0.0)] * len(sums))

        def step(c: Any, vectors: int, count: Any) -> None:
            """Emit some vectors of columns, row by row: the order in which they lie."""

            def load(kind: v.Widen, address: Any) -> Any:
                return kind.emit(b, address) if count is None else kind.emit_n(b, address, count)

            to = [b.mul(v.behind(b, c, v.LANES * part), v.number(4)) for part in range(vectors)]
            x = [[load(v.WIDEN["f32"], b.add(token, at)) for at in to] for token in tokens]
            at = b.lshr(b.mul(c, v.number(kind.bits)), v.number(3))
            for r, line in enumerate(lines):
                for part in range(vectors):
                    place = b.add(line, v.behind(b, at, kind.nbytes * part))
                    if count is None and len(xs) == 1:
                        v.emit_prefetch(b, v.behind(b, place, AHEAD), level=1)
                    w = load(kind, place)
                    for t in range(len(xs)):
                        slot = parts[r * len(xs) + t]
                        b.store(v.emit_fma(b, w, x[t][part], b.load(slot)), slot)

        pairs = b.and_(width, v.number(-2 * v.LANES))
        with v.loop(b, 0, pairs, 2 * v.LANES) as (c, _):
            step(c, 2, None)
        with b.if_then(b.icmp_signed("<", pairs, whole)):
            step(pairs, 1, None)
        tail = b.sub(width, whole)
        with b.if_then(b.icmp_signed(">", tail, v.number(0))):
            step(whole, 1, tail)
        if blocks.scales:
            scales = v.emit_at(b, blocks.scales, index, blocks.scale_block)
            for r, row in enumerate(rows):
                scale = v.emit_load(b, v.INT16, v.behind(b, scales, 2 * row))
                bits = b.shl(b.zext(scale, v.INT32), ir.Constant(v.INT32, 16))
                scale = v.spread(b, v.F32, b.bitcast(bits, v.FLOAT))
                for t in range(len(xs)):
                    own = r * len(xs) + t
                    total = v.emit_fma(b, b.load(parts[own]), scale, b.load(sums[own]))
                    b.store(total, sums[own])
    for slot, place in zip(sums, places, strict=True):
        v.emit_store(b, b.load(slot), place)


def tile_of(name: str, scaled: bool, rows: int, tokens: int) -> Any:
    """Make the operation that adds rows times tokens to accumulators [rows, tokens]."""
    kind = v.WIDEN[name]
    wide = min(tokens, 4 if CURRENT.avx512 else 2)
    tall = min(rows, _MOST // wide)

    @v.op(void, *[i64] * 12)
    def tile(b, codes, block, row, scales, step, columns, count, width, k, x, pitch, acc):
        blocks = _Blocks(
            codes, block, row, scales if scaled else None, step, columns, count, width, k
        )
        xs = [v.emit_at(b, x, pitch, t) for t in range(tokens)]
        for r in range(0, rows, tall):
            for t in range(0, tokens, wide):
                some = product(range(r, r + tall), range(t, t + wide))
                places = [v.behind(b, acc, ACC * (i * tokens + j)) for i, j in some]
                _emit_tile(b, kind, blocks, range(r, r + tall), xs[t : t + wide], places)

    return tile


TILES = {
    "f32": ("f32", False),
    "bf16": ("bf16", False),
    "f16": ("f16", False),
    "int8": ("i8", True),
    "int4": ("i4", True),
}
"""Inner format of the blocks -> kind of number, and whether there are scales."""


TALL = 32  # Rows of a unit
CHUNK = 32  # Tokens for which the blocks are read once

# Bytes of blocks that one token's tiles read before the rows below them: near what was asked for.
_NEAR = 4096
_SUMS = ACC * (TALL + v.LANES)


class Blocks(NamedTuple):
    """The weight of a block-sparse product; addresses and bytes."""

    height: int  # rows of a block
    width: int  # columns of a block
    block_rows: int  # rows of blocks
    row_ptr: int  # where the blocks of each block row begin, int32
    col_idx: int  # the block column of each block, int32
    codes: int  # the blocks, one after the other
    scales: int  # bf16, one for each row of each block; 0 if there are none
    line: int  # from one row of a block to the next
    activate: int  # address of the activation of the sums; 0 for none


# Write the sums of 16 accumulators.
_total = device(lambda acc, out: v.store_f32(out, totals(acc, acc + 8 * ACC)))


@device
def _first_unit(a, rank, size):
    """Return the first unit of a thread: units before it have rank / size of all blocks."""
    groups, row_ptr = -(-a.height // TALL), a.row_ptr
    units = a.block_rows * groups
    all_blocks = v.read_i32(row_ptr + 4 * a.block_rows)
    target = (all_blocks * groups + units) * rank // size
    low, high = np.int64(0), units
    while low < high:
        unit = (low + high) >> 1
        row = unit // groups
        begin = v.read_i32(row_ptr + 4 * row)
        count = v.read_i32(row_ptr + 4 * min(row + 1, a.block_rows)) - begin
        if begin * groups + unit % groups * count + unit < target:
            low = unit + 1
        else:
            high = unit
    return low


@device
def _write(a, sums, row, rows, token, tokens):
    """Write the sums [rows, tokens], at most 16 of them."""
    turned = sums + ACC
    if tokens == 1:
        turned = sums
    else:
        for t in range(tokens):
            for r in range(rows):
                v.write_f32(turned + 4 * (t * rows + r), v.read_f32(sums + 4 * (r * tokens + t)))
    finish(a, turned, rows, token, tokens, row, rows)


def _kernel(name: str, kind: str, scaled: bool) -> Kernel:
    tile16x1, tile4x1, tile1x1, tile4x4, tile4x2, tile1x4 = (
        tile_of(kind, scaled, *size) for size in ((16, 1), (4, 1), (1, 1), (4, 4), (4, 2), (1, 4))
    )

    @device
    def rows_of_unit(a, unit, start, stop, scratch):
        height, width, k, line = a.height, a.width, a.K, a.line
        groups = -(-height // TALL)
        block_row, top = unit // groups, unit % groups * TALL
        row = block_row * height + top
        stored = min(TALL, height - top)
        wanted = min(stored, a.N - row)
        begin = v.read_i32(a.row_ptr + 4 * block_row)
        count = v.read_i32(a.row_ptr + 4 * block_row + 4) - begin
        columns = a.col_idx + 4 * begin
        codes = a.codes + (begin * height + top) * line
        scales = a.scales + 2 * (begin * height + top)
        block, step = height * line, 2 * height
        if stop - start == 1:
            x = a.x + 4 * start * k
            clear(scratch, stored + v.LANES)
            some = max(1, _NEAR // block)
            for first in range(0, count, some):
                few, own = min(some, count - first), columns + 4 * first
                above = codes + first * block
                scale, r = scales + first * step, np.int64(0)
                while r < stored:
                    w, s, acc = above + r * line, scale + 2 * r, scratch + ACC * r
                    args = w, block, line, s, step, own, few, width, k, x, 4 * k, acc
                    if stored - r >= 16:
                        tile16x1(*args)
                        r += 16
                    elif stored - r >= 4:
                        tile4x1(*args)
                        r += 4
                    else:
                        tile1x1(*args)
                        r += 1
            for r in range(0, wanted, v.LANES):
                _total(scratch + ACC * r, scratch + _SUMS)
                _write(a, scratch + _SUMS, row + r, min(v.LANES, wanted - r), start, np.int64(1))
            return
        r = np.int64(0)
        while r < wanted:
            rows, t = 4 if stored - r >= 4 else 1, start
            w, s = codes + r * line, scales + 2 * r
            while t < stop:
                x, left = a.x + 4 * t * k, stop - t
                tokens = 4 if left >= 4 else 2 if left >= 2 and rows == 4 else 1
                clear(scratch, v.LANES)
                args = w, block, line, s, step, columns, count, width, k, x, 4 * k, scratch
                if rows == 4 and tokens == 4:
                    tile4x4(*args)
                elif rows == 4 and tokens == 2:
                    tile4x2(*args)
                elif rows == 4:
                    tile4x1(*args)
                elif tokens == 4:
                    tile1x4(*args)
                else:
                    tile1x1(*args)
                _total(scratch, scratch + _SUMS)
                _write(a, scratch + _SUMS, row + r, min(rows, wanted - r), t, tokens)
                t += tokens
            r += rows

    def bsr_linear(a, rank, size, scratch):
        first, last = _first_unit(a, rank, size), _first_unit(a, rank + 1, size)
        for start in range(0, a.M, CHUNK):
            for unit in range(first, last):
                rows_of_unit(a, unit, start, min(start + CHUNK, a.M), scratch)

    bsr_linear.__name__ = f"bsr_linear_{name}"
    return executes("bsr_linear", Blocks)(bsr_linear)


_KERNELS = {name: _kernel(name, *kind) for name, kind in TILES.items()}


def _bsr_linear(call: BoundCall) -> list[Launch]:
    weight = call.tensor("w")
    if not isinstance(weight.format, Bsr):
        raise UnsupportedOp(
            f"bsr_linear: the weight's format is {weight.format.name}; expected block-sparse rows, "
            "bsr_<R>x<C>_<dtype>"
        )
    # The kernel follows these indices without looking.
    weight.check()
    height, width = weight.format.block
    planes = weight.planes
    codes = planes["codes" if "codes" in planes else "values"]
    blocks = Blocks(
        height=height,
        width=width,
        block_rows=len(planes["row_ptr"]) - 1,
        row_ptr=int(planes["row_ptr"].ctypes.data),
        col_idx=int(planes["col_idx"].ctypes.data),
        codes=int(codes.ctypes.data),
        scales=int(planes["scales"].ctypes.data) if "scales" in planes else 0,
        line=codes.shape[-1] * codes.itemsize,
        activate=activation_of(call),  # type: ignore[arg-type]
    )
    return [call.launch(_KERNELS[weight.format.inner], blocks, _SUMS + 2 * ACC)]


LOWER = {"bsr_linear": _bsr_linear}
