"""Write planes and IEBIN so that a killed writer leaves nothing that a reader accepts."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from clocher_kernels.formats import Format
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import BIN_NAME, JSON_NAME
from clocher_runtime.checkpoints.iebin import (
    CERTIFICATE_NAME,
    FORMAT,
    VERSION,
    VOCAB_NAME,
    facts_of,
)
from clocher_runtime.disk.output_file import (
    PARTIAL,
    Journal,
    OutputFile,
    sync_directory,
    write_file,
)
from clocher_runtime.disk.plane_index import Entry, FileFacts, Region, Shape, lines, place, seal

Progress = Callable[[int, str], None]


class PlaneWriter:
    """Files that grow together: `add` tensors or `put` planes, then `publish`.

    Leaving earlier undoes it; with a job, the next writer of the same job can `resume` it.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        job: str = "",
        in_place: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Open the files, over what a killed writer left there. Raises UsageError, OSError.

        `job` identifies input and options. With `in_place` the files have their final names, and
        the next writer cuts off what a failed one added. `progress` gets each tensor added or kept.
        """
        self.files: dict[str, OutputFile] = {}
        self.entries: list[Entry] = []
        self._paths, self._resumable = dict(paths), bool(job)
        self._temporary, self._progress = not in_place, progress
        try:
            for name, path in paths.items():
                now = path if in_place else path.with_name(path.name + PARTIAL)
                self.files[name] = OutputFile(now)
        except BaseException:
            self._close()
            raise
        first = next(iter(self.files.values())).path
        self._journal = Journal(first.with_name(f"{first.name}.journal"), job)

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

    def resume(self, tensors: Mapping[str, tuple[Format, Shape]]) -> list[str]:
        """Take over a killed writer's verified tensors; return their names."""
        for found, (name, (fmt, shape)) in zip(
            self._journal.entries, tensors.items(), strict=False
        ):
            entry = self._journalled(found, name, fmt, shape)
            if entry is None or not self.keep(entry):
                break
            self._tell(name)
        self._journal.kept = len(self.entries)
        return [entry.name for entry in self.entries]

    def keep(self, entry: Entry) -> bool:
        """Skip a tensor if the files hold it next; return whether they do."""
        kept: list[OutputFile] = []
        for name, file in self.files.items():
            mine = [(key, region) for key, region in entry.regions.items() if region.file == name]
            if not file.keep([(r.offset, r.nbytes, entry.hashes[key]) for key, r in mine]):
                for other in kept:
                    other.unkeep()
                return False
            kept.append(file)
        self.entries.append(entry)
        return True

    def add(self, name: str, tensor: QuantTensor) -> None:
        """Append a tensor; raises FormatError, OSError."""
        regions = place(tensor.format, tensor.shape, self._ends)
        hashes = {key: self.put(region, tensor.planes[key]) for key, region in regions.items()}
        self.entries.append(Entry(name, tensor.shape, tensor.format, regions, hashes))
        if self._resumable:
            self._journal.add(self.entries[-1].document())
        self._tell(name)

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
            sync_directory(path.parent)
        for name, path in self._paths.items():
            self.files[name].path.replace(path)
            sync_directory(path.parent)
        self._temporary = False
        self._journal.remove()

    def _journalled(
        self, found: Mapping[str, Any], name: str, fmt: Format, shape: Shape
    ) -> Entry | None:
        """Return a journal line's entry if it is of this tensor at this place."""
        try:
            hashes = {key: str(plane["sha256"]) for key, plane in found["planes"].items()}
            entry = Entry(name, shape, fmt, place(fmt, shape, self._ends), hashes)
            return entry if found == entry.document() else None
        except (KeyError, TypeError, AttributeError):
            return None

    def _tell(self, name: str) -> None:
        if self._progress:
            self._progress(self.nbytes, name)

    def _close(self) -> None:
        for file in self.files.values():
            file.close()


class IebinWriter(PlaneWriter):
    """Writes one model: `add` every tensor, then `commit`, without which all is undone."""

    def __init__(self, directory: Path, job: str = "", progress: Progress | None = None) -> None:
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
            "format": FORMAT,
            "version": VERSION,
            "config": config,
            "generation_config": generation_config,
            "tokenizer_config": tokenizer_config,
        }
        if vocab is None:
            (self.directory / VOCAB_NAME).unlink(missing_ok=True)
        else:
            write_file(self.directory / VOCAB_NAME, vocab)
            document["vocab"] = {"file": VOCAB_NAME, **facts_of(vocab).document()}
        document["bin"] = {"file": BIN_NAME, **weights.document()}
        document["source"] = source
        text = lines(document, "tensors", [entry.document() for entry in self.entries])
        write_file(self.directory / JSON_NAME, seal(text.encode()))
