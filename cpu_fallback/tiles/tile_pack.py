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
from llvmlite import ir

from clocher_kernels.dtypes import to_f32
from clocher_kernels.formats import Ggml, Int4, Int8, Mxfp4, Ternary
from clocher_kernels.formats.ggml_blocks import PLANES, RECODED, recoded
from clocher_kernels.guards import refuse_in_window
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device, i64, void
from cpu_fallback.lanes.record import reader, words
from cpu_fallback.lanes.simd import join
from cpu_fallback.team.large_pages import fetched, give_back
from cpu_fallback.tiles import layout as layouts
from cpu_fallback.tiles import tile_cache
from cpu_fallback.tiles.layout import LINE, ROWS, UNIT, BlockLayout, Layout, layout_of, tiles_in
from cpu_fallback.tiles.tile_cache import TileCache, key_of

VERSION = 2  # Changes when the bytes of a tile do

_CHUNK = 4 << 20


class Source(NamedTuple):
    """What is packed, and to where; addresses and bytes."""

    n: int  # rows of an expert
    k: int  # columns
    tiles: int  # of an expert
    tile_bytes: int  # of a tile
    codes: int  # the stored codes
    stride: int  # from one stored row to the next
    units: int  # of columns of a row
    unit: int  # from the codes of a unit to those of the next
    order: int  # bytes of a unit that each of its lines holds: see `_order`
    fifths: int  # whether the last line has bit o of every four columns in place of those columns
    scales: int  # the stored scales
    zeros: int  # the stored zero points, 0 if there are none
    minima: int  # whether a minimum follows each scale, as stored and in a tile
    size: int  # of a scale
    step: int  # from one scale to the next
    groups: int  # scales of a row
    group: int  # columns per scale
    block: int  # units between records of scales in a tile, 0 for none
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
_unfinished: dict[int, tile_cache.Together] = {}
"""Those whose bytes are not all there yet, and what they are queued in."""


def tiles_of(op_name: str, tensor: QuantTensor) -> Tiles:
    """Return the tiles of a tensor, packed when they are first asked for.

    Inside of `tile_cache.packing` their bytes are there when it ends.

    Raises:
        UnsupportedOp: its format has no tiles.
    """
    layout = layout_of(op_name, tensor.format)
    codes = tensor.planes["codes" if "codes" in tensor.planes else "blocks"]
    key = id(codes)
    others = _unfinished.get(key)
    if others is not None and others is not tile_cache.current():
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
    tile_cache.run(parts)
    return packed


