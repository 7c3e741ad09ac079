"""What an expanded manifest says of tensors, and its parts: planes that rounding cannot give.

`q4.parts/` has a safetensors file per layer (`layer-00000`, ..., and `rest`), with plane P of
tensor T as `T/P`. Metadata: job, shapes, formats, records, SHA-256. Parts are written whole, so a
killed job resumes after the last one.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clocher_kernels.errors import ClocherError, FormatError, ModelError, ModelNotFound
from clocher_kernels.formats import Format, parse_format
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import stored_tensor
from clocher_runtime.checkpoints.iebin import PlaneWriter
from clocher_runtime.disk.files import sha256_of
from clocher_runtime.disk.plane_index import ALIGNMENT, Region, checked_hash, dump
from clocher_runtime.disk.safetensors_file import DTYPES, SafetensorsFile, safetensors_head
from clocher_runtime.disk.strict_json import checked_name, checked_shape, fields, parse_object

SUFFIX = ".safetensors"

_NAMES = {storage: name for name, storage in DTYPES.items() if name != "BOOL"} | {"e8m0": "U8"}
_LAYER = re.compile(r"(?:.*\.)?layers\.([0-9]{1,5})\..*")
_METADATA = ("job", "sha256", "tensors", "records")

_ENTRY: dict[str, type] = {
    **dict.fromkeys(("name", "format", "method"), str),
    **dict.fromkeys(("rule", "nbytes"), int),
    **dict.fromkeys(("sha256", "err"), dict),
    "shape": list,
    "bpw": float,
}
_SOURCE: dict[str, type] = {"kind": str, "files": list}
_ENTRY_MORE = {"part": str, "fallback": str, "tokens_seen": list}
METHODS = ("rtn", "imx", "gptq")
Records = dict[str, dict[str, Any]]
_PART = re.compile(r"[a-z0-9][a-z0-9-]{0,60}\.safetensors")


class Entry(NamedTuple):
    """What a manifest says of one quantised tensor."""

    shape: tuple[int, ...]  # logical shape
    format: Format  # of the result
    method: str  # how the codes were chosen
    rule: int  # index of the rule that asked for it
    sha256: Mapping[str, str]  # of each plane
    part: str = ""  # the file that holds the planes, "" if rounding gives them again
    err: Mapping[str, Any] = {}  # what the PTQ script measured


class PartFile(NamedTuple):
    """A file of planes in the parts folder."""

    file: str
    nbytes: int
    sha256: str


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
        self._tensors: dict[str, tuple[SafetensorsFile, tuple[int, ...], str]] = {}

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
        if name not in self._tensors:
            raise ModelError(f"{self.directory}: no finished part has tensor {name!r}")
        file, shape, fmt = self._tensors[name]
        return _tensor(file, name, shape, fmt)

    def release(self) -> None:
        """Let the kernel drop the parts' resident pages."""
        for file in self._open.values():
            file.file.release()

    def files(self) -> list[PartFile]:
        """Return the finished parts, hashed, as a manifest lists them."""
        return [
            PartFile(part + SUFFIX, self._open[part].file.nbytes, self._open[part].file.sha256())
            for part in sorted(self._open)
        ]

    def remove_others(self) -> None:
        """Delete files of the folder that are not finished parts of this job."""
        for path in self.directory.glob(f"*{SUFFIX}*"):
            if path.name.removesuffix(SUFFIX) not in self._open:
                path.unlink()
        if not self._open and self.directory.is_dir() and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def _path(self, part: str) -> Path:
        return self.directory / (part + SUFFIX)

    def _remember(
        self, part: str, file: SafetensorsFile, described: Mapping[str, Any], records: Any
    ) -> Records:
        where = str(file.file.path)
        found = {}
        for name, value in described.items():
            entry = fields(value, f"{where}: {name!r}", {"shape": list, "format": str})
            found[name] = file, checked_shape(entry["shape"], where), entry["format"]
            _tensor(file, name, *found[name][1:])
        if set(found) != set(records):
            raise FormatError(f"{where}: tensors and records differ")
        self._open[part] = file
        self._tensors |= found
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


