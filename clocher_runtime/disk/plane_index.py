"""JSON documents that list planes in files: where each lies, and what is checked.

Planes follow each other in document order, aligned, without overlap or holes. A sealed document
ends with its own SHA-256.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np

from clocher_kernels.errors import FormatError, ShapeError, UnsupportedModel
from clocher_kernels.formats import Format, parse_format
from clocher_kernels.formats.bsr import Bsr
from clocher_runtime.disk.files import MappedFile, sha256_of
from clocher_runtime.disk.strict_json import (
    checked_name,
    checked_shape,
    fields,
    parse_object,
    prefixed,
)

ALIGNMENT = 64
MAX_ELEMENTS_PER_BYTE = 1000

_HASH = re.compile("[0-9a-f]{64}")
_SEAL = re.compile(rb'"sha256": "([0-9a-f]{64})"\n}\n')
_SEAL_BYTES = 79
_ENTRY: dict[str, type] = {"name": str, "shape": list, "format": str, "planes": dict}
_PLANE: dict[str, type] = {
    **{"dtype": str, "shape": list, "sha256": str},
    **dict.fromkeys(("offset", "nbytes"), int),
}

Shape = tuple[int, ...]


class Region(NamedTuple):
    """A range of bytes of a named file."""

    file: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """Offset of the byte after the last one."""
        return self.offset + self.nbytes


DAMAGED = "the file is damaged; convert the model again"


def aligned(end: int, alignment: int = ALIGNMENT) -> int:
    """Return the next multiple of an alignment."""
    return -(-end // alignment) * alignment


def place(fmt: Format, shape: Shape, ends: Mapping[str, int]) -> dict[str, Region]:
    """Return the regions of the next tensor's planes; `ends`: each file's current end.

    A plane goes to the file of its name, else to the first.
    """
    try:
        planes = fmt.planes(shape)
    except ShapeError as error:
        raise FormatError(str(error)) from None
    if fmt.is_sparse:
        _check_density(fmt, shape, planes["col_idx"].shape[0])
    placed: dict[str, Region] = {}
    ends = dict(ends)
    for key, plane in planes.items():
        file = key if key in ends else next(iter(ends))
        placed[key] = Region(file, aligned(ends[file]), plane.nbytes)
        ends[file] = placed[key].end
    return placed


def _check_density(fmt: Format, shape: Shape, blocks: int) -> None:
    """Refuse a matrix without blocks, or a small file that decodes to a huge matrix."""
    nbytes = fmt.nbytes(shape)
    if not blocks:
        raise FormatError(f"{fmt.name}: no block is stored; expected at least 1")
    if shape[0] * shape[1] > MAX_ELEMENTS_PER_BYTE * nbytes:
        raise FormatError(
            f"{fmt.name}: a {list(shape)} matrix in {nbytes} bytes; expected at most "
            f"{MAX_ELEMENTS_PER_BYTE} elements for each byte"
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as a document lists it."""

    name: str
    shape: Shape
    format: Format
    regions: Mapping[str, Region]
    hashes: Mapping[str, str]

    @property
    def ends(self) -> dict[str, int]:
        """The end of each file that has its planes."""
        return {region.file: region.end for region in self.regions.values()}

    def document(self) -> dict[str, Any]:
        """Return the entry as the document holds it."""
        planes = {
            key: {
                "dtype": plane.dtype,
                "shape": list(plane.shape),
                "offset": self.regions[key].offset,
                "nbytes": self.regions[key].nbytes,
                "sha256": self.hashes[key],
            }
            for key, plane in self.format.planes(self.shape).items()
        }
        head = {"name": self.name, "shape": list(self.shape), "format": self.format.name}
        return {**head, "planes": planes}


def read_entries(
    values: Sequence[object], where: str, files: Sequence[str] = ("bin",)
) -> tuple[Entry, ...]:
    """Return a document's entries, with their places in the files, all checked."""
    found: dict[str, Entry] = {}
    ends = dict.fromkeys(files, 0)
    for index, value in enumerate(values):
        item = fields(value, f"{where}: tensors[{index}]", _ENTRY)
        name = checked_name(item["name"], where)
        at = f"{where}: tensor {name!r}"
        if name in found:
            raise FormatError(f"{at}: listed twice")
        found[name] = _read_entry(name, item, ends, at)
        ends |= found[name].ends
    return tuple(found.values())


def _read_entry(name: str, item: Mapping[str, Any], ends: Mapping[str, int], at: str) -> Entry:
    shape = checked_shape(item["shape"], at)
    with prefixed(at):
        fmt = parse_format(item["format"])
        fmt = _counted(fmt, item["planes"]) if fmt.is_sparse else fmt
        regions = place(fmt, shape, ends)
    if list(item["planes"]) != list(regions):
        raise FormatError(f"{at}: planes {list(item['planes'])!r:.80}, expected {[*regions]}")
    hashes = {}
    for key, value in item["planes"].items():
        plane = fields(value, f"{at}: plane {key!r}", _PLANE)
        checked_shape(plane["shape"], f"{at}: plane {key!r}")
        hashes[key] = checked_hash(plane["sha256"], f"{at}: plane {key!r}")
    entry = Entry(name, shape, fmt, regions, hashes)
    for key, expected in entry.document()["planes"].items():
        if item["planes"][key] != expected:
            got = [item["planes"][key][each] for each in expected if each != "sha256"]
            del expected["sha256"]
            raise FormatError(
                f"{at}: plane {key!r}: {', '.join(expected)} are {got!r:.120}, expected "
                f"{list(expected.values())}"
            )
    return entry


