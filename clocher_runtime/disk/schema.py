"""Check parsed JSON against declared types (`msgspec.Struct`), with uniform messages (ADR 29)."""

import re
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, TypeVar

from clocher_kernels.errors import FormatError, UnsupportedModel

_T = TypeVar("_T")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "an object",
}


def read_as(value: object, kind: type[_T], where: str) -> _T:
    """Return a JSON value as a type that msgspec knows, or raise FormatError; no bool is an int."""
    import msgspec  # late: who only writes documents starts without it

    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise FormatError(_told(str(error), value, kind, where)) from None


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
    return None if isinstance(value, float) and not isfinite(value) else value


def shown(value: object) -> str:
    """Return the start of a value, for messages."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "a number of very many digits"


def _told(message: str, value: object, kind: type, where: str) -> str:
    """Return msgspec's message in Clocher's form: where, what is there, what was expected."""
    reason, _, path = message.partition(" - at `$")
    path = path.removesuffix("`")
    for key, index in _STEP.findall(path):
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
