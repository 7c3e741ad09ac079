"""Reading `clocher.dedup`: checked in full when opened, decoded a piece at a time."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from clocher_kernels.errors import FormatError, ModelNotFound
from clocher_runtime.checkpoints.dedup.codec import UNIT, Decoder, Stream, unpack
from clocher_runtime.checkpoints.dedup.index import (
    ALIGNMENT,
    BLOCK_BYTES,
    FILE_NAMES,
    INDEX_NAME,
    KINDS,
    DedupIndex,
    Region,
    StoredPlane,
    parse_index,
)
from clocher_runtime.checkpoints.dedup.planes import SPLITS, Part, join
from clocher_runtime.disk.files import MappedFile, read_bytes
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES

PIECE_ITEMS = 4 * UNIT
_BLOCKS = 64
_HASH_STEP = 1 << 22

BasePlane = Callable[[str, str], np.ndarray]
"""Name of a tensor, name of a plane -> the plane of the base."""


def open_dedup(path: Path | str, base: BasePlane | None = None) -> "DedupFile":
    """Open the deduplicated weights of a directory.

    Args:
        path: the directory, or its model.dedup.json.
        base: where planes of the base come from; needed for planes that build on it.

    Raises:
        ModelNotFound: a file is missing.
        FormatError: a file is damaged or breaks a rule of docs/dedup.md.
        UnsupportedModel: it is of another version.
        WindowError: a timed window is open.
    """
    path = Path(path)
    json_path = path if path.name == INDEX_NAME else path / INDEX_NAME
    index = parse_index(read_bytes(json_path, MAX_JSON_BYTES), str(json_path))
    names = {kind: json_path.parent / name for kind, name in FILE_NAMES.items()}
    return DedupFile(json_path, index, names, base)


class DedupFile:
    """The three files, and the planes in them.

    Attributes:
        path: model.dedup.json.
        index: what it says.
        files: the files that are not empty, mapped.
    """

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
        self._check_padding()

    @property
    def files(self) -> tuple[MappedFile, ...]:
        """The files that are not empty."""
        return tuple(self._files.values())

    def in_place(self, number: int) -> bool:
        """Return whether a plane is a view of a file."""
        plane = self.index.planes[number]
        return plane.mode in ("raw", "base") or (plane.mode == "same" and self.in_place(plane.of))

    def plane(self, number: int, verify: bool = False) -> np.ndarray:
        """Return a plane, in the type and shape of the format.

        It is a view of a file if it is stored as it is, else an array of its own whose SHA-256
        has been checked.

        Args:
            number: its number in the index.
            verify: check the SHA-256 of a view, too.

        Raises:
            FormatError: the bytes do not match their SHA-256, or cannot be decoded.
        """
        plane = self.index.planes[number]
        if plane.mode == "same":
            return self.plane(plane.of, verify)
        if plane.mode == "base":
            data = self._base_bytes(plane)
        elif plane.mode == "raw":
            data = self._bytes(self.index.regions[number][0])
        else:
            # A base that is not there must be missed before memory is asked for.
            base = self._base_bytes(plane) if plane.xor else None
            data = np.empty(plane.plane.nbytes, np.uint8)
            self._decode(number, base, data)
            verify = False
        if verify:
            digest = hashlib.sha256()
            for start in range(0, len(data), _HASH_STEP):
                digest.update(data[start : start + _HASH_STEP].data)
            self._check_hash(plane, digest.hexdigest())
        return data.view(plane.plane.storage).reshape(plane.plane.shape)

    def read(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return a range of bytes of a plane, u8, without decoding all of it.

        Args:
            number: number of the plane in the index.
            start: first byte.
            stop: the byte after the last one.

        Raises:
            FormatError: it cannot be decoded.
        """
        plane = self.index.planes[number]
        if plane.mode == "same":
            return self.read(plane.of, start, stop)
        if self.in_place(number):
            return self.plane(number).reshape(-1).view(np.uint8)[start:stop]
        step = self._step(plane)
        first = start // step * step
        pieces = list(self.pieces(number, first, min(stop, plane.plane.nbytes)))
        return np.concatenate(pieces)[start - first : stop - first]

    def pieces(self, number: int, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield decoded bytes of a plane that is not in place, u8, without checking a hash.

        Args:
            number: number of the plane in the index.
            start: first byte; a multiple of the size of all pieces but the last.
            stop: the byte after the last one, at most the end.

        Raises:
            FormatError: it cannot be decoded.
        """
        plane = self.index.planes[number]
        base = self._base_bytes(plane) if plane.xor else None
        return self._pieces(number, base, start, stop)

    def verify(self) -> None:
        """Decode everything; check the SHA-256 of each plane and each file.

        Raises:
            FormatError: one does not match.
        """
        for number, plane in enumerate(self.index.planes):
            if plane.mode == "same":
                continue
            if self.in_place(number):
                self.plane(number, verify=True)
            else:
                base = self._base_bytes(plane) if plane.xor else None
                self._decode(number, base, None)
            self.release()
        for kind, file in self._files.items():
            digest = hashlib.sha256()
            for start in range(0, file.nbytes, _HASH_STEP):
                digest.update(file.bytes(start, min(start + _HASH_STEP, file.nbytes)).data)
            file.release()
            if digest.hexdigest() != self.index.files[kind].sha256:
                raise FormatError(f"{file.path}: the bytes do not match their SHA-256")

    def release(self) -> None:
        """Let the kernel take back the resident pages of the files."""
        for file in self.files:
            file.release()

    def _decode(self, number: int, base: np.ndarray | None, out: np.ndarray | None) -> None:
        plane = self.index.planes[number]
        digest = hashlib.sha256()
        start = 0
        for piece in self._pieces(number, base, 0, plane.plane.nbytes):
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

    def _step(self, plane: StoredPlane) -> int:
        if plane.mode == "blocks":
            return BLOCK_BYTES * _BLOCKS
        return PIECE_ITEMS * SPLITS[plane.split].item.itemsize

    def _pieces(
        self, number: int, base: np.ndarray | None, start: int, stop: int
    ) -> Iterator[np.ndarray]:
        """Yield bytes from `start`, a multiple of a step, until `stop` is passed or the end."""
        plane = self.index.planes[number]
        try:
            decode = self._blocks(number) if plane.mode == "blocks" else self._streams(number)
            step, size = self._step(plane), plane.plane.nbytes
            for at in range(start, stop, step):
                piece = decode(at, min(at + step, size))
                yield piece if base is None else piece ^ base[at : at + step]
        except FormatError as error:
            raise FormatError(
                f"{self.path}: tensor {plane.tensor!r}, plane {plane.key!r}: {error}"
            ) from None

    def _streams(self, number: int) -> Callable[[int, int], np.ndarray]:
        plane, regions = self.index.planes[number], self.index.regions[number]
        split = SPLITS[plane.split]
        decoders = [
            self._stream(stream, part, regions[4 * i : 4 * i + 4])
            for i, (stream, part) in enumerate(zip(plane.streams, split.parts, strict=True))
        ]
        scale = (split.per_item, split.item.itemsize)

        def decode(start: int, stop: int) -> np.ndarray:
            first, last = (at // scale[1] * scale[0] for at in (start, stop))
            return join(split, [one(first, last) for one in decoders]).view(np.uint8)

        return decode

    def _stream(
        self, stream: Stream, part: Part, regions: tuple[Region, ...]
    ) -> Callable[[int, int], np.ndarray]:
        table, codes, rank, literals = (self._bytes(region) for region in regions)
        if stream.mode == "raw":
            bits = part.bits
            return lambda start, stop: part.place(unpack(literals, bits, start, stop - start))
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
        return self._files[region.kind].bytes(region.offset, region.offset + region.nbytes)

    def _base_bytes(self, plane: StoredPlane) -> np.ndarray:
        if self._base is None:
            raise ModelNotFound(f"{self.path}: needs its base, which was not given")
        found = self._base(plane.tensor, plane.key)
        if found.dtype != plane.plane.storage or found.shape != plane.plane.shape:
            raise FormatError("the base has it in another type or shape")
        return found.reshape(-1).view(np.uint8)

    def _check_padding(self) -> None:
        ends = dict.fromkeys(KINDS, 0)
        for regions in self.index.regions:
            for region in regions:
                if not region.nbytes:
                    continue
                gap = self._files[region.kind].bytes(ends[region.kind], region.offset)
                if gap.size >= ALIGNMENT[region.kind] or gap.any():
                    raise FormatError(f"{self._files[region.kind].path}: padding is not zero")
                ends[region.kind] = region.offset + region.nbytes
