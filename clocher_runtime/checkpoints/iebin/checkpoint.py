"""IEBIN v1: the layout rules, and the reader. The specification is docs/iebin-v1.md."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clocher_kernels.errors import FormatError, ShapeError, UnsupportedModel
from clocher_kernels.formats import Bsr, Format, Plane, parse_format
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Checkpoint, Stored, stored_tensor
from clocher_runtime.disk.files import MappedFile, read_bytes
from clocher_runtime.disk.strict_json import (
    MAX_JSON_BYTES,
    checked_name,
    checked_shape,
    fields,
    parse_object,
)

JSON_NAME = "model.ie.json"
BIN_NAME = "model.ie.bin"
VOCAB_NAME = "vocab.json"
FORMAT = "iebin"
VERSION = 1
ALIGNMENT = 64
MAX_VOCAB_BYTES = 256_000_000
MAX_ELEMENTS_PER_BYTE = 1000

_FIELDS: dict[str, type] = {
    "format": str,
    "version": int,
    "config": dict,
    "generation_config": dict,
    "tokenizer_config": dict,
    "bin": dict,
    "source": dict,
    "tensors": list,
    "sha256": str,
}
_FILE: dict[str, type] = {"file": str, "nbytes": int, "sha256": str}
_TENSOR: dict[str, type] = {"name": str, "shape": list, "format": str, "planes": dict}
_PLANE: dict[str, type] = {
    "dtype": str,
    "shape": list,
    "offset": int,
    "nbytes": int,
    "sha256": str,
}
_HASH = re.compile("[0-9a-f]{64}")
_SEAL = re.compile(rb'"sha256": "([0-9a-f]{64})"\n}\n')
_SEAL_BYTES = 79
_HASH_STEP = 1 << 22


@dataclass(frozen=True, slots=True)
class PlacedPlane:
    """A plane and the place it has in model.ie.bin."""

    key: str
    plane: Plane
    offset: int

    @property
    def end(self) -> int:
        """Offset of the byte after the plane."""
        return self.offset + self.plane.nbytes


def place(fmt: Format, shape: tuple[int, ...], end: int) -> list[PlacedPlane]:
    """Return where the planes of the next tensor go, after a file that ends at `end`.

    Raises:
        FormatError: IEBIN v1 cannot hold this tensor.
    """
    try:
        planes = fmt.planes(shape)
    except ShapeError as error:
        raise FormatError(str(error)) from None
    if isinstance(fmt, Bsr):
        _check_density(fmt, shape, sum(plane.nbytes for plane in planes.values()))
    placed = []
    for key, plane in planes.items():
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        placed.append(PlacedPlane(key, plane, offset))
        end = placed[-1].end
    return placed


def _check_density(fmt: Bsr, shape: tuple[int, ...], nbytes: int) -> None:
    """Refuse a matrix without blocks, and a small file that would decode to a huge matrix."""
    if not fmt.nnzb:
        raise FormatError(f"{fmt.name}: no block is stored; expected at least 1")
    if shape[0] * shape[1] > MAX_ELEMENTS_PER_BYTE * nbytes:
        raise FormatError(
            f"{fmt.name}: a {list(shape)} matrix in {nbytes} bytes; expected at most "
            f"{MAX_ELEMENTS_PER_BYTE} elements for each byte"
        )


def seal(body: bytes) -> bytes:
    """Append the closing field, the SHA-256 of all bytes before it."""
    return body + b'"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def unsealed(data: bytes, where: str) -> bytes:
    """Return what `seal` was given.

    Raises:
        FormatError: the closing field is not there, or not the SHA-256 of what precedes it.
    """
    tail = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    body = data[:-_SEAL_BYTES]
    if tail is None or tail[1].decode() != hashlib.sha256(body).hexdigest():
        raise FormatError(
            f"{where}: the file does not match its own SHA-256: it was damaged or edited; "
            "convert the model again"
        )
    return body


def open_iebin(
    json_path: Path | str, bin_path: Path | str | None = None, verify: bool = False
) -> Checkpoint:
    """Open an IEBIN model.

    Args:
        json_path: model.ie.json; vocab.json lies beside it.
        bin_path: model.ie.bin; by default the one beside the JSON.
        verify: also read all weights: check every hash, the padding and all stored codes.

    Raises:
        ModelNotFound: a file is missing.
        FormatError: a file is damaged, or the files do not belong together.
        UnsupportedModel: it was written for another version of IEBIN.
        WindowError: a timed window is open.
    """
    index = read_index(Path(json_path))
    file = MappedFile(Path(bin_path) if bin_path else index.path.parent / BIN_NAME, index.nbytes)
    views = {entry.name: entry.view(file) for entry in index.entries}
    checkpoint = index.checkpoint(views, (file,))
    if verify:
        checkpoint.verify()
        _check_whole(file, index.entries, index.sha256)
    return checkpoint


@dataclass(frozen=True, slots=True)
class IebinIndex:
    """model.ie.json, checked in full, and vocab.json beside it.

    Attributes:
        path: the file.
        document: its contents.
        entries: its tensors, in the order of model.ie.bin.
        nbytes: size of model.ie.bin.
        sha256: SHA-256 of model.ie.bin.
    """

    path: Path
    document: Mapping[str, Any]
    entries: tuple["Entry", ...]
    nbytes: int
    sha256: str

    def checkpoint(
        self, tensors: Mapping[str, Stored], files: tuple[MappedFile, ...]
    ) -> Checkpoint:
        """Return a checkpoint of these tensors with the settings of the file."""
        return Checkpoint(
            path=self.path.parent,
            kind="iebin",
            config=self.document["config"],
            generation_config=self.document["generation_config"],
            tokenizer_config=self.document["tokenizer_config"],
            tokenizer_json=self.path.parent / VOCAB_NAME,
            tensors=tensors,
            files=files,
            hashes={entry.name: entry.hashes for entry in self.entries},
        )


def read_index(json_path: Path) -> IebinIndex:
    """Read model.ie.json and check all that can be checked without model.ie.bin.

    Raises:
        ModelNotFound: it or vocab.json is missing.
        FormatError: it is damaged, or vocab.json is another one.
        UnsupportedModel: it was written for another version of IEBIN.
        WindowError: a timed window is open.
    """
    document = _read_document(json_path)
    if "vocab" in document:
        _check_vocab(document["vocab"], json_path.parent / VOCAB_NAME, str(json_path))
    described = fields(document["bin"], f"{json_path}: bin", _FILE)
    _check_file(described, BIN_NAME, f"{json_path}: bin")
    entries = tuple(_entries(document["tensors"], str(json_path)))
    end = entries[-1].placed[-1].end if entries else 0
    if described["nbytes"] != end:
        raise FormatError(
            f"{json_path}: bin.nbytes is {described['nbytes']}, the tensors end at {end}"
        )
    return IebinIndex(json_path, document, entries, end, described["sha256"])


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of model.ie.json: its planes, their places and their SHA-256."""

    name: str
    shape: tuple[int, ...]
    format: Format
    placed: list[PlacedPlane]
    hashes: Mapping[str, str]

    def view(self, file: MappedFile) -> QuantTensor:
        """Return the tensor as views of model.ie.bin."""
        planes = {item.key: file.plane(item.plane, item.offset) for item in self.placed}
        where = f"{file.path}: tensor {self.name!r}"
        return stored_tensor(self.shape, self.format, planes, where)


