"""The header of a GGUF file, validated in full before a byte of its data is used.

Layout, little-endian: "GGUF", u32 version, u64 count of tensors, u64 count of metadata entries; the
entries (key, type, value); for each tensor its name, dimensions (fastest first), type and offset;
padding; the data. Strings are a u64 length and UTF-8.
Source: ggml's docs/gguf.md, versions 2 and 3. Stricter than that text: no arrays of arrays, tensors
in the order of their entries without holes, nothing after the last, at most `MAX_TENSORS` tensors,
`MAX_FIELDS` entries and `MAX_STRINGS` strings in arrays.
"""

import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.checkpoints.gguf.blocks import TYPES, GgmlType
from clocher_runtime.disk.files import MappedFile
from clocher_runtime.disk.strict_json import checked_name, checked_shape

MAX_TENSORS = 1 << 16
MAX_FIELDS = 1 << 12
MAX_STRINGS = 1 << 20
MAX_TEXT_BYTES = 1 << 24
MAX_RANK = 4

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
BOOL, STRING, _ARRAY = 7, 8, 9
NUMBERS: Mapping[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_FIELD_BYTES = 8 + 1 + 4 + 1
_ENTRY_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_OTHER_TYPES = {
    **{9: "q8_1", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 19: "iq1_s", 22: "iq2_s", 24: "i8"},
    **{25: "i16", 26: "i32", 27: "i64", 28: "f64", 29: "iq1_m", 40: "nvfp4", 41: "q1_0"},
    **{37: "i8_s of bitnet.cpp", 38: "tl1 of bitnet.cpp"},
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor is and what it holds.

    `kind`: its ggml type; `shape`: logical shape, slowest dimension first; `offset`: first byte,
    counted from the start of the file; `nbytes`: size in bytes.
    """

    kind: GgmlType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Field:
    """A metadata entry: type of a value or of an array's elements, where it is; count of elements.

    A single value has the count None; an array of strings has their starts.
    """

    kind: int
    offset: int
    nbytes: int
    count: int | None = None
    starts: np.ndarray | None = None


class Header:
    """A cursor over the part before the data."""

    def __init__(self, file: MappedFile) -> None:
        self._file, self._where = file, str(file.path)
        self._at = 0
        magic = self._take(4, "the magic").tobytes()
        if magic != _MAGIC:
            raise FormatError(f"{self._where}: begins with {magic!r}, expected {_MAGIC!r}: no GGUF")
        self.version = self._u32()
        if self.version not in _VERSIONS:
            if int.from_bytes(self.version.to_bytes(4, "big"), "little") in _VERSIONS:
                raise UnsupportedModel(f"{self._where}: a big-endian GGUF; convert it anew")
            raise UnsupportedModel(
                f"{self._where}: GGUF version {self.version}; Clocher reads 2 and 3"
            )
        self._tensor_count = self._count("tensors", MAX_TENSORS, _ENTRY_BYTES)
        self._field_count = self._count("metadata entries", MAX_FIELDS, _FIELD_BYTES)
        self._strings_left = MAX_STRINGS

    def fields(self) -> dict[str, Field]:
        """Read the metadata entries; call it once, before `tensors`."""
        fields: dict[str, Field] = {}
        for _ in range(self._field_count):
            key = self._name("a metadata key")
            if key in fields:
                raise FormatError(f"{self._where}: metadata key {key!r} appears twice")
            fields[key] = self._field(key)
        return fields

    def tensors(self, alignment: int) -> dict[str, GgufTensor]:
        """Read the entries of the tensors and check that their data lie as they should."""
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
            try:
                nbytes = kind.row_bytes(shape[-1])
            except FormatError as error:
                raise FormatError(f"{where}: {error}") from None
            for dim in shape[:-1]:
                nbytes *= dim
            nbytes += kind.tail
            last = offset + nbytes
            end = -(-last // alignment) * alignment
            tensors[name] = GgufTensor(kind, shape, start + offset, nbytes)
        if entries and self._file.nbytes < start + last:
            raise FormatError(
                f"{self._where}: truncated: the header describes {start + last} bytes, the file "
                f"has {self._file.nbytes}; get it again"
            )
        if entries and self._file.nbytes > start + end:
            raise FormatError(
                f"{self._where}: the header describes {start + last} bytes, the file has "
                f"{self._file.nbytes}: trailing data"
            )
        return tensors

    def _field(self, key: str) -> Field:
        kind, count = self._u32(), None
        if kind == _ARRAY:
            kind, count = self._u32(), self._u64()
        where = f"{self._where}: metadata {key!r}"
        if kind == _ARRAY:
            raise FormatError(f"{where} is an array of arrays, which GGUF readers do not read")
        if kind == STRING and count is not None:
            return self._string_array(where, count)
        if kind == STRING:
            data = self._string(where)
            decoded(data, where)
            return Field(kind, self._at - len(data), len(data))
        if kind not in NUMBERS:
            raise FormatError(f"{where} has the value type {kind}; known: 0 to 12")
        data = self._take((1 if count is None else count) * NUMBERS[kind].itemsize, where)
        if kind == BOOL and data.max(initial=0) > 1:
            raise FormatError(f"{where} has a bool of {data.max()}; expected 0 or 1")
        return Field(kind, self._at - len(data), len(data), count)

    def _string_array(self, where: str, count: int) -> Field:
        if count > self._strings_left or 8 * count > self._file.nbytes - self._at:
            raise FormatError(
                f"{where} has {count} strings in the {self._file.nbytes - self._at} bytes that are "
                f"left; the limit is {MAX_STRINGS} in a file"
            )
        self._strings_left -= count
        starts = array("q", bytes(8 * count))
        limit, at, unpack = self._file.nbytes, self._at, struct.Struct("<Q").unpack_from
        head = self._file.bytes(0, limit).data
        for index in range(count):
            if at + 8 > limit:
                break
            starts[index] = at + 8
            at += 8 + unpack(head, at)[0]
        else:
            if at <= limit:
                offset, self._at = self._at, at
                found = np.frombuffer(starts, np.int64) if count else np.empty(0, np.int64)
                return Field(STRING, offset, at - offset, count, found)
        raise FormatError(f"{where} has a string that goes beyond the end of the file ({limit})")

    def _entry(self) -> tuple[str, GgmlType, tuple[int, ...], int]:
        name = self._name("a tensor name")
        where = f"{self._where}: tensor {name!r}"
        rank = self._u32()
        if not 1 <= rank <= MAX_RANK:
            raise FormatError(f"{where} has {rank} dimensions; expected 1 to {MAX_RANK}")
        dims = [self._u64() for _ in range(rank)]
        if 0 in dims:
            raise FormatError(f"{where} has the dimensions {dims}; expected at least 1 each")
        shape = checked_shape(dims[::-1], where)
        code, offset = self._u32(), self._u64()
        if code not in TYPES:
            raise _unread(where, code)
        return name, TYPES[code], shape, offset

    def _count(self, what: str, limit: int, least: int) -> int:
        count, left = self._u64(), self._file.nbytes - self._at
        if count > limit or count * least > left:
            raise FormatError(
                f"{self._where}: {count} {what} in the {left} bytes that are left; each needs "
                f"{least} or more, and the limit is {limit}"
            )
        return count

    def _name(self, what: str) -> str:
        return checked_name(decoded(self._string(what), f"{self._where}: {what}"), self._where)

    def _string(self, what: str) -> np.ndarray:
        length = self._u64()
        if length > MAX_TEXT_BYTES:
            raise FormatError(
                f"{self._where}: {what} has {length} bytes of text; the limit is {MAX_TEXT_BYTES}"
            )
        return self._take(length, what)

    def _u32(self) -> int:
        return integer(self._take(4, "a number"))

    def _u64(self) -> int:
        return integer(self._take(8, "a number"))

    def _take(self, nbytes: int, what: str) -> np.ndarray:
        left = self._file.nbytes - self._at
        if nbytes > left:
            raise FormatError(
                f"{self._where}: {what} at byte {self._at} has {nbytes} bytes, {left} are left; "
                "the file is truncated or damaged"
            )
        self._at += nbytes
        return self._file.bytes(self._at - nbytes, self._at)


def decoded(data: np.ndarray, where: str) -> str:
    """Return bytes as text; FormatError if they are not UTF-8."""
    try:
        return data.tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from None


def integer(data: np.ndarray) -> int:
    """Return a little-endian integer."""
    return int.from_bytes(data.tobytes(), "little")


def _unread(where: str, code: int) -> Exception:
    known = ", ".join(kind.name for kind in TYPES.values())
    if code in _OTHER_TYPES:
        return UnsupportedModel(
            f"{where} is {_OTHER_TYPES[code]}; Clocher reads {known}; llama-quantize makes a file "
            "of one of these from the original"
        )
    return FormatError(f"{where} has the ggml type {code}, which is not known; known: {known}")
