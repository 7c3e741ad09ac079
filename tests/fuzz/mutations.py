"""Structure-aware mutations of bytes, JSON and files that are framed by it. Pure and seeded."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from typing import Any

from weight_files import HOSTILE

from clocher_runtime.disk.plane_index import seal

Words = Sequence[str]
Mutation = Callable[[bytes, Random, Words], bytes]
"""A mutation of one file: its bytes, the dice, words that mean something to its reader."""

MAX_BYTES = 1 << 19
EDGES: tuple[int, ...] = (
    *(0, 1, 2, 3, 7, 8, 31, 32, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65535, 65536),
    *((1 << bits) + more for bits in (24, 31, 32, 48, 62, 63, 64) for more in (-1, 0, 1)),
)

_ODD_VALUES: tuple[Any, ...] = (
    *HOSTILE,
    *(False, -(1 << 63), 1 << 53, 0.0, 0.5, 1e-320, float("nan"), float("inf")),
    *("\ud800", "\x1b[2J", "CON", "é" * 300, "0" * 64, [-1, 1 << 40], [0] * 100),
)
_NUMBER_TEXTS = (
    *(b"NaN", b"-Infinity", b"1e999", b"-0", b"1e-999", b"01", b"1.", b"0x10", b"true"),
    *(b"9" * 400, b"9" * 5000, b"[" * 70 + b"]" * 70, b"[" * 3000, b'"\\ud800"'),
)


def mutate_bytes(data: bytes, dice: Random, words: Words = ()) -> bytes:
    """Flip, overwrite, cut out, repeat, insert, truncate or extend; more often near the start."""
    out = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
        _edit_bytes(out, dice)
    return bytes(out[:MAX_BYTES])


def mutate_json(data: bytes, dice: Random, words: Words = ()) -> bytes:
    """Change values, keys and structure of a JSON text, and now and then the text itself."""
    if dice.random() < 0.1:
        return _edit_text(data, dice)
    text = _dump(mutate_document(json.loads(data), dice, words))
    return _edit_text(text, dice) if dice.random() < 0.05 else text


def mutate_document(document: Any, dice: Random, words: Words) -> Any:
    """Change one to three nodes of a parsed JSON document, in place where it can be."""
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        nodes = _nodes(document)
        if not nodes:
            return deepcopy(dice.choice(_ODD_VALUES))
        _edit_node(*dice.choice(nodes), nodes, dice, words)
    return document


def mutate_sealed(data: bytes, dice: Random, words: Words) -> bytes:
    """Change a model.ie.json and seal it again, mostly: a broken seal stops every reader."""
    if dice.random() < 0.1:
        return mutate_bytes(data, dice)
    document = json.loads(data)
    document.pop("sha256")
    changed = mutate_document(document, dice, words)
    if not isinstance(changed, dict):
        return _dump(changed)
    text = _dump(changed)[:-1]
    return seal(text + (b",\n" if changed else b"\n"))


def mutate_safetensors(data: bytes, dice: Random, words: Words) -> bytes:
    """Change the header and put it back with its length; or the length, the data, any byte."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = dice.random()
    if kind < 0.1:
        return mutate_bytes(data, dice)
    if kind < 0.2:
        length += dice.choice((-1, 1, 8, -8, 1 << 20, 1 << 32, 1 << 63, -length))
        return (length % (1 << 64)).to_bytes(8, "little") + header + body
    if kind < 0.3 and body:
        return data[: 8 + length] + mutate_bytes(body, dice)
    text = mutate_json(header, dice, words)
    if dice.random() < 0.1:
        text += b" " * dice.randrange(1, 16)
    return len(text).to_bytes(8, "little") + text + body


def mutate_lines(data: bytes, dice: Random, words: Words) -> bytes:
    """Change the JSON of one line, or lines as a whole."""
    lines = data.splitlines()
    at = dice.randrange(len(lines))
    kind = dice.random()
    if kind < 0.05:
        return mutate_bytes(data, dice)
    if kind < 0.1:
        lines.insert(at, dice.choice(lines))
    elif kind < 0.15:
        lines[at] = dice.choice((b"", b"null", b"[]", b"{}", b"\xff", b"\xef\xbb\xbf" + lines[at]))
    else:
        lines[at] = mutate_json(lines[at], dice, words)
    return dice.choice((b"\n", b"\n", b"\n", b"\r\n", b"")).join(lines)


