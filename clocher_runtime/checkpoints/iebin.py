"""IEBIN v1, the container that Clocher writes and maps; docs/iebin-v1.md specifies it.

`model.ie.json` is written last and removed first, so a directory always holds the old model, the
new one, or none: a killed writer leaves nothing that a reader accepts.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from clocher_kernels.errors import FormatError
from clocher_kernels.formats import Format
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import BIN_NAME, JSON_NAME, Checkpoint, stored_tensor
from clocher_runtime.disk import output_file
from clocher_runtime.disk.files import MappedFile, read_bytes
from clocher_runtime.disk.plane_index import (
    Entry,
    FileFacts,
    Region,
    Sealed,
    Shape,
    check_padding,
    place,
    read_entries,
)
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES

VOCAB_NAME = "vocab.json"
CERTIFICATE_NAME = "model.ie.certificate.json"
MAX_VOCAB_BYTES = 256_000_000

JSON_BYTES_PER_TENSOR = 2048

_DOCUMENT = Sealed(
    "iebin",
    1,
    "convert the model again or update Clocher",
    "tensors",
    dict.fromkeys(("config", "generation_config", "tokenizer_config", "bin", "source"), dict),
    {"vocab": dict, "extra": dict},
)


def open_iebin(
    json_path: Path | str, bin_path: Path | str | None = None, verify: bool = False
) -> Checkpoint:
    """Open an IEBIN model, its model.ie.bin by default beside the JSON. Raises ModelError.

    `verify` also reads all weights: hashes, padding and codes.
    """
    index = IebinIndex(Path(json_path))
    path = Path(bin_path) if bin_path else index.path.parent / BIN_NAME
    file = MappedFile(path, index.bin.nbytes)
    checkpoint = index.checkpoint(tensors_of(index.entries, {"bin": file}), (file,))
    if verify:
        checkpoint.verify()
        if file.sha256() != index.bin.sha256:
            raise FormatError(f"{file.path}: the file does not match bin.sha256")
        regions = (region for entry in index.entries for region in entry.regions.values())
        check_padding(regions, {"bin": file})
    return checkpoint


class IebinIndex:
    """model.ie.json, validated in full, and vocab.json beside it; `entries` in file order."""

    def __init__(self, json_path: Path) -> None:
        """Read the files, and check all that does not need model.ie.bin. Raises ModelError."""
        self.path, where = json_path, str(json_path)
        self.document = _DOCUMENT.read(read_bytes(json_path, MAX_JSON_BYTES), where)
        if "vocab" in self.document:
            vocab = FileFacts.read(self.document["vocab"], f"{where}: vocab", VOCAB_NAME)
            path = json_path.parent / VOCAB_NAME
            if facts_of(read_bytes(path, MAX_VOCAB_BYTES)) != vocab:
                raise FormatError(
                    f"{path}: not the vocabulary that {where} describes; convert again"
                )
        self.bin = FileFacts.read(self.document["bin"], f"{where}: bin", BIN_NAME)
        self.entries = read_entries(self.document["tensors"], where)
        end = self.entries[-1].ends["bin"] if self.entries else 0
        if self.bin.nbytes != end:
            raise FormatError(f"{where}: bin.nbytes is {self.bin.nbytes}, the tensors end at {end}")

    def checkpoint(
        self, tensors: Mapping[str, QuantTensor], files: tuple[MappedFile, ...]
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
    found, where = {}, f"{next(iter(files.values())).path}: tensor"
    for e in entries:
        planes = {
            key: files[e.regions[key].file].plane(plane, e.regions[key].offset)
            for key, plane in e.format.planes(e.shape).items()
        }
        found[e.name] = stored_tensor(e.shape, e.format, planes, f"{where} {e.name!r}")
    return found


def model_bytes(tensors: Iterable[tuple[Format, Shape]]) -> int:
    """Return the size of model.ie.bin, and at most that of model.ie.json without settings."""
    ends, count = {"bin": 0}, 0
    for fmt, shape in tensors:
        for region in place(fmt, shape, ends).values():
            ends["bin"] = region.end
        count += 1
    return ends["bin"] + JSON_BYTES_PER_TENSOR * count


def facts_of(data: bytes) -> FileFacts:
    """Return size and hash of a file's content."""
    return FileFacts(len(data), hashlib.sha256(data).hexdigest())


Progress = Callable[[int, str], None]
"""Gets the bytes that are done, and what was done last."""


def quiet(nbytes: int, name: str) -> None:
    """Show no progress."""


