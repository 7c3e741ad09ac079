"""Packing: the planes of a tensor, as its format stores them, to r16 tiles in large pages.

`tiles_of` packs a tensor once and keeps the result as long as the tensor's planes live, so that
every Plan of a model shares it; then it gives back the pages of the mapped file that it read.
`pack` is the pure function below it: format, shape, planes and `VERSION` determine every byte that
it returns.
"""

import ctypes
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np

from clocher_kernels.dtypes import to_f32
from clocher_kernels.errors import FormatError
from clocher_kernels.formats import Ggml, Int4, Mxfp4, Tcq, Ternary
from clocher_kernels.formats.ggml_blocks import PLANES, RECODED, recoded
from clocher_kernels.quant_tensor import BlockRows, LatePlanes, QuantTensor
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.record import reader, words
from cpu_fallback.team.large_pages import Kept, ask_for, fetched, give_back
from cpu_fallback.tiles import layout as layouts
from cpu_fallback.tiles import tile_cache
from cpu_fallback.tiles.layout import ROWS, UNIT, BlockLayout, Layout, layout_of, tiles_in
from cpu_fallback.tiles.tile_cache import TileCache, key_of

VERSION = 2  # Changes when the bytes of a tile do

_CHUNK = 4 << 20


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


@dataclass(frozen=True)
class Tiles:
    """A packed tensor."""

    layout: Layout | BlockLayout  # of its tiles
    data: np.ndarray  # u8, the tiles of all experts and rows, one after the other
    per_expert: int  # tiles per expert, or in all
    tile_bytes: int  # bytes of a tile
    factor: float  # what every product is multiplied by


_packed: Kept[Tiles] = Kept()
_unfinished: dict[int, tile_cache.Together] = {}
"""Those whose bytes are not all there yet, and what they are queued in."""


def tiles_of(op_name: str, tensor: QuantTensor) -> Tiles:
    """Return the tiles of a tensor, packed when they are first asked for. Raises UnsupportedOp.

    Inside of `tile_cache.packing` their bytes are there when it ends.
    """
    layout = layout_of(op_name, tensor.format)
    owner = _owner(tensor)
    key = id(owner)
    others = _unfinished.get(key)
    if others is not None and others is not tile_cache.current():
        others.ended.wait()
    make = partial(_load_or_pack, layout, tensor, key)
    return _packed.of(owner, "pack weights into tiles", make)


def _owner(tensor: QuantTensor) -> np.ndarray | LatePlanes:
    """Return what lives as long as the tiles of a tensor are of use."""
    if isinstance(tensor.planes, LatePlanes):
        return tensor.planes
    return tensor.planes["codes" if "codes" in tensor.planes else "blocks"]


def is_packed(tensor: QuantTensor) -> bool:
    """Return whether the tiles of a tensor are in memory."""
    planes = tensor.held.values() or (tensor.planes,)
    return any(id(plane) in _packed for plane in planes)


def _load_or_pack(layout: Layout | BlockLayout, tensor: QuantTensor, place: int) -> Tiles:
    cache, here = TileCache.get(), tile_cache.current()
    if cache is None and here is not None:
        return _queue(layout, tensor, place, here)
    tiles = pack(layout, tensor) if cache is None else _load_or_store(cache, layout, tensor)
    _give_back(tensor)
    return tiles