def _read_document(path: Path) -> dict[str, Any]:
    data = read_bytes(path, MAX_JSON_BYTES)
    document = parse_object(data, str(path))
    if document.get("format") != FORMAT:
        raise FormatError(f"{path}: not IEBIN: format is {document.get('format')!r:.40}")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise UnsupportedModel(
            f"{path}: IEBIN version {version!r:.40}; this Clocher reads version {VERSION}: "
            "convert the model again or update Clocher"
        )
    fields(document, str(path), _FIELDS, {"vocab": dict, "extra": dict})
    unsealed(data, str(path))
    return document


def _check_file(described: Mapping[str, Any], name: str, where: str) -> None:
    if described["file"] != name:
        raise FormatError(f"{where}: file is {described['file']!r:.80}, expected {name!r}")
    _check_hash(described["sha256"], where)


def _check_hash(value: str, where: str) -> None:
    if not _HASH.fullmatch(value):
        raise FormatError(f"{where}: sha256 must be 64 lower-case hexadecimal digits")


def _check_vocab(value: object, path: Path, where: str) -> None:
    described = fields(value, f"{where}: vocab", _FILE)
    _check_file(described, VOCAB_NAME, f"{where}: vocab")
    data = read_bytes(path, MAX_VOCAB_BYTES)
    digest = hashlib.sha256(data).hexdigest()
    if len(data) != described["nbytes"] or digest != described["sha256"]:
        raise FormatError(f"{path}: not the vocabulary that {where} describes; convert again")


