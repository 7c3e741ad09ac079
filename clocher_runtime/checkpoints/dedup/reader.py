"""Open a model by its deduplicated weights, validated in full, decoded piece by piece."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from clocher_kernels.errors import FormatError, ModelError, ModelNotFound
from clocher_runtime.checkpoints.checkpoint import Checkpoint, Stored, lazy_tensor, stored_tensor
from clocher_runtime.checkpoints.dedup.codec import (
    SPLITS,
    UNIT,
    Decoder,
    Part,
    Stream,
    join,
    unpack,
)
from clocher_runtime.checkpoints.dedup.index import (
    BLOCK_BYTES,
    FILE_NAMES,
    INDEX_NAME,
    KINDS,
    Base,
    DedupIndex,
    StoredPlane,
    parse_index,
    raw_planes,
)
from clocher_runtime.checkpoints.iebin import BIN_NAME, JSON_NAME, IebinIndex, read_index
from clocher_runtime.disk.files import MappedFile, read_bytes, sha256_of
from clocher_runtime.disk.plane_index import FileFacts, Region, check_padding
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES

PIECE_ITEMS = 4 * UNIT
_BLOCKS = 64

BasePlane = Callable[[str, str], np.ndarray]
"""Tensor name, plane name -> the plane of the base."""


def open_dedup(directory: Path, base: BasePlane | None = None) -> "DedupFile":
    """Open the deduplicated weights of a directory; `base` is needed by planes that build on it."""
    path = directory / INDEX_NAME
    index = parse_index(read_bytes(path, MAX_JSON_BYTES), str(path))
    names = {kind: directory / name for kind, name in FILE_NAMES.items()}
    return DedupFile(path, index, names, base)


class DedupFile:
    """The three files, mapped, and the planes in them."""

    def __init__(
        self, path: Path, index: DedupIndex, names: Mapping[str, Path], base: BasePlane | None
    ) -> None:
        self.path, self.index, self._base = path, index, base
        self._files: dict[str, MappedFile] = {}
        for kind in KINDS:
            size = index.files[kind].nbytes
            if size:
                self._files[kind] = MappedFile(names[kind], size)
            elif not names[kind].is_file() or names[kind].stat().st_size:
                raise FormatError(f"{names[kind]}: expected an empty file")
        regions = (region for plane in index.regions for region in plane if region.nbytes)
        check_padding(regions, self._files)

    @property
    def files(self) -> tuple[MappedFile, ...]:
        """The files that are not empty."""
        return tuple(self._files.values())

    def in_place(self, number: int) -> bool:
        """Return whether a plane is a view of a file."""
        plane = self.index.planes[number]
        return plane.mode in ("raw", "base") or (plane.mode == "same" and self.in_place(plane.of))

    def plane(self, number: int, verify: bool = False) -> np.ndarray:
        """Return a plane: a view (hash checked with `verify`), or decoded with its hash checked."""
        plane = self.index.planes[number]
        if plane.mode == "same":
            return self.plane(plane.of, verify)
        if plane.mode == "base":
            data = self._base_bytes(plane)
        elif plane.mode == "raw":
            data = self._bytes(self.index.regions[number][0])
        else:
            # A base that is not there must be missed before memory is asked for.
            pieces = self.pieces(number, 0, plane.plane.nbytes)
            data = np.empty(plane.plane.nbytes, np.uint8)
            self._decode(plane, pieces, data)
            verify = False
        if verify:
            self._check_hash(plane, sha256_of(data))
        return data.view(plane.plane.storage).reshape(plane.plane.shape)

    def pieces(self, number: int, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield decoded bytes [start, stop), unhashed; `start`: a multiple of the piece size."""
        plane = self.index.planes[number]
        base = self._base_bytes(plane) if plane.xor else None
        step = BLOCK_BYTES * _BLOCKS
        if plane.mode == "streams":
            step = PIECE_ITEMS * SPLITS[plane.split].item.itemsize

        def decoded() -> Iterator[np.ndarray]:
            try:
                decode = self._blocks(number) if plane.mode == "blocks" else self._streams(number)
                for at in range(start, stop, step):
                    piece = decode(at, min(at + step, plane.plane.nbytes))
                    yield piece if base is None else piece ^ base[at : at + step]
            except FormatError as error:
                raise FormatError(
                    f"{self.path}: tensor {plane.tensor!r}, plane {plane.key!r}: {error}"
                ) from None

        return decoded()

    def verify(self) -> None:
        """Decode everything; check the SHA-256 of each plane and each file; raises FormatError."""
        for number, plane in enumerate(self.index.planes):
            if plane.mode == "same":
                continue
            if self.in_place(number):
                self.plane(number, verify=True)
            else:
                self._decode(plane, self.pieces(number, 0, plane.plane.nbytes), None)
            self.release()
        for kind, file in self._files.items():
            if file.sha256() != self.index.files[kind].sha256:
                raise FormatError(f"{file.path}: the bytes do not match their SHA-256")

    def release(self) -> None:
        """Let the kernel take back the resident pages of the files."""
        for file in self.files:
            file.release()

    def _decode(
        self, plane: StoredPlane, pieces: Iterator[np.ndarray], out: np.ndarray | None
    ) -> None:
        digest = hashlib.sha256()
        start = 0
        for piece in pieces:
            digest.update(piece.data)
            if out is not None:
                out[start : start + len(piece)] = piece
            start += len(piece)
        self._check_hash(plane, digest.hexdigest())

    def _check_hash(self, plane: StoredPlane, found: str) -> None:
        if found != plane.sha256:
            raise FormatError(
                f"{self.path}: tensor {plane.tensor!r}, plane {plane.key!r}: the bytes do not "
                "match their SHA-256: the files are damaged; make them again from model.ie.bin"
            )

    def _streams(self, number: int) -> Callable[[int, int], np.ndarray]:
        plane, regions = self.index.planes[number], self.index.regions[number]
        split = SPLITS[plane.split]
        decoders = [
            self._stream(stream, part, regions[4 * i : 4 * i + 4])
            for i, (stream, part) in enumerate(zip(plane.streams, split.parts, strict=True))
        ]

        def decode(start: int, stop: int) -> np.ndarray:
            first, last = (at // split.item.itemsize * split.per_item for at in (start, stop))
            return join(split, [one(first, last) for one in decoders]).view(np.uint8)

        return decode

    def _stream(
        self, stream: Stream, part: Part, regions: tuple[Region, ...]
    ) -> Callable[[int, int], np.ndarray]:
        table, codes, rank, literals = (self._bytes(region) for region in regions)
        if stream.mode == "raw":
            return lambda start, stop: part.place(unpack(literals, part.bits, start, stop - start))
        if table.max(initial=0) >> part.bits or len(np.unique(table)) != len(table):
            raise FormatError("the table repeats a symbol or has one of too many bits")
        return Decoder(stream, part.place(table), codes, rank.view("<u4"), literals).decode

    def _blocks(self, number: int) -> Callable[[int, int], np.ndarray]:
        plane, regions = self.index.planes[number], self.index.regions[number]
        # A copy: what has been checked must not change in the file before it is used.
        index = self._bytes(regions[0]).view("<u4").copy()
        unique = self._bytes(regions[1]).reshape(-1, BLOCK_BYTES)
        if index.max() >= plane.unique:
            raise FormatError("the number of a block is too high")

        def decode(start: int, stop: int) -> np.ndarray:
            numbers = index[start // BLOCK_BYTES : -(-stop // BLOCK_BYTES)]
            blocks: np.ndarray = unique[numbers]
            return blocks.reshape(-1)[: stop - start]

        return decode

    def _bytes(self, region: Region) -> np.ndarray:
        if not region.nbytes:
            return np.zeros(0, np.uint8)
        return self._files[region.file].bytes(region.offset, region.end)

    def _base_bytes(self, plane: StoredPlane) -> np.ndarray:
        if self._base is None:
            raise ModelNotFound(f"{self.path}: needs its base, which was not given")
        found = self._base(plane.tensor, plane.key)
        if found.dtype != plane.plane.storage or found.shape != plane.plane.shape:
            raise FormatError("the base has it in another type or shape")
        return found.reshape(-1).view(np.uint8)


Keep = Callable[[DedupFile, int], np.ndarray]
"""Returns a plane of a file: `DedupFile.plane`, or a cache of it."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """Weights of a directory: model.ie.json and model.ie.bin, or `dedup` in its place."""

    index: IebinIndex
    dedup: DedupFile | None
    checkpoint: Checkpoint


def has_dedup(directory: Path) -> bool:
    """Return whether a directory holds deduplicated weights."""
    return os.path.isfile(directory / INDEX_NAME)


def open_deduplicated(
    directory: Path, base: Path | None = None, verify: bool = False, keep: Keep = DedupFile.plane
) -> Artifact:
    """Open a model by its deduplicated weights; raw planes stay views, others decode per read.

    `base` is by default looked for beside `directory`; `verify` checks every SHA-256 now. Raises
    ModelNotFound, FormatError, UnsupportedModel, WindowError.
    """
    index = read_index(directory / JSON_NAME)
    planes: list[BasePlane] = []
    dedup = open_dedup(directory, lambda tensor, key: planes[0](tensor, key))
    listed = [plane for plane, _ in raw_planes(index)]
    stated = [StoredPlane(p.tensor, p.key, p.plane, p.sha256) for p in dedup.index.planes]
    if dedup.index.source != index.bin or stated != listed:
        raise FormatError(
            f"{dedup.path}: stands for another {BIN_NAME} than {index.path} describes; "
            "deduplicate the model again"
        )
    files = dedup.files
    if dedup.index.base is not None:
        found = _find_base(dedup.index.base, directory, base)
        planes.append(planes_of(found.checkpoint))
        files += found.checkpoint.files
    if verify:
        dedup.verify()
    return Artifact(index, dedup, index.checkpoint(dict(_tensors(dedup, index, keep)), files))


def open_base(directory: Path) -> Artifact:
    """Open a model that others may build on; raises ModelError."""
    if os.path.isfile(directory / BIN_NAME) or not has_dedup(directory):
        index = read_index(directory / JSON_NAME)
        return Artifact(index, None, index.open())
    if open_dedup(directory).index.base is not None:
        raise FormatError(
            f"{directory}: builds on a base itself; expected a model that is complete: restore "
            f"its {BIN_NAME} first"
        )
    return open_deduplicated(directory)


def _find_base(wanted: Base, directory: Path, given: Path | None) -> Artifact:
    for candidate in [given] if given else _candidates(wanted, directory):
        try:
            index = read_index(candidate / JSON_NAME)
            if index.bin == FileFacts(wanted.nbytes, wanted.sha256):
                return open_base(candidate)
        except ModelError:
            if given:
                raise
    where = str(given) if given else f"a directory beside {directory}"
    raise ModelNotFound(
        f"{directory / INDEX_NAME}: builds on a model whose {BIN_NAME} has SHA-256 "
        f"{wanted.sha256} ({wanted.name_hint!r} when it was made); {where} is not that model: put "
        "it there"
    )


def _candidates(wanted: Base, directory: Path) -> Iterator[Path]:
    parent = directory.resolve().parent
    yield parent / wanted.name_hint
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return
    for name in names:
        if name != wanted.name_hint and os.path.isfile(parent / name / JSON_NAME):
            yield parent / name


def planes_of(checkpoint: Checkpoint) -> BasePlane:
    """Return a function that gives the planes of a base."""

    def plane(tensor: str, key: str) -> np.ndarray:
        planes = checkpoint.tensor(tensor).planes
        if key not in planes:
            raise FormatError("the base has no such plane")
        return planes[key]

    return plane


def _tensors(dedup: DedupFile, index: IebinIndex, keep: Keep) -> Iterator[tuple[str, Stored]]:
    number = 0
    for entry in index.entries:
        numbers = {key: number + i for i, key in enumerate(entry.regions)}
        number += len(numbers)
        where = f"{dedup.path}: tensor {entry.name!r}"
        if keep is DedupFile.plane and all(map(dedup.in_place, numbers.values())):
            planes = {key: dedup.plane(at) for key, at in numbers.items()}
            yield entry.name, stored_tensor(entry.shape, entry.format, planes, where)
        else:
            make = partial(_kept, dedup, numbers, keep)
            yield entry.name, lazy_tensor(entry.shape, entry.format, make, where)


def _kept(dedup: DedupFile, numbers: Mapping[str, int], keep: Keep) -> dict[str, np.ndarray]:
    return {key: keep(dedup, number) for key, number in numbers.items()}