def _queue(
    layout: Layout | BlockLayout, tensor: QuantTensor, place: int, here: tile_cache.Together
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
    planes = tensor.planes
    for array in planes.rows().arrays if isinstance(planes, LatePlanes) else planes.values():
        give_back(array)


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
    tile_cache.run(parts)
    return packed


def _parts(
    layout: Layout | BlockLayout, tensor: QuantTensor
) -> tuple[Tiles, list[tile_cache.Part]]:
    """Return the tiles of a tensor before they are filled, and what fills them."""
    packed = _around(layout, tensor, fetched(layout.nbytes(tensor.shape)))
    damaged = np.zeros(1, np.int64)
    source, rows, beside = _source(layout, tensor, packed, damaged)
    kernel = {Ternary: _pack_ternary, Tcq: _pack_trellis}.get(type(tensor.format), _pack_lines)
    form = np.array(list(words(source)), np.int64)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel.address)
    tiles = tiles_in(tensor.shape)
    step = max(1, _CHUNK // packed.tile_bytes)
    read = (tensor, packed, rows, beside)

    def part(first: int, _alive: object = read) -> None:  # what the addresses lead to
        for array in () if first else rows.arrays:
            ask_for(array)
        call(form.ctypes.data, first, min(first + step, tiles))
        if damaged[0]:
            raise FormatError(
                f"{rows.where or tensor.format.name}: a scale is NaN or infinite; the file is "
                "damaged: fetch it again"
            )

    return packed, [partial(part, start) for start in range(0, tiles, step)]


def _source(
    layout: Layout | BlockLayout, tensor: QuantTensor, packed: Tiles, damaged: np.ndarray
) -> tuple[Source, BlockRows, tuple[np.ndarray, ...]]:
    """Return what is packed, and arrays that nothing else may hold."""
    fmt, (*lead, n, k) = tensor.format, tensor.shape
    rows, stride = _stored_rows(layout, tensor)
    scales, late = np.zeros(0, np.float32), isinstance(tensor.planes, LatePlanes)
    own: dict[str, int] = {}
    if isinstance(layout, BlockLayout):
        about, unit, columns = PLANES[layout.kind], layout.block_bytes, layouts.BLOCK
        places = tuple(4 * dword for dword in layout.order)
        own |= {"first": about.at("d"), "other": about.at(about.low or "d")}
    else:
        first, group, unit, columns = 0, k, 4 * layout.lines, UNIT
        if late or isinstance(fmt, Ggml):
            group, unit = UNIT, stride // (k // UNIT)
            first, own["step"] = unit - (32 if layout.code == "int8" else 16), unit
        elif not isinstance(fmt, Ternary):
            scales, group = tensor.planes["scales"], getattr(fmt, "group", layout.block or UNIT)
            if layout.scale == "row":
                values = to_f32(scales, fmt.scale_dtype).reshape(prod(lead), -1)  # type: ignore[attr-defined]
                scales, group = np.ascontiguousarray(np.broadcast_to(values, (prod(lead), n))), k
            group = group if isinstance(group, int) else k
            own |= {"scales": int(scales.ctypes.data), "step": scales.itemsize}
            for beside in {"zeros", "rows"} & tensor.planes.keys():
                own["zeros"] = int(tensor.planes[beside].ctypes.data)
        # The fifth bits of a block of ggml stand before its codes.
        places = (*range(first, unit, 4), *range(first - 4, first, 4))[: layout.lines]
        own |= {"group": group, "groups": -(-k // group), "by_row": layout.scale == "row"}
        own |= {"fifths": layout.code == "q5", "minima": layout.offset == "minima"}
        own["halves"] = late and isinstance(fmt, Int4 | Mxfp4)
        if layout.block:
            own |= {"block": layout.block // UNIT, "size": layouts.SCALE_BYTES[layout.scale]}
            own |= {"per_head": layout.per_head, "record": layout.record}
        if layout.code == "int8" and not layouts.SIGNED:
            own["mask"] = 0x80808080
    order = layouts.lines_of(places)
    source = Source(  # its addresses live as long as the arrays
        n=n,
        k=k,
        tiles=packed.per_expert,
        tile_bytes=packed.tile_bytes,
        rows=rows.at.ctypes.data,
        stride=stride,
        units=-(-k // columns),
        unit=unit,
        lines=layout.lines,
        order=order.ctypes.data,
        target=packed.data.ctypes.data,
        damaged=damaged.ctypes.data,
        **own,
    )
    return source, rows, (scales, order)


def _stored_rows(layout: Layout | BlockLayout, tensor: QuantTensor) -> tuple[BlockRows, int]:
    """Return where the rows of codes are, and the bytes of one."""
    planes, fmt = tensor.planes, tensor.format
    is_recoded = isinstance(layout, BlockLayout) and layout.kind in RECODED
    if isinstance(planes, LatePlanes) and not is_recoded:
        found = planes.rows()
        return found, tensor.nbytes // found.at.size
    codes = planes["codes" if "codes" in planes else "blocks"]
    count = prod(tensor.shape[:-1]) // (4 if isinstance(fmt, Ternary) else 1)
    if isinstance(layout, BlockLayout) and isinstance(fmt, Ggml) and is_recoded:
        codes = recoded(layout.kind, codes.reshape(-1, fmt.block_bytes))
    return BlockRows.of(codes, (count,)), codes.nbytes // count


def _around(layout: Layout | BlockLayout, tensor: QuantTensor, data: np.ndarray) -> Tiles:
    """Return the tiles of a tensor whose bytes are these."""
    *_, n, k = tensor.shape
    factor = 0.5 if isinstance(tensor.format, Mxfp4) else 1.0
    if isinstance(layout, BlockLayout):
        factor = PLANES[layout.kind].factor
    if isinstance(tensor.format, Ternary):
        factor = float(tensor.format.multiplier(tensor.planes))
    return Tiles(layout, data, -(-n // ROWS), layout.tile_bytes(k), factor)


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


def _lines(form, begin, stop):
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


def _ternary(form, begin, stop):
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


def _trellis(form, begin, stop):
    """Pack tiles begin .. stop-1 of trellises, whose strips are stored as lines."""
    f = _source_at(form)
    codes, size = v.read_i64(f.rows), 64 * f.lines
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
                        v.write_u8(head + r, v.read_u8(f.scales + (first + r) * f.groups + g))
                    head += 16
            line = codes + (tile * f.units + unit) * size
            for i in range(0, size, 8):
                v.write_i64(at + i, v.read_i64(line + i))
            at += size
        for r in range(count):
            v.write_i32(at + 4 * r, v.read_u16(f.zeros + 2 * (first + r)) << 16)


_pack_lines = Kernel(_lines)
_pack_trellis = Kernel(_trellis)
_pack_ternary = Kernel(_ternary)