def _entries(tensors: list[object], where: str) -> Iterator[Entry]:
    seen: set[str] = set()
    end = 0
    for index, value in enumerate(tensors):
        item = fields(value, f"{where}: tensors[{index}]", _TENSOR)
        name = checked_name(item["name"], where)
        at = f"{where}: tensor {name!r}"
        if name in seen:
            raise FormatError(f"{at}: listed twice")
        seen.add(name)
        shape = checked_shape(item["shape"], at)
        try:
            fmt = _counted(parse_format(item["format"]), item["planes"])
            placed = place(fmt, shape, end)
        except FormatError as error:
            raise FormatError(f"{at}: {error}") from None
        if list(item["planes"]) != [plane.key for plane in placed]:
            keys = [plane.key for plane in placed]
            raise FormatError(f"{at}: planes {list(item['planes'])!r:.80}, expected {keys}")
        hashes = {plane.key: _plane_hash(item["planes"][plane.key], plane, at) for plane in placed}
        end = placed[-1].end
        yield Entry(name, shape, fmt, placed, hashes)


def _counted(fmt: Format, planes: Mapping[str, Any]) -> Format:
    """Return the format with its number of blocks, which only the shape of a plane tells."""
    if not isinstance(fmt, Bsr):
        return fmt
    described = planes.get("col_idx")
    shape = described.get("shape") if isinstance(described, dict) else None
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int:
        raise FormatError(f"{fmt.name}: plane 'col_idx' has shape {shape!r:.40}, expected [blocks]")
    return replace(fmt, nnzb=shape[0])


def _plane_hash(value: object, placed: PlacedPlane, where: str) -> str:
    where = f"{where}: plane {placed.key!r}"
    found = fields(value, where, _PLANE)
    shape = checked_shape(found["shape"], where)
    got = (found["dtype"], shape, found["offset"], found["nbytes"])
    expected = (placed.plane.dtype, placed.plane.shape, placed.offset, placed.plane.nbytes)
    if got != expected:
        raise FormatError(
            f"{where}: dtype, shape, offset, nbytes are {got!r:.120}, expected {expected}"
        )
    _check_hash(found["sha256"], where)
    return str(found["sha256"])


def _check_whole(file: MappedFile, entries: tuple[Entry, ...], expected: str) -> None:
    """Check the SHA-256 of model.ie.bin, and that what lies between the planes is zero."""
    whole = hashlib.sha256()
    end, filled = 0, ""
    for entry in entries:
        for item in entry.placed:
            if file.bytes(end, item.offset).any():
                filled = entry.name
            for start in range(end, item.end, _HASH_STEP):
                whole.update(file.bytes(start, min(start + _HASH_STEP, item.end)).data)
            end = item.end
            file.release()
    if whole.hexdigest() != expected:
        raise FormatError(f"{file.path}: the file does not match bin.sha256")
    if filled:
        raise FormatError(
            f"{file.path}: the padding before tensor {filled!r} is not zero: the file is damaged; "
            "convert the model again"
        )
