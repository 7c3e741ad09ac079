"""Writing a GGUF file: a header that says everything, then the tensors in that order.

Source: ggml's docs/gguf.md, version 3.
"""

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from clocher_kernels.errors import FormatError
from clocher_runtime.checkpoints.gguf.blocks import GgmlType
from clocher_runtime.disk.output_file import open_new

Field = str | bool | int | float

ALIGNMENT = 32
_UINT32, _FLOAT32, _BOOL, _STRING = 4, 6, 7, 8
_SUFFIX = ".partial"


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """A tensor of the file.

    Attributes:
        name: as llama.cpp spells it.
        shape: logical shape, slowest dimension first.
        kind: its element type.
    """

    name: str
    shape: tuple[int, ...]
    kind: GgmlType

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        rows = 1
        for dim in self.shape[:-1]:
            rows *= dim
        return rows * self.kind.row_bytes(self.shape[-1])


class GgufWriter:
    """Writes one file: `write` the bytes of every tensor in order, then `commit`.

    Leaving without a commit leaves nothing.

    Args:
        path: the file.
        fields: metadata; integers are stored as u32, floats as f32.
        entries: the tensors.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self, path: Path, fields: Mapping[str, Field], entries: Sequence[GgufEntry]
    ) -> None:
        self.path = path
        self._ends, header = _layout(fields, entries)
        self._partial = path.with_name(path.name + _SUFFIX)
        self._file = os.fdopen(open_new(self._partial), "wb")
        self._written = 0
        self._done = 0
        self._file.write(header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def write(self, data: np.ndarray) -> None:
        """Append bytes of the current tensor.

        Raises:
            FormatError: they are more than it has.
        """
        self._file.write(np.ascontiguousarray(data).data)
        self._written += data.nbytes
        if self._done == len(self._ends) or self._written > self._ends[self._done]:
            raise FormatError(f"{self.path}: more bytes than tensor {self._done} has")
        if self._written == self._ends[self._done]:
            padding = -self._written % ALIGNMENT
            self._file.write(bytes(padding))
            self._written += padding
            self._done += 1

    def commit(self) -> None:
        """Make the file appear under its name.

        Raises:
            FormatError: a tensor is not complete.
        """
        if self._done < len(self._ends):
            raise FormatError(f"{self.path}: {self._done} of {len(self._ends)} tensors written")
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._partial, self.path)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def file_bytes(fields: Mapping[str, Field], entries: Sequence[GgufEntry]) -> int:
    """Return the bytes of a file."""
    ends, header = _layout(fields, entries)
    return len(header) + (ends[-1] if ends else 0) + ALIGNMENT


def _layout(fields: Mapping[str, Field], entries: Sequence[GgufEntry]) -> tuple[list[int], bytes]:
    """Return where each tensor ends, counted from the first, and the header."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(entries), len(fields))]
    parts += [_string(key) + _value(value) for key, value in fields.items()]
    ends: list[int] = []
    for entry in entries:
        offset = -(-ends[-1] // ALIGNMENT) * ALIGNMENT if ends else 0
        ends.append(offset + entry.nbytes)
        shape = entry.shape[::-1]
        parts.append(_string(entry.name))
        parts.append(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        parts.append(struct.pack("<IQ", entry.kind.code, offset))
    header = b"".join(parts)
    return ends, header + bytes(-len(header) % ALIGNMENT)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Field) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    return struct.pack("<If", _FLOAT32, value)
