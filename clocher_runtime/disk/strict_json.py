"""JSON from untrusted files: bounded, unambiguous, checked field by field or by declared types."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from clocher_kernels.errors import FormatError, ShapeError, UnsupportedModel

if TYPE_CHECKING:
    import numpy as np

MAX_JSON_BYTES = 100_000_000
MAX_JSON_VALUES = 4_000_000
MAX_JSON_DEPTH = 64
MAX_JSON_MEMORY = 56 << 20
"""Bytes for text and values, besides twice the rest of the text's file."""

_OPENED_BYTES, _COMMA_BYTES, _KEY_BYTES = 80, 48, 200
_STEP = 1 << 20

MAX_NAME_CHARS = 512
MAX_RANK = 8
MAX_ELEMENTS = 1 << 48

_T = TypeVar("_T")
_HALF = re.compile(rb"\\u[dD]")
"""An escape of half a surrogate pair, whose other half may be gone."""
_PLACE = re.compile(r"\.(\w+)|\[(\d+)\]")
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "an object",
}


@contextmanager
def prefixed(where: str) -> Iterator[None]:
    """Begin errors about a file's content with where it is; a ShapeError becomes a FormatError."""
    try:
        yield
    except (FormatError, ShapeError, UnsupportedModel) as error:
        kind = UnsupportedModel if isinstance(error, UnsupportedModel) else FormatError
        raise kind(f"{where}: {error}") from None


def parse_json(data: bytes, where: str, rest: int = 0) -> Any:
    """Parse JSON text; `rest` is the size of the file beside it.

    Refuses invalid UTF-8, lone surrogates, duplicate keys, NaN and infinities, and, before building
    anything, more than `MAX_JSON_VALUES`, `MAX_JSON_DEPTH` or `MAX_JSON_MEMORY`.
    """
    _check_size(data, where, rest)
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_finite,
            parse_float=_finite,
        )
        # In vocabularies the backslash of such text is escaped.
        if _HALF.search(data) and _HALF.search(data.replace(rb"\\", b"")):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except ValueError as error:
        raise FormatError(f"{where}: not valid JSON: {error}") from None
    return value


def parse_object(data: bytes, where: str, rest: int = 0) -> dict[str, Any]:
    """Parse JSON text that must be an object; see `parse_json`."""
    value = parse_json(data, where, rest)
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_lines(data: bytes, path: object) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the object of each line that is not blank, and where it is; see `parse_json`."""
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield parse_object(line, where), where


def fields(
    value: object,
    where: str,
    required: Mapping[str, type],
    optional: Mapping[str, type] | None = None,
) -> dict[str, Any]:
    """Return an object of exactly these keys and types, or raise FormatError; no bool is an int."""
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected an object, got {type(value).__name__}")
    known = {**required, **(optional or {})}
    if unknown := sorted(set(value) - set(known)):
        raise FormatError(f"{where}: unknown field {unknown[0]!r:.80}; known: {', '.join(known)}")
    if missing := [key for key in required if key not in value]:
        raise FormatError(f"{where}: field {missing[0]!r} is missing")
    for key, item in value.items():
        if known[key] not in (type(item), object):
            raise FormatError(
                f"{where}: field {key!r} is {type(item).__name__}, expected {known[key].__name__}"
            )
    return value


def checked_name(value: object, where: str) -> str:
    """Return a tensor name: 1 to `MAX_NAME_CHARS` printable characters."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        raise FormatError(f"{where}: a tensor name needs 1 to {MAX_NAME_CHARS} characters")
    if not value.isprintable():
        raise FormatError(f"{where}: tensor name {value!r:.80} has unprintable characters")
    return value


def checked_shape(value: object, where: str) -> tuple[int, ...]:
    """Return a shape: at most `MAX_RANK` integers >= 0 and at most `MAX_ELEMENTS` elements."""
    if not isinstance(value, list) or len(value) > MAX_RANK:
        raise FormatError(f"{where}: a shape is a list of at most {MAX_RANK} integers")
    count = 1
    for dim in value:
        if type(dim) is not int or dim < 0:
            raise FormatError(f"{where}: a dimension must be an integer >= 0, got {dim!r:.40}")
        # A zero must not hide the size of the other dimensions.
        count *= max(dim, 1)
        if count > MAX_ELEMENTS:
            raise FormatError(f"{where}: the shape has more than 2^48 elements")
    return tuple(value)


def read_as(value: object, kind: type[_T], where: str) -> _T:
    """Return a JSON value as a type that msgspec knows, or raise FormatError; no bool is an int."""
    import msgspec  # late: who only writes documents starts without it

    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FormatError(_message(str(error), value, kind, where)) from None


