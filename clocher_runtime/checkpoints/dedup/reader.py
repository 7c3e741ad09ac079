"""Open a model by its deduplicated weights, validated in full, decoded piece by piece."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from clocher_kernels.errors import FormatError
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints import checkpoint
from clocher_runtime.checkpoints.dedup import codec
from clocher_runtime.checkpoints.dedup import index as dedup_index
from clocher_runtime.checkpoints.iebin import IebinIndex
from clocher_runtime.disk.files import MappedFile, read_bytes, sha256_of
from clocher_runtime.disk.plane_index import Region, check_padding
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES, prefixed

PIECE_ITEMS = 4 * codec.UNIT


class DedupFile:
    """The three files, mapped, and the planes in them."""

    def __init__(
        self, path: Path, index: dedup_index.DedupIndex, names: Mapping[str, Path]
    ) -> None:
        self.path, self.index = path, index
        self._files: dict[str, MappedFile] = {}
        for kind in dedup_index.KINDS:
            size = index.files[kind].nbytes
            if size:
                self._files[kind] = MappedFile(names[kind], size)
            elif not names[kind].is_file() or names[kind].stat().st_size:
                raise FormatError(f"{names[kind]}: expected an empty file")
        regions = (region for plane in index.planes for region in plane.regions if region.nbytes)
        check_padding(regions, self._files)

    @property
    def files(self) -> tuple[MappedFile, ...]:
        """The files that are not empty."""
        return tuple(self._files.values())

    def in_place(self, number: int) -> bool:
        """Return whether a plane is a view of a file."""
        plane = self.index.planes[number]
        return plane.mode == "raw" or (plane.mode == "same" and self.in_place(plane.of))

    def plane(self, number: int, verify: bool = False) -> np.ndarray:
        """Return a plane: a view (hash checked with `verify`), or decoded with its hash checked."""
        plane = self.index.planes[number]
        if plane.mode == "same":
            return self.plane(plane.of, verify)
        if plane.mode == "raw":
            data = self._bytes(plane.regions[0])
            if verify:
                self._check_hash(plane, sha256_of(data))
        else:
            data = self._decoded(plane)
        return data.view(plane.plane.storage).reshape(plane.plane.shape)

    def verify(self) -> None:
        """Decode everything; check the SHA-256 of each plane and each file; raises FormatError."""
        for number, plane in enumerate(self.index.planes):
            if plane.mode != "same":
                self.plane(number, verify=True)
                self.release()
        for kind, file in self._files.items():
            if file.sha256() != self.index.files[kind].sha256:
                raise FormatError(f"{file.path}: the bytes do not match their SHA-256")

    def release(self) -> None:
        """Let the kernel take back the resident pages of the files."""
        for file in self.files:
            file.release()

    def _decoded(self, plane: dedup_index.StoredPlane) -> np.ndarray:
        """Decode a plane piece by piece, check its hash, and return its bytes."""
        split, nbytes = codec.SPLITS[plane.split], plane.plane.nbytes
        out, digest = np.empty(nbytes, np.uint8), hashlib.sha256()
        item, step = split.item.itemsize, PIECE_ITEMS * split.item.itemsize
        with prefixed(f"{self.path}: tensor {plane.tensor!r}, plane {plane.key!r}"):
            decoders = [
                self._stream(stream, part, plane.regions[4 * i : 4 * i + 4])
                for i, (stream, part) in enumerate(zip(plane.streams, split.parts, strict=True))
            ]
            for start in range(0, nbytes, step):
                stop = min(start + step, nbytes)
                first, last = (end // item * split.per_item for end in (start, stop))
                piece = codec.join(split, [one(first, last) for one in decoders]).view(np.uint8)
                digest.update(piece.data)
                out[start:stop] = piece
        self._check_hash(plane, digest.hexdigest())
        return out

    def _check_hash(self, plane: dedup_index.StoredPlane, found: str) -> None:
        if found != plane.sha256:
            raise FormatError(
                f"{self.path}: tensor {plane.tensor!r}, plane {plane.key!r}: the bytes do not "
                "match their SHA-256: the files are damaged; make them again from model.ie.bin"
            )

    def _stream(
        self, stream: codec.Stream, part: codec.Part, regions: tuple[Region, ...]
    ) -> Callable[[int, int], np.ndarray]:
        table, codes, rank, literals = (self._bytes(region) for region in regions)
        if stream.mode == "raw":
            return lambda start, stop: part.place(
                codec.unpack(literals, part.bits, start, stop - start)
            )
        if table.max(initial=0) >> part.bits or len(np.unique(table)) != len(table):
            raise FormatError("the table repeats a symbol or has one of too many bits")
        return codec.decoder(stream, part.place(table), codes, rank.view("<u4"), literals)

    def _bytes(self, region: Region) -> np.ndarray:
        if not region.nbytes:
            return np.zeros(0, np.uint8)
        return self._files[region.file].bytes(region.offset, region.end)


Keep = Callable[[DedupFile, int], np.ndarray]
"""Returns a plane of a file: `DedupFile.plane`, or a cache of it."""


def has_dedup(directory: Path) -> bool:
    """Return whether a directory holds deduplicated weights."""
    return os.path.isfile(directory / dedup_index.INDEX_NAME)


def open_pair(directory: Path) -> tuple[IebinIndex, DedupFile]:
    """Open a model's document and its deduplicated weights, which must belong to it."""
    index, path = IebinIndex(directory / checkpoint.JSON_NAME), directory / dedup_index.INDEX_NAME
    raw = [plane for plane, _ in dedup_index.raw_planes(index)]
    data = read_bytes(path, MAX_JSON_BYTES)
    stored = dedup_index.parse_index(data, str(path), index.bin, raw)
    names = {kind: directory / name for kind, name in dedup_index.FILE_NAMES.items()}
    return index, DedupFile(path, stored, names)


def open_deduplicated(
    directory: Path, verify: bool = False, keep: Keep = DedupFile.plane
) -> checkpoint.Checkpoint:
    """Open a model by its deduplicated weights; raw planes stay views, others decode per read.

    `verify` checks every SHA-256 now. Raises ModelNotFound, FormatError, UnsupportedModel.
    """
    index, dedup = open_pair(directory)
    if verify:
        dedup.verify()
    return index.checkpoint(dict(_tensors(dedup, index, keep)), dedup.files)


def _tensors(dedup: DedupFile, index: IebinIndex, keep: Keep) -> Iterator[tuple[str, QuantTensor]]:
    number = 0
    for entry in index.entries:
        numbers = {key: number + i for i, key in enumerate(entry.regions)}
        number += len(numbers)
        where = f"{dedup.path}: tensor {entry.name!r}"
        if keep is DedupFile.plane and all(map(dedup.in_place, numbers.values())):
            planes = {key: dedup.plane(at) for key, at in numbers.items()}
            yield entry.name, checkpoint.stored_tensor(entry.shape, entry.format, planes, where)
        else:
            make = partial(_kept, dedup, numbers, keep)
            yield entry.name, checkpoint.lazy_tensor(entry.shape, entry.format, make, where)


def _kept(dedup: DedupFile, numbers: Mapping[str, int], keep: Keep) -> dict[str, np.ndarray]:
    return {key: keep(dedup, number) for key, number in numbers.items()}