def read_parts(document: Mapping[str, Any], where: str) -> tuple[PartFile, ...]:
    """Return an expanded manifest's parts; check its source, too. Raises FormatError."""
    source = fields(document.get("source", {"kind": "", "files": []}), f"{where}: source", _SOURCE)
    for index, file in enumerate(source["files"]):
        here = f"{where}: source.files[{index}]"
        more = {"sha256": str, "header_sha256": str}
        item = fields(file, here, {"name": str, "nbytes": int}, more)
        if "/" in item["name"] or len(item) != 3:
            raise FormatError(f"{here}: expected a plain name, a size and one hash")
        checked_hash(item.get("sha256", item.get("header_sha256", "")), here)
    parts: list[PartFile] = []
    for index, value in enumerate(document.get("parts", [])):
        here = f"{where}: parts[{index}]"
        part = PartFile(**fields(value, here, {"file": str, "nbytes": int, "sha256": str}))
        if not _PART.fullmatch(part.file):
            raise FormatError(
                f"{here}: part {part.file!r:.80}; expected a plain name such as "
                "layer-00000.safetensors"
            )
        checked_hash(part.sha256, here)
        if part.nbytes <= 0 or part.file in {other.file for other in parts}:
            raise FormatError(f"{here}: {part.file} has {part.nbytes} bytes, or is there twice")
        parts.append(part)
    return tuple(parts)


def read_tensors(
    document: Mapping[str, Any], where: str, rules: int, parts: Collection[str]
) -> tuple[dict[str, Entry] | None, dict[str, str]]:
    """Return what an expanded manifest says of each tensor; None of rules alone. FormatError."""
    if "tensors" not in document:
        if "kept" in document or parts:
            raise FormatError(f"{where}: kept and parts come with tensors, which is missing")
        return None, {}
    entries: dict[str, Entry] = {}
    for index, value in enumerate(document["tensors"]):
        here = f"{where}: tensors[{index}]"
        item = fields(value, here, _ENTRY, _ENTRY_MORE)
        name = checked_name(item["name"], here)
        if name in entries:
            raise FormatError(f"{here}: tensor {name!r} is there twice")
        entries[name] = _entry(item, f"{here} {name!r}", rules, parts)
    kept: dict[str, str] = {}
    for index, value in enumerate(document.get("kept", [])):
        here = f"{where}: kept[{index}]"
        item = fields(value, here, {"name": str, "reason": str})
        if item["name"] in kept or item["name"] in entries:
            raise FormatError(f"{here}: tensor {item['name']!r:.80} is there twice")
        kept[checked_name(item["name"], here)] = item["reason"]
    return entries, kept


def _entry(item: Mapping[str, Any], where: str, rules: int, parts: Collection[str]) -> Entry:
    shape, method, part = checked_shape(item["shape"], where), item["method"], item.get("part", "")
    try:
        fmt = parse_format(item["format"])
        planes = fmt.planes(shape)
    except ClocherError as error:
        raise FormatError(f"{where}: {error}") from None
    if item["nbytes"] != fmt.nbytes(shape):
        raise FormatError(
            f"{where}: nbytes is {item['nbytes']}; {fmt.name} of {list(shape)} takes "
            f"{fmt.nbytes(shape)}"
        )
    if method not in METHODS:
        raise FormatError(f"{where}: method {method!r:.40}; known: {', '.join(METHODS)}")
    if not 0 <= item["rule"] < rules:
        raise FormatError(f"{where}: rule {item['rule']}; there are {rules}")
    hashes = fields(item["sha256"], f"{where}: sha256", dict.fromkeys(planes, str))
    for plane, digest in hashes.items():
        checked_hash(digest, f"{where}: plane {plane!r}")
    if part and part not in parts:
        raise FormatError(f"{where}: part {part!r:.80} is not among the parts")
    if method != "rtn" and not part:
        raise FormatError(f"{where}: planes of {method} need a part")
    return Entry(shape, fmt, method, item["rule"], hashes, part, item["err"])
