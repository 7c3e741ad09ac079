"""Q4_0 planes in files of their own: model.q4.bin and model.q4.scales.fp16.bin.

model.q4.bin holds the codes of matrices one after the other, model.q4.scales.fp16.bin their scales;
each plane starts at the next multiple of 64. Two documents point into the pair: the expanded
manifest (`load_q4_planes`), from which a conversion takes the tensors, and model.ie.compat.json
(`overlay`), which puts them over an IEBIN pair. docs/q4-files.md is the specification.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_kernels.formats import Float, Format, Int4
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Stored, stored_tensor
from clocher_runtime.disk.files import MappedFile, read_bytes
from clocher_runtime.disk.strict_json import (
    MAX_JSON_BYTES,
    MAX_NAME_CHARS,
    checked_name,
    checked_shape,
    fields,
    parse_object,
)

Q4_0 = Int4(symmetric=True, group=32, scale_dtype="f16")
"""ggml's Q4_0: 32 columns share an fp16 scale, and the largest element becomes -8."""

FORMAT = "clocher.q4_planes"
VERSION = 1
CODES, SCALES = "codes", "scales"
PLANES = (CODES, SCALES)
ALIGNMENT = 64

_DOCUMENT: dict[str, type] = {
    "format": str,
    "version": int,
    "files": dict,
    "tensors": list,
    "kept": dict,
}
_TENSOR: dict[str, type] = {
    "name": str,
    "shape": list,
    "format": str,
    "planes": dict,
    "source_sha256": str,
}
_PLANE: dict[str, type] = {"offset": int, "nbytes": int, "sha256": str}
_HASH = re.compile("[0-9a-f]{64}")
_STEP = 1 << 22


@dataclass(frozen=True, slots=True)
class Q4Entry:
    """One matrix in the pair of files.

    Attributes:
        name: of the tensor.
        shape: [N, K].
        source_sha256: SHA-256 of the stored bytes of the matrix that it was made from.
        offsets: first byte of each plane in its file.
        hashes: SHA-256 of each plane.
    """

    name: str
    shape: tuple[int, ...]
    source_sha256: str
    offsets: Mapping[str, int]
    hashes: Mapping[str, str]

    def end(self, key: str) -> int:
        """Return the offset of the byte after a plane."""
        return self.offsets[key] + self.nbytes(key)

    def nbytes(self, key: str) -> int:
        """Return the size of a plane."""
        return Q4_0.planes(self.shape)[key].nbytes

    def document(self) -> dict[str, Any]:
        """Return the entry as the JSON documents hold it."""
        planes = {
            key: {
                "offset": self.offsets[key],
                "nbytes": self.nbytes(key),
                "sha256": self.hashes[key],
            }
            for key in PLANES
        }
        return {
            "name": self.name,
            "shape": list(self.shape),
            "format": Q4_0.name,
            "planes": planes,
            "source_sha256": self.source_sha256,
        }


@dataclass(frozen=True, slots=True)
class Q4Planes:
    """An expanded manifest with its files.

    Attributes:
        path: where it was read from.
        files: the file of each plane.
        document: its JSON without the places of files, to be recorded with the result.
        entries: what it describes, by name.
        tensors: the matrices, as views of the files.
    """

    path: Path
    files: Mapping[str, Path]
    document: Mapping[str, Any]
    entries: Mapping[str, Q4Entry]
    tensors: Mapping[str, QuantTensor]

    def choose(self, tensors: Mapping[str, Stored]) -> tuple[dict[str, Format], list[str]]:
        """Return the format of each tensor that the files replace, and notes (none).

        Raises:
            UsageError: the model lacks a tensor of the manifest, or holds it in another shape or
                not as floats.
        """
        for name, entry in self.entries.items():
            found = tensors.get(name)
            if found is None or found.shape != entry.shape or not isinstance(found.format, Float):
                got = f"{found.format.name}{list(found.shape)}" if found else "no such tensor"
                raise UsageError(
                    f"{self.path}: tensor {name!r} {list(entry.shape)}: the model has {got}; the "
                    "manifest was made from another model; run gen_q4_bytes_stream.py again"
                )
        return dict.fromkeys(self.entries, Q4_0), []

    def stored(self, name: str, source: QuantTensor) -> QuantTensor:
        """Return a matrix from the files.

        Args:
            name: of a tensor that `choose` names.
            source: the model's tensor.

        Raises:
            FormatError: the bytes in the files are damaged, or were made from other weights.
        """
        entry, tensor = self.entries[name], self.tensors[name]
        if sha256_of(source) != entry.source_sha256:
            raise FormatError(
                f"{self.path}: tensor {name!r} was made from other weights than the model has; run "
                "gen_q4_bytes_stream.py again"
            )
        check_hashes(entry, tensor, str(self.path))
        return tensor