def _parts(
    layout: Layout | BlockLayout, tensor: QuantTensor
) -> tuple[Tiles, list[tile_cache.Part]]:
    """Return the tiles of a tensor before they are filled, and what fills them."""
    packed = _around(layout, tensor, fetched(layout.nbytes(tensor.shape)))
    source, beside = _source(layout, tensor, packed)
    is_ternary = isinstance(tensor.format, Ternary)
    kernel = _pack_ternary if is_ternary else _pack_lines
    form = np.array(list(words(source)), np.int64)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(kernel.address)
    tiles = tiles_in(tensor.shape)
    step = max(1, _CHUNK // packed.tile_bytes)
    read = (tensor, packed, beside)

    def part(first: int, _alive: object = read) -> None:  # what the addresses lead to
        call(form.ctypes.data, first, min(first + step, tiles))

    return packed, [partial(part, start) for start in range(0, tiles, step)]


def _order(places: tuple[int, ...]) -> np.ndarray:
    """Return, of each line of a unit, 2 * its byte, + 1 if the next three lines go on from it."""
    runs = [places[i : i + 4] == tuple(range(p, p + 16, 4)) for i, p in enumerate(places)]
    return np.array([2 * p + run for p, run in zip(places, runs, strict=True)], np.int64)


def _source(
    layout: Layout | BlockLayout, tensor: QuantTensor, packed: Tiles
) -> tuple[Source, tuple[np.ndarray, ...]]:
    """Return what is packed, and arrays that nothing else may hold."""
    fmt, planes = tensor.format, tensor.planes
    *lead, n, k = tensor.shape
    experts = lead[0] if lead else 1
    zeros = block = 0
    scales = np.ones(1, np.float32)
    group, step, columns, unit = k, scales.itemsize, UNIT, 4 * layout.lines
    places = tuple(range(0, 4 * layout.lines, 4))
    if isinstance(layout, BlockLayout):
        codes, columns = planes["blocks"], layouts.BLOCK
        if layout.kind in RECODED:
            codes = recoded(layout.kind, codes.reshape(-1, fmt.block_bytes))  # type: ignore[attr-defined]
        places = tuple(4 * dword for dword in layout.order)
        unit = layout.block_bytes
        stride = k // columns * unit
    elif isinstance(fmt, Ternary):
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
        stride, unit = codes.shape[-1], fmt.block_bytes
        first = unit - 16
        places = (*range(first, unit, 4), *range(first - 4, first, 4))[: layout.lines]
        scales = codes.reshape(-1).view(np.float16)
    else:
        codes, scales, group = planes["blocks"], planes["scales"], UNIT
        stride, step = k // 2, scales.itemsize
    in_blocks = isinstance(layout, Layout) and layout.block
    block = layout.block // UNIT if in_blocks else 0
    order = _order(places)
    flipped = isinstance(layout, Layout) and layout.code == "int8" and not layouts.SIGNED
    return Source(  # its addresses live as long as the arrays
        n=n,
        k=k,
        tiles=packed.per_expert,
        tile_bytes=packed.tile_bytes,
        codes=codes.ctypes.data,
        stride=stride,
        units=-(-k // columns),
        unit=unit,
        order=order.ctypes.data,
        fifths=int(isinstance(layout, Layout) and layout.code == "q5"),
        scales=scales.ctypes.data,
        zeros=zeros,
        minima=int(isinstance(layout, Layout) and layout.offset == "minima"),
        size=scales.itemsize,
        step=step,
        groups=-(-k // group),
        group=group,
        block=block,
        per_head=layout.per_head if in_blocks else 1,
        record=layout.record if in_blocks else 0,
        lines=layout.lines,
        mask=0x80808080 if flipped else 0,
        by_row=int(isinstance(layout, Layout) and layout.scale == "row"),
        target=packed.data.ctypes.data,
    ), (scales, order, codes)


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
            v.write_u16(at + 2 * r, value)
            if f.minima:
                v.write_u16(at + 32 + 2 * r, v.read_u16(scales + step * index + 2))
        else:
            v.write_u8(at + r, v.read_u8(scales + step * index))
        if zeros:
            v.write_u8(at + 16 * size + r, v.read_u8(zeros + index))


@v.op(void, i64, i64, i64, i64)
def _move_lines(b, source, stride, target, mask):
    """Write 4 lines: word i of each of 16 rows, `stride` bytes apart, flipped, to line i."""
    four = ir.VectorType(v.INT32, 4)
    rows = [v.emit_load(b, four, v.emit_at(b, source, v.number(r), stride)) for r in range(ROWS)]
    flips = v.spread(b, v.I32, b.trunc(mask, v.INT32))
    while len(rows) > 4:
        rows = [join(b, rows[i : i + 2]) for i in range(0, len(rows), 2)]
    for i in range(4):
        halves = [v.shuffle(b, rows[j], rows[j + 1], range(i, 32, 4)) for j in (0, 2)]
        v.emit_store(b, b.xor(join(b, halves), flips), v.behind(b, target, LINE * i))


_flip = v.op(i64, i64, i64)(lambda b, value, mask: b.xor(value, mask))


@device
def _read_some(address, end):
    """Return the four bytes at an address, those from `end` on as zeros."""
    if address + 4 <= end:
        return v.read_i32(address)
    value = 0
    for i in range(end - address):
        value += v.read_u8(address + i) << 8 * i
    return value


@device
def _by_operand(word):
    """Return a word whose byte i has bit o where this one has bit 4 o + i."""
    made = 0
    for i in range(4):
        nibbles = word >> i & 0x11111111
        pairs = (nibbles | nibbles >> 3) & 0x03030303
        fours = (pairs | pairs >> 6) & 0x000F000F
        made |= ((fours | fours >> 12) & 255) << 8 * i
    return made


def _lines(form, begin, stop):
    """Pack tiles begin .. stop-1 of a format whose rows are stored one after the other."""
    f = _source_at(form)
    n, stride, lines = f.n, f.stride, f.lines
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
            codes, i = f.codes + first * stride, 0
            end = codes + min(stride, (unit + 1) * f.unit)
            while i < lines:
                entry = v.read_i64(f.order + 8 * i)
                source = codes + unit * f.unit + (entry >> 1)
                if rows == 16 and entry & 1 and source + 16 <= end:
                    _move_lines(source, stride, at + 64 * i, f.mask)
                    i += 4
                    continue
                for r in range(rows):
                    value = _read_some(source + r * stride, end + r * stride)
                    if f.fifths and i == 4:
                        value = _by_operand(value)
                    v.write_i32(at + 64 * i + 4 * r, _flip(value, f.mask))
                i += 1
            at += 64 * lines
        if f.by_row:
            for r in range(rows):
                v.write_i32(at + 4 * r, v.read_i32(f.scales + 4 * (first + r)))


def _ternary(form, begin, stop):
    """Pack tiles begin .. stop-1 of ternary codes, which are strided along N."""
    f = _source_at(form)
    k, packed = f.k, f.n >> 2
    for tile in range(begin, stop):
        at = f.target + tile * f.tile_bytes
        for r in range(min(16, f.n - 16 * tile)):
            row = 16 * tile + r
            line, shift = f.codes + row % packed * k, 2 * (row // packed)
            for i in range(2 * f.units):
                value = 0  # the digits of 16 columns
                for plane in range(4):
                    four = _read_some(line + 16 * i + 4 * plane, line + k)
                    value += (four >> shift & 0x03030303) << 2 * plane
                v.write_i32(at + 64 * i + 4 * r, value)


_pack_lines = Kernel(_lines)
_pack_ternary = Kernel(_ternary)
