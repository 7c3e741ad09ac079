"""Bounds of numbers in a JSON schema, as llguidance obeys them.

Of numbers between two bounds less than 1 apart, llguidance 1.9 allows an exclusive bound itself if
that is an integer: 20 where numbers above 20 and below 20.5 are asked for.
"""

from typing import Any

from clocher_kernels.errors import UsageError

MAX_DEPTH = 128
"""What llguidance reads."""
_LEAST = 1e-6
_LARGEST = 1 << 31  # where doubles still tell such a difference
_LITERAL = frozenset({"const", "enum", "default", "examples", "required"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def without_open_integers(schema: Any, depth: int = 0) -> Any:
    """Return a schema whose bounds that are excluded integers are moved inwards by 10^-6.

    What it allows, the given one allows too.

    Raises:
        UsageError: it is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise UsageError(f"the JSON schema has more than {MAX_DEPTH} levels; make it flatter")
    if isinstance(schema, list):
        return [without_open_integers(each, depth + 1) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key in _LITERAL:
            made[key] = value
        elif key in _NAMED and isinstance(value, dict):
            made[key] = {n: without_open_integers(each, depth + 2) for n, each in value.items()}
        else:
            made[key] = without_open_integers(value, depth + 1)
    _close(made, "exclusiveMinimum", "minimum", 1)
    _close(made, "exclusiveMaximum", "maximum", -1)
    return made


def _close(schema: dict[str, Any], open_: str, closed: str, inwards: int) -> None:
    """Replace an excluded integer by a number beside it that is not excluded."""
    if not _is_small_integer(schema.get(open_)):
        return
    other = schema.get(closed)
    if other is not None and (isinstance(other, bool) or not isinstance(other, int | float)):
        return  # an error that llguidance names
    bound = schema.pop(open_) + inwards * _LEAST
    schema[closed] = bound if other is None else inwards * max(inwards * other, inwards * bound)


def _is_small_integer(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _LARGEST and value == int(value)
