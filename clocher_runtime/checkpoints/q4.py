"""Q4_0 plane files, model.q4.bin (codes) and model.q4.scales.fp16.bin; see docs/q4-files.md.

They are indexed by the expanded manifest (`load_q4_planes`) or by model.ie.compat.json, which lays
them over an IEBIN pair, named by its hash (`open_index`). Appending leaves older indexes valid.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_kernels.formats import Float, Format, Int4
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import JSON_NAME, Checkpoint, Stored
from clocher_runtime.checkpoints.iebin import open_iebin, tensors_of
from clocher_runtime.disk.files import MappedFile, read_bytes, sha256_of
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.disk.plane_index import (
    Entry,
    Shape,
    check_hashes,
    lines,
    read_sealed,
    seal,
    unsealed,
)
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES, MAX_NAME_CHARS, fields, parse_object

Q4_0 = Int4(symmetric=True, group=32, scale_dtype="f16")
"""ggml's Q4_0: 32 columns share an fp16 scale; the largest element becomes -8."""

CODES, SCALES = "codes", "scales"
PLANES = (CODES, SCALES)
Q4_NAMES = {CODES: "model.q4.bin", SCALES: "model.q4.scales.fp16.bin"}
FORMAT, OVERLAY = "clocher.q4_planes", "iebin-q4-overlay"
VERSION = 1
COMPAT_NAME = "model.ie.compat.json"
AGAIN = "run scripts/rebuild_dedup_and_quant.sh again"

_WRITE_AGAIN = "run gen_q4_bytes_stream.py again"
_HEAD: dict[str, type] = {"format": str, "version": int, "files": dict, "tensors": list}
_MANIFEST: dict[str, type] = {**_HEAD, "kept": dict}
_OVERLAY: dict[str, type] = {**_HEAD, "base": dict, "sha256": str}
_PLACES = dict.fromkeys(PLANES, str)


class Q4Entry(Entry):
    """A matrix [N, K] in the pair of files."""

    __slots__ = ()
    FILES = PLANES
    FIELDS: ClassVar = {**Entry.FIELDS, "source_sha256": str}
    PLANE: ClassVar = {"offset": int, "nbytes": int, "sha256": str}

    @classmethod
    def parse_format(cls, name: str, shape: Shape, planes: Mapping[str, Any]) -> Format:
        """Return Q4_0, the only format."""
        if name != Q4_0.name or len(shape) != 2 or 0 in shape:
            raise FormatError(f"{name!r:.40}{list(shape)}; expected a matrix in {Q4_0.name}")
        return Q4_0


@dataclass(frozen=True, slots=True)
class Q4Planes:
    """An expanded manifest, with its matrices as views of the plane files."""

    path: Path
    files: Mapping[str, Path]
    document: Mapping[str, Any]
    entries: Mapping[str, Q4Entry]
    tensors: Mapping[str, QuantTensor]

    def choose(self, tensors: Mapping[str, Stored]) -> tuple[dict[str, Format], list[str]]:
        """Return the formats of the tensors that the files replace, and no notes."""
        for name, entry in self.entries.items():
            if not is_float(found := tensors.get(name), entry.shape):
                raise UsageError(
                    f"{self.path}: tensor {name!r} {list(entry.shape)}: the model has "
                    f"{described(found)}; the manifest was made from another model; {_WRITE_AGAIN}"
                )
        return dict.fromkeys(self.entries, Q4_0), []

    def stored(self, name: str, source: QuantTensor, threads: int = 1) -> QuantTensor:
        """Return a matrix from the files; `threads` is unused, other manifests round with it."""
        if source_hash(source) != self.entries[name].source_sha256:
            raise FormatError(
                f"{self.path}: tensor {name!r} was made from other weights than the model has; "
                f"{_WRITE_AGAIN}"
            )
        self.check(name)
        return self.tensors[name]

    def check(self, name: str) -> None:
        """Compare a matrix with its hashes; raises FormatError."""
        _check(self.entries[name], self.tensors[name], self.path)


def is_float(tensor: Stored | None, shape: Shape) -> bool:
    """Return whether a model has a float tensor of this shape."""
    return tensor is not None and tensor.shape == shape and isinstance(tensor.format, Float)


def described(tensor: Stored | None) -> str:
    """Describe a model's tensor, for messages."""
    return f"{tensor.format.name}{list(tensor.shape)}" if tensor else "no such tensor"


def source_hash(tensor: QuantTensor) -> str:
    """Return the SHA-256 of a tensor's planes, in the format's order."""
    return sha256_of(*(tensor.planes[key] for key in tensor.format.planes(tensor.shape)))


