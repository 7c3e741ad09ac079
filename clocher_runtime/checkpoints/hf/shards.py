"""The files of a Hugging Face directory, its weight shards and their arrays; nothing is trusted.

Shard names must be plain, and links may not leave the model's directory (or the cache directory
with its blobs). Index and shards must agree on every tensor. Without an index, shard names count
from 1 to m (transformers) or 0 to m (gpt-oss).

A safetensors file is validated in full before its data is used. Source:
https://github.com/huggingface/safetensors#format. Stricter: duplicate keys, unprintable names,
shapes beyond 2^48 elements and unknown dtypes are refused.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from clocher_kernels.errors import FormatError, ModelNotFound
from clocher_kernels.formats import Fp8
from clocher_kernels.formats.base import Plane
from clocher_kernels.formats.floats import FP8_BLOCK as BLOCK
from clocher_kernels.formats.floats import Scope
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import stored_tensor
from clocher_runtime.checkpoints.locate import listed, no_weights, unfinished
from clocher_runtime.disk import strict_json
from clocher_runtime.disk.files import MappedFile, read_bytes

FLOATS = ("F32", "F16", "BF16")
REQUANTISE = "quantise the float checkpoint again"
SETTINGS = "quantization_config"

_SINGLE = "model.safetensors"
_MAX_CONFIG_BYTES = 16_000_000
_MOST_SHARDS = 10_000
_MAX_GROUP = 999_999
# Of the store that repositories of a hub cache share: blobs/01/0123...
_BLOB = re.compile("[0-9a-f]{64}")
# They scale activations and the KV cache, which run as the session's settings say.
_ACTIVATION_SCALES = (
    *(".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point"),
    *(".activation_scale", ".q_scale", ".k_scale", ".v_scale"),
)

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
Tensors = dict[str, QuantTensor]
ReadFile = Callable[[Path], tuple[Arrays, MappedFile]]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A checkpoint while its tensors are recognised; `rest` are the arrays not claimed yet."""

    rest: Arrays
    settings: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    def ending(self, suffix: str) -> list[str]:
        """Return the names of unclaimed arrays with a suffix."""
        return [name for name in self.rest if name.endswith(suffix)]

    def claim(self, name: str, owner: StoredArray) -> StoredArray:
        """Claim an array that belongs to another one; raises FormatError."""
        if name not in self.rest:
            raise FormatError(f"{owner.where}: packed, but {name!r} is missing")
        return self.rest.pop(name)

    def drop_activation_scales(self) -> None:
        """Drop the scales of activations and of the KV cache, with a note."""
        dropped = [name for name in self.rest if name.endswith(_ACTIVATION_SCALES)]
        for name in dropped:
            del self.rest[name]
        if dropped:
            self.notes.append(
                f"{len(dropped)} stored scales of activations or of the KV cache are not used, "
                f"such as {dropped[0]}: these run as act_prec and kv_dtype say"
            )

    def refuse_orphans(self, *suffixes: str) -> None:
        """Raise FormatError for a leftover array that belongs to a packed weight."""
        for name, stored in self.rest.items():
            if name.endswith(suffixes):
                raise FormatError(f"{stored.where}: no packed weight belongs to it")

    def choice(self, key: str, default: Any, known: Iterable[Any], way_out: str = "") -> Any:
        """Return a setting limited to known values; null counts as absent."""
        return strict_json.one_of(self.settings, key, default, known, SETTINGS, way_out)


def columns_per_group(value: object) -> int | None:
    """Return a setting `group_size`, None for -1: a scale per row; raises FormatError."""
    if type(value) is not int or not (value == -1 or 1 <= value <= _MAX_GROUP):
        got = strict_json.shown(value)
        raise FormatError(f"{SETTINGS}: group_size is {got}; expected -1 or 1 to {_MAX_GROUP}")
    return None if value == -1 else value


