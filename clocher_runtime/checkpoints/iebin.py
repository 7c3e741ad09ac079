"""IEBIN v1, the container that Clocher writes and maps; docs/iebin-v1.md specifies it.

`model.ie.json` is written last and removed first, so a directory always holds the old model, the
new one, or none.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clocher_kernels.errors import FormatError
from clocher_kernels.formats import Format
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import (
    BIN_NAME,
    Checkpoint,
    Stored,
    stored_tensor,
)
from clocher_runtime.disk.files import MappedFile, read_bytes
from clocher_runtime.disk.plane_index import (
    Entry,
    FileFacts,
    Shape,
    check_padding,
    place,
    read_entries,
    read_sealed,
)
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES

VOCAB_NAME = "vocab.json"
CERTIFICATE_NAME = "model.ie.certificate.json"
FORMAT = "iebin"
VERSION = 1
MAX_VOCAB_BYTES = 256_000_000

_JSON_BYTES_PER_TENSOR = 2048

_FIELDS: dict[str, type] = {
    **{"format": str, "version": int, "tensors": list, "sha256": str},
    **dict.fromkeys(("config", "generation_config", "tokenizer_config", "bin", "source"), dict),
}
_KIND = (FORMAT, VERSION, "convert the model again or update Clocher")


def open_iebin(
    json_path: Path | str, bin_path: Path | str | None = None, verify: bool = False
) -> Checkpoint:
    """Open an IEBIN model, its model.ie.bin by default beside the JSON. Raises ModelError.

    `verify` also reads all weights: hashes, padding and codes.
    """
    index = read_index(Path(json_path))
    checkpoint = index.open(Path(bin_path) if bin_path else None)
    if verify:
        checkpoint.verify()
        (file,) = checkpoint.files
        if file.sha256() != index.bin.sha256:
            raise FormatError(f"{file.path}: the file does not match bin.sha256")
        regions = (region for entry in index.entries for region in entry.regions.values())
        check_padding(regions, {"bin": file})
    return checkpoint


@dataclass(frozen=True, slots=True)
class IebinIndex:
    """model.ie.json, validated in full, and vocab.json beside it; `entries` in file order."""

    path: Path
    document: Mapping[str, Any]
    entries: tuple[Entry, ...]
    bin: FileFacts

    def open(self, bin_path: Path | None = None) -> Checkpoint:
        """Return the model as views of model.ie.bin, by default the one beside it."""
        file = MappedFile(bin_path or self.path.parent / BIN_NAME, self.bin.nbytes)
        return self.checkpoint(tensors_of(self.entries, {"bin": file}), (file,))

    def checkpoint(
        self, tensors: Mapping[str, Stored], files: tuple[MappedFile, ...]
    ) -> Checkpoint:
        """Return a checkpoint of these tensors with the file's settings."""
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


def tensors_of(entries: Iterable[Entry], files: Mapping[str, MappedFile]) -> dict[str, QuantTensor]:
    """Return entries' tensors as views of files of checked size."""
    where = f"{next(iter(files.values())).path}: tensor"
    return {
        e.name: stored_tensor(e.shape, e.format, e.views(files), f"{where} {e.name!r}")
        for e in entries
    }


def read_index(json_path: Path) -> IebinIndex:
    """Read model.ie.json and check all that does not need model.ie.bin."""
    where = str(json_path)
    data = read_bytes(json_path, MAX_JSON_BYTES)
    document = read_sealed(data, where, _KIND, _FIELDS, {"vocab": dict, "extra": dict})
    if "vocab" in document:
        vocab = FileFacts.read(document["vocab"], f"{where}: vocab", VOCAB_NAME)
        path = json_path.parent / VOCAB_NAME
        if facts_of(read_bytes(path, MAX_VOCAB_BYTES)) != vocab:
            raise FormatError(f"{path}: not the vocabulary that {where} describes; convert again")
    weights = FileFacts.read(document["bin"], f"{where}: bin", BIN_NAME)
    entries = read_entries(document["tensors"], where)
    end = entries[-1].ends["bin"] if entries else 0
    if weights.nbytes != end:
        raise FormatError(f"{where}: bin.nbytes is {weights.nbytes}, the tensors end at {end}")
    return IebinIndex(json_path, document, entries, weights)


def model_bytes(tensors: Iterable[tuple[Format, Shape]]) -> int:
    """Return the size of model.ie.bin, and at most that of model.ie.json without settings."""
    ends, count = {"bin": 0}, 0
    for fmt, shape in tensors:
        for region in place(fmt, shape, ends).values():
            ends["bin"] = region.end
        count += 1
    return ends["bin"] + _JSON_BYTES_PER_TENSOR * count


def facts_of(data: bytes) -> FileFacts:
    """Return size and hash of a file's content."""
    return FileFacts(len(data), hashlib.sha256(data).hexdigest())
