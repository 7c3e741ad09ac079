"""Parts of a quantisation manifest: planes that rounding cannot reproduce.

`q4.parts/` has a safetensors file per layer (`layer-00000`, ..., and `rest`), with plane P of
tensor T as `T/P`. Metadata: job, shapes, formats, records, SHA-256. Parts are written whole, so a
killed job resumes after the last one.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.errors import ClocherError, FormatError, ModelError, ModelNotFound
from clocher_kernels.formats import parse_format
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import stored_tensor
from clocher_runtime.checkpoints.plane_writer import PlaneWriter
from clocher_runtime.convert.q4.document import Entry, PartFile
from clocher_runtime.disk.files import sha256_of
from clocher_runtime.disk.plane_index import ALIGNMENT, Region, dump
from clocher_runtime.disk.safetensors_file import DTYPES, SafetensorsFile, safetensors_head
from clocher_runtime.disk.strict_json import checked_shape, fields, parse_object

SUFFIX = ".safetensors"

_NAMES = {storage: name for name, storage in DTYPES.items() if name != "BOOL"} | {"e8m0": "U8"}
_LAYER = re.compile(r"(?:.*\.)?layers\.([0-9]{1,5})\..*")
_METADATA = ("job", "sha256", "tensors", "records")

Records = dict[str, dict[str, Any]]


def part_of(name: str) -> str:
    """Return the part that a tensor belongs to."""
    match = _LAYER.fullmatch(name)
    return f"layer-{int(match[1]):05d}" if match else "rest"


class PartsWriter:
    """Writes a job's parts, and finds those finished by an earlier run."""

    def __init__(self, directory: Path, job: str) -> None:
        self.directory = directory
        self._job = job
        self._open: dict[str, SafetensorsFile] = {}
        self._where: dict[str, tuple[str, tuple[int, ...], str]] = {}

    def finished(self, part: str) -> Records | None:
        """Return the records of a finished, intact part of this job, or None."""
        path = self._path(part)
        try:
            file = SafetensorsFile(path)
            job, digest, *texts = (file.metadata[key] for key in _METADATA)
            start = min((info.offset for info in file.tensors.values()), default=0)
            if job != self._job or digest != file.file.sha256(start):
                return None
            described, records = (parse_object(text.encode(), str(path)) for text in texts)
            return self._remember(part, file, described, records)
        except (ClocherError, KeyError):
            return None

    def write(
        self, part: str, tensors: Mapping[str, QuantTensor], records: Mapping[str, dict[str, Any]]
    ) -> None:
        """Write a part, "layer-00000" or "rest". Raises UsageError if locked; OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        arrays, planes = {}, {}
        for name, tensor in tensors.items():
            for key, plane in tensor.format.planes(tensor.shape).items():
                arrays[f"{name}/{key}"] = (_NAMES[plane.dtype], plane.shape)
                planes[f"{name}/{key}"] = tensor.planes[key]
        described = {
            n: {"shape": list(t.shape), "format": t.format.name} for n, t in tensors.items()
        }
        said = (self._job, sha256_of(*planes.values()), dump(described), dump(dict(records)))
        head, places = safetensors_head(arrays, dict(zip(_METADATA, said, strict=True)), ALIGNMENT)
        path = self._path(part)
        with PlaneWriter({part: path}) as output:
            output.put(Region(part, 0, len(head)), np.frombuffer(head, np.uint8))
            for stored, info in places.items():
                output.put(Region(part, info.offset, info.nbytes), planes[stored])
            output.sync()
            output.publish()
        self._remember(part, SafetensorsFile(path), described, records)

    def tensor(self, name: str) -> QuantTensor:
        """Return a tensor of a finished part as views; ModelError if it is in none."""
        if name not in self._where:
            raise ModelError(f"{self.directory}: no finished part has tensor {name!r}")
        part, shape, fmt = self._where[name]
        return _tensor(self._open[part], name, shape, fmt)

    def release(self) -> None:
        """Let the kernel drop the parts' resident pages."""
        for file in self._open.values():
            file.file.release()

    def files(self) -> list[PartFile]:
        """Return the finished parts, hashed, as a manifest lists them."""
        found = []
        for part in sorted(self._open):
            file = self._open[part].file
            found.append(PartFile(part + SUFFIX, file.nbytes, file.sha256()))
        return found

    def remove_others(self) -> None:
        """Delete files of the folder that are not finished parts of this job."""
        mine = {part + SUFFIX for part in self._open}
        if self.directory.is_dir():
            for path in self.directory.glob(f"*{SUFFIX}*"):
                if path.name not in mine:
                    path.unlink()
            if not mine and not any(self.directory.iterdir()):
                self.directory.rmdir()

    def _path(self, part: str) -> Path:
        return self.directory / (part + SUFFIX)

    def _remember(
        self,
        part: str,
        file: SafetensorsFile,
        described: Mapping[str, Any],
        records: Mapping[str, dict[str, Any]],
    ) -> Records:
        where = str(file.file.path)
        found = {}
        for name, value in described.items():
            entry = fields(value, f"{where}: {name!r}", {"shape": list, "format": str})
            shape = checked_shape(entry["shape"], where)
            _tensor(file, name, shape, entry["format"])
            found[name] = (part, shape, entry["format"])
        if set(found) != set(records):
            raise FormatError(f"{where}: tensors and records differ")
        self._open[part] = file
        self._where |= found
        return dict(records)


def read_part(directory: Path, files: Iterable[PartFile], name: str, entry: Entry) -> QuantTensor:
    """Return a tensor of a manifest's parts, hashes checked. Raises FormatError, ModelNotFound."""
    listed = next(file for file in files if file.file == entry.part)
    path = directory / listed.file
    if not path.is_file():
        raise ModelNotFound(
            f"{path}: missing; the manifest needs its folder {directory.name} beside it"
        )
    file = SafetensorsFile(path)
    if file.file.nbytes != listed.nbytes:
        raise FormatError(f"{path}: {file.file.nbytes} bytes, the manifest lists {listed.nbytes}")
    tensor = _tensor(file, name, entry.shape, entry.format.name)
    check_hashes(tensor, entry, f"{path}: tensor {name!r}")
    tensor.check()
    return tensor


def plane_hashes(tensor: QuantTensor) -> dict[str, str]:
    """Return the SHA-256 of each plane of a tensor."""
    return {key: sha256_of(plane) for key, plane in tensor.planes.items()}


def check_hashes(tensor: QuantTensor, entry: Entry, where: str) -> None:
    """Raise FormatError if a plane does not match a manifest's entry."""
    for key, digest in plane_hashes(tensor).items():
        if digest != entry.sha256[key]:
            raise FormatError(
                f"{where}: plane {key!r} has SHA-256 {digest}, the manifest says "
                f"{entry.sha256[key]}; it was made from other weights: run the PTQ script again"
            )


def _tensor(file: SafetensorsFile, name: str, shape: tuple[int, ...], fmt: str) -> QuantTensor:
    where = f"{file.file.path}: tensor {name!r}"
    try:
        parsed = parse_format(fmt)
        keys = {key: f"{name}/{key}" for key in parsed.planes(shape)}
    except ClocherError as error:
        raise FormatError(f"{where}: {error}") from None
    if missing := [key for key in keys.values() if key not in file.tensors]:
        raise FormatError(f"{where}: {missing[0]!r} is not in the file")
    planes = {
        key: np.require(file.view(stored), requirements=["C", "A"]) for key, stored in keys.items()
    }
    return stored_tensor(shape, parsed, planes, where)
