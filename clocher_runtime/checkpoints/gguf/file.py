"""A GGUF file, validated in full before a byte of its data is used; see `header`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from clocher_kernels.errors import FormatError
from clocher_runtime.checkpoints.gguf.header import (
    BOOL,
    NUMBERS,
    STRING,
    Field,
    GgufTensor,
    Header,
    decoded,
    integer,
)
from clocher_runtime.disk.files import MappedFile

MAX_ALIGNMENT = 1 << 16
_T = TypeVar("_T", bool, int, float, str, np.ndarray, "Strings")


@dataclass(frozen=True, slots=True, eq=False)
class Strings:
    """An array of strings: where they are. They are read when asked for.

    `key`: of the metadata; `starts`: first byte of each string in the file, int64; its length is in
    the 8 bytes before.
    """

    file: MappedFile
    key: str
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def text(self, index: int) -> str:
        """Return one string; raises FormatError."""
        start = int(self.starts[index])
        length = integer(self.file.bytes(start - 8, start))
        return decoded(
            self.file.bytes(start, start + length), f"{self.file.path}: {self.key}[{index}]"
        )

    def texts(self) -> list[str]:
        """Return all strings."""
        return [self.text(index) for index in range(len(self))]


Value = bool | int | float | str | np.ndarray | Strings


class GgufFile:
    """A validated, read-only, memory-mapped GGUF file, with the parts that are attached to it.

    `file`: the mapping, of the first part; `files`: the mappings of all parts; `version`: 2 or 3;
    `keys`: of the metadata, in file order; `tensors`: what the parts hold, by name, in file order.
    """

    def __init__(self, path: Path) -> None:
        """Map and validate a file.

        Raises FormatError, UnsupportedModel, ModelError, WindowError.
        """
        self.file = MappedFile(path)
        header = Header(self.file)
        self.version = header.version
        self._fields: Mapping[str, Field] = header.fields()
        self.keys = tuple(self._fields)
        alignment = self.integer("general.alignment", 32)
        if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise FormatError(
                f"{path}: general.alignment is {alignment}; expected a power of two from 8 to "
                f"{MAX_ALIGNMENT}"
            )
        self.tensors: dict[str, GgufTensor] = header.tensors(alignment)
        self.files: tuple[MappedFile, ...] = (self.file,)
        self._homes = dict.fromkeys(self.tensors, self.file)

    def attach(self, part: "GgufFile") -> None:
        """Add the tensors of another part of the same model; its metadata are not read.

        Raises FormatError.
        """
        for name in part.tensors:
            if name in self.tensors:
                raise FormatError(
                    f"{part.file.path}: tensor {name!r} is in {self._homes[name].path.name}, too"
                )
            self._homes[name] = part.file
        self.tensors |= part.tensors
        self.files += (part.file,)

    def data(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor, u8 [nbytes], as a read-only view of its file."""
        info = self.tensors[name]
        return self._homes[name].bytes(info.offset, info.offset + info.nbytes)

    def release(self) -> None:
        """Let the kernel take back the resident pages of the files."""
        for file in self.files:
            file.release()

    def value(self, key: str) -> Value | None:
        """Return the value of a metadata entry, None without one.

        Arrays of numbers are views of the file, of bools as u8.
        """
        if key not in self._fields:
            return None
        field = self._fields[key]
        if field.starts is not None:
            return Strings(self.file, key, field.starts)
        data = self.file.bytes(field.offset, field.offset + field.nbytes)
        if field.kind == STRING:
            return decoded(data, f"{self.file.path}: {key}")
        numbers = data.view(NUMBERS[field.kind])
        if field.count is not None:
            return numbers
        return bool(numbers[0]) if field.kind == BOOL else _plain(numbers[0])

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string of the metadata; without a default it must be there.

        Raises FormatError.
        """
        return self._typed(key, str, "a string", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer of the metadata."""
        return self._typed(key, int, "an integer", default)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of the metadata: for an f32 the shortest decimal that rounds to it."""
        value = self.value(key)
        if type(value) is int:
            return float(value)
        return self._typed(key, float, "a number", default)

    def flag(self, key: str, default: bool) -> bool:
        """Return a bool of the metadata."""
        return self._typed(key, bool, "a bool", default)

    def strings(self, key: str) -> Strings:
        """Return an array of strings of the metadata."""
        return self._typed(key, Strings, "an array of strings", None)

    def numbers(self, key: str) -> np.ndarray:
        """Return an array of numbers of the metadata."""
        return self._typed(key, np.ndarray, "an array of numbers", None)

    def _typed(self, key: str, kind: type[_T], what: str, default: _T | None) -> _T:
        value = self.value(key)
        if value is None and default is not None:
            return default
        if type(value) is not kind:
            got = "missing" if value is None else f"{type(value).__name__} {value!r:.60}"
            raise FormatError(f"{self.file.path}: metadata {key!r} is {got}; expected {what}")
        return value


def _plain(value: np.generic) -> int | float:
    """Return a Python number; 0.00001 in fp32 gives 1e-05, as a config.json would say it."""
    if value.dtype.kind != "f":
        return int(value.item())
    return float(str(value))