def fp8_tensor(codes: StoredArray, scales: StoredArray, scopes: tuple[Scope, ...]) -> QuantTensor:
    """Return a tensor of e4m3 codes, with the first of `scopes` that fits the scales' shape."""
    codes.expect(("F8_E4M3",))
    n, k = codes.matrix()
    scales.expect(FLOATS)
    shapes: dict[Scope, tuple[tuple[int, ...], ...]] = {
        "b128": ((-(-n // BLOCK), -(-k // BLOCK)),),
        "tensor": ((1,), (), (1, 1)),
        "row": ((n,), (n, 1)),
    }
    for scope in scopes:
        if scales.array.shape in shapes[scope]:
            fmt = Fp8("e4m3", scope, DTYPES[scales.dtype])
            planes = {"codes": codes.array, "scales": scales.array.reshape(shapes[scope][0])}
            return stored_tensor((n, k), fmt, planes, codes.where)
    expected = " or ".join(str(list(shape)) for scope in scopes for shape in shapes[scope])
    raise FormatError(f"{scales.where}: shape {list(scales.array.shape)}, expected {expected}")


class _Index(Struct):
    weight_map: Annotated[dict[str, Any], Meta(min_length=1)]


class HfFolder:
    """A directory that its files may not leave."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        real = Path(os.path.realpath(directory))
        cached = real.parent.name == "snapshots" and real.parents[1].name.startswith("models--")
        self.boundary = real.parents[1] if cached else real
        self._shared = real.parents[2] / "blobs" if cached else None

    def member(self, name: str) -> Path:
        """Return the path of a member, which may not exist."""
        path = self.directory / name
        target = Path(os.path.realpath(path))
        shared = self._shared is not None and target.parent.parent == self._shared
        if not (target.is_relative_to(self.boundary) or (shared and _BLOB.fullmatch(target.name))):
            raise FormatError(f"{path}: a link to {target}, which is outside {self.boundary}")
        return path

    def has(self, name: str) -> bool:
        """Return whether the directory has this file."""
        return os.path.isfile(self.member(name))

    def json(self, name: str, limit: int = _MAX_CONFIG_BYTES) -> dict[str, Any]:
        """Return the object in a JSON file."""
        path = self.member(name)
        return strict_json.parse_object(read_bytes(path, limit), str(path))

    def optional_json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file, {} without the file."""
        return self.json(name) if self.has(name) else {}


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
    entry = strict_json.fields(value, where, {"dtype": str, "shape": list, "data_offsets": list})
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


def read_shards(
    folder: HfFolder, stem: str, suffix: str, read: ReadFile
) -> tuple[Arrays, tuple[MappedFile, ...]]:
    """Read the weight file `<stem><suffix>`, or its shards, by the index or by their names."""
    single, index = f"{stem}{suffix}", f"{stem}{suffix}.index.json"
    weight_map: Mapping[str, Any] = {}
    if folder.has(single):
        shards = [single]
    elif folder.has(index):
        weight_map = _weight_map(folder, index, suffix)
        shards = sorted(set(weight_map.values()))
    elif not (shards := _numbered(folder.directory, stem, suffix)):
        if single == _SINGLE:
            raise no_weights(folder.directory)
        got = f"{folder.directory}: neither {single} nor {index} is there"
        raise ModelNotFound(f"{got}; hf_to_iebin.py and ptq_from_hf.py read other weights")
    everything: Arrays = {}
    files = []
    for shard in shards:
        arrays, file = read(folder.member(shard))
        listed_here = {name for name, place in weight_map.items() if place == shard}
        if weight_map and (differing := sorted(listed_here ^ set(arrays))):
            state = "is not in it" if differing[0] in listed_here else "is not listed for it"
            raise FormatError(
                f"{folder.directory / shard}: {index} and the shard disagree: tensor "
                f"{differing[0]!r} {state} ({len(differing)} in all); download the model again"
            )
        if twice := sorted(everything.keys() & arrays.keys()):
            raise FormatError(f"{file.path}: tensor {twice[0]!r} is in another shard, too")
        everything |= arrays
        files.append(file)
    return everything, tuple(files)


def _weight_map(folder: HfFolder, index: str, suffix: str) -> Mapping[str, Any]:
    where = str(folder.directory / index)
    weight_map = strict_json.read_as(
        folder.json(index, strict_json.MAX_JSON_BYTES), _Index, where
    ).weight_map
    plain = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,240}}{re.escape(suffix)}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not plain.fullmatch(shard):
            raise FormatError(
                f"{where}: tensor {name!r:.80} is in {shard!r:.80}; a shard is a plain "
                f"file name of letters, digits, '.', '_', '-' that ends in {suffix}"
            )
    shards = sorted(set(weight_map.values()))
    if missing := [shard for shard in shards if not folder.has(shard)]:
        raise ModelNotFound(
            f"{folder.directory}: {len(missing)} of {len(shards)} weight files are missing, the "
            f"first is {missing[0]}; {unfinished(folder.directory)}"
        )
    return weight_map


def _numbered(directory: Path, stem: str, suffix: str) -> list[str]:
    pattern = re.compile(rf"{re.escape(stem)}--?([0-9]{{5}})-of-([0-9]{{5}}){re.escape(suffix)}")
    found = {name: match for name in listed(directory) if (match := pattern.fullmatch(name))}
    if not found:
        return []
    totals = {int(match[2]) for match in found.values()}
    numbers = sorted(int(match[1]) for match in found.values())
    last = max(totals)
    twice = len(set(numbers)) < len(numbers)
    if len(totals) > 1 or twice or last > _MOST_SHARDS or numbers[-1] > last:
        raise FormatError(
            f"{directory}: shards without an index that do not belong together: "
            f"{', '.join(sorted(found)[:3])}, ...; keep those of one model"
        )
    first = 0 if numbers[0] == 0 else 1
    missing = sorted(set(range(first, last + 1)) - set(numbers))
    if missing:
        raise ModelNotFound(
            f"{directory}: {len(missing)} of {last + 1 - first} shards are missing, the first is "
            f"{stem}-{missing[0]:05d}-of-{last:05d}{suffix}; {unfinished(directory)}"
        )
    return sorted(found, key=lambda name: int(found[name][1]))
