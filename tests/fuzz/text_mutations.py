"""Mutations of texts, tokenizers and chat templates, with knowledge of what is hard for each."""

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

from fuzz.mutations import Words, mutate_bytes, mutate_json

MAX_TEXT_CHARS = 1 << 14

_ATOMS = (
    *("A", "a", " ", "\n", "\r\n", "\t", "1", "!", "'", "é", "e\u0301", "\u0301", "日", "😀", "\0"),
    *("<s>", "▁", "\ufffd", "\ufdfa", "İ", "ß", "\u200d", "\ufeff", "</s>", "<0x41>", "ab", "<"),
)
_PATTERNS = (
    r"(a+)+$",
    r"(\w*)*b",
    r"\s*\s*\s*x",
    r"(?<=a*)b",
    r"(?=(a|a)*$)a",
    r"(a{1000}){1000}",
    r"[^\s]{1,9999}?",
    "(" * 50 + "a" + ")" * 50,
    r"(?<n>a\g<n>?b)",
    "",
    r"\p{Nope}",
    "(?:",
)
_STEPS: tuple[dict[str, object], ...] = (
    {"type": "Replace", "pattern": {"String": "a"}, "content": "aa" * 40},
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "x"},
    {"type": "Prepend", "prepend": "p" * 5000},
    {"type": "FixedLength", "length": 0},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "Removed", "invert": True},
    {"type": "Strip", "content": "a", "start": 1 << 40, "stop": 3},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "Precompiled", "precompiled_charsmap": "////"},
)
_FRAGMENTS = (
    *(" | center(60000)", " | join('x' * 9999)", " | replace('', 'yy')", " * 99999", " ~ messages"),
    *(".translate({97: 'b' * 9999})", ".expandtabs(99999)", " | tojson(indent=9999)", " ** 9999"),
    *(" | list", " | sum", " | length", ".__class__", " | attr('__init__')", "[::-1]", "[9:]"),
    *(" | sort", " | map('upper')", " | map(attribute='x.y')", " | groupby('role')", " | random"),
    *(" | urlize", " | xmlattr", " | pprint", " | format(1, 2)", ".format(a=1)", " % 3", " // 0"),
    *(" | indent('\\t' * 999, true)", " | slice(9999)", " | unique", " | batch(1)", " | round(9)"),
    *("{% for i in range(9999) %}{{ range(9999) | sum }}{% endfor %}", "{% break %}", "{% raw %}"),
    *("{% set x %}{{ messages }}{% endset %}{{ x * 99 }}", "{{ range(99999) | list }}"),
    "{% set n = namespace(x='a') %}{% for i in range(50) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    *("{% macro r() %}{{ r() }}{% endmacro %}{{ r() }}", "{% include 'x' %}", "{{ self }}", "{{ "),
    *("{{ raise_exception('no') }}", "{{ strftime_now('%s' * 999) }}", "{{ cycler(1).next() }}"),
    *("{% filter upper %}a{% endfilter %}", "{% call show(1) %}{% endcall %}", "{{ dict(a=1) }}"),
    *(
        "{{ 9999999999 ** 9 }}",
        "{{ 'a' * -1 }}",
        "{{ [[]] * 9 }}",
        "{{ messages.append(1) }}",
        "#}",
    ),
)
_TOKEN = re.compile(r"\{[{%#]-?|-?[}%#]\}|\w+|\s+|.", re.DOTALL)


def mutate_text(data: bytes, dice: Random, words: Words = ()) -> bytes:
    """Return another text: runs and mixtures of few characters, or the same with bytes changed."""
    if dice.random() < 0.3:
        return mutate_bytes(data, dice)
    atoms = [*dice.sample(_ATOMS, 3), *dice.choices(words or ("x",), k=1)]
    text = "".join(
        dice.choice(atoms) * dice.choice((1, 1, 2, 3, 50, 1000, 9999))
        for _ in range(dice.choice((1, 2, 3, 20)))
    )
    return text[:MAX_TEXT_CHARS].encode("utf-8", "surrogatepass")


def mutate_tokenizer(data: bytes, dice: Random, words: Words) -> bytes:
    """Change a tokenizer.json as any JSON, or plant a hostile step or expression in it."""
    if dice.random() < 0.7:
        return mutate_json(data, dice, words)
    document = json.loads(data)
    kinds = (
        ("normalizer", "normalizers"),
        ("pre_tokenizer", "pretokenizers"),
        ("decoder", "decoders"),
        ("post_processor", "processors"),
    )
    part, within = dice.choice(kinds)
    steps: list[Any] = [dict(dice.choice(_STEPS)) for _ in range(dice.choice((0, 1, 1, 2, 9)))]
    if not steps or dice.random() < 0.4:
        pattern = {"Regex": dice.choice(_PATTERNS)}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        replace = {"type": "Replace", "pattern": pattern, "content": "b"}
        steps.append(split if part == "pre_tokenizer" else replace)
    if document[part] is not None:
        steps.insert(dice.randrange(len(steps) + 1), document[part])
    document[part] = {"type": "Sequence", within: steps}
    return json.dumps(document).encode()


def mutate_template(data: bytes, dice: Random, words: Words) -> bytes:
    """Take out, repeat, swap or put in tokens of a template, and fragments that are hard work."""
    if dice.random() < 0.05:
        return mutate_bytes(data, dice)
    tokens = _TOKEN.findall(data.decode("utf-8", "replace"))
    for _ in range(dice.choice((1, 1, 2, 3))):
        at = dice.randrange(len(tokens)) if tokens else 0
        dice.choice(_EDITS)(tokens, at, dice, words)
    return "".join(tokens).encode()


def _fragment(tokens: list[str], at: int, dice: Random, words: Words) -> None:
    fragment = dice.choice(_FRAGMENTS)
    if not fragment.startswith("{"):  # it belongs behind an expression
        ends = [i for i, token in enumerate(tokens) if token in ("}}", "-}}")]
        at = dice.choice(ends) if ends else at
    tokens.insert(at, fragment)


def _drop(tokens: list[str], at: int, dice: Random, words: Words) -> None:
    del tokens[at : at + dice.choice((1, 1, 2, 9))]


def _repeat(tokens: list[str], at: int, dice: Random, words: Words) -> None:
    tokens[at:at] = tokens[at : at + dice.choice((1, 3, 9, 40))] * dice.choice((1, 1, 9))


def _swap(tokens: list[str], at: int, dice: Random, words: Words) -> None:
    if tokens:
        other = dice.randrange(len(tokens))
        tokens[at], tokens[other] = tokens[other], tokens[at]


def _word(tokens: list[str], at: int, dice: Random, words: Words) -> None:
    tokens[at : at + 1] = [dice.choice((*words, "messages", "loop", "namespace", "9" * 20, "''"))]


_EDITS: tuple[Callable[[list[str], int, Random, Words], None], ...] = (
    *(_fragment, _fragment, _drop, _repeat, _swap, _word),
)
