"""Block-sparse rows: products over the stored blocks only.

Threads divide the stored blocks, not the rows: a unit is up to TALL rows of a block row, and weighs
as much as the blocks it has. Tokens go in chunks whose activations stay in cache, so the blocks are
read once for up to CHUNK tokens.
"""

import numpy as np

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import Bsr
from cpu_fallback.bind import BoundCall, counted
from cpu_fallback.bsr_tiles import ACC, TILES, Tiles, totals
from cpu_fallback.jit import Kernel, device
from cpu_fallback.memory import (
    field,
    load_f32,
    load_f32_n,
    read_f32,
    read_i32,
    store_f32,
    store_f32_n,
    write_f32,
)
from cpu_fallback.simd import add, zero
from cpu_fallback.tape import Launch
from cpu_fallback.vector import LANES

TALL = 32
"""Rows of a unit."""
CHUNK = 32
"""Tokens for which the blocks are read once."""

# Bytes of blocks that one token's tiles read before the rows below them: near what was asked for.
_NEAR = 4096
_SUMS = ACC * (TALL + LANES)

(
    _M,
    _N,
    _K,
    _HEIGHT,
    _WIDTH,
    _BLOCK_ROWS,
    _X,
    _Y,
    _BIAS,
    _RESIDUAL,
    _ROW_PTR,
    _COL_IDX,
    _CODES,
    _SCALES,
    _ROW_BYTES,
) = range(15)


@device
def _first_unit(rec, rank, size):
    """Return the first unit of a thread: units before it have rank / size of all blocks."""
    groups, row_ptr = -(-field(rec, _HEIGHT) // TALL), field(rec, _ROW_PTR)
    units = field(rec, _BLOCK_ROWS) * groups
    all_blocks = read_i32(row_ptr + 4 * field(rec, _BLOCK_ROWS))
    target = (all_blocks * groups + units) * rank // size
    low, high = np.int64(0), units
    while low < high:
        unit = (low + high) >> 1
        row = unit // groups
        begin = read_i32(row_ptr + 4 * row)
        count = read_i32(row_ptr + 4 * min(row + 1, field(rec, _BLOCK_ROWS))) - begin
        if begin * groups + unit % groups * count + unit < target:
            low = unit + 1
        else:
            high = unit
    return low


@device
def _clear(acc, count):
    for at in range(acc, acc + ACC * count, ACC):
        store_f32(at, zero())


@device
def _write(rec, sums, row, rows, token, tokens):
    """Write the sums [.., tokens] of `rows` rows, with bias and residual."""
    n, y, bias, residual = (
        field(rec, _N),
        field(rec, _Y),
        field(rec, _BIAS),
        field(rec, _RESIDUAL),
    )
    if tokens == 1:
        at, total = 4 * (token * n + row), load_f32(sums)
        if bias:
            total = add(total, load_f32_n(bias + 4 * row, rows))
        if residual:
            total = add(total, load_f32_n(residual + at, rows))
        store_f32_n(y + at, total, rows)
        return
    for t in range(tokens):
        for r in range(rows):
            total = read_f32(sums + 4 * (r * tokens + t))
            at = 4 * ((token + t) * n + row + r)
            if bias:
                total += read_f32(bias + 4 * (row + r))
            if residual:
                total += read_f32(residual + at)
            write_f32(y + at, total)


def _kernel(name: str, tiles: Tiles) -> Kernel:
    tile16x1, tile4x1, tile1x1 = (tiles.tile(rows, 1) for rows in (16, 4, 1))
    tile4x4, tile4x2, tile1x4 = tiles.tile(4, 4), tiles.tile(4, 2), tiles.tile(1, 4)

    @device
    def rows_of_unit(rec, unit, start, stop, scratch):
        height, width, k = field(rec, _HEIGHT), field(rec, _WIDTH), field(rec, _K)
        groups, line = -(-height // TALL), field(rec, _ROW_BYTES)
        block_row, top = unit // groups, unit % groups * TALL
        row = block_row * height + top
        stored = min(TALL, height - top)
        wanted = min(stored, field(rec, _N) - row)
        begin = read_i32(field(rec, _ROW_PTR) + 4 * block_row)
        count = read_i32(field(rec, _ROW_PTR) + 4 * block_row + 4) - begin
        columns = field(rec, _COL_IDX) + 4 * begin
        codes = field(rec, _CODES) + (begin * height + top) * line
        scales = field(rec, _SCALES) + 2 * (begin * height + top)
        block, step = height * line, 2 * height
        if stop - start == 1:
            x = field(rec, _X) + 4 * start * k
            _clear(scratch, stored + LANES)
            some = max(1, _NEAR // block)
            for first in range(0, count, some):
                few, own, above = (
                    min(some, count - first),
                    columns + 4 * first,
                    codes + first * block,
                )
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
                _write(rec, scratch + _SUMS, row + r, min(LANES, wanted - r), start, np.int64(1))
            return
        r = np.int64(0)
        while r < wanted:
            rows, t = np.int64(1), start
            if stored - r >= 4:
                rows = np.int64(4)
            w, s = codes + r * line, scales + 2 * r
            while t < stop:
                x, tokens = field(rec, _X) + 4 * t * k, np.int64(1)
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
                _write(rec, scratch + _SUMS, row + r, min(rows, wanted - r), t, tokens)
                t += tokens
            r += rows

    def bsr_linear(rec, ctl, rank, size, scratch):
        m = counted(ctl, field(rec, _M))
        first, last = _first_unit(rec, rank, size), _first_unit(rec, rank + 1, size)
        for start in range(0, m, CHUNK):
            for unit in range(first, last):
                rows_of_unit(rec, unit, start, min(start + CHUNK, m), scratch)

    bsr_linear.__name__ = f"bsr_linear_{name}"
    return Kernel(bsr_linear)


_KERNELS = {name: _kernel(name, tiles) for name, tiles in TILES.items()}


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
    fields = [
        call.count("x"),
        call.dim("N"),
        call.dim("K"),
        height,
        width,
        len(planes["row_ptr"]) - 1,
        call.address("x"),
        call.address("y"),
        call.address("bias"),
        call.address("residual"),
        int(planes["row_ptr"].ctypes.data),
        int(planes["col_idx"].ctypes.data),
        int(codes.ctypes.data),
        int(planes["scales"].ctypes.data) if "scales" in planes else 0,
        codes.shape[-1] * codes.itemsize,
    ]
    return [call.launch(_KERNELS[weight.format.inner], fields, _SUMS + ACC)]


LOWER = {"bsr_linear": _bsr_linear}
