"""Choose the smallest way to store a plane, and write it to the three files piece by piece."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from clocher_runtime.checkpoints.dedup.codec import (
    MAX_ESCAPES,
    RANK_STRIDE,
    SPLITS,
    UNIT,
    WIDTHS,
    Part,
    Stream,
    exception_bits,
    pack,
    pack_trits,
    splits_of,
)
from clocher_runtime.checkpoints.dedup.index import StoredPlane
from clocher_runtime.disk.output_file import OutputFile
from clocher_runtime.disk.plane_index import Region

KEEP_RAW = 0.95
"""Larger results are stored raw. Source: ZipNN, arXiv 2411.05239."""
PIECE_ITEMS = UNIT * 16
_COPY_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen storage of a plane, with its tables."""

    plane: StoredPlane
    tables: tuple[np.ndarray, ...] = ()  # symbols of each stream, the most frequent first, u8


def choose(raw: StoredPlane, data: np.ndarray) -> Choice:
    """Return the smallest way to store a plane's bytes; raw unless 5 per cent are saved."""
    found = [Choice(raw)]
    names = splits_of(raw.plane.dtype)
    item = SPLITS[names[0]].item
    histogram = None  # how often each item occurs, where items have few enough values to count
    if item.itemsize <= 2:
        histogram = _tally(1 << 8 * item.itemsize, np.asarray, item, data)
    for name in names:
        streams, tables = [], []
        for part in SPLITS[name].parts:
            if histogram is None:
                counts = _tally(1 << part.bits, part.cut, SPLITS[name].item, data)
            else:
                counts = _fold(part, histogram)
            stream, table = choose_stream(counts, part.bits)
            streams.append(stream)
            tables.append(table)
        plane = replace(raw, mode="streams", split=name, streams=tuple(streams))
        found.append(Choice(plane, tuple(tables)))
    best = min(found, key=lambda choice: choice.plane.stored_bytes)
    small = best.plane.stored_bytes <= KEEP_RAW * raw.plane.nbytes
    return best if small else Choice(raw)


def _tally(
    size: int, cut: Callable[[np.ndarray], np.ndarray], item: np.dtype, data: np.ndarray
) -> np.ndarray:
    """Return the count of each of `size` symbols cut out of a plane's items."""
    total = np.zeros(size, np.int64)
    for piece in pieces(data, PIECE_ITEMS * item.itemsize):
        total += np.bincount(cut(piece.view(item)), minlength=len(total))
    return total


def _fold(part: Part, histogram: np.ndarray) -> np.ndarray:
    """Return the counts of a stream's symbols, from those of the items."""
    items = np.flatnonzero(histogram).astype(np.uint8 if len(histogram) == 256 else "<u2")
    symbols = part.cut(items)
    total = np.zeros(1 << part.bits, np.int64)
    np.add.at(total, symbols, np.repeat(histogram[items], len(symbols) // len(items)))
    return total


def choose_stream(counts: np.ndarray, bits: int) -> tuple[Stream, np.ndarray]:
    """Return the smallest way to store a stream, and its table, from counts [2^bits]."""
    count = int(counts.sum())
    order = np.lexsort((np.arange(len(counts)), -counts))
    table = order[: np.count_nonzero(counts)].astype(np.uint8)
    if len(table) == 1:
        return Stream("const", bits, count, table=1), table
    found = [Stream("raw", bits, count)]
    if len(table) <= 3:
        found.append(Stream("trits", bits, count, table=len(table)))
    for width in WIDTHS:
        if width < bits:
            rare = exception_bits(len(table), width)
            escapes = count - int(counts[table[: (1 << width) - 1]].sum()) if rare else 0
            if escapes <= MAX_ESCAPES:
                found.append(Stream("code", bits, count, width, len(table), escapes))
    best = min(found, key=_cost)
    return best, table[: best.table]


def _cost(stream: Stream) -> float:
    """Return the bytes of a stream, plus a bit per escape for its time."""
    stored = stream.table + stream.code_bytes + 4 * stream.ranks + stream.literal_bytes
    return stored + stream.escapes / 8


def pieces(data: np.ndarray, step: int) -> Iterator[np.ndarray]:
    """Yield bytes, `step` at a time."""
    return (data[start : start + step] for start in range(0, len(data), step))


def encode(
    choice: Choice, data: np.ndarray, files: Mapping[str, OutputFile], regions: tuple[Region, ...]
) -> None:
    """Append the parts of a plane to the files, each padded up to its region."""
    plane = choice.plane
    if plane.mode == "streams":
        split = SPLITS[plane.split]
        for number, (stream, table) in enumerate(zip(plane.streams, choice.tables, strict=True)):
            parts = regions[4 * number : 4 * number + 4]
            items = pieces(data, PIECE_ITEMS * split.item.itemsize)
            symbols = (split.parts[number].cut(piece.view(split.item)) for piece in items)
            _write_stream(stream, table, symbols, files, parts)
        return
    _begin(files, *regions)
    if plane.mode == "raw":
        for piece in pieces(data, _COPY_BYTES):
            files["exceptions"].write(piece)


def _begin(files: Mapping[str, OutputFile], *regions: Region) -> None:
    for region in regions:
        if region.nbytes:
            files[region.file].pad(region.offset)


def _write_stream(
    stream: Stream,
    table: np.ndarray,
    pieces: Iterator[np.ndarray],
    files: Mapping[str, OutputFile],
    regions: tuple[Region, ...],
) -> None:
    masks, exceptions = files["masks"], files["exceptions"]
    _begin(files, regions[0])
    files["defaults"].write(table)
    _begin(files, regions[1], regions[3])
    place_of = np.zeros(1 << stream.bits, np.uint8)
    place_of[table] = np.arange(len(table))
    escape = (1 << stream.width) - 1
    ranks, left = [np.zeros(1, int)], np.zeros(0, np.uint8)
    for symbols in pieces if stream.mode != "const" else ():
        places = place_of[symbols]
        if stream.mode == "raw":
            exceptions.write(pack(symbols, stream.bits))
        elif stream.mode == "trits":
            masks.write(pack_trits(places))
        else:
            masks.write(pack(np.minimum(places, escape), stream.width))
        if stream.escapes:
            rare = places >= escape
            ranks.append(np.add.reduceat(rare, np.arange(0, len(rare), RANK_STRIDE), dtype=int))
            found = np.concatenate([left, places[rare] - np.uint8(escape)])
            whole = len(found) // 8 * 8  # what fills bytes
            left = found[whole:]
            if whole:
                exceptions.write(pack(found[:whole], stream.exception_bits))
    if len(left):
        exceptions.write(pack(left, stream.exception_bits))
    _begin(files, regions[2])
    if regions[2].nbytes:
        masks.write(np.cumsum(np.concatenate(ranks))[1:-1].astype("<u4"))
