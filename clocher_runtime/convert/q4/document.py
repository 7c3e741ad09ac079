"""The expanded quantisation manifest; see docs/q4-manifest.schema.json, docs/quantisation.md."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clocher_kernels.errors import ClocherError, FormatError
from clocher_kernels.formats import Format, parse_format
from clocher_runtime.disk.plane_index import checked_hash
from clocher_runtime.disk.strict_json import checked_name, checked_shape, fields

METHODS = ("rtn", "imx", "gptq")
SECTIONS: dict[str, type] = {
    "tool": dict,
    "source": dict,
    "requantize": bool,
    "options": dict,
    "calibration": dict,
    "allocation": dict,
    "gate": dict,
    "tensors": list,
    "kept": list,
    "parts": list,
    "size": dict,
    "gates": list,
}
"""Types of the optional fields."""

_PART = re.compile(r"[a-z0-9][a-z0-9-]{0,60}\.safetensors")
_ENTRY = {"name": str, "shape": list, "format": str, "method": str, "rule": int} | {
    "nbytes": int,
    "bpw": float,
    "sha256": dict,
    "err": dict,
}
_ENTRY_MORE = {"part": str, "fallback": str, "tokens_seen": list}


@dataclass(frozen=True, slots=True)
class Entry:
    """The result for one tensor."""

    shape: tuple[int, ...]  # logical shape
    format: Format  # of the result
    method: str  # how the codes were chosen
    rule: int  # index of the rule that asked for it
    sha256: Mapping[str, str]  # of each plane
    part: str = ""  # the file that holds the planes, "" if rounding gives them again


@dataclass(frozen=True, slots=True)
class PartFile:
    """A file of planes in the parts folder."""

    file: str
    nbytes: int
    sha256: str


Sections = tuple[dict[str, Entry] | None, dict[str, str], tuple[PartFile, ...]]


def read_sections(document: Mapping[str, Any], where: str, rules: int) -> Sections:
    """Check an expanded manifest and return its sections. Raises FormatError."""
    if "source" in document:
        _check_source(document["source"], f"{where}: source")
    parts = tuple(
        _part(value, f"{where}: parts[{index}]")
        for index, value in enumerate(document.get("parts", []))
    )
    if len({part.file for part in parts}) < len(parts):
        raise FormatError(f"{where}: parts names a file twice")
    if "tensors" not in document:
        if "kept" in document or parts:
            raise FormatError(f"{where}: kept and parts come with tensors, which is missing")
        return None, {}, ()
    known = {part.file for part in parts}
    entries: dict[str, Entry] = {}
    for index, value in enumerate(document["tensors"]):
        here = f"{where}: tensors[{index}]"
        name, entry = _entry(value, here, rules)
        if name in entries:
            raise FormatError(f"{here}: tensor {name!r} is there twice")
        if entry.part and entry.part not in known:
            raise FormatError(f"{here}: part {entry.part!r} is not among the parts")
        if entry.method != "rtn" and not entry.part:
            raise FormatError(f"{here}: planes of {entry.method} need a part")
        entries[name] = entry
    kept: dict[str, str] = {}
    for index, value in enumerate(document.get("kept", [])):
        here = f"{where}: kept[{index}]"
        item = fields(value, here, {"name": str, "reason": str})
        if item["name"] in kept or item["name"] in entries:
            raise FormatError(f"{here}: tensor {item['name']!r:.80} is there twice")
        kept[checked_name(item["name"], here)] = item["reason"]
    return entries, kept, parts


def _entry(value: object, where: str, rules: int) -> tuple[str, Entry]:
    item = fields(value, where, _ENTRY, _ENTRY_MORE)
    where = f"{where} {checked_name(item['name'], where)!r}"
    shape = checked_shape(item["shape"], where)
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
    if item["method"] not in METHODS:
        raise FormatError(f"{where}: method {item['method']!r:.40}; known: {', '.join(METHODS)}")
    if not 0 <= item["rule"] < rules:
        raise FormatError(f"{where}: rule {item['rule']}; there are {rules}")
    hashes = fields(item["sha256"], f"{where}: sha256", dict.fromkeys(planes, str))
    for plane, digest in hashes.items():
        checked_hash(digest, f"{where}: plane {plane!r}")
    part = item.get("part", "")
    if part:
        _check_part_name(part, where)
    return item["name"], Entry(shape, fmt, item["method"], item["rule"], hashes, part)


def _part(value: object, where: str) -> PartFile:
    item = fields(value, where, {"file": str, "nbytes": int, "sha256": str})
    _check_part_name(item["file"], where)
    checked_hash(item["sha256"], where)
    if item["nbytes"] <= 0:
        raise FormatError(f"{where}: nbytes is {item['nbytes']}")
    return PartFile(item["file"], item["nbytes"], item["sha256"])


def _check_source(value: object, where: str) -> None:
    source = fields(value, where, {"kind": str, "files": list})
    for index, file in enumerate(source["files"]):
        here = f"{where}.files[{index}]"
        more = {"sha256": str, "header_sha256": str}
        item = fields(file, here, {"name": str, "nbytes": int}, more)
        if "/" in item["name"] or len(item) != 3:
            raise FormatError(f"{here}: expected a plain name, a size and one hash")
        checked_hash(item.get("sha256", item.get("header_sha256", "")), here)


def _check_part_name(name: str, where: str) -> None:
    if not _PART.fullmatch(name):
        raise FormatError(
            f"{where}: part {name!r:.80}; expected a plain name such as layer-00000.safetensors"
        )
