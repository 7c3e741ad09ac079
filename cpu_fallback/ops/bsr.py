"""Block-sparse rows: products over the stored blocks only.

Threads divide the stored blocks, not the rows: a unit is up to TALL rows of a block row, and weighs
as much as the blocks it has. Tokens go in chunks whose activations stay in cache, so the blocks are
read once for up to CHUNK tokens.
"""

from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import Bsr
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.record import executes
from cpu_fallback.lanes.vector import LANES
from cpu_fallback.ops.bind import BoundCall
from cpu_fallback.ops.bsr_tiles import ACC, TILES, tile_of, totals
from cpu_fallback.ops.finish import activation_of, finish
from cpu_fallback.team.tape import Launch

TALL = 32  # Rows of a unit
CHUNK = 32  # Tokens for which the blocks are read once

# Bytes of blocks that one token's tiles read before the rows below them: near what was asked for.
_NEAR = 4096
_SUMS = ACC * (TALL + LANES)


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
def _clear(acc, count):
    for at in range(acc, acc + ACC * count, ACC):
        v.store_f32(at, v.zero())


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
            _clear(scratch, stored + LANES)
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
            for r in range(0, wanted, LANES):
                totals(scratch + ACC * r, scratch + _SUMS)
                _write(a, scratch + _SUMS, row + r, min(LANES, wanted - r), start, np.int64(1))
            return
        r = np.int64(0)
        while r < wanted:
            rows, t = np.int64(1), start
            if stored - r >= 4:
                rows = np.int64(4)
            w, s = codes + r * line, scales + 2 * r
            while t < stop:
                x, tokens = a.x + 4 * t * k, np.int64(1)
                _clear(scratch, LANES)
                args = w, block, line, s, step, columns, count, width, k, x, 4 * k, scratch
                if rows == 4 and stop - t >= 4:
                    tokens = np.int64(4)
                    tile4x4(*args)
                elif rows == 4 and stop - t >= 2:
                    tokens = np.int64(2)
                    tile4x2(*args)
                elif rows == 4:
                    tile4x1(*args)
                elif stop - t >= 4:
                    tokens = np.int64(4)
                    tile1x4(*args)
                else:
                    tile1x1(*args)
                totals(scratch, scratch + _SUMS)
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
