"""Shards without an index: their names say how many there are, `model-00001-of-00003.safetensors`.

transformers counts from 1 to m; gpt-oss's shards count from 0 to m.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from clocher_kernels.errors import FormatError, ModelNotFound
from clocher_runtime.checkpoints.hf.arrays import Arrays
from clocher_runtime.checkpoints.hf.foreign import listed, unfinished
from clocher_runtime.disk.files import MappedFile

_MOST = 10_000


def numbered_shards(directory: Path, stem: str, suffix: str) -> list[str]:
    """Return the names of the shards of a directory in order, none if there are no such files.

    `stem`: what the names begin with, such as "model"; `suffix`: what they end with. Raises
    ModelNotFound, FormatError.
    """
    pattern = re.compile(rf"{re.escape(stem)}--?([0-9]{{5}})-of-([0-9]{{5}}){re.escape(suffix)}")
    found = {name: match for name in listed(directory) if (match := pattern.fullmatch(name))}
    if not found:
        return []
    totals = {int(match[2]) for match in found.values()}
    numbers = sorted(int(match[1]) for match in found.values())
    last = max(totals)
    if len(totals) > 1 or len(set(numbers)) < len(numbers) or last > _MOST or numbers[-1] > last:
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


def read_numbered(
    names: Iterable[str], read: Callable[[str], tuple[Arrays, MappedFile]]
) -> tuple[Arrays, tuple[MappedFile, ...]]:
    """Return the arrays of shards together, and their files; raises FormatError."""
    everything: Arrays = {}
    files = []
    for name in names:
        arrays, file = read(name)
        if twice := sorted(everything.keys() & arrays.keys()):
            raise FormatError(f"{file.path}: tensor {twice[0]!r} is in another shard, too")
        everything |= arrays
        files.append(file)
    return everything, tuple(files)
