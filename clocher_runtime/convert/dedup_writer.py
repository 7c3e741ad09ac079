"""model.ie.bin -> `clocher.dedup` and back, bit for bit; the output is read back and compared."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import FormatError, ModelNotFound
from clocher_runtime.checkpoints.checkpoint import BIN_NAME, JSON_NAME
from clocher_runtime.checkpoints.dedup.codec import SPLITS, Stream
from clocher_runtime.checkpoints.dedup.index import (
    FILE_NAMES,
    INDEX_NAME,
    KINDS,
    DedupIndex,
    Places,
    StoredPlane,
    check_expansion,
    raw_planes,
)
from clocher_runtime.checkpoints.dedup.reader import DedupFile, open_deduplicated
from clocher_runtime.checkpoints.iebin import IebinIndex, read_index
from clocher_runtime.checkpoints.plane_writer import PlaneWriter, Progress
from clocher_runtime.convert.dedup_encode import Choice, choose, encode
from clocher_runtime.disk.files import MappedFile
from clocher_runtime.disk.output_file import check_free, sync_directory, write_file
from clocher_runtime.disk.plane_index import Region, check_hashes

WORTH_IT = 0.97
"""Largest worthwhile new size, relative to the old one."""


@dataclass(frozen=True, slots=True, eq=False)
class Deduplication:
    """The plan of a deduplication: nothing has been written."""

    directory: Path  # where the model is, and where the output goes
    index: IebinIndex
    choices: tuple[Choice, ...]  # how each plane will be stored
    regions: tuple[tuple[Region, ...], ...]  # where the parts of each plane will be
    nbytes: int  # of the output

    @property
    def worth_it(self) -> bool:
        """Whether it saves enough."""
        return self.nbytes <= WORTH_IT * self.index.bin.nbytes

    def run(self, progress: Progress | None = None) -> None:
        """Write the output, worth it or not. Raises FormatError, UsageError, OSError."""
        check_free(self.directory / INDEX_NAME, self.nbytes)
        path = self.directory / INDEX_NAME
        paths = {kind: self.directory / FILE_NAMES[kind] for kind in KINDS}
        done = 0
        with PlaneWriter(paths) as writer:
            stored = zip(self.choices, self.regions, strict=True)
            planes = _planes(self.directory, self.index)
            for (choice, regions), (plane, data) in zip(stored, planes, strict=True):
                encode(choice, data, writer.files, regions)
                done += plane.plane.nbytes
                if progress:
                    progress(done, plane.tensor)
            chosen = tuple(choice.plane for choice in self.choices)
            index = DedupIndex(self.index.bin, writer.sync(), chosen, self.regions)
            written = {kind: file.path for kind, file in writer.files.items()}
            DedupFile(path, index, written).verify()
            try:
                writer.publish(stale=[path])
                write_file(path, index.text())
            except OSError:
                remove_dedup(self.directory)
                raise


def plan_dedup(directory: Path, progress: Progress | None = None) -> Deduplication:
    """Read a model and decide how each plane is stored."""
    index = read_index(directory / JSON_NAME)
    if not os.path.isfile(directory / BIN_NAME):
        raise ModelNotFound(f"{directory}: no {BIN_NAME}; restore it first (--restore)")
    choices: list[Choice] = []
    seen: dict[tuple[object, str], int] = {}
    done = 0
    for number, (raw, data) in enumerate(_planes(directory, index)):
        first = seen.setdefault((raw.plane, raw.sha256), number)
        if first < number:
            choices.append(Choice(replace(raw, mode="same", of=first)))
        else:
            where = f"{BIN_NAME}: tensor {raw.tensor!r}"
            check_hashes({raw.key: data}, {raw.key: raw.sha256}, where, "convert the model again")
            choices.append(choose(raw, data))
        done += raw.plane.nbytes
        if progress:
            progress(done, raw.tensor)
    places = Places()
    regions = tuple(places.take(choice.plane) for choice in choices)
    stored = sum(places.ends.values())
    check_expansion([choice.plane for choice in choices], stored, str(directory))
    nbytes = stored + sum(len(json.dumps(choice.plane.document())) + 2 for choice in choices)
    return Deduplication(directory, index, tuple(choices), regions, nbytes)


def remove_dedup(directory: Path) -> None:
    """Delete a directory's deduplicated weights, if any."""
    (directory / INDEX_NAME).unlink(missing_ok=True)
    sync_directory(directory)
    for name in FILE_NAMES.values():
        (directory / name).unlink(missing_ok=True)


def restore(directory: Path, progress: Progress | None = None) -> int:
    """Write model.ie.bin back, byte for byte; return its size. Raises ModelError, OSError."""
    artifact = open_deduplicated(directory)
    index, dedup = artifact.index, artifact.dedup
    check_free(directory / BIN_NAME, index.bin.nbytes)
    with PlaneWriter({"bin": directory / BIN_NAME}) as writer:
        for number, (plane, region) in enumerate(raw_planes(index)):
            writer.put(region, dedup.plane(number, verify=True))
            dedup.release()
            if progress:
                progress(writer.nbytes, plane.tensor)
        if writer.sync()["bin"] != index.bin:
            raise FormatError(f"{directory}: what was restored does not match bin.sha256")
        writer.publish()
    return index.bin.nbytes


def _planes(directory: Path, index: IebinIndex) -> Iterator[tuple[StoredPlane, np.ndarray]]:
    file = MappedFile(directory / BIN_NAME, index.bin.nbytes)
    for plane, region in raw_planes(index):
        yield plane, file.bytes(region.offset, region.end)
        file.release()


class Gain(NamedTuple):
    """One plane before and after."""

    name: str  # tensor and plane
    dtype: str
    nbytes: int
    stored: int  # bytes that it takes, without padding
    how: str  # how it is stored

    @property
    def percent(self) -> float:
        """Part of the size that is saved, in per cent."""
        return 100 * (1 - self.stored / self.nbytes)


def gain_of(plane: StoredPlane) -> Gain:
    """Return a plane's gain, its storage in a few words."""
    said = "as it is" if plane.mode == "raw" else f"same as plane {plane.of}"
    if plane.mode == "streams":
        parts = zip(SPLITS[plane.split].parts, plane.streams, strict=True)
        said = ", ".join(f"{part.name} {_stream(stream)}" for part, stream in parts)
    stored = sum(nbytes for _, nbytes in plane.parts())
    name = f"{plane.tensor} {plane.key}"
    return Gain(name, plane.plane.dtype, plane.plane.nbytes, stored, said)


def _stream(stream: Stream) -> str:
    if stream.mode == "code":
        escaped = f" + {100 * stream.escapes / stream.count:.2f} % escapes"
        return f"{stream.width}-bit code{escaped if stream.escapes else ''}"
    return {"const": "constant", "trits": "5 per byte", "raw": "as it is"}[stream.mode]
