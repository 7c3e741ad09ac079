"""JSON schemas made at random, of what the JSON Schema test suite is about."""

from random import Random
from typing import Any

Schema = dict[str, Any]

_WORDS = ("name", "age", "tags", "id", "value", "a b", "größe", "x/y", "kind", 'say "hi"', "next")
_PATTERNS = ("^[a-z]{2,6}$", "^\\d{3}-\\d{4}$", "[A-F0-9]+", "^(yes|no)$", "^$", "^[^a-z]*$")
_FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "duration")
_VALUES = (
    None,
    True,
    False,
    0,
    -7,
    2.5,
    "",
    "red",
    "grün",
    "a\nb",
    [],
    [1, "x"],
    {},
    {"k": [None]},
)


def schema_of(seed: int) -> Schema:
    """Return the schema of a seed."""
    rng = Random(seed)
    made = _any(rng, 3)
    if rng.random() < 0.25:  # a definition, often of itself
        inner = _object(rng, 1)
        inner.setdefault("properties", {})["more"] = {
            "anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]
        }
        made = {"$defs": {"node": inner}, "type": "object", "additionalProperties": False}
        made["properties"] = {"root": {"$ref": "#/$defs/node"}, "other": _any(rng, 1)}
        made["required"] = ["root"]
    if rng.random() < 0.08:
        made |= rng.choice(_UNCOMMON)
    return made


def _any(rng: Random, depth: int) -> Schema:
    flat = (_string, _integer, _number, _enum, _const, _simple)
    return rng.choice(flat + (_object, _array, _one_of_some, _both) * (2 if depth else 0))(
        rng, depth - 1
    )


def _simple(rng: Random, depth: int) -> Schema:
    return rng.choice(
        ({"type": "boolean"}, {"type": "null"}, {"type": ["string", "integer", "null"]})
    ).copy()


def _string(rng: Random, depth: int) -> Schema:
    made: Schema = {"type": "string"}
    kind = rng.randrange(5)
    if kind == 0:
        made["pattern"] = rng.choice(_PATTERNS)
    elif kind == 1:
        made["format"] = rng.choice(_FORMATS)
    elif kind == 2:
        made["minLength"] = rng.randrange(4)
        made["maxLength"] = made["minLength"] + rng.randrange(12)
    elif kind == 3:
        made["maxLength"] = rng.randrange(15)
    return made


def _integer(rng: Random, depth: int) -> Schema:
    low = rng.randrange(-1000, 1000)
    made: Schema = {"type": "integer"}
    kind = rng.randrange(5)
    if kind in (0, 1):
        made["minimum" if rng.random() < 0.6 else "exclusiveMinimum"] = low
    if kind in (1, 2):
        high = low + rng.choice((2, 10, 5000))
        made["maximum" if rng.random() < 0.6 else "exclusiveMaximum"] = high
    if kind == 3:
        made["multipleOf"] = rng.choice((2, 5, 7, 10))
    return made


def _number(rng: Random, depth: int) -> Schema:
    made: Schema = {"type": "number"}
    if rng.random() < 0.5:
        low = rng.randrange(-100, 100) / 4
        made |= {"minimum": low, "exclusiveMaximum": low + rng.choice((0.5, 3, 1000.25))}
    return made


def _enum(rng: Random, depth: int) -> Schema:
    return {"enum": rng.sample(_VALUES, rng.randrange(1, 5))}


def _const(rng: Random, depth: int) -> Schema:
    return {"const": rng.choice(_VALUES)}


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randrange(4))
    made: Schema = {"type": "object", "properties": {n: _any(rng, max(0, depth)) for n in names}}
    made["required"] = [name for name in names if rng.random() < 0.7]
    more = rng.randrange(4)
    if more < 2:
        made["additionalProperties"] = False
    elif more == 2:
        made["additionalProperties"] = _string(rng, 0)
    elif rng.random() < 0.3:
        made["patternProperties"] = {"^x-": {"type": "integer"}}
        made["additionalProperties"] = False
    return made


def _array(rng: Random, depth: int) -> Schema:
    made: Schema = {"type": "array", "items": _any(rng, max(0, depth))}
    low = rng.randrange(3)
    if rng.random() < 0.5:
        made["minItems"] = low
    if rng.random() < 0.7:
        made["maxItems"] = low + rng.randrange(4)
    if rng.random() < 0.2:
        made["prefixItems"] = [_any(rng, 0), _any(rng, 0)]
    return made


def _one_of_some(rng: Random, depth: int) -> Schema:
    if rng.random() < 0.3:  # told apart by a constant
        kinds = [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": _any(rng, 0)},
                "required": ["kind"],
                "additionalProperties": False,
            }
            for kind in ("cat", "dog")
        ]
        return {rng.choice(("anyOf", "oneOf")): kinds}
    return {"anyOf": [_any(rng, max(0, depth)) for _ in range(rng.randrange(1, 4))]}


def _both(rng: Random, depth: int) -> Schema:
    first, second = _object(rng, 0), _object(rng, 0)
    for each in (first, second):
        each.pop("additionalProperties", None)
        each.pop("patternProperties", None)
    return {"allOf": [first, second]}


_UNCOMMON: tuple[Schema, ...] = (
    {"not": {"type": "string"}},
    {"uniqueItems": True},
    {"contains": {"type": "integer"}},
    {"minProperties": 1},
    {"if": {"type": "object"}, "then": {"required": ["id"]}},
    {"propertyNames": {"maxLength": 3}},
    {"dependentRequired": {"a": ["b"]}},
)
