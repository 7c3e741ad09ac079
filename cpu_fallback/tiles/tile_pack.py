"""Packing: the planes of a tensor, as its format stores them, to r16 tiles in large pages.

`tiles_of` packs a tensor once and keeps the result as long as the tensor's planes live, so that
every Plan of a model shares it; then it gives back the pages of the mapped file that it read.
`pack` is the pure function below it: format, shape, planes and `VERSION` determine every byte that
it returns.
"""

import ctypes
import weakref
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from clocher_kernels.dtypes import to_f32
from clocher_kernels.formats import Ggml, Int4, Int8, Mxfp4, Ternary
from clocher_kernels.guards import refuse_in_window
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.record import reader, words
from cpu_fallback.team.large_pages import fetched, give_back
from cpu_fallback.tiles import together
from cpu_fallback.tiles.block_pack import block_source, pack_blocks
from cpu_fallback.tiles.layout import ROWS, SIGNED, UNIT, BlockLayout, Layout, layout_of, tiles_in
from cpu_fallback.tiles.row_lines import flip, move_lines, read_some
from cpu_fallback.tiles.tile_cache import TileCache, key_of

VERSION = 1  # Changes when the bytes of a tile do

_CHUNK = 4 << 20


class Source(NamedTuple):
    """What is packed, and to where; addresses and bytes."""

    n: int  # rows of an expert
    k: int  # columns
    tiles: int  # of an expert
    tile_bytes: int  # of a tile
    codes: int  # the stored codes
    stride: int  # from one stored row to the next
    unit: int  # from the codes of a unit of columns to the next ones
    scales: int  # the stored scales
    zeros: int  # the stored zero points, 0 if there are none
    size: int  # of a scale
    step: int  # from one scale to the next
    groups: int  # scales of a row
    group: int  # columns per scale
    block: int  # columns between records of scales in a tile, 0 for none
    per_head: int  # records that stand together
    record: int  # bytes of one
    lines: int  # of a unit of columns
    mask: int  # what four codes are flipped with
    by_row: int  # whether the scales of rows come last
    target: int  # the tiles


_source_at = reader(Source)


@dataclass(frozen=True)
class Tiles:
    """A packed tensor."""

    layout: Layout | BlockLayout  # of its tiles
    data: np.ndarray  # u8, the tiles of all experts and rows, one after the other
    per_expert: int  # tiles per expert, or in all
    tile_bytes: int  # bytes of a tile
    factor: float  # what every product is multiplied by


_packed: dict[int, Tiles] = {}
_unfinished: dict[int, together.Together] = {}
"""Those whose bytes are not all there yet, and what they are queued in."""


def tiles_of(op_name: str, tensor: QuantTensor) -> Tiles:
    """Return the tiles of a tensor, packed when they are first asked for.

    Inside of `together.packing` their bytes are there when it ends.

    Raises:
        UnsupportedOp: its format has no tiles.
    """
    layout = layout_of(op_name, tensor.format)
    codes = tensor.planes["codes" if "codes" in tensor.planes else "blocks"]
    key = id(codes)
    others = _unfinished.get(key)
    if others is not None and others is not together.current():
        others.ended.wait()
    if key not in _packed:
        refuse_in_window("pack weights into tiles")
        _packed[key] = _load_or_pack(layout, tensor, key)
        weakref.finalize(codes, _packed.pop, key, None)
    return _packed[key]


def is_packed(tensor: QuantTensor) -> bool:
    """Return whether the tiles of a tensor are in memory."""
    return any(id(plane) in _packed for plane in tensor.planes.values())


def _load_or_pack(layout: Layout | BlockLayout, tensor: QuantTensor, place: int) -> Tiles:
    cache, here = TileCache.get(), together.current()
    if cache is None and here is not None:
        return _queue(layout, tensor, place, here)
    tiles = pack(layout, tensor) if cache is None else _load_or_store(cache, layout, tensor)
    _give_back(tensor)
    return tiles


def _queue(
    layout: Layout | BlockLayout, tensor: QuantTensor, place: int, here: together.Together
) -> Tiles:
    packed, parts = _parts(layout, tensor)

    def done() -> None:
        _unfinished.pop(place, None)
        _give_back(tensor)

    def failed() -> None:
        _packed.pop(place, None)
        _unfinished.pop(place, None)

    _unfinished[place] = here
    here.add(parts, tensor.nbytes, done, failed)
    return packed


def _give_back(tensor: QuantTensor) -> None:
    for plane in tensor.planes.values():
        give_back(plane)


def _load_or_store(cache: TileCache, layout: Layout | BlockLayout, tensor: QuantTensor) -> Tiles:
    """Return tiles, which the processes of a machine share if they can be stored."""
    key, nbytes = key_of(layout, tensor, VERSION), layout.nbytes(tensor.shape)
    data = cache.read(key, nbytes)
    if data is None:
        with cache.alone():
            data = cache.read(key, nbytes)  # another process may have packed it meanwhile
            if data is None:
                tiles = pack(layout, tensor)
                cache.write(key, tiles.data)
                data = cache.read(key, nbytes)
                if data is None:
                    return tiles
    return _around(layout, tensor, data)


def pack(layout: Layout | BlockLayout, tensor: QuantTensor) -> Tiles:
    """Pack a tensor."""
    packed, parts = _parts(layout, tensor)
    together.run(parts)
    return packed


