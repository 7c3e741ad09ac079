"""A model whose weights come from `clocher.dedup`, and the base that a variant builds on."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clocher_kernels.errors import FormatError, ModelError, ModelNotFound
from clocher_runtime.checkpoints.checkpoint import Checkpoint, Stored, lazy_tensor, stored_tensor
from clocher_runtime.checkpoints.dedup.index import INDEX_NAME, Base, StoredPlane
from clocher_runtime.checkpoints.dedup.reader import BasePlane, DedupFile, open_dedup
from clocher_runtime.checkpoints.iebin.checkpoint import BIN_NAME, JSON_NAME, IebinIndex, read_index
from clocher_runtime.disk.files import MappedFile

Keep = Callable[[DedupFile, int], np.ndarray]
"""Gives a plane of a file: `DedupFile.plane`, or something that remembers planes."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """The weights of a directory: model.ie.json, and model.ie.bin or its deduplicated form.

    Attributes:
        index: model.ie.json.
        dedup: the deduplicated form; None if model.ie.bin is read.
        checkpoint: the model.
    """

    index: IebinIndex
    dedup: DedupFile | None
    checkpoint: Checkpoint


def has_dedup(directory: Path) -> bool:
    """Return whether a directory holds deduplicated weights."""
    return os.path.isfile(directory / INDEX_NAME)


def open_deduplicated(
    directory: Path,
    base: Path | None = None,
    verify: bool = False,
    keep: Keep = DedupFile.plane,
) -> Artifact:
    """Open a model by its deduplicated weights.

    Planes that are stored as they are stay views of the files; the others are decoded each time
    that a tensor is read, and checked against their SHA-256.

    Args:
        directory: where model.ie.json, model.dedup.json and its three files are.
        base: directory of the base; by default it is looked for beside `directory`.
        verify: decode everything and check every SHA-256 now.
        keep: gives the planes.

    Raises:
        ModelNotFound: a file or the base is missing.
        FormatError: a file is damaged, or the files do not belong together.
        UnsupportedModel: one is of another version.
        WindowError: a timed window is open.
    """
    index = read_index(directory / JSON_NAME)
    planes: list[BasePlane] = []
    dedup = open_dedup(directory, lambda tensor, key: planes[0](tensor, key))
    _check_same_model(dedup, index)
    files, found = dedup.files, None
    if dedup.index.base is not None:
        found = _find_base(dedup.index.base, directory, base)
        planes.append(planes_of(found.checkpoint))
        files += found.checkpoint.files
    if verify:
        dedup.verify()
    tensors = dict(_tensors(dedup, index, keep))
    checkpoint = index.checkpoint(tensors, files)
    return Artifact(index, dedup, checkpoint)


def open_base(directory: Path) -> Artifact:
    """Open a model that others may build on.

    Raises:
        ModelError: it is missing, damaged, or builds on another one itself.
    """
    if os.path.isfile(directory / BIN_NAME) or not has_dedup(directory):
        index = read_index(directory / JSON_NAME)
        file = MappedFile(directory / BIN_NAME, index.nbytes)
        views = {entry.name: entry.view(file) for entry in index.entries}
        return Artifact(index, None, index.checkpoint(views, (file,)))
    if open_dedup(directory).index.base is not None:
        raise FormatError(
            f"{directory}: builds on a base itself; expected a model that is complete: restore "
            f"its {BIN_NAME} first"
        )
    return open_deduplicated(directory)


def raw_planes(index: IebinIndex) -> Iterator[tuple[StoredPlane, int]]:
    """Yield every plane of model.ie.bin, stored as it is, with its offset there."""
    for entry in index.entries:
        for item in entry.placed:
            digest = entry.hashes[item.key]
            yield StoredPlane(entry.name, item.key, item.plane, digest), item.offset


def _check_same_model(dedup: DedupFile, index: IebinIndex) -> None:
    source = dedup.index.source
    listed = [plane for plane, _ in raw_planes(index)]
    found = [StoredPlane(p.tensor, p.key, p.plane, p.sha256) for p in dedup.index.planes]
    if (source.nbytes, source.sha256) != (index.nbytes, index.sha256) or found != listed:
        raise FormatError(
            f"{dedup.path}: stands for another {BIN_NAME} than {index.path} describes; "
            "deduplicate the model again"
        )


def _find_base(wanted: Base, directory: Path, given: Path | None) -> Artifact:
    """Return the base: the one that is given, or the one beside a directory that has its hash."""
    for candidate in [given] if given else _candidates(wanted, directory):
        try:
            index = read_index(candidate / JSON_NAME)
            if (index.nbytes, index.sha256) == (wanted.nbytes, wanted.sha256):
                return open_base(candidate)
        except ModelError:
            if given:
                raise
    where = str(given) if given else f"a directory beside {directory}"
    raise ModelNotFound(
        f"{directory / INDEX_NAME}: builds on a model whose {BIN_NAME} has SHA-256 "
        f"{wanted.sha256} ({wanted.name_hint!r} when it was made); {where} is not that model: put "
        "it there"
    )


def _candidates(wanted: Base, directory: Path) -> Iterator[Path]:
    parent = directory.resolve().parent
    yield parent / wanted.name_hint
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return
    for name in names:
        if name != wanted.name_hint and os.path.isfile(parent / name / JSON_NAME):
            yield parent / name


def planes_of(checkpoint: Checkpoint) -> BasePlane:
    """Return what gives the planes of a model as a base."""

    def plane(tensor: str, key: str) -> np.ndarray:
        planes = checkpoint.tensor(tensor).planes
        if key not in planes:
            raise FormatError("the base has no such plane")
        return planes[key]

    return plane


def _tensors(dedup: DedupFile, index: IebinIndex, keep: Keep) -> Iterator[tuple[str, Stored]]:
    number = 0
    for entry in index.entries:
        numbers = {item.key: number + i for i, item in enumerate(entry.placed)}
        number += len(numbers)
        where = f"{dedup.path}: tensor {entry.name!r}"
        if keep is DedupFile.plane and all(map(dedup.in_place, numbers.values())):
            planes = {key: dedup.plane(at) for key, at in numbers.items()}
            yield entry.name, stored_tensor(entry.shape, entry.format, planes, where)
        else:
            make = _maker(dedup, numbers, keep)
            yield entry.name, lazy_tensor(entry.shape, entry.format, make, where)


def _maker(
    dedup: DedupFile, numbers: Mapping[str, int], keep: Keep
) -> Callable[[], Mapping[str, np.ndarray]]:
    return lambda: {key: keep(dedup, number) for key, number in numbers.items()}