def is_q4_planes(path: Path) -> bool:
    """Return whether a file is an expanded manifest; what is wrong with it is said later."""
    try:
        return parse_object(read_bytes(path, MAX_JSON_BYTES), str(path)).get("format") == FORMAT
    except ModelError:
        return False


def load_q4_planes(path: Path) -> Q4Planes:
    """Read an expanded manifest and map its files.

    Raises:
        UsageError: the manifest is not what docs/q4-files.md describes.
        ModelError: a file is missing, or shorter than the manifest says.
    """
    where = str(path)
    try:
        document = fields(parse_object(read_bytes(path, MAX_JSON_BYTES), where), where, _DOCUMENT)
        names = fields(document["files"], f"{where}: files", dict.fromkeys(PLANES, str))
        entries = q4_entries(document["tensors"], where)
        if not all(_is_place(name) for name in names.values()):
            raise FormatError(
                f"{where}: files: expected places relative to the manifest, of at most "
                f"{MAX_NAME_CHARS} characters"
            )
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise FormatError(
                f"{where}: {document['format']!r:.40} version {document['version']}; this Clocher "
                f"reads {FORMAT} version {VERSION}"
            )
        if not entries:
            raise FormatError(f"{where}: no tensors")
    except ModelError as error:
        raise UsageError(str(error)) from None
    files = {key: path.parent / name for key, name in names.items()}
    tensors = q4_tensors(
        entries, {key: open_plane_file(files[key], entries, key) for key in PLANES}
    )
    portable = {key: value for key, value in document.items() if key != "files"}
    return Q4Planes(path, files, portable, {entry.name: entry for entry in entries}, tensors)


def _is_place(name: str) -> bool:
    """Return whether a name can be that of a file beside the manifest, or below or above it."""
    return len(name) <= MAX_NAME_CHARS and name.isprintable() and not os.path.isabs(name)


def q4_document(files: Mapping[str, str], entries: Sequence[Q4Entry], kept: Any) -> dict[str, Any]:
    """Return the JSON of an expanded manifest.

    Args:
        files: place of the file of each plane, seen from the manifest's directory.
        entries: the matrices, in the order of the files.
        kept: name -> reason of every tensor that is not in the files.
    """
    tensors = [entry.document() for entry in entries]
    return {
        "format": FORMAT,
        "version": VERSION,
        "files": dict(files),
        "tensors": tensors,
        "kept": kept,
    }


