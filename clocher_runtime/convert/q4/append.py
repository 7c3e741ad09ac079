"""Making model.ie.compat.json, and appending attention matrices to what it describes."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clocher_kernels.errors import FormatError, UsageError
from clocher_kernels.formats import Float
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.iebin.checkpoint import JSON_NAME, open_iebin
from clocher_runtime.checkpoints.q4.overlay import (
    AGAIN,
    COMPAT_NAME,
    Q4_NAMES,
    open_index,
    read_overlay,
    write_overlay,
)
from clocher_runtime.checkpoints.q4.planes import (
    CODES,
    Q4_0,
    Q4Entry,
    check_hashes,
    load_q4_planes,
    next_offsets,
)
from clocher_runtime.convert.q4.writer import CHUNK_ROWS, encoded
from clocher_runtime.convert.to_iebin import Progress, open_source
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.output_file import OutputFile, check_free
from clocher_runtime.disk.strict_json import MAX_JSON_BYTES

_ATTENTION = re.compile(r".*\.self_attn\.[qkvo]_proj\.weight")


def make_index(model_dir: Path, manifest: Path) -> list[str]:
    """Write model.ie.compat.json from model.ie.json and an expanded manifest.

    Args:
        model_dir: the directory of the pair and of the plane files.
        manifest: the expanded manifest that describes them.

    Returns:
        The names of the matrices that it takes from the plane files.

    Raises:
        UsageError: the manifest describes other files, or another model.
        ModelError: the pair or a plane file is missing or damaged.
    """
    planes = load_q4_planes(manifest)
    for key, name in Q4_NAMES.items():
        described = planes.files[key]
        if os.path.realpath(described) != os.path.realpath(model_dir / name):
            raise UsageError(f"{manifest}: describes {described}, expected {model_dir / name}")
    base = open_iebin(model_dir / JSON_NAME)
    for name, entry in planes.entries.items():
        found = base.tensors.get(name)
        if found is None or found.shape != entry.shape or not _replaceable(found.format.name):
            got = f"{found.format.name}{list(found.shape)}" if found else "no such tensor"
            raise UsageError(
                f"{manifest}: tensor {name!r} {list(entry.shape)}: {JSON_NAME} has {got}"
            )
    for entry in planes.entries.values():
        check_hashes(entry, planes.tensors[entry.name], str(manifest))
    write_overlay(model_dir / COMPAT_NAME, list(planes.entries.values()))
    return list(planes.entries)


@dataclass(frozen=True, slots=True, eq=False)
class AppendJob:
    """Attention matrices that can be appended.

    Attributes:
        source: the checkpoint that the pair was made of.
        index: model.ie.compat.json.
        entries: what the index lists.
        names: the matrices that it lacks.
        present: those that it has.
        nbytes: bytes that the new ones will take.
        free_bytes: bytes that the disk has for them.
    """

    source: Checkpoint
    index: Path
    entries: tuple[Q4Entry, ...]
    names: tuple[str, ...]
    present: tuple[str, ...]
    nbytes: int
    free_bytes: int

    def run(self, progress: Progress | None = None) -> None:
        """Append the matrices. The index is written anew after each, so a kill loses one at most.

        Args:
            progress: called after each matrix with the bytes appended so far and its name.

        Raises:
            UsageError: another process is writing the files.
            ModelError: a matrix cannot be encoded, or the files are not what the index says.
            OSError: the files cannot be written; the index is as it was after the last matrix.
        """
        entries = list(self.entries)
        with _Growing(self.index.parent, entries) as files:
            start = files.nbytes
            for name, tensor, digest in encoded(self.source, self.names, CHUNK_ROWS):
                offsets = next_offsets(entries[-1] if entries else None)
                self.source.check_unchanged()
                hashes = files.append(offsets, tensor.planes)
                entries.append(Q4Entry(name, tensor.shape, digest, offsets, hashes))
                write_overlay(self.index, entries)
                if progress:
                    progress(files.nbytes - start, name)


def plan_append(hf_dir: Path, index: Path, q4_bin: Path) -> AppendJob:
    """Find the attention matrices that an index does not have yet, and check what can be checked.

    Args:
        hf_dir: the checkpoint that the pair was made of.
        index: model.ie.compat.json.
        q4_bin: model.q4.bin beside it.

    Raises:
        UsageError: the files do not lie together, or the checkpoint is of another model.
        ModelError: the model or the index is missing or damaged.
        OSError: the disk is too small.
    """
    expected = index.with_name(Q4_NAMES[CODES])
    if os.path.realpath(q4_bin) != os.path.realpath(expected):
        raise UsageError(f"--q4-bin {q4_bin}: expected {expected}, the one beside --compat-json")
    if not os.path.isfile(index):
        raise UsageError(
            f"--compat-json not found: {index}; scripts/rebuild_dedup_and_quant.sh --model-dir "
            f"{index.parent} makes it"
        )
    entries = read_overlay(index, read_bytes(index, MAX_JSON_BYTES))
    source, base = open_source(hf_dir), open_index(index)
    there = {entry.name for entry in entries}
    wanted = [name for name in base.names if _ATTENTION.fullmatch(name)]
    missing = tuple(name for name in wanted if name not in there)
    for name in missing:
        found = source.tensors.get(name)
        if found is None or found.shape != base.shape(name) or not isinstance(found.format, Float):
            got = f"{found.format.name}{list(found.shape)}" if found else "no such tensor"
            raise UsageError(
                f"{hf_dir}: tensor {name!r} {list(base.shape(name))}: got {got}; give the "
                "checkpoint that the model was made of, with floats"
            )
    nbytes = sum(Q4_0.nbytes(base.shape(name)) for name in missing)
    free = check_free(index, nbytes)
    present = tuple(name for name in wanted if name in there)
    return AppendJob(source, index, tuple(entries), missing, present, nbytes, free)


class _Growing:
    """The plane files, opened where the index says that they end; what is behind is cut off."""

    def __init__(self, folder: Path, entries: list[Q4Entry]) -> None:
        self._files: dict[str, OutputFile] = {}
        try:
            for key, name in Q4_NAMES.items():
                self._files[key] = file = OutputFile(folder / name)
                ranges = [(e.offsets[key], e.nbytes(key), e.hashes[key]) for e in entries]
                if not file.keep(ranges):
                    raise FormatError(
                        f"{file.path}: the bytes do not match the SHA-256 in the index; {AGAIN}"
                    )
            for file in self._files.values():
                file.truncate()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "_Growing":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self._files.values())

    def append(self, offsets: dict[str, int], planes: Any) -> dict[str, str]:
        """Append planes, wait until the disk has them, and return their hashes."""
        hashes = {}
        for key, file in self._files.items():
            file.pad(offsets[key])
            hashes[key] = file.write(planes[key])
        for file in self._files.values():
            file.sync()
        return hashes


def _replaceable(format_name: str) -> bool:
    return format_name in ("f32", "f16", "bf16", Q4_0.name)
