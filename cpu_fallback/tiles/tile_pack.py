"""Packing: the planes of a tensor, as its format stores them, to r16 tiles in large pages.

`tiles_of` packs a tensor once and keeps the result as long as the tensor's planes live, so that
every Plan of a model shares it; then it gives back the pages of the mapped file that it read.
`pack` is the pure function below it: format, shape, planes and `VERSION` determine every byte that
it returns.
"""

import ctypes
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from clocher_kernels.dtypes import to_f32
from clocher_kernels.formats import Int4, Int8, Ternary
from clocher_kernels.guards import refuse_in_window
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.memory import (
    emit_load,
    emit_store,
    read_i32,
    read_u8,
    read_u16,
    write_i32,
    write_u8,
)
from cpu_fallback.lanes.record import reader, words
from cpu_fallback.lanes.vector import I32, i64, op, spread, void
from cpu_fallback.team.large_pages import allocate, give_back
from cpu_fallback.team.placement import usable_cpus
from cpu_fallback.tiles.layout import LINE, ROWS, UNIT, Layout, layout_of
from cpu_fallback.tiles.tile_cache import TileCache, key_of

VERSION = 1
"""Changes when the bytes of a tile do."""

_CHUNK = 1 << 20


class Source(NamedTuple):
    """What is packed, and to where; addresses and bytes.

    Attributes:
        n: rows of an expert.
        k: columns.
        tiles: of an expert.
        tile_bytes: of a tile.
        codes: the stored codes.
        stride: from one stored row to the next.
        scales: the stored scales.
        zeros: the stored zero points, 0 if there are none.
        size: of a scale.
        groups: scales of a row.
        group: columns per scale.
        block: columns between records of scales in a tile, 0 for none.
        per_head: records that stand together.
        record: bytes of one.
        lines: of a unit of columns.
        mask: what four codes are flipped with.
        by_row: whether the scales of rows come last.
        target: the tiles.
    """

    n: int
    k: int
    tiles: int
    tile_bytes: int
    codes: int
    stride: int
    scales: int
    zeros: int
    size: int
    groups: int
    group: int
    block: int
    per_head: int
    record: int
    lines: int
    mask: int
    by_row: int
    target: int


_source_at = reader(Source)


@dataclass(frozen=True)
class Tiles:
    """A packed tensor.

    Attributes:
        layout: of its tiles.
        data: u8, the tiles of all experts and rows, one after the other.
        per_expert: tiles per expert, or in all.
        tile_bytes: bytes of a tile.
        factor: what every product is multiplied by.
    """

    layout: Layout
    data: np.ndarray
    per_expert: int
    tile_bytes: int
    factor: float


_packed: dict[int, Tiles] = {}


def tiles_of(op_name: str, tensor: QuantTensor) -> Tiles:
    """Return the tiles of a tensor, packed when they are first asked for.

    Raises:
        UnsupportedOp: its format has no tiles.
    """
    layout = layout_of(op_name, tensor.format)
    codes = tensor.planes["blocks" if layout.code == "fp4" else "codes"]
    key = id(codes)
    if key not in _packed:
        refuse_in_window("pack weights into tiles")
        _packed[key] = _load_or_pack(layout, tensor)
        weakref.finalize(codes, _packed.pop, key, None)
        for plane in tensor.planes.values():
            give_back(plane)
    return _packed[key]


def is_packed(tensor: QuantTensor) -> bool:
    """Return whether the tiles of a tensor are in memory."""
    return any(id(plane) in _packed for plane in tensor.planes.values())


def _load_or_pack(layout: Layout, tensor: QuantTensor) -> Tiles:
    cache = TileCache.get()
    if cache is None:
        return pack(layout, tensor)
    key, tiles = key_of(layout, tensor, VERSION), _room(layout, tensor)
    if not cache.read(key, tiles.data):
        tiles = pack(layout, tensor)  # into other memory: parts of a damaged file may be in this
        cache.write(key, tiles.data)
    return tiles


def pack(layout: Layout, tensor: QuantTensor) -> Tiles:
    """Pack a tensor."""
    packed = _room(layout, tensor)
    fmt, planes = tensor.format, tensor.planes
    tiles, tile_bytes = packed.per_expert, packed.tile_bytes
    *lead, n, k = tensor.shape
    experts = lead[0] if lead else 1
    zeros = 0
    scales = np.ones(1, np.float32)
    group = k
    if isinstance(fmt, Ternary):
        codes, stride = planes["codes"], k
    elif isinstance(fmt, Int4 | Int8):
        codes, scales = planes["codes"], planes["scales"]
        stride = codes.shape[-1]
        if layout.scale == "row":
            values = to_f32(scales, fmt.scale_dtype).reshape(experts, -1)
            scales = np.ascontiguousarray(np.broadcast_to(values, (experts, n)))
        if isinstance(fmt.group, int):
            group = fmt.group
        if "zeros" in planes:
            zeros = int(planes["zeros"].ctypes.data)
    else:
        codes, scales, group = planes["blocks"], planes["scales"], UNIT
        stride = k // 2
    source = Source(
        n=n,
        k=k,
        tiles=tiles,
        tile_bytes=tile_bytes,
        codes=codes.ctypes.data,
        stride=stride,
        scales=scales.ctypes.data,
        zeros=zeros,
        size=scales.itemsize,
        groups=-(-k // group),
        group=group,
        block=layout.block,
        per_head=layout.per_head if layout.block else 1,
        record=layout.record if layout.block else 0,
        lines=layout.lines,
        mask=0x80808080 if layout.code == "int8" else 0,
        by_row=int(layout.scale == "row"),
        target=packed.data.ctypes.data,
    )
    form = np.array(list(words(source)), np.int64)
    kernel = _pack_ternary if layout.code == "ternary" else _pack_lanes
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel.address)
    step = max(1, _CHUNK // tile_bytes)
    starts = range(0, experts * tiles, step)
    threads = usable_cpus()

    def part(first: int) -> None:
        call(form.ctypes.data, first, min(first + step, experts * tiles))

    if len(starts) == 1 or threads == 1:
        for start in starts:
            part(start)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, starts))
    return packed