class PlaneWriter:
    """Files that grow together: `add` tensors or `put` planes, then `publish`.

    Leaving earlier undoes it; with a job, the next writer of the same job can `resume` it.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        job: str = "",
        in_place: bool = False,
        progress: Progress = quiet,
    ) -> None:
        """Open the files, over what a killed writer left there. Raises UsageError, OSError.

        `job` identifies input and options. With `in_place` the files have their final names, and
        the next writer cuts off what a failed one added. `progress` gets each tensor added or kept.
        """
        self.files: dict[str, output_file.OutputFile] = {}
        self.entries: list[Entry] = []
        self.records: dict[str, Mapping[str, Any]] = {}  # that the journal has of tensors
        self._paths, self._resumable = dict(paths), bool(job)
        self._temporary, self._progress = not in_place, progress
        try:
            for name, path in paths.items():
                now = path if in_place else path.with_name(path.name + output_file.PARTIAL)
                self.files[name] = output_file.OutputFile(now)
        except BaseException:
            self._close()
            raise
        first = next(iter(self.files.values())).path
        self._journal = output_file.Journal(first.with_name(f"{first.name}.journal"), job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._temporary and not (isinstance(error, KeyboardInterrupt) and self._resumable):
            self._journal.remove()
            for file in self.files.values():
                file.path.unlink(missing_ok=True)
        self._journal.close()
        self._close()

    @property
    def nbytes(self) -> int:
        """Bytes of the files so far."""
        return sum(file.nbytes for file in self.files.values())

    @property
    def _ends(self) -> dict[str, int]:
        return {name: file.nbytes for name, file in self.files.items()}

    def resume(self, tensors: Mapping[str, tuple[Format, Shape]]) -> int:
        """Take over a killed writer's verified tensors; return how many."""
        for found, (name, stored) in zip(self._journal.entries, tensors.items(), strict=False):
            entry = self._journalled(found, name, *stored)
            if entry is None or not self.keep(entry):
                break
            self.records[name] = found.get("record", {})
            self._progress(self.nbytes, name)
        self._journal.kept = len(self.entries)
        return len(self.entries)

    def keep(self, entry: Entry) -> bool:
        """Skip a tensor if the files hold it next; return whether they do."""
        before = [(file, file.nbytes, file.digest.copy()) for file in self.files.values()]
        planes = ((region, entry.hashes[key]) for key, region in entry.regions.items())
        if all(self.files[r.file].take(r.offset, r.nbytes, digest) for r, digest in planes):
            self.entries.append(entry)
            return True
        for file, nbytes, digest in before:
            file.nbytes, file.digest = nbytes, digest
        return False

    def add(self, name: str, tensor: QuantTensor, record: Mapping[str, Any] = {}) -> None:
        """Append a tensor; `record` is for the journal alone. Raises FormatError, OSError."""
        regions = place(tensor.format, tensor.shape, self._ends)
        hashes = {key: self.put(region, tensor.planes[key]) for key, region in regions.items()}
        self.entries.append(Entry(name, tensor.shape, tensor.format, regions, hashes))
        if self._resumable:
            line = self.entries[-1].document()
            self._journal.add(line | ({"record": record} if record else {}))
        self.records[name] = record
        self._progress(self.nbytes, name)

    def put(self, region: Region, plane: np.ndarray) -> str:
        """Append a plane at its place, zero-padded; return its SHA-256."""
        file = self.files[region.file]
        file.pad(region.offset)
        return file.write(plane)

    def sync(self) -> dict[str, FileFacts]:
        """Flush to the disk; return the facts of each file."""
        return {name: FileFacts(file.nbytes, file.sync()) for name, file in self.files.items()}

    def publish(self, stale: Iterable[Path] = ()) -> None:
        """Rename the synced files, first removing `stale`, the documents of the replaced files."""
        for path in stale:
            path.unlink(missing_ok=True)
            output_file.sync_directory(path.parent)
        for name, path in self._paths.items():
            self.files[name].path.replace(path)
            output_file.sync_directory(path.parent)
        self._temporary = False
        self._journal.remove()

    def _journalled(
        self, found: Mapping[str, Any], name: str, fmt: Format, shape: Shape
    ) -> Entry | None:
        """Return a journal line's entry if it is of this tensor at this place."""
        try:
            hashes = {key: str(plane["sha256"]) for key, plane in found["planes"].items()}
            entry = Entry(name, shape, fmt, place(fmt, shape, self._ends), hashes)
            return entry if entry.document().items() <= found.items() else None
        except (KeyError, TypeError, AttributeError):
            return None

    def _close(self) -> None:
        for file in self.files.values():
            file.close()


class IebinWriter(PlaneWriter):
    """Writes one model: `add` every tensor, then `commit`, without which all is undone."""

    def __init__(self, directory: Path, job: str = "", progress: Progress = quiet) -> None:
        """Start a model in an existing directory; `job` and `progress` as in `PlaneWriter`."""
        super().__init__({"bin": directory / BIN_NAME}, job, progress=progress)
        self.directory = directory

    def commit(
        self,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any],
        tokenizer_config: Mapping[str, Any],
        vocab: bytes | None,
        source: Mapping[str, Any],
    ) -> None:
        """Write the document; `vocab` is tokenizer.json, `source` is informational."""
        weights = self.sync()["bin"]
        self.publish(stale=[self.directory / name for name in (JSON_NAME, CERTIFICATE_NAME)])
        document: dict[str, Any] = {
            "config": config,
            "generation_config": generation_config,
            "tokenizer_config": tokenizer_config,
        }
        if vocab is None:
            (self.directory / VOCAB_NAME).unlink(missing_ok=True)
        else:
            output_file.write_file(self.directory / VOCAB_NAME, vocab)
            document["vocab"] = {"file": VOCAB_NAME, **facts_of(vocab)._asdict()}
        document["bin"] = {"file": BIN_NAME, **weights._asdict()}
        document["source"] = source
        text = _DOCUMENT.text(document, [entry.document() for entry in self.entries])
        output_file.write_file(self.directory / JSON_NAME, text)
