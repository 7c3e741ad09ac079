"""model.dedup.json: how each plane is stored; places follow from the order of the parts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_kernels.formats.base import Plane
from clocher_runtime.checkpoints.checkpoint import BIN_NAME, JSON_NAME
from clocher_runtime.checkpoints.dedup import codec
from clocher_runtime.checkpoints.iebin import IebinIndex
from clocher_runtime.disk.plane_index import FileFacts, Region, Sealed, aligned
from clocher_runtime.disk.strict_json import fields

INDEX_NAME = "model.dedup.json"
KINDS = ("defaults", "masks", "exceptions")
FILE_NAMES = {kind: f"model.dedup.{kind}.bin" for kind in KINDS}
ALIGNMENT = {"defaults": 8, "masks": 8, "exceptions": 64}
"""Raw planes are used in place, so these are aligned as in IEBIN."""
MAX_EXPANSION, FREE_EXPANSION = 1000, 16 << 20
"""Decoded bytes per stored byte, and a free allowance: bounds what a small file can stand for."""

_DOCUMENT = Sealed(
    "clocher.dedup",
    1,
    "make it again from model.ie.bin or update Clocher",
    "planes",
    {"base": object, **dict.fromkeys(("source", "files", "totals"), dict)},
)
_HEAD: dict[str, type] = {
    **dict.fromkeys(("tensor", "plane", "dtype"), str),
    "shape": list,
    "sha256": str,
}
_EXTRA: dict[str, dict[str, type]] = {
    "raw": {},
    "streams": {"xor": bool, "split": str, "streams": list},
    "same": {"of": int},
}
_STREAM: dict[str, dict[str, type]] = {
    "const": {},
    "code": {"width": int, "table": int, "escapes": int},
    "trits": {"table": int},
    "raw": {},
}


@dataclass(frozen=True, slots=True)
class StoredPlane:
    """How one plane is stored.

    `mode` is "raw", "streams" (`split` into `streams`) or "same" (as the earlier plane `of`).
    `sha256` is of the decoded bytes, `regions` the places of `parts`, as `placed` gives them.
    """

    tensor: str
    key: str
    plane: Plane
    sha256: str
    mode: str = "raw"
    split: str = ""
    streams: tuple[codec.Stream, ...] = ()
    of: int = 0
    regions: tuple[Region, ...] = ()

    @property
    def head(self) -> dict[str, Any]:
        """What the JSON object says of the plane itself."""
        plane = {"dtype": self.plane.dtype, "shape": list(self.plane.shape)}
        return {"tensor": self.tensor, "plane": self.key, **plane, "sha256": self.sha256}

    def parts(self) -> Iterator[tuple[str, int]]:
        """Yield file and bytes of every part, in the order in which they are stored."""
        if self.mode == "raw":
            yield "exceptions", self.plane.nbytes
        for stream in self.streams:
            yield "defaults", stream.table
            yield "masks", stream.code_bytes
            yield "masks", 4 * stream.ranks
            yield "exceptions", stream.literal_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parts, each rounded up to its alignment."""
        return sum(aligned(n, ALIGNMENT[kind]) for kind, n in self.parts())

    def document(self) -> dict[str, Any]:
        """Return the JSON object of the plane."""
        streams = [
            {"mode": s.mode, **{key: getattr(s, key) for key in _STREAM[s.mode]}}
            for s in self.streams
        ]
        extra = {"xor": False, "split": self.split, "streams": streams, "of": self.of}
        return {**self.head, "mode": self.mode, **{key: extra[key] for key in _EXTRA[self.mode]}}


def placed(planes: Iterable[StoredPlane]) -> tuple[tuple[StoredPlane, ...], dict[str, int]]:
    """Return planes with the places of their parts, empty ones too, and the ends of the files."""
    ends = dict.fromkeys(KINDS, 0)
    found = []
    for plane in planes:
        regions = []
        for kind, nbytes in plane.parts():
            offset = aligned(ends[kind], ALIGNMENT[kind]) if nbytes else ends[kind]
            ends[kind] = offset + nbytes
            regions.append(Region(kind, offset, nbytes))
        found.append(replace(plane, regions=tuple(regions)))
    return tuple(found), ends


@dataclass(frozen=True, slots=True)
class DedupIndex:
    """model.dedup.json: `source` is the model.ie.bin it stands for, whose `planes` are in order."""

    source: FileFacts
    files: Mapping[str, FileFacts]
    planes: tuple[StoredPlane, ...]

    def text(self) -> bytes:
        """Return the file."""
        head: dict[str, Any] = {
            "source": self.source._asdict(),
            "base": None,
            "files": {kind: self.files[kind]._asdict() for kind in KINDS},
        }
        planes = [plane.document() for plane in self.planes]
        return _DOCUMENT.text(head, planes, {"totals": self._totals})

    @property
    def _totals(self) -> dict[str, int]:
        stored = sum(facts.nbytes for facts in self.files.values())
        return {"in": self.source.nbytes, "out": stored}


