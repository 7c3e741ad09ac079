"""model.ie.compat.json: an IEBIN pair whose Q4_0 matrices lie in model.q4.bin; docs/q4-files.md.

The index names the pair by its hash. Appending to the plane files leaves older indexes valid.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from clocher_kernels.errors import FormatError, ModelError
from clocher_kernels.formats import Int4
from clocher_runtime.checkpoints.checkpoint import JSON_NAME, Checkpoint
from clocher_runtime.checkpoints.iebin import open_iebin, tensors_of
from clocher_runtime.disk.files import MappedFile, read_bytes
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.disk.plane_index import Entry, Sealed, read_entries, unsealed
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES, fields, parse_object

Q4_0 = Int4(symmetric=True, group=32, scale_dtype="f16")
"""ggml's Q4_0: 32 columns share an fp16 scale; the largest element becomes -8."""

Q4_NAMES = {"codes": "model.q4.bin", "scales": "model.q4.scales.fp16.bin"}
COMPAT_NAME = "model.ie.compat.json"
AGAIN = "run scripts/rebuild_dedup_and_quant.sh again"

_OVERLAY = Sealed("iebin-q4-overlay", 2, AGAIN, "tensors", {"base": dict, "files": dict})


def open_index(json_path: Path | str, bin_path: Path | str | None = None) -> Checkpoint:
    """Open an IEBIN pair by model.ie.json, or by model.ie.compat.json."""
    json_path = Path(json_path)
    data = read_bytes(json_path, MAX_JSON_BYTES)
    if parse_object(data, str(json_path)).get("format") != _OVERLAY.format:
        return open_iebin(json_path, bin_path)
    entries = read_overlay(json_path, data)
    base = open_iebin(json_path.with_name(JSON_NAME), bin_path)
    for entry in entries:
        found = base.tensors.get(entry.name)
        if found is None or found.shape != entry.shape:
            raise FormatError(
                f"{json_path}: tensor {entry.name!r} {list(entry.shape)} is not one of {JSON_NAME}"
            )
    if not entries:
        return base
    files = map_planes(json_path.parent, entries)
    return replace(
        base,
        tensors={**base.tensors, **tensors_of(entries, files)},
        files=(*base.files, *files.values()),
        hashes={**base.hashes, **{entry.name: entry.hashes for entry in entries}},
    )


def read_overlay(path: Path, data: bytes) -> tuple[Entry, ...]:
    """Return the matrices of an index, checked without the plane files."""
    where = str(path)
    document = _OVERLAY.read(data, where)
    base = fields(document["base"], f"{where}: base", {"file": str, "sha256": str})
    if base["file"] != JSON_NAME or document["files"] != Q4_NAMES:
        raise FormatError(
            f"{where}: file names are not {JSON_NAME}, {', '.join(Q4_NAMES.values())}"
        )
    if base["sha256"] != _base_hash(path):
        raise ModelError(f"{where}: made for another {JSON_NAME} than the one beside it; {AGAIN}")
    entries = read_entries(document["tensors"], where, tuple(Q4_NAMES))
    for entry in entries:
        if entry.format != Q4_0 or len(entry.shape) != 2 or 0 in entry.shape:
            raise FormatError(
                f"{where}: tensor {entry.name!r} is {entry.format.name}{list(entry.shape)}; "
                f"expected a matrix in {Q4_0.name}"
            )
    return entries


def write_overlay(path: Path, entries: Sequence[Entry]) -> None:
    """Write an index over the pair beside it, atomically."""
    head = {"base": {"file": JSON_NAME, "sha256": _base_hash(path)}, "files": Q4_NAMES}
    write_file(path, _OVERLAY.text(head, [entry.document() for entry in entries]))


def map_planes(directory: Path, entries: Sequence[Entry]) -> Mapping[str, MappedFile]:
    """Map the plane files, which must be as long as the entries need."""
    mapped = {key: MappedFile(directory / name) for key, name in Q4_NAMES.items()}
    for key, end in entries[-1].ends.items():
        if mapped[key].nbytes < end:
            raise FormatError(
                f"{mapped[key].path}: {mapped[key].nbytes} bytes, expected {end} or more; the file "
                f"is truncated or of another run; {AGAIN}"
            )
    return mapped


def _base_hash(path: Path) -> str:
    pair = path.with_name(JSON_NAME)
    return unsealed(read_bytes(pair, MAX_JSON_BYTES), str(pair))