def _room(layout: Layout, tensor: QuantTensor) -> Tiles:
    """Return the tiles of a tensor before they are filled: zeros."""
    *_, n, k = tensor.shape
    factor = 0.5 if layout.code == "fp4" else 1.0
    if isinstance(tensor.format, Ternary):
        factor = float(tensor.format.multiplier(tensor.planes))
    data = allocate(layout.nbytes(tensor.shape))
    return Tiles(layout, data, -(-n // ROWS), layout.tile_bytes(k), factor)


@op(i64, i64, i64)
def _flip(b, value, mask):
    return b.xor(value, mask)


@op(void, i64, i64, i64, i64)
def _move_lines(b, source, stride, target, mask):
    """Write 4 lines: word i of each of 16 rows, `stride` bytes apart, flipped, to line i."""
    four = ir.VectorType(ir.IntType(32), 4)
    rows = [
        emit_load(b, four, b.add(source, b.mul(stride, ir.Constant(stride.type, r))))
        for r in range(ROWS)
    ]
    flips = spread(b, I32, b.trunc(mask, ir.IntType(32)))
    while len(rows) > 4:
        rows = [_joined(b, rows[i], rows[i + 1]) for i in range(0, len(rows), 2)]
    for i in range(4):
        halves = [_picked(b, rows[j], rows[j + 1], range(i, 32, 4)) for j in (0, 2)]
        line = b.xor(_joined(b, *halves), flips)
        emit_store(b, line, b.add(target, ir.Constant(target.type, LINE * i)))


def _joined(b: Any, first: Any, second: Any) -> Any:
    return _picked(b, first, second, range(2 * first.type.count))


def _picked(b: Any, first: Any, second: Any, lanes: Sequence[int]) -> Any:
    order = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return b.shuffle_vector(first, second, order)


@device
def _read_some(address, end):
    """Return the four bytes at an address, those from `end` on as zeros."""
    if address + 4 <= end:
        return read_i32(address)
    value = 0
    for i in range(end - address):
        value += read_u8(address + i) << 8 * i
    return value


@device
def _pack_record(form, first, column, at):
    """Write the scales and zero points of a block of the 16 rows from `first` (expert-major)."""
    f = _source_at(form)
    size, scales, zeros = f.size, f.scales, f.zeros
    index = first * f.groups + column // f.group - f.groups
    for r in range(min(16, f.n - first % f.n)):
        index += f.groups
        if size == 4:
            write_i32(at + 4 * r, read_i32(scales + 4 * index))
        elif size == 2:
            value = read_u16(scales + 2 * index)
            write_u8(at + 2 * r, value)
            write_u8(at + 2 * r + 1, value >> 8)
        else:
            write_u8(at + r, read_u8(scales + index))
        if zeros:
            write_u8(at + 16 * size + r, read_u8(zeros + index))


def _lanes(form, begin, stop):
    """Pack tiles begin .. stop-1 of a format whose rows are stored one after the other."""
    f = _source_at(form)
    n, k, codes, stride = f.n, f.k, f.codes, f.stride
    block, per_head, record, lines = f.block, f.per_head, f.record, f.lines
    for tile in range(begin, stop):
        row = tile % f.tiles * 16
        first = tile // f.tiles * n + row
        rows = min(16, n - row)
        at = f.target + tile * f.tile_bytes
        head = at
        for unit in range((k + 31) >> 5):
            if block and unit * 32 % block == 0:
                index = unit * 32 // block
                if index % per_head == 0:
                    head = at
                    at += per_head * record
                _pack_record(form, first, unit * 32, head + index % per_head * record)
            moved = 0
            if rows == 16 and 32 * unit + 32 <= k:
                while moved < lines:
                    source = codes + first * stride + 4 * (unit * lines + moved)
                    _move_lines(source, stride, at + 64 * moved, f.mask)
                    moved += 4
            for r in range(rows):
                line = codes + (first + r) * stride
                for i in range(moved, lines):
                    source = line + 4 * (unit * lines + i)
                    value = _read_some(source, line + stride)
                    write_i32(at + 64 * i + 4 * r, _flip(value, f.mask))
            at += 64 * lines
        if f.by_row:
            for r in range(rows):
                write_i32(at + 4 * r, read_i32(f.scales + 4 * (first + r)))


def _ternary(form, begin, stop):
    """Pack tiles begin .. stop-1 of ternary codes, which are strided along N."""
    f = _source_at(form)
    k, packed = f.k, f.n >> 2
    for tile in range(begin, stop):
        at = f.target + tile * f.tile_bytes
        for r in range(min(16, f.n - 16 * tile)):
            row = 16 * tile + r
            line = f.codes + row % packed * k
            shift = 2 * (row // packed)
            for i in range(2 * ((k + 31) >> 5)):
                value = 0
                for plane in range(4):
                    source = line + 16 * i + 4 * plane
                    digits = (_read_some(source, line + k) >> shift) & 0x03030303
                    value += digits << 2 * plane
                write_i32(at + 64 * i + 4 * r, value)


_pack_lanes = Kernel(_lanes)
_pack_ternary = Kernel(_ternary)
