"""One safetensors file, validated in full before its data is used.

Source: https://github.com/huggingface/safetensors#format. Stricter: duplicate keys, unprintable
names, shapes beyond 2^48 elements and unknown dtypes are refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.errors import FormatError
from clocher_kernels.formats.base import Plane
from clocher_runtime.disk import strict_json
from clocher_runtime.disk.files import MappedFile

DTYPES: dict[str, str] = {
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "F8_E4M3": "e4m3",
    "F8_E5M2": "e5m2",
    "I64": "i64",
    "I32": "i32",
    "I8": "i8",
    "U8": "u8",
    "BOOL": "u8",
}
"""safetensors dtype -> name in `clocher_kernels.dtypes.STORAGE`."""

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class StoredArray:
    """An array of a shard: safetensors `dtype`, a view of the mapped file, `where` for messages."""

    dtype: str
    array: np.ndarray
    where: str

    def expect(self, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Raise FormatError unless the array has one of these dtypes and shapes (if any given)."""
        if self.dtype not in dtypes:
            raise FormatError(f"{self.where}: dtype {self.dtype}, expected {' or '.join(dtypes)}")
        if shapes and self.array.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise FormatError(f"{self.where}: shape {list(self.array.shape)}, expected {expected}")

    def matrix(self) -> tuple[int, int]:
        """Return the two dimensions; raise FormatError if there are others, or an empty one."""
        if self.array.ndim != 2 or 0 in self.array.shape:
            raise FormatError(
                f"{self.where}: shape {list(self.array.shape)}, expected 2 dimensions of at least 1"
            )
        return self.array.shape


Arrays = dict[str, StoredArray]


def open_safetensors(path: Path) -> tuple[Arrays, MappedFile]:
    """Map and validate a file; return its arrays, and the file.

    Raises FormatError, ModelError, WindowError.
    """
    file, where = MappedFile(path), str(path)
    if file.nbytes < _LENGTH_BYTES:
        raise FormatError(f"{where}: {file.nbytes} bytes is too short for a safetensors file")
    length = int.from_bytes(file.bytes(0, _LENGTH_BYTES).tobytes(), "little")
    start = _LENGTH_BYTES + length
    if length > strict_json.MAX_JSON_BYTES or start > file.nbytes:
        raise FormatError(
            f"{where}: header of {length} bytes in a file of {file.nbytes} (limit "
            f"{strict_json.MAX_JSON_BYTES}); the file is truncated or not safetensors"
        )
    text = file.bytes(_LENGTH_BYTES, start).tobytes()
    if not text.startswith(b"{"):
        raise FormatError(f"{where}: the header does not begin with '{{': not safetensors")
    header = strict_json.parse_object(text, f"{where} (header)", file.nbytes - length)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{where}: __metadata__ must map strings to strings")
    entries = [_entry(name, entry, start, where) for name, entry in header.items()]
    entries.sort(key=lambda entry: (entry[3], entry[2].nbytes))
    end = start
    for name, _, plane, offset in entries:
        if offset != end:
            raise FormatError(
                f"{where}: tensor {name!r} starts at byte {offset}, expected {end}: "
                "tensors must neither overlap nor leave holes"
            )
        end += plane.nbytes
    if end != file.nbytes:
        raise FormatError(
            f"{where}: the header describes {end} bytes, the file has {file.nbytes}: "
            "truncated download, or trailing data"
        )
    arrays = {
        name: StoredArray(dtype, file.plane(plane, at), f"{where}: tensor {name!r}")
        for name, dtype, plane, at in entries
    }
    return arrays, file


def _entry(name: str, value: object, start: int, where: str) -> tuple[str, str, Plane, int]:
    where = f"{where}: tensor {strict_json.checked_name(name, where)!r}"
    entry: dict[str, Any] = strict_json.fields(
        value, where, {"dtype": str, "shape": list, "data_offsets": list}
    )
    if entry["dtype"] not in DTYPES:
        raise FormatError(
            f"{where}: dtype {entry['dtype']!r:.40} is not read; known: {', '.join(DTYPES)}"
        )
    plane = Plane(DTYPES[entry["dtype"]], strict_json.checked_shape(entry["shape"], where))
    offsets = entry["data_offsets"]
    if len(offsets) != 2 or any(type(offset) is not int for offset in offsets):
        raise FormatError(f"{where}: data_offsets must be two integers")
    begin, end = offsets
    if begin < 0 or end - begin != plane.nbytes:
        raise FormatError(
            f"{where}: data_offsets [{begin}, {end}] do not span the {plane.nbytes} bytes of "
            f"{entry['dtype']}{list(plane.shape)}"
        )
    return name, entry["dtype"], plane, start + begin
