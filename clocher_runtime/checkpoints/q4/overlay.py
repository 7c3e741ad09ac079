"""model.ie.compat.json: an IEBIN pair with some of its matrices taken from the Q4_0 plane files.

The index names the pair by the hash of its model.ie.json and lists the matrices in model.q4.bin and
model.q4.scales.fp16.bin, all in one directory. Nothing is copied. Appending matrices only lets the
plane files grow, so an index that was written before stays true.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from clocher_kernels.errors import FormatError, ModelError
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.iebin.checkpoint import JSON_NAME, open_iebin, seal, unsealed
from clocher_runtime.checkpoints.q4.planes import (
    CODES,
    PLANES,
    SCALES,
    Q4Entry,
    check_hashes,
    open_plane_file,
    q4_entries,
    q4_tensors,
)
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES, fields, parse_object

COMPAT_NAME = "model.ie.compat.json"
Q4_NAMES = {CODES: "model.q4.bin", SCALES: "model.q4.scales.fp16.bin"}
FORMAT = "iebin-q4-overlay"
VERSION = 1

_DOCUMENT: dict[str, type] = {
    "format": str,
    "version": int,
    "base": dict,
    "files": dict,
    "tensors": list,
    "sha256": str,
}
_BASE: dict[str, type] = {"file": str, "sha256": str}
AGAIN = "run scripts/rebuild_dedup_and_quant.sh again"


def open_index(
    json_path: Path | str, bin_path: Path | str | None = None, verify: bool = False
) -> Checkpoint:
    """Open an IEBIN pair by its index: model.ie.json, or model.ie.compat.json over one.

    Args:
        json_path: the index.
        bin_path: model.ie.bin; by default the one beside the index.
        verify: also read all weights and check every hash and all stored codes.

    Raises:
        ModelError: as `open_iebin`; a plane file is missing or shorter than the index says.
    """
    json_path = Path(json_path)
    data = read_bytes(json_path, MAX_JSON_BYTES)
    if parse_object(data, str(json_path)).get("format") != FORMAT:
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
    files = {k: open_plane_file(json_path.with_name(Q4_NAMES[k]), entries, k) for k in PLANES}
    tensors = q4_tensors(entries, files)
    if verify:
        for entry in entries:
            check_hashes(entry, tensors[entry.name], str(json_path))
    both = {name: tensors.get(name, tensor) for name, tensor in base.tensors.items()}
    hashes = {**base.hashes, **{entry.name: entry.hashes for entry in entries}}
    return replace(base, tensors=both, files=(*base.files, *files.values()), hashes=hashes)


def read_overlay(path: Path, data: bytes) -> list[Q4Entry]:
    """Return the matrices that an index lists, checked as far as that goes without the plane files.

    Raises:
        ModelError: the index is damaged, or the pair beside it is another one.
    """
    where = str(path)
    document = fields(parse_object(data, where), where, _DOCUMENT)
    if document["format"] != FORMAT or document["version"] != VERSION:
        raise FormatError(
            f"{where}: {document['format']!r:.40} version {document['version']}; expected {FORMAT} "
            f"version {VERSION}; {AGAIN}"
        )
    unsealed(data, where)
    base = fields(document["base"], f"{where}: base", _BASE)
    files = fields(document["files"], f"{where}: files", dict.fromkeys(PLANES, str))
    if base["file"] != JSON_NAME or files != Q4_NAMES:
        raise FormatError(
            f"{where}: file names are not {JSON_NAME}, {', '.join(Q4_NAMES.values())}"
        )
    if base["sha256"] != _base_hash(path):
        raise ModelError(f"{where}: made for another {JSON_NAME} than the one beside it; {AGAIN}")
    return q4_entries(document["tensors"], where)


def _base_hash(path: Path) -> str:
    """Return the checksum that the model.ie.json beside an index carries."""
    pair = path.with_name(JSON_NAME)
    return hashlib.sha256(unsealed(read_bytes(pair, MAX_JSON_BYTES), str(pair))).hexdigest()


def write_overlay(path: Path, entries: list[Q4Entry]) -> None:
    """Write an index over the pair beside it, whole or not at all."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "base": {"file": JSON_NAME, "sha256": _base_hash(path)},
        "files": Q4_NAMES,
    }
    lines = "".join(f'"{key}": {json.dumps(value)},\n' for key, value in head.items())
    tensors = ",\n".join(json.dumps(entry.document(), ensure_ascii=False) for entry in entries)
    write_file(path, seal(f'{{\n{lines}"tensors": [\n{tensors}\n],\n'.encode()))