def _counted(fmt: Format, planes: Mapping[str, Any]) -> Format:
    """Return the format with its number of blocks, known only from a plane's shape."""
    assert isinstance(fmt, Bsr)
    described = planes.get("col_idx")
    shape = described.get("shape") if isinstance(described, dict) else None
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int:
        raise FormatError(f"{fmt.name}: plane 'col_idx' has shape {shape!r:.40}, expected [blocks]")
    return replace(fmt, nnzb=shape[0])


class FileFacts(NamedTuple):
    """Size and SHA-256 of a file."""

    nbytes: int
    sha256: str

    @classmethod
    def read(cls, value: object, where: str, file: str = "") -> Self:
        """Return a document's facts about a file."""
        named = {"file": str} if file else {}
        found = fields(value, where, named | {"nbytes": int, "sha256": str})
        if found.get("file", "") != file:
            raise FormatError(f"{where}: file is {found['file']!r:.80}, expected {file!r}")
        if found["nbytes"] < 0:
            raise FormatError(f"{where}: nbytes is {found['nbytes']}")
        return cls(found["nbytes"], checked_hash(found["sha256"], where))


def checked_hash(value: str, where: str) -> str:
    """Return a SHA-256: 64 lower-case hexadecimal digits."""
    if not _HASH.fullmatch(value):
        raise FormatError(f"{where}: sha256 {value!r:.80}; expected 64 lower-case hex digits")
    return value


def check_hashes(
    planes: Mapping[str, np.ndarray], hashes: Mapping[str, str], where: str, cause: str
) -> None:
    """Compare planes with their SHA-256; `cause` says why they may differ, and what to do."""
    for key, expected in hashes.items():
        if (found := sha256_of(planes[key])) != expected:
            raise FormatError(
                f"{where}plane {key!r} has SHA-256 {found}, expected {expected}: {cause}"
            )


def check_padding(regions: Iterable[Region], files: Mapping[str, MappedFile]) -> None:
    """Check that the gaps before regions, given in file order, are zero."""
    ends = dict.fromkeys(files, 0)
    for region in regions:
        file = files[region.file]
        if file.bytes(ends[region.file], region.offset).any():
            raise FormatError(
                f"{file.path}: the padding before byte {region.offset} is not zero: the file is "
                "damaged; make it again"
            )
        ends[region.file] = region.end


def dump(value: object) -> str:
    """Return the JSON of a value, in one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def seal(body: bytes) -> bytes:
    """Append the closing field, the SHA-256 of all bytes before it."""
    return body + b'"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def unsealed(data: bytes, where: str) -> str:
    """Return the SHA-256 that seals a text, checked."""
    tail = _SEAL.fullmatch(data[-_SEAL_BYTES:])
    found = hashlib.sha256(data[:-_SEAL_BYTES]).hexdigest()
    if tail is None or tail[1].decode() != found:
        raise FormatError(
            f"{where}: the file does not match its own SHA-256: it was damaged or edited; "
            "convert the model again"
        )
    return found


@dataclass(frozen=True, slots=True)
class Sealed:
    """A kind of sealed document: a line per field, and per item of the list `items`.

    `fields` and `optional` are those of its own; `again` says what to do about another version.
    """

    format: str
    version: int
    again: str
    items: str
    fields: Mapping[str, type]
    optional: Mapping[str, type] = field(default_factory=dict)

    def text(
        self, head: Mapping[str, Any], items: Iterable[object], tail: Mapping[str, Any] = {}
    ) -> bytes:
        """Return a document; `tail` are the fields after the list."""
        first = {"format": self.format, "version": self.version, **head}
        before, after = (
            "".join(f'"{name}": {dump(value)},\n' for name, value in part.items())
            for part in (first, tail)
        )
        listed = ",\n".join(map(dump, items))
        return seal(f'{{\n{before}"{self.items}": [\n{listed}\n],\n{after}'.encode())

    def read(self, data: bytes, where: str) -> dict[str, Any]:
        """Return a document, its fields checked. Raises FormatError, UnsupportedModel."""
        document = parse_object(data, where)
        if document.get("format") != self.format:
            raise FormatError(
                f"{where}: not {self.format}: format is {document.get('format')!r:.40}"
            )
        found = document.get("version")
        if type(found) is not int or found != self.version:
            raise UnsupportedModel(
                f"{where}: {self.format} version {found!r:.40}; this Clocher reads version "
                f"{self.version}: {self.again}"
            )
        own = {"format": str, "version": int, self.items: list, "sha256": str, **self.fields}
        fields(document, where, own, self.optional)
        unsealed(data, where)
        return document
