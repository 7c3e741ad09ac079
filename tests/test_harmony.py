"""The format of gpt-oss, token by token: right where it is kept to, lossless where it is not."""

import random
import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clocher_runtime.text.harmony import (
    MARKS,
    HarmonyReader,
    harmony_marks,
    harmony_stop_ids,
)
from tests.answer_texts import TOKENIZER, joined, read_tokens

Parts = list[tuple[str, str, int]]
NAMES = {name: TOKENIZER.token_id(name) for name in MARKS}
PROMPT = "<|start|>system<|message|>Be brief.<|end|><|start|>assistant"


def read(text: str, *, tools: bool = True, prompt: str = PROMPT) -> Parts:
    reader = HarmonyReader(TOKENIZER, tools=tools, prompt_tail=prompt)
    return read_tokens(reader, TOKENIZER.encode(text, special=False))


ANALYSIS = "<|channel|>analysis<|message|>Need to use function get_weather.<|end|>"
CALL = '{"location":"San Francisco"}'
CASES = {
    # docs/format.md of openai/harmony
    "answer": (
        '<|channel|>analysis<|message|>User asks: "What is 2 + 2?"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        [("reasoning", 'User asks: "What is 2 + 2?"', 0), ("content", "2 + 2 = 4.", 0)],
    ),
    "call": (
        f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{CALL}<|call|>",
        [
            ("reasoning", "Need to use function get_weather.", 0),
            ("tool_call", "get_weather", 0),
            ("arguments", CALL, 0),
        ],
    ),
    "preamble": (
        "<|channel|>analysis<|message|>{long}<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>**Action plan**:\n1. Generate an HTML file<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.generate_file<|constrain|>json<|message|>"
        '{"path": "i.html"}<|call|>',
        [
            ("reasoning", "{long}", 0),
            ("content", "**Action plan**:\n1. Generate an HTML file", 0),
            ("tool_call", "generate_file", 0),
            ("arguments", '{"path": "i.html"}', 0),
        ],
    ),
    # its tests
    "recipient first": (
        " to=functions.get_weather<|channel|>commentary <|constrain|>json"
        f"<|message|>{CALL}<|call|>",
        [("tool_call", "get_weather", 0), ("arguments", CALL, 0)],
    ),
    "constrain adjacent": (
        f" to=functions.get_weather<|channel|>commentary<|constrain|>json<|message|>{CALL}<|end|>",
        [("tool_call", "get_weather", 0), ("arguments", CALL, 0)],
    ),
    "browser": (
        '<|channel|>commentary to=browser.search code<|message|>{"query": "x"}<|call|>'
        "<|start|>browser.search to=assistant<|channel|>commentary<|message|>found<|end|>",
        [("reasoning", '{"query": "x"}found', 0)],
    ),
    "no message mark": ("<|channel|>commentary Hello<|end|>", [("content", "Hello", 0)]),
    # named bugs of other servers
    "no channel marks in a name": (
        " to=functions.query_dataset<|channel|>commentary<|constrain|>json<|message|>{}<|call|>",
        [("tool_call", "query_dataset", 0), ("arguments", "{}", 0)],
    ),
    "a call on any channel is a call": (
        "<|channel|>analysis to=functions.f<|message|>{}<|call|><|start|>assistant"
        "<|channel|>final to=functions.g code<|message|>{1}<|call|>",
        [
            ("tool_call", "f", 0),
            ("arguments", "{}", 0),
            ("tool_call", "g", 1),
            ("arguments", "{1}", 1),
        ],
    ),
    "a stray stop ends the message": (
        "<|return|><|channel|>final<|message|>a<|return|>b<|call|><|end|>c d",
        [("content", "abc d", 0)],
    ),
    "no start": (
        "<|channel|>analysis<|message|>a<|end|>assistant<|channel|>final<|message|>b<|end|>"
        "<|channel|>analysis<|message|>c<|channel|>final<|message|>d",
        [("reasoning", "a", 0), ("content", "b", 0), ("reasoning", "c", 0), ("content", "d", 0)],
    ),
    "no header": ("Hello, world.\n", [("content", "Hello, world.\n", 0)]),
    "no header, but a recipient, almost": (" to be", [("content", " to be", 0)]),
    "unknown channel": ("<|channel|>notes<|message|>a", [("content", "a", 0)]),
    "unknown channel that is text": (
        "<|channel|>notes on the topic",
        [("content", "notes on the topic", 0)],
    ),
    "no message mark, in a call": (
        '<|channel|>commentary to=functions.f json{"a":1}<|call|>',
        [("tool_call", "f", 0), ("arguments", '{"a":1}', 0)],
    ),
    "no channel in a call": (
        ' to=functions.f<|constrain|>json<|message|>{"a":1}<|call|>',
        [("tool_call", "f", 0), ("arguments", '{"a":1}', 0)],
    ),
    "no name": ("<|channel|>commentary to=functions.<|message|>a", [("reasoning", "a", 0)]),
    "another role": ("<|end|><|start|>user<|message|>a<|end|>", [("reasoning", "a", 0)]),
    "a header that ends the answer": ("<|channel|>commentary to=functions.f", []),
    "a role that ends the answer": ("<|end|><|start|>assistant", []),
    "a word that is no role": ("<|end|><|start|>Hello<|end|>", [("content", "Hello", 0)]),
    "two channels": (
        "<|channel|>analysis<|channel|>final<|message|>a<|message|>b<|constrain|>c",
        [("content", "abc", 0)],
    ),
    "half a character before a mark": ("<|message|>é<|end|>é", [("content", "éé", 0)]),
}


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_read(name: str) -> None:
    text, parts = CASES[name]
    assert read(text) == parts


