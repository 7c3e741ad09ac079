"""model.ie.bin -> `clocher.dedup` and back, bit for bit; the output is read back and compared.

Each plane is stored in the smallest way, and written piece by piece.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from clocher_kernels.errors import FormatError, ModelNotFound
from clocher_runtime.checkpoints.checkpoint import BIN_NAME, JSON_NAME
from clocher_runtime.checkpoints.dedup import codec
from clocher_runtime.checkpoints.dedup import index as dedup_index
from clocher_runtime.checkpoints.dedup.reader import DedupFile, open_pair
from clocher_runtime.checkpoints.iebin import IebinIndex, PlaneWriter, Progress, quiet
from clocher_runtime.disk.files import MappedFile
from clocher_runtime.disk.output_file import check_free, sync_directory, write_file
from clocher_runtime.disk.plane_index import DAMAGED, Region, check_hashes

KEEP_RAW = 0.95
"""Larger results are stored raw. Source: ZipNN, arXiv 2411.05239."""
WORTH_IT = 0.97
"""Largest worthwhile new size, relative to the old one."""
PIECE_ITEMS = codec.UNIT * 16


def choose(raw: dedup_index.StoredPlane, data: np.ndarray) -> dedup_index.StoredPlane:
    """Return the smallest way to store a plane's bytes; raw unless 5 per cent are saved."""
    found = [raw]
    names = codec.splits_of(raw.plane.dtype)
    item = codec.SPLITS[names[0]].item
    histogram = None  # how often each item occurs, where items have few enough values to count
    if item.itemsize <= 2:
        histogram = _tally(1 << 8 * item.itemsize, np.asarray, item, data)
    for name in names:
        streams = []
        for part in codec.SPLITS[name].parts:
            if histogram is None:
                counts = _tally(1 << part.bits, part.cut, codec.SPLITS[name].item, data)
            else:
                counts = _fold(part, histogram)
            streams.append(choose_stream(counts, part.bits))
        found.append(replace(raw, mode="streams", split=name, streams=tuple(streams)))
    best = min(found, key=lambda plane: plane.stored_bytes)
    return best if best.stored_bytes <= KEEP_RAW * raw.plane.nbytes else raw


def _tally(
    size: int, cut: Callable[[np.ndarray], np.ndarray], item: np.dtype, data: np.ndarray
) -> np.ndarray:
    """Return the count of each of `size` symbols cut out of a plane's items."""
    total = np.zeros(size, np.int64)
    for piece in pieces(data, PIECE_ITEMS * item.itemsize):
        total += np.bincount(cut(piece.view(item)), minlength=len(total))
    return total