def _parts(layout: Layout | BlockLayout, tensor: QuantTensor) -> tuple[Tiles, list[together.Part]]:
    """Return the tiles of a tensor before they are filled, and what fills them."""
    packed = _room(layout, tensor)
    if isinstance(layout, BlockLayout):
        beside = np.array(layout.order, np.int64)
        source: NamedTuple = block_source(layout, tensor, beside, packed.data)
        kernel = pack_blocks
    else:
        source, beside = _source(layout, tensor, packed)
        kernel = _pack_ternary if layout.code == "ternary" else _pack_lanes
    form = np.array(list(words(source)), np.int64)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel.address)
    tiles = tiles_in(tensor.shape)
    step = max(1, _CHUNK // packed.tile_bytes)
    read = (tensor, packed, beside)

    def part(first: int, _alive: object = read) -> None:  # what the addresses lead to
        call(form.ctypes.data, first, min(first + step, tiles))

    return packed, [partial(part, start) for start in range(0, tiles, step)]


def _source(layout: Layout, tensor: QuantTensor, packed: Tiles) -> tuple[Source, np.ndarray]:
    """Return what is packed, and the scales, which may be an array that nothing else holds."""
    fmt, planes = tensor.format, tensor.planes
    *lead, n, k = tensor.shape
    experts = lead[0] if lead else 1
    zeros = at = 0
    scales = np.ones(1, np.float32)
    group, step = k, scales.itemsize
    unit = 4 * layout.lines
    if isinstance(fmt, Ternary):
        codes, stride = planes["codes"], k
    elif isinstance(fmt, Int4 | Int8):
        codes, scales = planes["codes"], planes["scales"]
        stride, step = codes.shape[-1], scales.itemsize
        if layout.scale == "row":
            values = to_f32(scales, fmt.scale_dtype).reshape(experts, -1)
            scales = np.ascontiguousarray(np.broadcast_to(values, (experts, n)))
        if isinstance(fmt.group, int):
            group = fmt.group
        if "zeros" in planes:
            zeros = int(planes["zeros"].ctypes.data)
    elif isinstance(fmt, Ggml):
        codes, group, step = planes["blocks"], fmt.block, fmt.block_bytes
        stride, unit, at = codes.shape[-1], fmt.block_bytes, 2
        scales = codes.reshape(-1).view(np.float16)
    else:
        codes, scales, group = planes["blocks"], planes["scales"], UNIT
        stride, step = k // 2, scales.itemsize
    return Source(  # its addresses live as long as the arrays
        n=n,
        k=k,
        tiles=packed.per_expert,
        tile_bytes=packed.tile_bytes,
        codes=codes.ctypes.data + at,
        stride=stride,
        unit=unit,
        scales=scales.ctypes.data,
        zeros=zeros,
        size=scales.itemsize,
        step=step,
        groups=-(-k // group),
        group=group,
        block=layout.block,
        per_head=layout.per_head if layout.block else 1,
        record=layout.record if layout.block else 0,
        lines=layout.lines,
        mask=0x80808080 if layout.code == "int8" and not SIGNED else 0,
        by_row=int(layout.scale == "row"),
        target=packed.data.ctypes.data,
    ), scales


def _room(layout: Layout | BlockLayout, tensor: QuantTensor) -> Tiles:
    """Return the tiles of a tensor before they are filled: zeros."""
    return _around(layout, tensor, fetched(layout.nbytes(tensor.shape)))


def _around(layout: Layout | BlockLayout, tensor: QuantTensor, data: np.ndarray) -> Tiles:
    """Return the tiles of a tensor whose bytes are these."""
    *_, n, k = tensor.shape
    factor = 0.5 if isinstance(tensor.format, Mxfp4) else 1.0
    if isinstance(tensor.format, Ternary):
        factor = float(tensor.format.multiplier(tensor.planes))
    return Tiles(layout, data, -(-n // ROWS), layout.tile_bytes(k), factor)


@device
def _pack_record(form, first, column, at):
    """Write the scales and zero points of a block of the 16 rows from `first` (expert-major)."""
    f = _source_at(form)
    size, step, scales, zeros = f.size, f.step, f.scales, f.zeros
    index = first * f.groups + column // f.group - f.groups
    for r in range(min(16, f.n - first % f.n)):
        index += f.groups
        if size == 4:
            v.write_i32(at + 4 * r, v.read_i32(scales + step * index))
        elif size == 2:
            value = v.read_u16(scales + step * index)
            v.write_u8(at + 2 * r, value)
            v.write_u8(at + 2 * r + 1, value >> 8)
        else:
            v.write_u8(at + r, v.read_u8(scales + step * index))
        if zeros:
            v.write_u8(at + 16 * size + r, v.read_u8(zeros + index))


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
                    source = codes + first * stride + unit * f.unit + 4 * moved
                    move_lines(source, stride, at + 64 * moved, f.mask)
                    moved += 4
            for r in range(rows):
                line = codes + (first + r) * stride
                for i in range(moved, lines):
                    source = line + unit * f.unit + 4 * i
                    value = read_some(source, line + stride)
                    v.write_i32(at + 64 * i + 4 * r, flip(value, f.mask))
            at += 64 * lines
        if f.by_row:
            for r in range(rows):
                v.write_i32(at + 4 * r, v.read_i32(f.scales + 4 * (first + r)))


@device
def ternary_dword(line, k, index, shift):
    """Return the digits of columns 16 index .. 16 index + 15 of a stored row of K codes."""
    value = 0
    for plane in range(4):
        source = line + 16 * index + 4 * plane
        digits = (read_some(source, line + k) >> shift) & 0x03030303
        value += digits << 2 * plane
    return value


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
                v.write_i32(at + 64 * i + 4 * r, ternary_dword(line, k, i, shift))


_pack_lanes = Kernel(_lanes)
_pack_ternary = Kernel(_ternary)
