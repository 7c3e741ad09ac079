"""Deduplicated weights of a run: whether they are used, and how planes are kept."""

import fnmatch
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clocher_kernels.errors import FormatError, ModelError, ModelNotFound, UsageError
from clocher_runtime.checkpoints import Checkpoint
from clocher_runtime.checkpoints.checkpoint import BIN_NAME
from clocher_runtime.checkpoints.dedup.index import INDEX_NAME
from clocher_runtime.checkpoints.dedup.reader import DedupFile, Keep, has_dedup, open_deduplicated
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.values import every
from clocher_runtime.disk.files import MappedFile
from clocher_runtime.disk.output_file import write_file

CACHE_NAME = "model.dedup.cache"
CACHE_MIB = 1024

_ALWAYS = frozenset({"dedup", "dedup_strict", "dedup_policy"})
_ACTED_ON = {
    "on_demand": _ALWAYS,
    "cache": _ALWAYS | {"dedup_cache_mb"},
    "replicate_hot": _ALWAYS | {"dedup_hot_bytes", "dedup_hot_list"},
}
_FIELDS = frozenset(name for name, _ in every(EngineConfig) if name.startswith("dedup"))
_HASH = re.compile("[0-9a-f]{64}")
_log = logging.getLogger(__name__)


def open_weights(
    config: EngineConfig, directory: Path | None
) -> tuple[Checkpoint | None, frozenset[str]]:
    """Open the deduplicated weights of a run; None if others are to be used.

    Returns also the settings without effect. Raises UsageError, ModelError.
    """
    policy = config.dedup_policy
    if config.dedup and config.dedup_strict and policy == "off":
        raise UsageError(
            "IE_DEDUP_STRICT=1 asks for deduplicated weights and IE_DEDUP_POLICY=off for none; "
            "drop one"
        )
    if directory is None:
        return None, _FIELDS
    only_form = has_dedup(directory) and not os.path.isfile(directory / BIN_NAME)
    wanted = only_form if config.dedup is None else config.dedup
    if wanted and policy != "off":
        try:
            return _open(config, directory), _FIELDS - _ACTED_ON[policy]
        except ModelError as error:
            if config.dedup_strict or only_form:
                raise
            _log.warning("IE_DEDUP=1 is not obeyed, %s is used: %s", BIN_NAME, error)
    elif only_form:
        raise ModelNotFound(
            f"{directory}: has its weights in deduplicated form only, and they are not to be "
            f"used; unset IE_DEDUP and IE_DEDUP_POLICY, or restore {BIN_NAME} with "
            "clocher dedup --restore"
        )
    return None, _FIELDS


def _open(config: EngineConfig, directory: Path) -> Checkpoint:
    if not has_dedup(directory):
        raise FormatError(
            f"{directory}: no {INDEX_NAME}; make it with clocher dedup, or unset IE_DEDUP"
        )
    keep: Keep = DedupFile.plane
    if config.dedup_policy == "cache":
        mib = CACHE_MIB if config.dedup_cache_mb is None else config.dedup_cache_mb
        keep = PlaneCache(directory / CACHE_NAME, mib << 20).plane
    elif config.dedup_policy == "replicate_hot":
        keep = HotPlanes(config.dedup_hot_list, config.dedup_hot_bytes).plane
    checkpoint = open_deduplicated(directory, verify=config.dedup_strict, keep=keep)
    names = checkpoint.names
    for pattern in _patterns(config.dedup_hot_list):
        if config.dedup_policy == "replicate_hot" and not fnmatch.filter(names, pattern):
            raise UsageError(
                f"IE_DEDUP_HOT_LIST: no tensor matches {pattern!r}; the model has {len(names)}, "
                f"such as {', '.join(names[:3])}"
            )
    return checkpoint


def _patterns(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else ["*"]


class HotPlanes:
    """Copies hot tensors to memory, even if they could be read from the file.

    `patterns`: tensor names, comma-separated, with * and ?; None: all. `limit`: bytes copied, 0: no
    limit; planes that do not fit are read in place.
    """

    def __init__(self, patterns: str | None, limit: int) -> None:
        self._patterns, self._limit = _patterns(patterns), limit
        self._copied: dict[int, np.ndarray] = {}
        self._total = 0

    def plane(self, dedup: DedupFile, number: int) -> np.ndarray:
        """Return a plane, copied if it is hot."""
        if number in self._copied:
            return self._copied[number]
        found = dedup.plane(number)
        name = dedup.index.planes[number].tensor
        hot = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)
        fits = not self._limit or self._total + found.nbytes <= self._limit
        if hot and fits and dedup.in_place(number):
            self._total += found.nbytes
            found = self._copied[number] = found.copy()
        return found


@dataclass(slots=True)
class PlaneCache:
    """Caches decoded planes in files, to be mapped by later runs; without room, only decodes.

    Cache files are trusted like model.ie.bin: verified when written, then mapped as they are.
    """

    directory: Path  # directory of the files; created on demand
    limit: int  # limit of bytes of all files
    total: int | None = None  # their bytes now; None before the first plane

    def plane(self, dedup: DedupFile, number: int) -> np.ndarray:
        """Return a plane: a view of its file, else decoded."""
        if self.limit and self.directory.is_symlink():
            # A link in a model may lead to foreign files, which `_tidy` would delete.
            _log.warning("%s is a symbolic link: no decoded weights are kept there", self.directory)
            self.limit = 0
        if dedup.in_place(number) or not self.limit:
            return dedup.plane(number)
        if self.total is None:
            self.total = self._tidy(dedup)
        stored = dedup.index.planes[number]
        path = self.directory / stored.sha256
        size = stored.plane.nbytes
        if not path.is_file():
            found = dedup.plane(number)
            if self.total + size > self.limit:
                return found
            try:
                self.directory.mkdir(exist_ok=True)
                write_file(path, found.tobytes())
            except OSError as error:
                _log.warning("the cache of decoded weights cannot be written: %s", error)
                self.limit = 0
                return found
            self.total += size
        return MappedFile(path, size).plane(stored.plane, 0)

    def _tidy(self, dedup: DedupFile) -> int:
        sizes = {plane.sha256: plane.plane.nbytes for plane in dedup.index.planes}
        total = 0
        names = sorted(os.listdir(self.directory)) if self.directory.is_dir() else []
        for name in filter(_HASH.match, names):
            path = self.directory / name
            size = path.stat().st_size
            if sizes.get(name) == size and total + size <= self.limit:
                total += size
            else:
                path.unlink(missing_ok=True)
        return total
