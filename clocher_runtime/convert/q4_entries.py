"""What an expanded manifest says of tensors, and its plane file: planes that rounding cannot give.

The manifest `q4.json` has them in `q4.planes.bin`; a journal beside it lists them with the record
of each tensor, so that a killed job resumes after the last one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clocher_kernels.errors import FormatError, ModelNotFound
from clocher_kernels.formats import Format, parse_format
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.iebin import PlaneWriter, tensors_of
from clocher_runtime.disk import plane_index
from clocher_runtime.disk.files import MappedFile, sha256_of
from clocher_runtime.disk.plane_index import (
    ALIGNMENT,
    Region,
    Shape,
    aligned,
    check_hashes,
    checked_hash,
)
from clocher_runtime.disk.strict_json import checked_name, checked_shape, fields, prefixed

METHODS = ("rtn", "imx", "gptq")
OTHER_WEIGHTS = "it was made from other weights: run the PTQ script again"

_LAYER = re.compile(r"(?:.*\.)?layers\.([0-9]{1,5})\..*")
_FILE = re.compile(r"[\w.-]{1,200}\.planes\.bin")
_ENTRY: dict[str, type] = {
    **dict.fromkeys(("name", "format", "method"), str),
    **dict.fromkeys(("rule", "nbytes"), int),
    **dict.fromkeys(("sha256", "err"), dict),
    "shape": list,
    "bpw": float,
}
_ENTRY_MORE = {"offsets": dict, "fallback": str, "tokens_seen": list}


@dataclass(frozen=True, slots=True)
class Entry(plane_index.Entry):
    """What a manifest says of a quantised tensor; without `regions` rounding gives its planes."""

    method: str  # how the codes were chosen
    rule: int  # index of the rule that asked for it
    err: Mapping[str, Any]  # what the PTQ script measured


ROUNDED: Mapping[str, Any] = {"method": "rtn", "err": {}}
"""The record of a tensor that was rounded."""


def entry_document(
    name: str,
    shape: Shape,
    fmt: Format,
    rule: int,
    sha256: Mapping[str, str],
    record: Mapping[str, Any] = ROUNDED,
) -> dict[str, Any]:
    """Return a manifest's entry; `record`: `method`, `err` and what else is known of the tensor."""
    nbytes = fmt.nbytes(shape)
    head = {"name": name, "shape": list(shape), "format": fmt.name, "rule": rule}
    size = {"bpw": 8 * nbytes / prod(shape), "nbytes": nbytes, "sha256": dict(sha256)}
    return {**head, **size, **record}


class Planes(NamedTuple):
    """A plane file, as a manifest names it."""

    file: str
    nbytes: int
    sha256: str


def part_of(name: str) -> str:
    """Return the part of the model that a tensor belongs to, "layer-00000" or "rest"."""
    match = _LAYER.fullmatch(name)
    return f"layer-{int(match[1]):05d}" if match else "rest"


def planes_path(manifest: Path) -> Path:
    """Return the plane file of a manifest: `q4.json` has `q4.planes.bin`."""
    return manifest.with_name(f"{manifest.stem}.planes.bin")


def remove_planes(manifest: Path) -> None:
    """Delete the plane file of a manifest, and its journal."""
    path = planes_path(manifest)
    for each in (path, path.with_name(f"{path.name}.journal")):
        each.unlink(missing_ok=True)


class PlaneFile(PlaneWriter):
    """The plane file of a job while it is written, with the records of its tensors."""

    def __init__(self, manifest: Path, job: str) -> None:
        """Open it over what a run of the same job has left. Raises UsageError, OSError."""
        self.manifest, self.path = manifest, planes_path(manifest)
        self.tensors: dict[str, QuantTensor] = {}  # of the finished file, as views
        super().__init__({"planes": self.path}, job, in_place=True)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if not self.entries:
            remove_planes(self.manifest)

    def finish(self) -> Planes | None:
        """Flush the file, and make its tensors readable; None if it has none."""
        facts = self.sync()["planes"]
        if not self.entries:
            return None
        self._file = MappedFile(self.path)
        self.tensors = tensors_of(self.entries, {"planes": self._file})
        return Planes(self.path.name, facts.nbytes, facts.sha256)

    def put_anew(self, name: str, key: str, plane: np.ndarray) -> None:
        """Write a plane of a tensor behind all others; the one before counts no more."""
        at = [entry.name for entry in self.entries].index(name)
        region = Region("planes", aligned(self.nbytes), plane.nbytes)
        hashes = {**self.entries[at].hashes, key: self.put(region, plane)}
        regions = {**self.entries[at].regions, key: region}
        self.entries[at] = replace(self.entries[at], regions=regions, hashes=hashes)

    def release(self) -> None:
        """Let the kernel drop the resident pages."""
        if self.tensors:
            self._file.release()

    def offsets(self, name: str) -> dict[str, int]:
        """Return the offsets of a tensor's planes, {} for one that is not in the file."""
        found = (entry.regions for entry in self.entries if entry.name == name)
        return {key: region.offset for key, region in next(found, {}).items()}


