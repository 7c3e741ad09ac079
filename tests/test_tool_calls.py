"""Calls and thoughts in answers that are plain text, however the text is cut."""

import json
import random
import re
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clocher_runtime.text.answers import TextReader, Thinking
from clocher_runtime.text.call_styles import STYLES
from clocher_runtime.text.tool_calls import LlamaCalls, MarkedCalls
from tests.answer_texts import joined, read_pieces

Parts = list[tuple[str, str, int]]
TYPES = {
    "code": {"type": "string"},
    "some": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "count": {"type": "integer"},
    "all": {"type": "boolean"},
}
FUNCTIONS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": TYPES}}}
    for name in ("f", "g", "get_weather")
]
READERS: dict[str, Callable[[], TextReader]] = {
    **{
        name: partial(MarkedCalls, STYLES[name], FUNCTIONS)
        for name in STYLES
        if name not in ("harmony", "hermes", "llama3")
    },
    "hermes": lambda: MarkedCalls(STYLES["hermes"]),
    "hermes_xml": partial(MarkedCalls, STYLES["hermes"], FUNCTIONS),
    "llama": LlamaCalls,
    "thinking": lambda: Thinking(TextReader(), opened=False),
    "opened": lambda: Thinking(MarkedCalls(STYLES["hermes"]), opened=True),
    "both": lambda: Thinking(MarkedCalls(STYLES["hermes"]), opened=False),
}


def call(name: str, arguments: str, index: int = 0) -> Parts:
    return [("tool_call", name, index), ("arguments", arguments, index)]


def content(text: str) -> Parts:
    return [("content", text, 0)]


WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris \\"}\\" \\u00e9", "n": [1, {}]}}'
ARGUMENTS = '{"city": "Paris \\"}\\" \\u00e9", "n": [1, {}]}'
BARE = WEATHER.replace("arguments", "parameters")
CASES: list[tuple[str, str, Parts]] = [
    (
        "hermes",
        f"Sure:\n```json\n{WEATHER}\n```",
        content("Sure:") + call("get_weather", ARGUMENTS),
    ),
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", call("get_weather", ARGUMENTS)),
    (
        "hermes",
        f"I look.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n"
        '{"name": "f", "arguments": {}}\n</tool_call>',
        content("I look.") + call("get_weather", ARGUMENTS) + call("f", "{}", 1),
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "id": 7, "name": "f"}</tool_call> Done.',
        call("f", '{"a": 1}') + content(" Done."),
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', call("f", "{}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', call("f", "{}")),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        call("f", '{"a": 1}'),
    ),
    # A last brace too few, one too many, no closing mark, a line break in a string.
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}\n</tool_call>\nx',
        call("f", "{}") + content("x"),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>', call("f", "{}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', call("f", "{}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}', call("f", '{"a": "1\n2"}')),
    # Cut short, by the length or by an error.
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a',
        content('<tool_call>{"name": "f", "arguments": {"a'),
    ),
    ("hermes", '<tool_call>{"name": "f", "argum', content('<tool_call>{"name": "f", "argum')),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call>',
        content('<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call>'),
    ),
    ("llama", BARE, call("get_weather", ARGUMENTS)),
    ("llama", f"<|python_tag|>{BARE}", call("get_weather", ARGUMENTS)),
    (
        "llama",
        f'{BARE}; {{"name": "f", "parameters": {{}}}}',
        call("get_weather", ARGUMENTS) + call("f", "{}", 1),
    ),
    ("llama", f'{{"type": "function", {BARE[1:]}', call("get_weather", ARGUMENTS)),
    # Qwen3-Coder: what is text by the schema stays text.
    (
        "hermes_xml",
        'Well.\n<tool_call>\n<function=f>\n<parameter=code>\nif a:\n    b("</i>")\n</parameter>\n'
        "<parameter=some>\n12\n</parameter>\n<parameter=count>\n12\n</parameter>\n"
        '<parameter=all>\nTrue\n</parameter>\n<parameter=other>\n{"a": [1]}\n'
        "</parameter>\n</function>\n</tool_call>",
        content("Well.")
        + call(
            "f",
            '{"code": "if a:\\n    b(\\"</i>\\")", "some": "12", "count": 12, "all": true, '
            '"other": {"a": [1]}}',
        ),
    ),
    ("hermes_xml", "<tool_call>\n<function=f>\n</function>\n</tool_call>", call("f", "{}")),
    ("hermes_xml", f"<tool_call>\n{WEATHER}\n</tool_call>", call("get_weather", ARGUMENTS)),
    # Mistral: a list, or names before the arguments.
    (
        "mistral_list",
        f'[TOOL_CALLS][{WEATHER}, {{"name": "f", "arguments": {{}}, "id": "abcdefghi"}}]',
        call("get_weather", ARGUMENTS) + call("f", "{}", 1),
    ),
    (
        "mistral",
        'Well.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
        content("Well.") + call("f", '{"a": 1}') + call("g", "{}", 1),
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}\nDone {it}', call("f", '{"a": 1}') + content("Done {it}")),
    # DeepSeek R1 and V3, then V3.1.
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n'
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        call("f", '{"a": 1}') + call("g", "{}", 1),
    ),
    (
        "deepseek",
        'Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        content("Ok.") + call("f", '{"a": 1}') + call("function", "{}", 1),
    ),
    ("granite", f"<|tool_call|>[{WEATHER}]", call("get_weather", ARGUMENTS)),
    ("granite", f"<|tool_call|> {WEATHER}", call("get_weather", ARGUMENTS)),
    (
        "phi4",
        f'<|tool_call|>[{WEATHER},{{"type":"function","function":{{"name":"f","arguments":{{}}}}}}]'
        "<|/tool_call|>",
        call("get_weather", ARGUMENTS) + call("f", "{}", 1),
    ),
    (
        "function_gemma",
        '<start_function_call>call:f{city:<escape>Rome, "x" {1}<escape>,n:3,all:true,l:[<escape>a'
        "<escape>],o:{k:1}}<end_function_call><start_function_call>call:g{}<end_function_call>",
        call("f", '{"city":"Rome, \\"x\\" {1}","n":3,"all":true,"l":["a"],"o":{"k":1}}')
        + call("g", "{}", 1),
    ),
    # Gemma: JSON or Python within a fence.
    ("gemma", f"Sure:\n```json\n{WEATHER}\n```", content("Sure:") + call("get_weather", ARGUMENTS)),
    (
        "gemma",
        "```tool_code\nprint(f(city=\"Rome\", what='it\\'s \"x\"', l=[1, None], d={'k': True}))\n"
        "g()\n```",
        call("f", '{"city":"Rome", "what":"it\'s \\"x\\"", "l":[1, null], "d":{"k": true}}')
        + call("g", "{}", 1),
    ),
    ("gemma", '```json\n{"name": "Alice"}\n```', content('```json\n{"name": "Alice"}\n```')),
    ("plain", f"<tool_call>\n{WEATHER}\n</tool_call>", call("get_weather", ARGUMENTS)),
    # Without marks, as Qwen2.5-Coder also does: at the start, and of functions that there are.
    ("hermes_xml", WEATHER, call("get_weather", ARGUMENTS)),
    ("hermes_xml", WEATHER[:-1], call("get_weather", ARGUMENTS)),
    (
        "plain",
        f'\n{WEATHER}\n{{\n  "name": "f", "arguments": {{}}\n}}\n\nDone.',
        call("get_weather", ARGUMENTS) + call("f", "{}", 1) + content("Done."),
    ),
    (
        "gemma",
        f"{WEATHER}\n<tool_call>{WEATHER}</tool_call>",
        call("get_weather", ARGUMENTS) + call("get_weather", ARGUMENTS, 1),
    ),
    (
        "hermes_xml",
        '{"name": "f", "arguments": {}} {"name": "h", "arguments": {}}',
        call("f", "{}") + content(' {"name": "h", "arguments": {}}'),
    ),
    ("hermes_xml", f"As {WEATHER}", content(f"As {WEATHER}")),
    (
        "thinking",
        "<think>\nHm.\n</think>\n\nYes.",
        [("reasoning", "Hm.", 0), ("content", "Yes.", 0)],
    ),
    ("thinking", "<think>\n\n</think>\n\nYes.", content("Yes.")),
    ("thinking", "<think>Hm.\n", [("reasoning", "Hm.\n", 0)]),
    ("thinking", "Yes <think>no</think>", content("Yes <think>no</think>")),
    ("opened", "Hm.</think>Yes.", [("reasoning", "Hm.", 0), ("content", "Yes.", 0)]),
    ("opened", "<think>\nHm.</think>Yes.", [("reasoning", "Hm.", 0), ("content", "Yes.", 0)]),
    ("opened", "\nHm", [("reasoning", "Hm", 0)]),
    (
        "both",
        f"<think>\n<tool_call>? {{\n</think>\n\n<tool_call>\n{WEATHER}\n</tool_call>",
        [("reasoning", "<tool_call>? {", 0), *call("get_weather", ARGUMENTS)],
    ),
]
TEXTS = [
    *(
        "",
        " ",
        "Hello <world",
        "<",
        "<tool_call",
        "<tool_call>",
        "<tool_call>\n",
        "a\n\n\n<b",
        "\n" * 9,
    ),
    *("<tool_call>{}</tool_call>", "<tool_call>[1]</tool_call>", '<tool_call>{"x": 1}</tool_call>'),
    *(
        '<tool_call>{"name": 3}',
        '<tool_call>{"name": "a b", "arguments": {}}',
        "<tool_call>\n\nhi\n",
    ),
    *('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"name": "f", "arguments": [1]}'),
    *('{"name": "Alice", "age": 3}', '{"name": "Alice"}', '{"parameters": {}}', '{"a": [1, 2', "{"),
    *("<|python_tag|>print(1)", "<|python", " " * 40 + "{}", '{"name": "f", "parameters": "x"}'),
    *("<think", "<th", " <thin", "x</think>"),
    *("[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS] f x", '[TOOL_CALLS][{"name": "f"', "[TOOL_"),
    *("[TOOL_CALLS]f[ARGS]", '[TOOL_CALLS]f[ARGS]{"a', "[TOOL_CALLS]f[ARGS][1]", "[ARGS]{}"),
    *("<|tool_call|>[]", "<|tool_call|>[1]", "<|tool_call|>hi", "<|/tool_call|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>f{<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
    "<tool_call>\n<function=f g>\n</function>\n</tool_call>",
    "<tool_call>\n<function=f>\nx\n</function>\n</tool_call>",
    *(
        "<start_function_call>call:f{a:<escape>x}<end_function_call>",
        "call:f{}",
        "```json\n{}\n```",
    ),
    *('```json\n{"name": "f"}\n```', '```json\n{"name": "f", "arguments": {}, "x": 1}\n```'),
    *("```tool_code\nf(1)\n```", "```tool_code\nx = f(a=1)\n```", "```tool_code\nf(a=(1, 2))```"),
]


DEEP = [
    "```tool_code\n" + "f(a=" * 500 + "1" + ")" * 500 + "\n```",
    "[TOOL_CALLS]" + '[{"a":' * 2000,
]
DEEP += ["<tool_call>\n" + "<function=f>" * 500, "[TOOL_CALLS]" * 500, "```json\n" + "'" * 2000]


@pytest.mark.parametrize(("reader", "text", "parts"), CASES)
def test_an_answer_is_read(reader: str, text: str, parts: Parts) -> None:
    assert read_pieces(READERS[reader](), [text]) == parts
    assert read_pieces(READERS[reader](), text) == parts  # a character at a time


@pytest.mark.parametrize("text", TEXTS + DEEP)
@pytest.mark.parametrize("reader", [name for name in READERS if name != "opened"])
def test_what_is_no_call_is_text(reader: str, text: str) -> None:
    expected = content(text) if text else []
    assert read_pieces(READERS[reader](), [text] if text else []) == expected
    assert read_pieces(READERS[reader](), text) == expected


def test_a_fence_calls_functions_that_there_are_only() -> None:
    text = '```json\n{"name": "h", "arguments": {}}\n```'
    assert read_pieces(MarkedCalls(STYLES["hermes"], FUNCTIONS), text) == content(text)


def test_a_call_comes_as_soon_as_it_is_whole() -> None:
    for reader, text in (
        (MarkedCalls(STYLES["hermes"]), f"<tool_call>{WEATHER}</tool_call>"),
        (LlamaCalls(), BARE),
        (MarkedCalls(STYLES["hermes"], FUNCTIONS), WEATHER),
    ):
        for character in text[:-1]:
            assert not reader.push(character)
        assert joined(reader.push(text[-1])) == call("get_weather", ARGUMENTS)


def test_text_is_not_held_back() -> None:
    for make in READERS.values():
        reader = make()
        assert all(
            reader.push(word) for word in ["A", " list", " {", '"a"', ": 1}", ".\nB", " <b>"]
        )


def test_json_that_is_no_call_is_not_held_back() -> None:
    assert LlamaCalls().push('{"title": "Alice", ')
    for text in ('{"title"', '{"name": "Alice"', "{\n  3", '{"name": 3', " A"):
        assert MarkedCalls(STYLES["hermes"], FUNCTIONS).push(text)


def mutated(draw: random.Random) -> str:
    """Return answers with calls, and a few characters of them lost, doubled or moved."""
    parts = [text for _, text, _ in CASES] + TEXTS
    text = "".join(draw.choices(parts, k=draw.randrange(1, 4)))
    for _ in range(draw.choice((0, 0, 1, 1, 2, 5))):
        at, size = draw.randrange(len(text) + 1), draw.randrange(4)
        other = draw.randrange(len(text) + 1)
        new = draw.choice(("", "", text[other : other + size], draw.choice('{}"\\[],:\n <x')))
        text = text[:at] + new + text[at + size :]
    return text


@pytest.mark.parametrize("name", READERS)
def test_how_text_is_cut_changes_nothing_and_nothing_is_lost(name: str) -> None:
    draw = random.Random(name)
    for _ in range(800):
        text = mutated(draw)
        places = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(6)))
        pieces = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
        parts = read_pieces(READERS[name](), pieces)
        assert parts == read_pieces(READERS[name](), text) == read_pieces(READERS[name](), [text])
        is_there(text, parts)


def is_there(text: str, parts: Parts) -> None:
    """Whatever comes out stands in the text, in order; all of it if there was nothing to read.

    Arguments are a whole JSON object, as the text spells it or not.
    """
    kinds = {kind for kind, _, _ in parts}
    if kinds <= {"content"} and "think>" not in text:
        assert "".join(piece for _, piece, _ in parts) == text
    at, calls = 0, 0
    for kind, piece, index in parts:
        if kind == "tool_call":
            assert index == calls and re.fullmatch(r"[\w.-]+", piece) and piece in text
            calls += 1
        elif kind == "arguments":
            assert index == calls - 1
            assert isinstance(json.loads(piece, strict=False), dict)
        else:
            at = text.index(piece, at) + len(piece)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(-9, 9) | st.text(max_size=8)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(SCALARS.map(str), SCALARS)


@settings(max_examples=80)
@given(st.dictionaries(st.text(max_size=8), VALUES), st.booleans(), st.sampled_from([None, 1]))
def test_any_arguments_come_out_as_they_are(
    value: object, ascii_only: bool, indent: int | None
) -> None:
    arguments = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>\nok'
    assert read_pieces(MarkedCalls(STYLES["hermes"]), text) == call("f", arguments) + content("ok")