def _fold(part: codec.Part, histogram: np.ndarray) -> np.ndarray:
    """Return the counts of a stream's symbols, from those of the items."""
    items = np.flatnonzero(histogram).astype(np.uint8 if len(histogram) == 256 else "<u2")
    symbols = part.cut(items)
    total = np.zeros(1 << part.bits, np.int64)
    np.add.at(total, symbols, np.repeat(histogram[items], len(symbols) // len(items)))
    return total


def choose_stream(counts: np.ndarray, bits: int) -> codec.Stream:
    """Return the smallest way to store a stream, with its table, from counts [2^bits]."""
    count = int(counts.sum())
    order = np.lexsort((np.arange(len(counts)), -counts))
    table = order[: np.count_nonzero(counts)].astype(np.uint8)
    if len(table) == 1:
        return codec.Stream("const", bits, count, table=1, symbols=table)
    found = [codec.Stream("raw", bits, count, symbols=table[:0])]
    if len(table) <= 3:
        found.append(codec.Stream("trits", bits, count, table=len(table), symbols=table))
    for width in codec.WIDTHS:
        if width < bits:
            rare = codec.exception_bits(len(table), width)
            escapes = count - int(counts[table[: (1 << width) - 1]].sum()) if rare else 0
            if escapes <= codec.MAX_ESCAPES:
                found.append(codec.Stream("code", bits, count, width, len(table), escapes, table))
    # Its bytes, and a bit per escape for its time.
    return min(
        found, key=lambda s: s.table + s.code_bytes + 4 * s.ranks + s.literal_bytes + s.escapes / 8
    )


def pieces(data: np.ndarray, step: int) -> Iterator[np.ndarray]:
    """Yield bytes, `step` at a time."""
    return (data[start : start + step] for start in range(0, len(data), step))


def encode(
    plane: dedup_index.StoredPlane, data: np.ndarray, put: Callable[[Region, np.ndarray], object]
) -> None:
    """Append the parts of a plane that has its places to files by `PlaneWriter.put`."""
    if plane.mode == "raw":
        put(plane.regions[0], data)
    for number, stream in enumerate(plane.streams):
        split = codec.SPLITS[plane.split]
        items = pieces(data, PIECE_ITEMS * split.item.itemsize)
        symbols = (split.parts[number].cut(piece.view(split.item)) for piece in items)
        _write_stream(stream, symbols, plane.regions[4 * number : 4 * number + 4], put)


def _write_stream(
    stream: codec.Stream,
    pieces: Iterator[np.ndarray],
    regions: tuple[Region, ...],
    put: Callable[[Region, np.ndarray], object],
) -> None:
    table, codes, rank, exceptions = regions
    assert stream.symbols is not None, "choose_stream gives it"
    put(table, stream.symbols)
    place_of = np.zeros(1 << stream.bits, np.uint8)
    place_of[stream.symbols] = np.arange(len(stream.symbols))
    escape = (1 << stream.width) - 1
    ranks, left = [np.zeros(1, int)], np.zeros(0, np.uint8)
    for symbols in pieces if stream.mode != "const" else ():
        places = place_of[symbols]
        if stream.mode == "raw":
            put(exceptions, codec.pack(symbols, stream.bits))
        elif stream.mode == "trits":
            put(codes, codec.pack_trits(places))
        else:
            put(codes, codec.pack(np.minimum(places, escape), stream.width))
        if stream.escapes:
            rare = places >= escape
            ranks.append(
                np.add.reduceat(rare, np.arange(0, len(rare), codec.RANK_STRIDE), dtype=int)
            )
            found = np.concatenate([left, places[rare] - np.uint8(escape)])
            whole = len(found) // 8 * 8  # what fills bytes
            left = found[whole:]
            put(exceptions, codec.pack(found[:whole], stream.exception_bits))
    put(exceptions, codec.pack(left, stream.exception_bits))
    put(rank, np.cumsum(np.concatenate(ranks))[1:-1].astype("<u4"))


class Deduplication:
    """The deduplicated weights of a model: planned, ready to be written beside it."""

    def __init__(self, directory: Path, progress: Progress = quiet) -> None:
        """Read a model and decide how and where each plane is stored."""
        self.directory, self._index = directory, IebinIndex(directory / JSON_NAME)
        if not os.path.isfile(directory / BIN_NAME):
            raise ModelNotFound(f"{directory}: no {BIN_NAME}; restore it first (--restore)")
        planes: list[dedup_index.StoredPlane] = []
        seen: dict[tuple[object, str], int] = {}
        done = 0
        for number, (raw, data) in enumerate(_planes(directory, self._index)):
            first = seen.setdefault((raw.plane, raw.sha256), number)
            if first < number:
                planes.append(replace(raw, mode="same", of=first))
            else:
                where = f"{BIN_NAME}: tensor {raw.tensor!r}: "
                check_hashes({raw.key: data}, {raw.key: raw.sha256}, where, DAMAGED)
                planes.append(choose(raw, data))
            done += raw.plane.nbytes
            progress(done, raw.tensor)
        self.planes, ends = dedup_index.placed(planes)
        stored = sum(ends.values())
        dedup_index.check_expansion(planes, stored, str(directory))
        self.nbytes = stored + sum(len(json.dumps(plane.document())) + 2 for plane in planes)

    def run(self, progress: Progress = quiet) -> None:
        """Write the output, worth it or not. Raises FormatError, UsageError, OSError."""
        check_free(self.directory / dedup_index.INDEX_NAME, self.nbytes)
        path = self.directory / dedup_index.INDEX_NAME
        paths = {kind: self.directory / dedup_index.FILE_NAMES[kind] for kind in dedup_index.KINDS}
        done = 0
        with PlaneWriter(paths) as writer:
            planes = _planes(self.directory, self._index)
            for plane, (_, data) in zip(self.planes, planes, strict=True):
                encode(plane, data, writer.put)
                done += plane.plane.nbytes
                progress(done, plane.tensor)
            index = dedup_index.DedupIndex(self._index.bin, writer.sync(), self.planes)
            written = {kind: file.path for kind, file in writer.files.items()}
            DedupFile(path, index, written).verify()
            try:
                writer.publish(stale=[path])
                write_file(path, index.text())
            except OSError:
                remove_dedup(self.directory)
                raise


def remove_dedup(directory: Path) -> None:
    """Delete a directory's deduplicated weights, if any."""
    (directory / dedup_index.INDEX_NAME).unlink(missing_ok=True)
    sync_directory(directory)
    for name in dedup_index.FILE_NAMES.values():
        (directory / name).unlink(missing_ok=True)


def restore(directory: Path, progress: Progress = quiet) -> int:
    """Write model.ie.bin back, byte for byte; return its size. Raises ModelError, OSError."""
    index, dedup = open_pair(directory)
    check_free(directory / BIN_NAME, index.bin.nbytes)
    with PlaneWriter({"bin": directory / BIN_NAME}) as writer:
        for number, (plane, region) in enumerate(dedup_index.raw_planes(index)):
            writer.put(region, dedup.plane(number, verify=True))
            dedup.release()
            progress(writer.nbytes, plane.tensor)
        if writer.sync()["bin"] != index.bin:
            raise FormatError(f"{directory}: what was restored does not match bin.sha256")
        writer.publish()
    return index.bin.nbytes


def _planes(
    directory: Path, index: IebinIndex
) -> Iterator[tuple[dedup_index.StoredPlane, np.ndarray]]:
    file = MappedFile(directory / BIN_NAME, index.bin.nbytes)
    for plane, region in dedup_index.raw_planes(index):
        yield plane, file.bytes(region.offset, region.end)
        file.release()


def described(plane: dedup_index.StoredPlane) -> str:
    """Return how a plane is stored, in a few words."""
    if plane.mode != "streams":
        return "as it is" if plane.mode == "raw" else f"same as plane {plane.of}"
    parts = zip(codec.SPLITS[plane.split].parts, plane.streams, strict=True)
    return ", ".join(f"{part.name} {_stream(stream)}" for part, stream in parts)


def _stream(stream: codec.Stream) -> str:
    if stream.mode == "code":
        escaped = f" + {100 * stream.escapes / stream.count:.2f} % escapes"
        return f"{stream.width}-bit code{escaped if stream.escapes else ''}"
    return {"const": "constant", "trits": "5 per byte", "raw": "as it is"}[stream.mode]
