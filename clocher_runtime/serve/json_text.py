"""JSON as it is sent. What a model makes is text of any characters, and numbers are finite."""

from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    """Return the JSON text of a value.

    A surrogate that stands alone is no character: it becomes U+FFFD.
    """
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(_mended(value))


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mended(item) for item in value]
    return value