def test_without_tools_there_are_no_calls() -> None:
    assert read(CASES["recipient first"][0], tools=False) == [("reasoning", CALL, 0)]


@pytest.mark.parametrize(
    ("prompt", "text", "parts"),
    [
        ("", "<|channel|>final<|message|>a", [("content", "a", 0)]),
        ("no such format", "assistant a", [("content", "assistant a", 0)]),
        ("<|start|>", "assistant<|channel|>final<|message|>a", [("content", "a", 0)]),
        ("<|start|>assistant<|channel|>analysis<|message|>", "a", [("reasoning", "a", 0)]),
        ("<|start|>assistant<|channel|>", "analysis<|message|>a", [("reasoning", "a", 0)]),
        ("<|start|>assistant<|channel|>analysis", "<|message|>a", [("reasoning", "a", 0)]),
        ("<|start|>assistant<|channel|>final<|message|>x", " y<|end|>z", [("content", " yz", 0)]),
        ("<|start|>assistant<|message|>x<|end|>", "assistant<|message|>y", [("content", "y", 0)]),
        (
            "<|start|>assistant<|channel|>commentary to=functions.f<|constrain|>json<|message|>",
            "{}",
            [("tool_call", "f", 0), ("arguments", "{}", 0)],
        ),
        ("<|start|>assistant to=functions.f<|message|>{", "", [("tool_call", "f", 0)]),
    ],
)
def test_an_answer_goes_on_from_its_prompt(prompt: str, text: str, parts: Parts) -> None:
    assert read(text, prompt=prompt) == parts


def test_plain_text_is_not_held_back() -> None:
    reader = HarmonyReader(TOKENIZER, prompt_tail=PROMPT)
    tokens = TOKENIZER.encode("Plain text comes out at once.", special=False)
    assert all(reader.push(token) for token in tokens)


def test_arguments_come_as_they_are_made() -> None:
    reader = HarmonyReader(TOKENIZER, prompt_tail=PROMPT)
    head = TOKENIZER.encode(" to=functions.f<|channel|>commentary<|message|>", special=False)
    found = [delta for token in head for delta in reader.push(token)]
    assert joined(found) == [("tool_call", "f", 0)]
    tokens = TOKENIZER.encode('{"a": [1, 2, {"b": "text"}]}', special=False)
    assert all(reader.push(token)[0].kind == "arguments" for token in tokens)


def test_what_ends_an_answer() -> None:
    assert harmony_stop_ids(TOKENIZER) == {NAMES["<|return|>"], NAMES["<|call|>"]}
    end = TOKENIZER.token_id("<|endoftext|>")
    assert end is not None
    tokens = TOKENIZER.encode("<|message|>a<|endoftext|><|channel|>final<|message|>b")
    for ends, text in (((end,), "ab"), ((), "a<|endoftext|>b")):
        reader = HarmonyReader(TOKENIZER, ends=ends)
        assert read_tokens(reader, tokens) == [("content", text, 0)]


# Random answers. What comes out is held against what went in, mark by mark.
NAME, TO = r"[\w./-]{0,128}", r"to=[^\s{<]{0,256}"
WORDS = "assistant|user|system|developer|tool|analysis|commentary|final"
HEADER = re.compile(rf"\s?{NAME}(?:\s?{TO})?(?:\s{NAME})?\s?")
KNOWN = re.compile(rf"\s?(?:(?:{WORDS})(?![\w./-]))?(?:\s?{TO}(?:\sjson\b)?)?\s?")
PLAIN_HEADS = [("start", ""), ("start", "assistant"), ("end", ""), ("end", "assistant")]
KINDS = {"analysis": "reasoning", "commentary": "content", "final": "content"}
FRAGMENTS = [
    *("assistant", "user", "analysis", "commentary", "final", " to=functions.f", " to=python"),
    *("json", " code", "<|channel|>final<|message|>", "<|channel|>analysis<|message|>", "{", " "),
]
SPELLED = [TOKENIZER.encode(text, special=False) for text in FRAGMENTS]
MARK_OF = harmony_marks(TOKENIZER)