def read_planes(path: Path, nbytes: int, entry: Entry) -> QuantTensor:
    """Return a tensor of a plane file, hashes checked. Raises FormatError, ModelNotFound."""
    if not path.is_file():
        raise ModelNotFound(
            f"{path}: missing; the manifest needs it beside it. `clocher quantize` leaves none: "
            "its model has the planes: convert that, or quantise again"
        )
    tensor = tensors_of([entry], {"planes": MappedFile(path, nbytes)})[entry.name]
    where = f"{path}: tensor {entry.name!r}: "
    check_hashes(tensor.planes, entry.hashes, where, OTHER_WEIGHTS)
    tensor.check()
    return tensor


def plane_hashes(tensor: QuantTensor) -> dict[str, str]:
    """Return the SHA-256 of each plane of a tensor."""
    return {key: sha256_of(plane) for key, plane in tensor.planes.items()}


def read_tensors(
    document: Mapping[str, Any], where: str, rules: int
) -> tuple[dict[str, Entry] | None, dict[str, str], Planes | None]:
    """Return what an expanded manifest says of each tensor; None of rules alone. FormatError.

    The second value are the reasons of tensors that are kept, the third is the plane file.
    """
    if "tensors" not in document:
        if "kept" in document or "planes" in document:
            raise FormatError(f"{where}: kept and planes come with tensors, which is missing")
        return None, {}, None
    planes = None
    if "planes" in document:
        here = f"{where}: planes"
        named = {"file": str, "nbytes": int, "sha256": str}
        planes = Planes(**fields(document["planes"], here, named))
        checked_hash(planes.sha256, here)
        if not _FILE.fullmatch(planes.file):
            raise FormatError(f"{here}: file {planes.file!r:.80}; expected a plain name")
    size = planes.nbytes if planes else 0
    entries: dict[str, Entry] = {}
    for index, value in enumerate(document["tensors"]):
        here = f"{where}: tensors[{index}]"
        item = fields(value, here, _ENTRY, _ENTRY_MORE)
        name = checked_name(item["name"], here)
        if name in entries:
            raise FormatError(f"{here}: tensor {name!r} is there twice")
        entries[name] = _entry(name, item, f"{here} {name!r}", rules, size)
    kept: dict[str, str] = {}
    for index, value in enumerate(document.get("kept", [])):
        here = f"{where}: kept[{index}]"
        item = fields(value, here, {"name": str, "reason": str})
        if item["name"] in kept or item["name"] in entries:
            raise FormatError(f"{here}: tensor {item['name']!r:.80} is there twice")
        kept[checked_name(item["name"], here)] = item["reason"]
    return entries, kept, planes


def _entry(name: str, item: Mapping[str, Any], where: str, rules: int, size: int) -> Entry:
    shape, method = checked_shape(item["shape"], where), item["method"]
    with prefixed(where):
        fmt = parse_format(item["format"])
        planes = fmt.planes(shape)
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
    offsets = item.get("offsets", {})
    if offsets:
        fields(offsets, f"{where}: offsets", dict.fromkeys(planes, int))
        for key, at in offsets.items():
            if at < 0 or at % ALIGNMENT or at + planes[key].nbytes > size:
                raise FormatError(
                    f"{where}: plane {key!r} at byte {at} of a plane file of {size}; expected "
                    f"multiples of {ALIGNMENT} within it"
                )
    elif method != "rtn":
        raise FormatError(f"{where}: planes of {method} need offsets in the plane file")
    regions = {key: Region("planes", at, planes[key].nbytes) for key, at in offsets.items()}
    return Entry(name, shape, fmt, regions, hashes, method, item["rule"], item["err"])