def q4_entries(values: Sequence[object], where: str) -> list[Q4Entry]:
    """Return what a document lists, checked: names, shapes, and places that follow from them.

    Raises:
        FormatError: something is not as the specification says.
    """
    entries: list[Q4Entry] = []
    seen: set[str] = set()
    for index, value in enumerate(values):
        item = fields(value, f"{where}: tensors[{index}]", _TENSOR)
        name = checked_name(item["name"], where)
        at = f"{where}: tensor {name!r}"
        if name in seen:
            raise FormatError(f"{at}: listed twice")
        seen.add(name)
        shape = checked_shape(item["shape"], at)
        if item["format"] != Q4_0.name or len(shape) != 2 or 0 in shape:
            raise FormatError(
                f"{at}: {item['format']!r:.40}{list(shape)}; expected a matrix in {Q4_0.name}"
            )
        planes = fields(item["planes"], f"{at}: planes", dict.fromkeys(PLANES, dict))
        found = {key: fields(planes[key], f"{at}: plane {key!r}", _PLANE) for key in PLANES}
        hashes = {key: found[key]["sha256"] for key in PLANES}
        for digest in (*hashes.values(), item["source_sha256"]):
            if not _HASH.fullmatch(digest):
                raise FormatError(f"{at}: sha256 must be 64 lower-case hexadecimal digits")
        last = entries[-1] if entries else None
        entry = Q4Entry(name, shape, item["source_sha256"], next_offsets(last), hashes)
        for key in PLANES:
            got = (found[key]["offset"], found[key]["nbytes"])
            if got != (expected := (entry.offsets[key], entry.nbytes(key))):
                raise FormatError(f"{at}: plane {key!r}: offset, nbytes {got}, expected {expected}")
        entries.append(entry)
    return entries


def next_offsets(last: Q4Entry | None) -> dict[str, int]:
    """Return where the planes after an entry begin."""
    if last is None:
        return dict.fromkeys(PLANES, 0)
    return {key: -(-last.end(key) // ALIGNMENT) * ALIGNMENT for key in PLANES}


def open_plane_file(path: Path, entries: Sequence[Q4Entry], key: str) -> MappedFile:
    """Map the file of a plane.

    Raises:
        ModelError: it is missing, or shorter than the entries say.
    """
    file = MappedFile(path)
    if file.nbytes < entries[-1].end(key):
        raise FormatError(
            f"{path}: {file.nbytes} bytes, expected {entries[-1].end(key)} or more; the file is "
            "truncated or of another run; run gen_q4_bytes_stream.py again"
        )
    return file


def q4_tensors(
    entries: Sequence[Q4Entry], files: Mapping[str, MappedFile]
) -> dict[str, QuantTensor]:
    """Return the matrices as views of the files."""
    tensors = {}
    for entry in entries:
        planes = {
            key: files[key].plane(plane, entry.offsets[key])
            for key, plane in Q4_0.planes(entry.shape).items()
        }
        where = f"{files[CODES].path}: tensor {entry.name!r}"
        tensors[entry.name] = stored_tensor(entry.shape, Q4_0, planes, where)
    return tensors


def check_hashes(entry: Q4Entry, tensor: QuantTensor, where: str) -> None:
    """Compare a matrix with the hashes of its entry.

    Raises:
        FormatError: they differ.
    """
    for key in PLANES:
        digest = hashlib.sha256()
        _update(digest, tensor.planes[key])
        if digest.hexdigest() != entry.hashes[key]:
            raise FormatError(
                f"{where}: tensor {entry.name!r}, plane {key!r}: the bytes do not match their "
                "SHA-256: the file is damaged; run gen_q4_bytes_stream.py again"
            )


def sha256_of(tensor: QuantTensor) -> str:
    """Return the SHA-256 of a tensor's planes, in the format's order."""
    digest = hashlib.sha256()
    for key in tensor.format.planes(tensor.shape):
        _update(digest, tensor.planes[key])
    return digest.hexdigest()


def relative_place(path: Path, folder: Path) -> str:
    """Return the place of a file seen from a folder, so that documents hold no absolute path."""
    return Path(os.path.relpath(os.path.realpath(path), os.path.realpath(folder))).as_posix()


def _update(digest: Any, plane: np.ndarray) -> None:
    data = np.ascontiguousarray(plane).reshape(-1).view(np.uint8)
    for start in range(0, len(data), _STEP):
        digest.update(data[start : start + _STEP].data)