def random_answer(draw: random.Random) -> list[int]:
    """Return tokens of which many are marks, and many spell what a header holds."""
    tokens: list[int] = []
    for _ in range(draw.randrange(12)):
        kind = draw.random()
        if kind < 0.4:
            tokens.append(draw.choice(list(MARK_OF)))
        elif kind < 0.7:
            tokens += draw.choice(SPELLED)
        else:
            tokens += draw.choices(range(TOKENIZER.vocab_size), k=draw.randrange(4))
    return tokens


def check(tokens: Sequence[int]) -> None:
    """Read an answer; every run of text between two marks comes out once, in order, in one part.

    Text may be left out where a header can stand, and only such as a header has; of a header that
    no `<|message|>` ends, only what the format knows.
    """
    reader = HarmonyReader(TOKENIZER, prompt_tail=PROMPT)
    out, pattern, run, header = "", "", [], True
    marks = ["start", *map(MARK_OF.get, tokens), "end"]
    heads: list[tuple[str, str]] = []  # the runs of the header, and the marks before them
    kind = ""  # that the header before a body demands
    seen: set[str] = set()
    for at, token in enumerate([*tokens, None]):
        deltas = reader.finish() if token is None else reader.push(token)
        out += "".join(text for kind, text, _ in deltas if kind != "tool_call")
        mark = MARK_OF.get(token) if token is not None else "end"
        if mark is None:
            run.append(token)
            seen.update(kind for kind, _, _ in deltas)
            continue
        text = TOKENIZER.decode(run)
        if header:
            within = (None, "channel", "constrain")
            ends_well = next(x for x in marks[at + 1 :] if x not in within) == "message"
            allowed = HEADER if ends_well or marks_before(marks, at) == "constrain" else KNOWN
            cuts = [end for end in range(len(text) + 1) if allowed.fullmatch(text, 0, end)]
            pattern += f"(?:{'|'.join(re.escape(text[end:]) for end in {0, *cuts})})"
            heads.append((marks_before(marks, at), text))
            if mark == "message":
                *first, (before, channel) = heads
                plain = before == "channel" and all(head in PLAIN_HEADS for head in first)
                kind = KINDS.get(channel, "") if plain else ""
        else:
            pattern += re.escape(text)
            seen.update(kind for kind, _, _ in deltas)
            assert len(seen - {"tool_call"}) <= 1
            if kind and text:
                assert seen == {kind}
        header_before = header
        if mark != "constrain":
            header = mark != "message"
        if mark in ("start", "end") or (mark == "channel" and not header_before):
            heads = []
        run, seen = [], set()
    assert re.fullmatch(pattern, out), (tokens, out, pattern)


def marks_before(marks: Sequence[str | None], at: int) -> str:
    """Return the mark that the run ending at a place began at."""
    return next(mark for mark in reversed(marks[: at + 1]) if mark is not None)


def test_random_answers_lose_nothing() -> None:
    draw = random.Random(17)
    for _ in range(5_000):
        check(random_answer(draw))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_random_answers_lose_nothing() -> None:
    draw = random.Random(18)
    for _ in range(1_000_000):
        check(random_answer(draw))


@settings(max_examples=150)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=30))
def test_any_tokens_lose_nothing(tokens: list[int]) -> None:
    check(tokens)


@settings(max_examples=150)
@given(st.integers(0, 1 << 30), st.data())
def test_how_text_is_cut_into_tokens_changes_nothing(seed: int, data: st.DataObject) -> None:
    tokens = random_answer(random.Random(seed))
    text = TOKENIZER.decode(tokens)
    if "\N{REPLACEMENT CHARACTER}" in text:
        return
    pieces = re.split(f"({'|'.join(map(re.escape, MARKS))})", text)
    cut: list[int] = []
    for piece in pieces:
        places = data.draw(st.lists(st.integers(0, len(piece)), max_size=4))
        ends = [0, *sorted(places), len(piece)] if piece not in MARKS else [0, len(piece)]
        for start, end in pairwise(ends):
            cut += TOKENIZER.encode(piece[start:end], special=False)
    assert read_tokens(HarmonyReader(TOKENIZER), cut) == read_tokens(
        HarmonyReader(TOKENIZER), tokens
    )