def parse_index(
    data: bytes, where: str, source: FileFacts, raw: Sequence[StoredPlane]
) -> DedupIndex:
    """Parse and check model.dedup.json of a model.ie.bin with these planes, see `raw_planes`.

    Raises FormatError, UnsupportedModel.
    """
    document = _DOCUMENT.read(data, where)
    if document["base"] is not None:
        raise UnsupportedModel(
            f"{where}: builds on another model; make it again from its own model.ie.bin"
        )
    stated = FileFacts.read(document["source"], f"{where}: source")
    values = [value if isinstance(value, dict) else {} for value in document["planes"]]
    heads = [{key: value.get(key) for key in _HEAD} for value in values]
    if (stated, heads) != (source, [plane.head for plane in raw]):
        raise FormatError(
            f"{where}: stands for another {BIN_NAME} than the {JSON_NAME} beside it describes; "
            "deduplicate the model again"
        )
    kinds = fields(document["files"], f"{where}: files", dict.fromkeys(KINDS, dict))
    files = {kind: FileFacts.read(kinds[kind], f"{where}: files: {kind}") for kind in KINDS}
    planes: list[StoredPlane] = []
    for number, (value, plane) in enumerate(zip(values, raw, strict=True)):
        planes.append(_read_plane(value, plane, planes, f"{where}: planes[{number}]"))
    in_files, ends = placed(planes)
    for kind, end in ends.items():
        if files[kind].nbytes != end:
            raise FormatError(
                f"{where}: files.{kind}.nbytes is {files[kind].nbytes}, its parts end at {end}"
            )
    check_expansion(planes, sum(ends.values()), where)
    index = DedupIndex(source, files, in_files)
    if document["totals"] != (totals := index._totals):
        raise FormatError(f"{where}: totals are {document['totals']!r:.80}, expected {totals}")
    return index


def raw_planes(index: IebinIndex) -> Iterator[tuple[StoredPlane, Region]]:
    """Yield every plane of model.ie.bin as mode "raw", with its place there."""
    for entry in index.entries:
        for key, plane in entry.format.planes(entry.shape).items():
            yield StoredPlane(entry.name, key, plane, entry.hashes[key]), entry.regions[key]


def check_expansion(planes: Iterable[StoredPlane], stored: int, where: str) -> None:
    """Refuse files that decode to far more than they hold; raises FormatError."""
    own = sum(p.plane.nbytes for p in planes)
    if own > MAX_EXPANSION * stored + FREE_EXPANSION:
        raise FormatError(
            f"{where}: {own} bytes of weights in {stored}; expected at most {MAX_EXPANSION} times "
            f"as many and {FREE_EXPANSION}"
        )


def _mode(value: object, known: Mapping[str, Any], at: str) -> str:
    mode = value.get("mode") if isinstance(value, dict) else None
    if not isinstance(mode, str) or mode not in known:
        raise FormatError(f"{at}: mode is {mode!r:.40}; known: {', '.join(known)}")
    return mode


def _read_plane(
    value: object, raw: StoredPlane, earlier: Sequence[StoredPlane], at: str
) -> StoredPlane:
    mode = _mode(value, _EXTRA, at)
    found = fields(value, at, _HEAD | {"mode": str} | _EXTRA[mode])
    if mode == "streams":
        if found["xor"]:
            raise FormatError(f"{at}: builds on a base, but there is none")
        streams = _read_streams(found, raw.plane, at)
        return replace(raw, mode=mode, split=found["split"], streams=streams)
    if mode == "same":
        of = found["of"]
        if not 0 <= of < len(earlier):
            raise FormatError(f"{at}: the same as plane {of}, which is not an earlier one")
        other = earlier[of]
        if other.mode == "same" or (other.plane, other.sha256) != (raw.plane, raw.sha256):
            raise FormatError(f"{at}: not the same as plane {of}")
        return replace(raw, mode=mode, of=of)
    return raw


def _read_streams(found: Mapping[str, Any], plane: Plane, at: str) -> tuple[codec.Stream, ...]:
    if found["split"] not in codec.splits_of(plane.dtype):
        raise FormatError(f"{at}: split is {found['split']!r:.40}, dtype {plane.dtype}")
    split = codec.SPLITS[found["split"]]
    if len(found["streams"]) != len(split.parts):
        raise FormatError(f"{at}: {len(found['streams'])} streams, expected {len(split.parts)}")
    count = plane.nbytes // split.item.itemsize * split.per_item
    pairs = zip(found["streams"], split.parts, strict=True)
    return tuple(_read_stream(value, part.bits, count, f"{at}: stream") for value, part in pairs)


def _read_stream(value: object, bits: int, count: int, at: str) -> codec.Stream:
    mode = _mode(value, _STREAM, at)
    found = fields(value, at, {"mode": str} | _STREAM[mode])
    stated = {key: found[key] for key in _STREAM[mode]}
    stream = codec.Stream(mode, bits, count, **{"table": int(mode == "const")} | stated)
    if mode == "trits" and not 2 <= stream.table <= 3:
        raise FormatError(f"{at}: trits of {stream.table} symbols, expected 2 or 3")
    if mode == "code":
        width, table, escapes = stream.width, stream.table, stream.escapes
        if width not in codec.WIDTHS or not 2 <= table <= 1 << bits:
            raise FormatError(f"{at}: a code of {width} bits for {table} symbols of {bits} bits")
        most = min(count, codec.MAX_ESCAPES) if codec.exception_bits(table, width) else 0
        if not 0 <= escapes <= most or (most and not escapes):
            raise FormatError(f"{at}: {escapes} escapes of {count} symbols, at most {most} can be")
    return stream
