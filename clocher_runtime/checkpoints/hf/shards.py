"""The files of a Hugging Face directory and its weight shards; nothing in it is trusted.

Shard names must be plain, and links may not leave the model's directory (or the cache directory
with its blobs). Index and shards must agree on every tensor. Without an index, shard names count
from 1 to m (transformers) or 0 to m (gpt-oss).
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from clocher_kernels.errors import FormatError, ModelNotFound
from clocher_runtime.checkpoints.hf.arrays import Arrays, StoredArray
from clocher_runtime.checkpoints.hf.foreign import listed, no_weights, unfinished
from clocher_runtime.disk.files import MappedFile, read_bytes
from clocher_runtime.disk.safetensors_file import SafetensorsFile
from clocher_runtime.disk.schema import read_as
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES, parse_object

Weights = tuple[Arrays, tuple[MappedFile, ...]]

_SINGLE = "model.safetensors"
_MAX_CONFIG_BYTES = 16_000_000
_MOST_SHARDS = 10_000
# Of the store that repositories of a hub cache share: blobs/01/0123...
_BLOB = re.compile("[0-9a-f]{64}")


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
        return parse_object(read_bytes(path, limit), str(path))

    def optional_json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file, {} without the file."""
        return self.json(name) if self.has(name) else {}


def read_safetensors(path: Path) -> tuple[Arrays, MappedFile]:
    """Return the arrays of a safetensors file, and the file."""
    shard = SafetensorsFile(path)
    where = f"{shard.file.path}: tensor"
    arrays = {
        name: StoredArray(info.dtype, shard.view(name), f"{where} {name!r}")
        for name, info in shard.tensors.items()
    }
    return arrays, shard.file


def read_shards(
    folder: HfFolder, stem: str, suffix: str, read: Callable[[Path], tuple[Arrays, MappedFile]]
) -> Weights:
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
        raise ModelNotFound(f"{folder.directory}: neither {single} nor {index} is there")
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
    weight_map = read_as(folder.json(index, MAX_JSON_BYTES), _Index, where).weight_map
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
    if (
        len(totals) > 1
        or len(set(numbers)) < len(numbers)
        or last > _MOST_SHARDS
        or numbers[-1] > last
    ):
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
