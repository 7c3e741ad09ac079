"""Writing IEBIN v1 so that a killed writer never leaves a model that a reader accepts.

`model.ie.json` makes a directory a model. It is written last and removed first, so at every moment
the directory holds the old model, no model, or the new one.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from clocher_kernels.formats import Format
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.iebin.checkpoint import (
    BIN_NAME,
    FORMAT,
    JSON_NAME,
    VERSION,
    VOCAB_NAME,
    PlacedPlane,
    place,
    seal,
)
from clocher_runtime.disk.output_file import Journal, OutputFile, sync_directory, write_file

__all__ = ["PARTIAL_NAME", "IebinWriter", "write_file"]

PARTIAL_NAME = BIN_NAME + ".partial"
JOURNAL_NAME = PARTIAL_NAME + ".journal"

Progress = Callable[[int, str], None]


class IebinWriter:
    """Writes one model: `add` every tensor, then `commit`. Leaving without a commit undoes it.

    With a job, a killed (or interrupted) writer's work is kept for the next writer of the same job,
    which takes it over with `resume`.
    """

    def __init__(self, directory: Path, job: str = "") -> None:
        """Start a model in an existing directory, over what a killed writer left there.

        Args:
            directory: where the model will be.
            job: names the input and the options; the same job always gives the same bytes.

        Raises:
            UsageError: another writer is at work in the directory.
            OSError: the directory cannot be written.
        """
        self.directory = directory
        self._partial = directory / PARTIAL_NAME
        self._file = OutputFile(self._partial)
        self._journal = Journal(directory / JOURNAL_NAME, job)
        self._entries: list[dict[str, Any]] = []
        self._resumable = bool(job)
        self._started = False
        self._committed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        interrupted = isinstance(error, KeyboardInterrupt) and self._resumable
        if not self._committed and not interrupted:
            self._journal.remove()
            self._partial.unlink(missing_ok=True)
        self._journal.close()
        self._file.close()

    @property
    def nbytes(self) -> int:
        """Bytes of model.ie.bin so far."""
        return self._file.nbytes

    def resume(
        self, tensors: Mapping[str, tuple[Format, tuple[int, ...]]], progress: Progress | None
    ) -> list[str]:
        """Take over what a killed writer of the same job finished, as far as its hashes hold.

        Args:
            tensors: format and shape of the tensors that will be added, in order.
            progress: called after each tensor with the bytes so far and its name.

        Returns:
            The names of the first tensors, which need not be added.
        """
        for entry, (name, (fmt, shape)) in zip(
            self._journal.entries, tensors.items(), strict=False
        ):
            if not self._keep(entry, name, fmt, shape):
                break
            self._entries.append(entry)
            if progress:
                progress(self.nbytes, name)
        self._start()
        return [entry["name"] for entry in self._entries]

    def add(self, name: str, tensor: QuantTensor) -> None:
        """Append a tensor.

        Raises:
            FormatError: IEBIN v1 cannot hold it.
            OSError: the file cannot be written.
        """
        placed = place(tensor.format, tensor.shape, self.nbytes)
        self._start()
        hashes = {}
        for item in placed:
            self._file.pad(item.offset)
            hashes[item.key] = self._file.write(tensor.planes[item.key])
        entry = _entry(name, tensor.format, tensor.shape, placed, hashes)
        self._entries.append(entry)
        if self._resumable:
            self._journal.add(entry)

    def commit(
        self,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any],
        tokenizer_config: Mapping[str, Any],
        vocab: bytes | None,
        source: Mapping[str, Any],
    ) -> None:
        """Turn what was added into the directory's model.

        Args:
            config: contents of config.json.
            generation_config: contents of generation_config.json.
            tokenizer_config: contents of tokenizer_config.json.
            vocab: contents of tokenizer.json, or None.
            source: what the model was made from; for people, no reader looks inside.
        """
        self._start()
        digest = self._file.sync()
        (self.directory / JSON_NAME).unlink(missing_ok=True)
        sync_directory(self.directory)
        os.replace(self._partial, self.directory / BIN_NAME)
        self._committed = True
        self._journal.remove()
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
            document["vocab"] = _describe(VOCAB_NAME, len(vocab), hashlib.sha256(vocab).hexdigest())
        document["bin"] = _describe(BIN_NAME, self.nbytes, digest)
        document["source"] = source
        write_file(self.directory / JSON_NAME, seal(_document_body(document, self._entries)))

    def _start(self) -> None:
        """Drop what is left of a killed writer, except what `resume` has taken over."""
        if self._started:
            return
        self._started = True
        self._file.truncate()
        if self._resumable:
            self._journal.restart(len(self._entries))
        else:
            self._journal.remove()

    def _keep(
        self, entry: Mapping[str, Any], name: str, fmt: Format, shape: tuple[int, ...]
    ) -> bool:
        """Keep a tensor's planes if the journal describes this one and the bytes are there."""
        placed = place(fmt, shape, self.nbytes)
        planes = entry.get("planes")
        if not isinstance(planes, dict) or list(planes) != [item.key for item in placed]:
            return False
        if not all(isinstance(plane, dict) for plane in planes.values()):
            return False
        hashes = {key: plane.get("sha256") for key, plane in planes.items()}
        if entry != _entry(name, fmt, shape, placed, hashes):
            return False
        return self._file.keep([(i.offset, i.plane.nbytes, hashes[i.key]) for i in placed])


def _entry(
    name: str,
    fmt: Format,
    shape: tuple[int, ...],
    placed: list[PlacedPlane],
    hashes: Mapping[str, str],
) -> dict[str, Any]:
    planes = {
        item.key: {
            "dtype": item.plane.dtype,
            "shape": list(item.plane.shape),
            "offset": item.offset,
            "nbytes": item.plane.nbytes,
            "sha256": hashes[item.key],
        }
        for item in placed
    }
    return {"name": name, "shape": list(shape), "format": fmt.name, "planes": planes}


def _describe(name: str, nbytes: int, digest: str) -> dict[str, Any]:
    return {"file": name, "nbytes": nbytes, "sha256": digest}


def _document_body(document: Mapping[str, Any], entries: list[dict[str, Any]]) -> bytes:
    """Return the text before the closing field: a line per field and a line per tensor."""
    lines = [f'"{key}": {_dump(value)},\n' for key, value in document.items()]
    tensors = ",\n".join(_dump(entry) for entry in entries)
    return f'{{\n{"".join(lines)}"tensors": [\n{tensors}\n],\n'.encode()


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
