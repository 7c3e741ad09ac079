"""A GGUF file, validated in full before its data is used.

Source: ggml's docs/gguf.md, versions 2 and 3. Stricter: no arrays of arrays, no holes or trailing
bytes, and at most `MAX_TENSORS` tensors, `MAX_FIELDS` entries and `MAX_STRINGS` strings in arrays.
"""

import math
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.checkpoints.gguf.blocks import TYPES, GgmlType
from clocher_runtime.disk.files import MappedFile
from clocher_runtime.disk.strict_json import checked_name, checked_shape, prefixed

MAX_TENSORS = 1 << 16
MAX_FIELDS = 1 << 12
MAX_STRINGS, MAX_STRINGS_BYTES = 1 << 20, 1 << 26
MAX_TEXT_BYTES = 1 << 24
MAX_ALIGNMENT = 1 << 16
MAX_RANK = 4
SLIDING, FULL = "sliding_attention", "full_attention"

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: Mapping[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in (
        *((0, "u1"), (1, "i1"), (2, "<u2"), (3, "<i2"), (4, "<u4"), (5, "<i4"), (6, "<f4")),
        *((_BOOL, "u1"), (10, "<u8"), (11, "<i8"), (12, "<f8")),
    )
}
_USUAL = 32  # bytes of a string, its length included, are more than usual
_FIELD_BYTES = 8 + 1 + 4 + 1
_ENTRY_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_OTHER_TYPES = {
    **{9: "q8_1", 15: "q8_k", 24: "i8"},
    **{25: "i16", 26: "i32", 27: "i64", 28: "f64", 29: "iq1_m", 40: "nvfp4", 41: "q1_0"},
    **{37: "i8_s of bitnet.cpp", 38: "tl1 of bitnet.cpp"},
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's file, type, logical shape (slowest dimension first), offset and size."""

    file: MappedFile
    kind: GgmlType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Strings:
    """An array of strings, read on demand; `starts` are byte offsets of the text, int64."""

    file: MappedFile
    key: str
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def text(self, index: int) -> str:
        """Return one string; raises FormatError if it is not UTF-8."""
        start = int(self.starts[index])
        length = int.from_bytes(self.file.bytes(start - 8, start).tobytes(), "little")
        data = self.file.bytes(start, start + length)
        return _decoded(data, f"{self.file.path}: {self.key}[{index}]")

    def texts(self) -> list[str]:
        """Return all strings; raises FormatError if one is not UTF-8, or they are too long."""
        if not len(self):
            return []
        # They follow each other, each after eight bytes with its length.
        first, last = int(self.starts[0]), int(self.starts[-1])
        end = last + int.from_bytes(self.file.bytes(last - 8, last).tobytes(), "little")
        if end - first > MAX_STRINGS_BYTES:
            raise FormatError(
                f"{self.file.path}: {self.key} has {end - first} bytes; the limit is "
                f"{MAX_STRINGS_BYTES}"
            )
        data = self.file.bytes(first, end).tobytes()
        begins = [*(self.starts - first).tolist(), end - first + 8]
        try:
            return [data[begin : after - 8].decode() for begin, after in pairwise(begins)]
        except UnicodeDecodeError:
            return [self.text(i) for i in range(len(self))]  # which says where


Value = bool | int | float | str | np.ndarray | Strings
_T = TypeVar("_T", bool, int, float, str, np.ndarray, Strings)
_SPELLED: Mapping[type, str] = {
    **{str: "a string", int: "an integer", float: "a number", bool: "a bool"},
    **{np.ndarray: "an array of numbers", Strings: "an array of strings"},
}


class GgufFile:
    """A validated, memory-mapped GGUF file with its attached parts; all in file order.

    Arrays of numbers in its `metadata` are views (bools as u8).
    """

    def __init__(self, path: Path) -> None:
        """Map and validate a file; FormatError, UnsupportedModel, ModelError or WindowError."""
        self.file = MappedFile(path)
        header = _Header(self.file)
        self.metadata: Mapping[str, Value] = header.values()
        alignment = self.get("general.alignment", int, 32)
        if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise FormatError(
                f"{path}: general.alignment is {alignment}; expected a power of two from 8 to "
                f"{MAX_ALIGNMENT}"
            )
        self.tensors = header.tensors(alignment)
        self.files: tuple[MappedFile, ...] = (self.file,)

    def data(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor, u8 [nbytes], as a read-only view of its file."""
        info = self.tensors[name]
        return info.file.bytes(info.offset, info.offset + info.nbytes)

    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """Return an entry; FormatError for another kind, or if missing with no default.

        An integer is a float, too; an f32 is the shortest decimal that rounds to it.
        """
        value = self.metadata.get(key)
        if value is None and default is not None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            got = "missing" if value is None else f"{type(value).__name__} {value!r:.60}"
            raise FormatError(
                f"{self.file.path}: metadata {key!r} is {got}; expected {_SPELLED[kind]}"
            )
        return value


class Metadata:
    """A file's entries without the architecture prefix, and which were read.

    `window` is 0 for full attention.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file, self.where = file, str(file.file.path)
        self.read: set[str] = set()
        self.arch = file.get("general.architecture", str)
        self.layers = self.get("block_count", int)
        heads = self.get("attention.head_count", int)
        size = self.get("embedding_length", int) // max(heads, 1)
        self.head_dim = self.get("attention.key_length", int, size)
        self.window = self.get("attention.sliding_window", int, 0)

    def get(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """Return an entry; see `GgufFile.get`."""
        self.read.add(key)
        return self.file.get(f"{self.arch}.{key}", kind, default)

    def value(self, key: str) -> Any:
        """Return a value of any type, None without one."""
        return self.file.metadata.get(f"{self.arch}.{key}")

    def layer_types(self, every: int) -> list[str]:
        """Return the layer types: all but every n-th have a window, unless a list says which."""
        key = "attention.sliding_window_pattern"
        value = self.value(key)
        if isinstance(value, np.ndarray) and len(value) == self.layers:
            return [SLIDING if slides else FULL for slides in value]
        value = every if value is None else value
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModel(
                f"{self.where}: {key} is {value!r:.60}; Clocher knows a number of layers and "
                f"a list of {self.layers}"
            )
        return [SLIDING if (layer + 1) % value else FULL for layer in range(self.layers)]


def _short_strings(data: np.ndarray, count: int) -> np.ndarray | None:
    """Return where strings begin in their bytes, and where a next one would.

    None if that is not seen at a glance: some have zeros or 64 KiB, or are long on average.
    """
    zeros = np.flatnonzero(data == 0)
    sixth = zeros[5:][zeros[5:] - zeros[:-5] == 5]  # six end a length of less than 64 KiB
    last = sixth[np.diff(sixth, append=data.size + 1) != 1][:count]
    if last.size != count or not count or last[0] != 7:
        return None
    nexts = last + 9 + data[last - 7] + 256 * data[last - 6].astype(np.int64)
    found = np.append(last + 1, nexts[-1])
    return found if np.array_equal(found[1:], nexts) and nexts[-1] <= data.size + 8 else None


class _Header:
    """Cursor over the header; every read is bounded by `_take`."""

    def __init__(self, file: MappedFile) -> None:
        self._file, self._where, self._at = file, str(file.path), 0
        magic = self._take(4, "the magic").tobytes()
        if magic != b"GGUF":
            raise FormatError(f"{self._where}: begins with {magic!r}, expected b'GGUF': no GGUF")
        version = self._integer(4)
        if version not in (2, 3):
            if int.from_bytes(version.to_bytes(4, "big"), "little") in (2, 3):
                raise UnsupportedModel(f"{self._where}: a big-endian GGUF; convert it again")
            raise UnsupportedModel(f"{self._where}: GGUF version {version}; Clocher reads 2 and 3")
        self._tensor_count = self._count("tensors", MAX_TENSORS, _ENTRY_BYTES)
        self._field_count = self._count("metadata entries", MAX_FIELDS, _FIELD_BYTES)
        self._strings_left = MAX_STRINGS

    def values(self) -> dict[str, Value]:
        """Read the metadata; call it once, before `tensors`."""
        found: dict[str, Value] = {}
        for _ in range(self._field_count):
            key = self._name("a metadata key")
            if key in found:
                raise FormatError(f"{self._where}: metadata key {key!r} appears twice")
            found[key] = self._value(key, f"{self._where}: metadata {key!r}")
        return found

    def tensors(self, alignment: int) -> dict[str, GgufTensor]:
        """Read the tensor entries and check the places of their data."""
        entries = [self._entry() for _ in range(self._tensor_count)]
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end = last = 0
        for name, kind, shape, offset in entries:
            where = f"{self._where}: tensor {name!r}"
            if name in tensors:
                raise FormatError(f"{where} appears twice")
            if offset != end:
                raise FormatError(
                    f"{where} starts at byte {offset} of the data, expected {end}: tensors follow "
                    f"each other in order, aligned to {alignment}, without overlaps or holes"
                )
            with prefixed(where):
                nbytes = kind.row_bytes(shape[-1])
            nbytes = nbytes * math.prod(shape[:-1]) + kind.tail
            last = offset + nbytes
            end = -(-last // alignment) * alignment
            tensors[name] = GgufTensor(self._file, kind, shape, start + offset, nbytes)
        held = self._file.nbytes
        if entries and not start + last <= held <= start + end:
            state = "truncated" if held < start + last else "trailing data"
            raise FormatError(
                f"{self._where}: {state}: the header describes {start + last} bytes, the file has "
                f"{held}; download it again"
            )
        return tensors

    def _value(self, key: str, where: str) -> Value:
        kind, count = self._integer(4), None
        if kind == _ARRAY:
            kind, count = self._integer(4), self._integer(8)
        if kind == _ARRAY:
            raise FormatError(f"{where} is an array of arrays, which GGUF readers do not read")
        if kind == _STRING:
            if count is None:
                return _decoded(self._string(where), where)
            return Strings(self._file, key, self._starts(where, count))
        if kind not in _NUMBERS:
            raise FormatError(f"{where} has the value type {kind}; known: 0 to 12")
        data = self._take((1 if count is None else count) * _NUMBERS[kind].itemsize, where)
        if kind == _BOOL and data.max(initial=0) > 1:
            raise FormatError(f"{where} has a bool of {data.max()}; expected 0 or 1")
        numbers = data.view(_NUMBERS[kind])
        if count is not None:
            return numbers
        if kind == _BOOL:
            return bool(numbers[0])
        # 0.00001 in fp32 gives 1e-05, as a config.json would say it.
        return float(str(numbers[0])) if numbers.dtype.kind == "f" else int(numbers[0])

    def _starts(self, where: str, count: int) -> np.ndarray:
        """Return where the strings of an array begin; see `Strings`."""
        if count > self._strings_left or 8 * count > self._file.nbytes - self._at:
            raise FormatError(
                f"{where} has {count} strings in the {self._file.nbytes - self._at} bytes that are "
                f"left; the limit is {MAX_STRINGS} in a file"
            )
        self._strings_left -= count
        limit, at, unpack = self._file.nbytes, self._at, struct.Struct("<Q").unpack_from
        head = self._file.bytes(0, limit).data
        found = _short_strings(self._file.bytes(at, min(limit, at + _USUAL * count)), count)
        if found is not None:
            self._at += int(found[count]) - 8
            return at + found[:count]
        starts = array("q", bytes(8 * count))
        for index in range(count):
            if at + 8 > limit:
                at = limit + 1
                break
            starts[index] = at + 8
            at += 8 + unpack(head, at)[0]
        if at > limit:
            raise FormatError(
                f"{where} has a string that goes beyond the end of the file ({limit})"
            )
        self._at = at
        return np.array(starts, np.int64)

    def _entry(self) -> tuple[str, GgmlType, tuple[int, ...], int]:
        name = self._name("a tensor name")
        where = f"{self._where}: tensor {name!r}"
        rank = self._integer(4)
        if not 1 <= rank <= MAX_RANK:
            raise FormatError(f"{where} has {rank} dimensions; expected 1 to {MAX_RANK}")
        dims = [self._integer(8) for _ in range(rank)]
        if 0 in dims:
            raise FormatError(f"{where} has the dimensions {dims}; expected at least 1 each")
        shape = checked_shape(dims[::-1], where)
        code, offset = self._integer(4), self._integer(8)
        if code in TYPES:
            return name, TYPES[code], shape, offset
        known = ", ".join(kind.name for kind in TYPES.values())
        if code in _OTHER_TYPES:
            raise UnsupportedModel(
                f"{where} is {_OTHER_TYPES[code]}; Clocher reads {known}; llama-quantize makes a "
                "file of one of these from the original"
            )
        raise FormatError(f"{where} has the ggml type {code}, which is not known; known: {known}")

    def _count(self, what: str, limit: int, least: int) -> int:
        count, left = self._integer(8), self._file.nbytes - self._at
        if count > limit or count * least > left:
            raise FormatError(
                f"{self._where}: {count} {what} in the {left} bytes that are left; each needs "
                f"{least} or more, and the limit is {limit}: truncated or damaged; fetch it again"
            )
        return count

    def _name(self, what: str) -> str:
        return checked_name(_decoded(self._string(what), f"{self._where}: {what}"), self._where)

    def _string(self, what: str) -> np.ndarray:
        length = self._integer(8)
        if length > MAX_TEXT_BYTES:
            raise FormatError(
                f"{self._where}: {what} has {length} bytes of text; the limit is {MAX_TEXT_BYTES}"
            )
        return self._take(length, what)

    def _integer(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes, "a number").tobytes(), "little")

    def _take(self, nbytes: int, what: str) -> np.ndarray:
        left = self._file.nbytes - self._at
        if nbytes > left:
            raise FormatError(
                f"{self._where}: {what} at byte {self._at} has {nbytes} bytes, {left} are left; "
                "the file is truncated or damaged; fetch it again"
            )
        self._at += nbytes
        return self._file.bytes(self._at - nbytes, self._at)


def _decoded(data: np.ndarray, where: str) -> str:
    try:
        return data.tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from None