def given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null; many writers use null for absent."""
    return {key: value for key, value in config.items() if value is not None}


def one_of(
    settings: Mapping[str, Any],
    key: str,
    default: Any,
    known: Iterable[Any],
    where: str,
    way_out: str = "",
) -> Any:
    """Return a setting limited to known values; null counts as absent."""
    value = settings.get(key)
    value = default if value is None else value
    known = tuple(known)
    # True == 1 in Python, and a list has no hash.
    if not any(type(value) is type(item) and value == item for item in known):
        raise unknown(key, value, known, where, way_out)
    return value


def unknown(
    key: str, value: object, known: Iterable[object], where: str, way_out: str = ""
) -> UnsupportedModel:
    """Return the error for an unknown value of a setting."""
    listed = ", ".join(str(item) for item in known)
    text = f"{where}: {key} {shown(value)} is not known; known: {listed}"
    return UnsupportedModel(f"{text}; {way_out}" if way_out else text)


def finite(value: Any) -> Any:
    """Return JSON values with null for numbers that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown(value: object) -> str:
    """Return the start of a value, for messages."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "a number of very many digits"


def _check_size(data: bytes, where: str, rest: int) -> None:
    import numpy as np  # late: a command line is read without it

    if len(data) > MAX_JSON_BYTES:
        raise FormatError(f"{where}: {len(data)} bytes of JSON; the limit is {MAX_JSON_BYTES}")
    depth = values = 0
    # Strings store their widest character's width.
    memory = len(data) * (8 if not data.isascii() else 4 if b"\\u" in data else 1)
    for codes in _outside_strings(data):
        opening = (codes == ord("[")) | (codes == ord("{"))
        closing = (codes == ord("]")) | (codes == ord("}"))
        opened, commas = (int(np.count_nonzero(found)) for found in (opening, codes == ord(",")))
        values += opened + commas
        keys = int(np.count_nonzero(codes == ord(":")))
        memory += _OPENED_BYTES * opened + _COMMA_BYTES * commas + _KEY_BYTES * keys
        steps = opening.view(np.int8) - closing.view(np.int8)
        levels = depth + np.cumsum(steps[steps != 0], dtype=np.int32)
        if levels.max(initial=0) > MAX_JSON_DEPTH:
            raise FormatError(f"{where}: JSON nested deeper than {MAX_JSON_DEPTH} levels")
        depth = int(levels[-1]) if levels.size else depth
    if values > MAX_JSON_VALUES:
        raise FormatError(f"{where}: more than {MAX_JSON_VALUES} JSON values")
    if memory > MAX_JSON_MEMORY + 2 * rest:
        raise FormatError(
            f"{where}: {len(data)} bytes of JSON with {values} values would take about "
            f"{memory >> 20} MiB of memory; the limit is {MAX_JSON_MEMORY + 2 * rest >> 20} MiB"
        )


def _outside_strings(data: bytes) -> Iterator["np.ndarray"]:
    import numpy as np

    start, inside = 0, 0
    while start < len(data):
        piece = data[start : start + _STEP]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the next byte is escaped
            piece = data[start : start + _STEP + 1]
        start += len(piece)
        plain = piece.replace(rb"\\", b"").replace(rb"\"", b"")
        codes = np.frombuffer(plain, np.uint8)
        # Between an odd and an even quote lies a string; a count modulo 256 keeps its parity.
        quotes = np.cumsum(codes == ord('"'), dtype=np.uint8) + np.uint8(inside)
        yield codes[quotes & 1 == 0]
        inside = int(quotes[-1]) & 1 if quotes.size else inside


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r:.80} appears twice in one object")
        result[key] = value
    return result


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is out of range")
    return value


def _message(message: str, value: object, kind: type, where: str) -> str:
    """Return msgspec's message in Clocher's form: where, what is there, what was expected."""
    reason, _, path = message.partition(" - at `$")
    path = path.removesuffix("`")
    for key, index in _PLACE.findall(path):
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and index:
            value = value[int(index)]
    place = f"{where}: {path.removeprefix('.')}" if path else where
    if match := re.fullmatch("Object (missing required|contains unknown) field `(.*)`", reason):
        state, field = match.groups()
        if state.startswith("missing"):
            return f"{place}: field {field!r} is missing"
        known = ", ".join(getattr(kind, "__struct_encode_fields__", ()))
        return f"{place}: unknown field {field!r:.80}" + ("" if path else f"; known: {known}")
    reason = re.sub("`([a-z |]+)`", _worded, f"{reason[0].lower()}{reason[1:]}")
    if "[...]" in path:  # a key that msgspec does not name
        return f"{place}: {reason}"
    return f"{place} is {shown(value)}; {reason.partition(', got')[0]}"


def _worded(match: re.Match[str]) -> str:
    return " or ".join(_WORDS.get(word, word) for word in match[1].split(" | "))
