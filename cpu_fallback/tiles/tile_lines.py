"""The kernels that write tiles: of rows one after the other, of ternary codes, of trellises."""

from typing import NamedTuple

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.record import reader


class Source(NamedTuple):
    """What is packed, and to where; addresses and bytes."""

    n: int  # rows of an expert
    k: int  # columns
    tiles: int  # of an expert
    tile_bytes: int  # of a tile
    rows: int  # the address of each stored row, int64
    stride: int  # bytes of a stored row
    units: int  # of columns of a row
    unit: int  # from the codes of a unit to those of the next
    lines: int  # of a unit of columns
    order: int  # bytes of a unit that each of its lines holds: see `layout.lines_of`
    target: int  # the tiles
    damaged: int  # an int64 that is set if a scale of a byte, or one of a row's own, is not finite
    fifths: int = 0  # whether the last line has bit o of every four columns in place of those
    halves: int = 0  # whether a byte has columns i and i + 16 in place of neighbours
    scales: int = 0  # the stored scales, 0 if a row has its own, from its beginning
    zeros: int = 0  # the stored zero points, or numbers of rows in bf16, 0 if there are none
    minima: int = 0  # whether a minimum follows each scale, as stored and in a tile
    size: int = 0  # of a scale
    step: int = 0  # from one scale to the next
    groups: int = 1  # scales of a row
    group: int = 1  # columns per scale
    block: int = 0  # units between records of scales in a tile, 0 for none
    per_head: int = 1  # records that stand together
    record: int = 0  # bytes of one
    mask: int = 0  # what four codes are flipped with
    by_row: int = 0  # whether the scales of rows come last
    first: int = -1  # in blocks of 256 columns, the byte of a scale of fp16, and of another or
    other: int = -1  # the same


_source_at = reader(Source)


@device
def _look_at(form, scale):
    """Say that the tensor is damaged if a scale of fp16 is not finite."""
    if v.read_u16(scale) & 0x7C00 == 0x7C00:
        v.write_i64(_source_at(form).damaged, 1)


@device
def _pack_record(form, first, column, at):
    """Write the scales and zero points of a block of the 16 rows from `first` (expert-major)."""
    f = _source_at(form)
    size, zeros = f.size, f.zeros
    place = column // f.group
    for r in range(min(16, f.n - first % f.n)):
        index = (first + r) * f.groups + place
        scale = f.scales + f.step * index
        if not f.scales:
            scale = v.read_i64(f.rows + 8 * (first + r)) + f.step * place
        if size == 4:
            v.write_i32(at + 4 * r, v.read_i32(scale))
        elif size == 2:
            v.write_u16(at + 2 * r, v.read_u16(scale))
            if not f.scales:  # fp16, which nothing has looked at
                _look_at(form, scale)
            if f.minima:
                v.write_u16(at + 32 + 2 * r, v.read_u16(scale + 2))
                _look_at(form, scale + 2)
        else:
            v.write_u8(at + r, v.read_u8(scale))
            if v.read_u8(scale) == 255:
                v.write_i64(f.damaged, 1)
        if zeros:
            v.write_u8(at + 16 * size + r, v.read_u8(zeros + index))


@Kernel
def pack_lines(form, begin, stop):
    """Pack tiles begin .. stop-1 of a format whose rows are stored one after the other."""
    f = _source_at(form)
    n, lines = f.n, f.lines
    for tile in range(begin, stop):
        row = tile % f.tiles * 16
        first = tile // f.tiles * n + row
        rows = min(16, n - row)
        at = f.target + tile * f.tile_bytes
        head = at
        for unit in range(f.units):
            if f.block and unit % f.block == 0:
                index = unit // f.block
                if index % f.per_head == 0:
                    head = at
                    at += f.per_head * f.record
                _pack_record(form, first, unit * 32, head + index % f.per_head * f.record)
            table, i = f.rows + 8 * first, 0
            for r in range(rows if f.first >= 0 else 0):
                block = v.read_i64(table + 8 * r) + unit * f.unit
                _look_at(form, block + f.first)
                _look_at(form, block + f.other)
            end = min(f.stride, (unit + 1) * f.unit)
            while i < lines:
                entry = v.read_i64(f.order + 8 * i)
                place, target = unit * f.unit + (entry >> 1), at + 64 * i
                if rows == 16 and entry & 1 and place + 16 <= end:
                    if f.halves:
                        v.move_halves(table, place, target)
                    else:
                        v.move_lines(table, place, target, f.mask)
                    i += 4
                    continue
                for r in range(rows):
                    row = v.read_i64(table + 8 * r)
                    if f.halves:
                        value = v.neighbours(row + place + 4 * (i % 2 * 2 - i), i // 2 * 4)
                    else:
                        value = v.read_some(row + place, row + end)
                    if f.fifths and i == 4:
                        value = v.by_operand(value)
                    v.write_i32(target + 4 * r, value ^ f.mask)
                i += 1
            at += 64 * lines
        if f.by_row:
            for r in range(rows):
                v.write_i32(at + 4 * r, v.read_i32(f.scales + 4 * (first + r)))


@Kernel
def pack_ternary(form, begin, stop):
    """Pack tiles begin .. stop-1 of ternary codes, which are strided along N."""
    f = _source_at(form)
    k, packed = f.k, f.n >> 2
    codes = v.read_i64(f.rows)
    for tile in range(begin, stop):
        at = f.target + tile * f.tile_bytes
        for r in range(min(16, f.n - 16 * tile)):
            row = 16 * tile + r
            line, shift = codes + row % packed * k, 2 * (row // packed)
            for i in range(2 * f.units):
                value = 0  # the digits of 16 columns
                for plane in range(4):
                    four = v.read_some(line + 16 * i + 4 * plane, line + k)
                    value += (four >> shift & 0x03030303) << 2 * plane
                v.write_i32(at + 64 * i + 4 * r, value)


@device
def _lane_of(row):
    """Return the place of a row in `layout.EVENS_FIRST`."""
    return (row >> 1) + 8 * (row & 1)


@Kernel
def pack_trellis(form, begin, stop):
    """Pack tiles begin .. stop-1 of trellises, whose strips are stored as lines."""
    f = _source_at(form)
    codes, size, swapped = v.read_i64(f.rows), 64 * f.lines, min(f.lines, 3)
    for tile in range(begin, stop):
        row = tile % f.tiles * 16
        first, count = tile // f.tiles * f.n + row, min(16, f.n - row)
        at = f.target + tile * f.tile_bytes
        for unit in range(f.units):
            if unit % (f.block * f.per_head) == 0:
                head = at
                at += f.per_head * f.record
                for g in range(unit // f.block, min(f.groups, unit // f.block + f.per_head)):
                    for r in range(count):
                        scale = v.read_u8(f.scales + (first + r) * f.groups + g)
                        v.write_u8(head + _lane_of(r), scale)
                    head += 16
            line = codes + (tile * f.units + unit) * size
            for i in range(f.lines):
                for r in range(16):
                    value = v.read_i32(line + 64 * i + 4 * r)
                    if 0 < i < swapped:
                        value = (value & 0x33333333) << 2 | value >> 2 & 0x33333333
                    v.write_i32(at + 64 * i + 4 * _lane_of(r), value)
            at += size
        for r in range(count):
            v.write_i32(at + 4 * _lane_of(r), v.read_u16(f.zeros + 2 * (first + r)) << 16)
