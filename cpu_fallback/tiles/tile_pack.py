"""Packing: the planes of a tensor, as its format stores them, to r16 tiles in large pages.

`tiles_of` packs a tensor once and keeps the result as long as the tensor's planes live, so that
every Plan of a model shares it; then it gives back the pages of the mapped file that it read.
`pack` is the pure function below it: format, shape, planes and `VERSION` determine every byte that
it returns.
"""

from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from clocher_kernels.dtypes import to_f32
from clocher_kernels.errors import FormatError
from clocher_kernels.formats import Ggml, Int4, Mxfp4, Tcq, Ternary
from clocher_kernels.formats.ggml_blocks import PLANES, RECODED, recoded
from clocher_kernels.quant_tensor import BlockRows, LatePlanes, QuantTensor
from cpu_fallback.lanes.record import words
from cpu_fallback.team.large_pages import Kept, ask_for, fetched, give_back
from cpu_fallback.tiles import layout as layouts
from cpu_fallback.tiles import tile_cache
from cpu_fallback.tiles.layout import (
    ROWS,
    UNIT,
    BlockLayout,
    Layout,
    layout_of,
    nbytes_of,
    tiles_in,
)
from cpu_fallback.tiles.tile_cache import TileCache, key_of
from cpu_fallback.tiles.tile_lines import Source, pack_lines, pack_ternary, pack_trellis

VERSION = 3  # Changes when the bytes of a tile do

_CHUNK = 4 << 20


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
    late = planes.rows if isinstance(planes, LatePlanes) else None
    for array in late().arrays if late else planes.values():
        give_back(array)


def _load_or_store(cache: TileCache, layout: Layout | BlockLayout, tensor: QuantTensor) -> Tiles:
    """Return tiles, which the processes of a machine share if they can be stored."""
    key, nbytes = key_of(layout, tensor, VERSION), nbytes_of(layout, tensor.shape)
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
    packed = _around(layout, tensor, fetched(nbytes_of(layout, tensor.shape)))
    damaged = np.zeros(1, np.int64)
    source, rows, beside = _source(layout, tensor, packed, damaged)
    kernel = {Ternary: pack_ternary, Tcq: pack_trellis}.get(type(tensor.format), pack_lines)
    form = np.array(list(words(source)), np.int64)
    tiles = tiles_in(tensor.shape)
    step = max(1, _CHUNK // packed.tile_bytes)
    read = (tensor, packed, rows, beside)

    def part(first: int, _alive: object = read) -> None:  # what the addresses lead to
        for array in () if first else rows.arrays:
            ask_for(array)
        kernel.callable(form.ctypes.data, first, min(first + step, tiles))
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
    if isinstance(planes, LatePlanes) and planes.rows and not is_recoded:
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
