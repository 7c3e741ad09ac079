"""Writing IEBIN v1 so that a killed writer never leaves a model that a reader accepts.

`model.ie.json` makes a directory a model. It is written last and removed first, so at every moment
the directory holds the old model, no model, or the new one.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.weights.iebin import (
    BIN_NAME,
    FORMAT,
    JSON_NAME,
    VERSION,
    VOCAB_NAME,
    place,
    seal,
)

PARTIAL_NAME = BIN_NAME + ".partial"
_STEP = 1 << 22


class IebinWriter:
    """Writes one model: `add` every tensor, then `commit`. Leaving without a commit undoes it."""

    def __init__(self, directory: Path) -> None:
        """Start a model in an existing directory, over what a killed writer left there.

        Raises:
            UsageError: another writer is at work in the directory.
            OSError: the directory cannot be written.
        """
        self.directory = directory
        self.nbytes = 0
        self._partial = directory / PARTIAL_NAME
        self._descriptor = _open_locked(self._partial)
        self._hash = hashlib.sha256()
        self._entries: list[dict[str, Any]] = []
        self._committed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._committed:
            self._partial.unlink(missing_ok=True)
        os.close(self._descriptor)

    def add(self, name: str, tensor: QuantTensor) -> None:
        """Append a tensor.

        Raises:
            FormatError: IEBIN v1 cannot hold it.
            OSError: the file cannot be written.
        """
        planes = {}
        for item in place(tensor.format, tensor.shape, self.nbytes):
            self._write(np.zeros(item.offset - self.nbytes, np.uint8))
            planes[item.key] = {
                "dtype": item.plane.dtype,
                "shape": list(item.plane.shape),
                "offset": item.offset,
                "nbytes": item.plane.nbytes,
                "sha256": self._write(tensor.planes[item.key]),
            }
        self._entries.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "format": tensor.format.name,
                "planes": planes,
            }
        )

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
        os.fsync(self._descriptor)
        (self.directory / JSON_NAME).unlink(missing_ok=True)
        _sync_directory(self.directory)
        os.replace(self._partial, self.directory / BIN_NAME)
        self._committed = True
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
        document["bin"] = _describe(BIN_NAME, self.nbytes, self._hash.hexdigest())
        document["source"] = source
        write_file(self.directory / JSON_NAME, seal(_document_body(document, self._entries)))

    def _write(self, array: np.ndarray) -> str:
        """Append the bytes of an array and return their SHA-256."""
        digest = hashlib.sha256()
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(data), _STEP):
            piece = data[start : start + _STEP].data
            digest.update(piece)
            self._hash.update(piece)
            _write_all(self._descriptor, piece, self._partial)
            self.nbytes += len(piece)
        return digest.hexdigest()


def _open_locked(path: Path) -> int:
    """Open the partial file, empty, locked until its descriptor is closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A writer that finished in between has renamed the file that was opened.
        if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise BlockingIOError
        os.ftruncate(descriptor, 0)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError | FileNotFoundError):
            raise UsageError(f"{path.parent}: another conversion is writing there") from None
        raise
    return descriptor


def _write_all(descriptor: int, data: memoryview, path: Path) -> None:
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_file(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it, so that no reader sees half of it."""
    partial = path.with_name(path.name + ".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write_all(descriptor, memoryview(data), partial)
        os.fsync(descriptor)
    except BaseException:
        partial.unlink()
        raise
    finally:
        os.close(descriptor)
    os.replace(partial, path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe(name: str, nbytes: int, digest: str) -> dict[str, Any]:
    return {"file": name, "nbytes": nbytes, "sha256": digest}


def _document_body(document: Mapping[str, Any], entries: list[dict[str, Any]]) -> bytes:
    """Return the text before the closing field: a line per field and a line per tensor."""
    lines = [f'"{key}": {_dump(value)},\n' for key, value in document.items()]
    tensors = ",\n".join(_dump(entry) for entry in entries)
    return f'{{\n{"".join(lines)}"tensors": [\n{tensors}\n],\n'.encode()


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