def mutate_gguf(data: bytes, dice: Random, words: Words) -> bytes:
    """Change counts, lengths, types, dimensions and offsets, or texts, or any byte."""
    if dice.random() < 0.15:
        return mutate_bytes(data, dice)
    out = bytearray(data)
    places = _gguf_integers(data)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        at, width = dice.choice(places)
        here = int.from_bytes(out[at : at + width], "little")
        near = here + dice.choice((-1, 1, 7, here, 1 << 8 * width - 1, 1 << 31))
        value = dice.choice(EDGES) if dice.random() < 0.4 else near
        if width == 4 and dice.random() < 0.4:
            value = dice.randrange(45)  # types of values and of tensors
        out[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    if words and dice.random() < 0.1:
        old, new = (word.encode() for word in dice.choices(words, k=2))
        return bytes(out).replace(old, new[: len(old)].ljust(len(old), b"x"), 1)
    return bytes(out)


def _gguf_integers(data: bytes) -> list[tuple[int, int]]:
    """Return (offset, width) of every integer in the header of a sound GGUF file."""
    sizes = dict(enumerate((1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)))
    string, array = 8, 9
    found = [(4, 4), (8, 8), (16, 8)]
    at = 24

    def number(width: int) -> int:
        nonlocal at
        found.append((at, width))
        at += width
        return int.from_bytes(data[at - width : at], "little")

    def value(kind: int) -> None:
        nonlocal at
        if kind == string:
            length = number(8)
            at += length
        elif kind == array:
            inner = number(4)
            for _ in range(number(8)):
                value(inner)
        else:
            number(sizes[kind])

    for _ in range(int.from_bytes(data[16:24], "little")):
        value(string)
        value(number(4))
    for _ in range(int.from_bytes(data[8:16], "little")):
        value(string)
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return found


def words_of(data: bytes) -> list[str]:
    """Return keys and texts of a JSON document."""
    found: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            found.update(node)
            for item in node.values():
                walk(item)
        elif isinstance(node, list):
            for item in node:
                walk(item)
        elif isinstance(node, str):
            found.add(node)

    walk(json.loads(data))
    return sorted(word for word in found if len(word) < 200)


def _dump(document: Any) -> bytes:
    return json.dumps(document).encode("ascii")[:MAX_BYTES]


def _place(size: int, dice: Random) -> int:
    return min(dice.randrange(size + 1), dice.randrange(size + 1))


def _edit_bytes(out: bytearray, dice: Random) -> None:
    if not out:
        out += dice.randbytes(8)
        return
    at = _place(len(out) - 1, dice)
    length = dice.choice((1, 2, 4, 8, 16, 64))
    kind = dice.randrange(9)
    if kind == 0:
        out[at] ^= 1 << dice.randrange(8)
    elif kind == 1:
        out[at] = dice.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, dice.randrange(256)))
    elif kind in (2, 3):
        width = dice.choice((1, 2, 4, 4, 8, 8))
        at -= at % width if dice.random() < 0.5 else 0
        value = dice.choice(EDGES)
        if dice.random() < 0.3:
            here = int.from_bytes(out[at : at + width], "little")
            value = here + dice.choice((-1, 1, -here, here, 1 << 8 * width - 1))
        out[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    elif kind == 4:
        del out[at : at + length]
    elif kind == 5:
        out[at:at] = out[at : at + length]
    elif kind == 6:
        out[at:at] = dice.randbytes(length)
    elif kind == 7:
        del out[dice.randrange(len(out)) :]
    else:
        out += bytes(dice.choice((1, 8, 63, 4096))) if dice.random() < 0.5 else dice.randbytes(64)


def _edit_text(data: bytes, dice: Random) -> bytes:
    kind = dice.randrange(6)
    places = [at for at, code in enumerate(data) if code in b"{[:,"]
    if kind == 0 or not places:
        return mutate_bytes(data, dice)
    at = dice.choice(places) + 1
    if kind == 1:
        end = at
        while end < len(data) and data[end] not in b",]}":
            end += 1
        return data[:at] + dice.choice(_NUMBER_TEXTS) + data[end:]
    if kind == 2:
        start = data.find(b"{") + 1
        end = data.find(b",", start)
        return data[: end + 1] + data[start : end + 1] + data[end + 1 :]  # the first key twice
    if kind == 3:
        return (
            data[:at]
            + dice.choice((b" " * 9000, b"\t\r\n", b"/**/", b"\xc3\x28", b"\x00"))
            + data[at:]
        )
    if kind == 4:
        return dice.choice((b"\xef\xbb\xbf", b"[", b'"', b"\xff\xfe")) + data
    return data[:at]


def _nodes(document: Any) -> list[tuple[Any, Any]]:
    """Return every place in a document as (container, key)."""
    found: list[tuple[Any, Any]] = []
    stack = [document]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            keys: Any = node.keys()
        elif isinstance(node, list):
            keys = range(len(node))
        else:
            continue
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                stack.append(node[key])
    return found


def _edit_node(
    parent: Any, key: Any, nodes: list[tuple[Any, Any]], dice: Random, words: Words
) -> None:
    value = parent[key]
    kind = dice.randrange(12)
    if kind <= 2:
        parent[key] = deepcopy(dice.choice(_ODD_VALUES))  # a later edit may change it
    elif kind == 3:
        parent[key] = dice.choice(EDGES) * dice.choice((1, 1, -1))
    elif kind <= 5 and type(value) is int:
        parent[key] = value + dice.choice((-1, 1, value, -2 * value, 1 << 32, 1 << 64))
    elif kind == 4 and words:
        parent[key] = dice.choice(words)
    elif kind == 5 and isinstance(value, str):
        cut = dice.randrange(len(value) + 1)
        parent[key] = dice.choice((value[:cut], value + "x", value[cut:] + value[:cut], value * 99))
    elif kind == 6:
        del parent[key]
    elif kind == 7:
        parent[key] = _copy(dice.choice(nodes), value)
    elif kind == 8 and isinstance(parent, list):
        parent.insert(key, json.loads(json.dumps(value)))
    elif kind == 8 and words:
        parent[dice.choice(words)] = json.loads(json.dumps(value))
    elif kind == 9 and isinstance(parent, dict):
        parent[dice.choice(words) if words and dice.random() < 0.5 else f"{key}x"] = parent.pop(key)
    elif kind == 10:
        parent[key] = dice.choice(([value], {"a": value}, [value, value]))
    elif isinstance(value, list):
        dice.shuffle(value)
    elif isinstance(value, str):
        parent[key] = dice.choice(words) if words else value.upper()
    else:
        parent[key] = str(value) if dice.random() < 0.5 else [value] * 9


def _copy(place: tuple[Any, Any], default: Any) -> Any:
    """Return a copy of another node; an earlier edit may have taken it away."""
    container, key = place
    try:
        return json.loads(json.dumps(container[key]))
    except (KeyError, IndexError, ValueError):
        return default