def is_q4_planes(path: Path) -> bool:
    """Return whether a file looks like an expanded manifest; reading it reports errors."""
    try:
        return parse_object(read_bytes(path, MAX_JSON_BYTES), str(path)).get("format") == FORMAT
    except ModelError:
        return False


def load_q4_planes(path: Path) -> Q4Planes:
    """Read an expanded manifest and map its files; raises UsageError, ModelError."""
    where = str(path)
    try:
        document = fields(parse_object(read_bytes(path, MAX_JSON_BYTES), where), where, _MANIFEST)
        names = fields(document["files"], f"{where}: files", _PLACES)
        entries = Q4Entry.read(document["tensors"], where)
        for name in names.values():
            if len(name) > MAX_NAME_CHARS or not name.isprintable() or os.path.isabs(name):
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
    tensors = tensors_of(entries, _map(files, entries))
    portable = {key: value for key, value in document.items() if key != "files"}
    return Q4Planes(path, files, portable, {entry.name: entry for entry in entries}, tensors)


def q4_document(files: Mapping[str, str], entries: Sequence[Entry], kept: Any) -> dict[str, Any]:
    """Return an expanded manifest's JSON; `files` are relative, `kept` maps names to reasons."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "files": dict(files),
        "tensors": [entry.document() for entry in entries],
        "kept": kept,
    }


def open_index(
    json_path: Path | str, bin_path: Path | str | None = None, verify: bool = False
) -> Checkpoint:
    """Open an IEBIN pair by model.ie.json, or by model.ie.compat.json; `verify` reads all."""
    json_path = Path(json_path)
    data = read_bytes(json_path, MAX_JSON_BYTES)
    if parse_object(data, str(json_path)).get("format") != OVERLAY:
        return open_iebin(json_path, bin_path, verify)
    entries = read_overlay(json_path, data)
    base = open_iebin(json_path.with_name(JSON_NAME), bin_path, verify)
    for entry in entries:
        found = base.tensors.get(entry.name)
        if found is None or found.shape != entry.shape:
            raise FormatError(
                f"{json_path}: tensor {entry.name!r} {list(entry.shape)} is not one of {JSON_NAME}"
            )
    if not entries:
        return base
    files = _map({key: json_path.with_name(name) for key, name in Q4_NAMES.items()}, entries)
    tensors = tensors_of(entries, files)
    if verify:
        for entry in entries:
            _check(entry, tensors[entry.name], json_path)
    both = {name: tensors.get(name, tensor) for name, tensor in base.tensors.items()}
    hashes = {**base.hashes, **{entry.name: entry.hashes for entry in entries}}
    return replace(base, tensors=both, files=(*base.files, *files.values()), hashes=hashes)


def read_overlay(path: Path, data: bytes) -> tuple[Q4Entry, ...]:
    """Return the matrices of an index, checked without the plane files."""
    where = str(path)
    document = read_sealed(data, where, (OVERLAY, VERSION, AGAIN), _OVERLAY)
    base = fields(document["base"], f"{where}: base", {"file": str, "sha256": str})
    files = fields(document["files"], f"{where}: files", _PLACES)
    if base["file"] != JSON_NAME or files != Q4_NAMES:
        raise FormatError(
            f"{where}: file names are not {JSON_NAME}, {', '.join(Q4_NAMES.values())}"
        )
    if base["sha256"] != _base_hash(path):
        raise ModelError(f"{where}: made for another {JSON_NAME} than the one beside it; {AGAIN}")
    return Q4Entry.read(document["tensors"], where)


def write_overlay(path: Path, entries: Sequence[Entry]) -> None:
    """Write an index over the pair beside it, atomically."""
    head = {
        "format": OVERLAY,
        "version": VERSION,
        "base": {"file": JSON_NAME, "sha256": _base_hash(path)},
        "files": Q4_NAMES,
    }
    text = lines(head, "tensors", [entry.document() for entry in entries])
    write_file(path, seal(text.encode()))


def _base_hash(path: Path) -> str:
    pair = path.with_name(JSON_NAME)
    return unsealed(read_bytes(pair, MAX_JSON_BYTES), str(pair))


def _map(files: Mapping[str, Path], entries: Sequence[Q4Entry]) -> dict[str, MappedFile]:
    """Map the plane files, which must be as long as the entries need."""
    mapped = {}
    for key, end in entries[-1].ends.items():
        mapped[key] = MappedFile(files[key])
        if mapped[key].nbytes < end:
            raise FormatError(
                f"{files[key]}: {mapped[key].nbytes} bytes, expected {end} or more; the file is "
                f"truncated or of another run; {_WRITE_AGAIN}"
            )
    return mapped


def _check(entry: Q4Entry, tensor: QuantTensor, path: Path) -> None:
    check_hashes(tensor.planes, entry.hashes, f"{path}: tensor {entry.name!r}", _WRITE_AGAIN)
