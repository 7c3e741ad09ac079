"""Structured output: what ends is what was wanted, and hostile wishes are refused in time."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from answer_texts import read_tokens
from json_schemas import schema_of
from serving import model_with_template, without_harmony

import clocher_runtime
from clocher_kernels.errors import ConstraintFailed, UsageError
from clocher_kernels.ops.sampling import tokens_of, words_for
from clocher_runtime.api import LanguageModel
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.text import grammar
from clocher_runtime.text.answers import make_reader
from clocher_runtime.text.call_styles import STYLES
from clocher_runtime.text.grammar import GrammarMaker

DATA = Path(__file__).parent / "data"
TOKENIZER = (DATA / "clocher-tiny-llama" / "tokenizer.json").read_text(encoding="utf-8")
VOCABULARY = 4096
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    with clocher_runtime.load(threads=2, batch=8, context=512, prefix_cache=False) as made:
        yield made


@pytest.fixture(scope="module")
def maker() -> GrammarMaker:
    return GrammarMaker(TOKENIZER.encode(), VOCABULARY, [0])


def texts(
    model: LanguageModel,
    maker: GrammarMaker,
    specs: Sequence[Mapping[str, Any] | None],
    max_new: int = 400,
) -> list[tuple[str, str]]:
    """Return the finish and the text of each spec at temperature 1, made side by side."""
    ids: list[list[int]] = [[] for _ in specs]
    finish = [""] * len(specs)
    prompts = [model.tokenizer.encode(f"value {i}: ") for i in range(len(specs))]
    constraints = [None if spec is None else maker.compile(spec) for spec in specs]
    sampling = Sampling(temperature=1, seed=11)
    for token in model.session.generate(prompts, max_new, sampling, constraints=constraints):
        ids[token.sequence].append(token.id)
        finish[token.sequence] = token.finish
    ended = frozenset(model.model.spec.eos_ids)
    return [
        (why, model.tokenizer.decode([token for token in made if token not in ended]))
        for why, made in zip(finish, ids, strict=True)
    ]


def check_schemas(model: LanguageModel, maker: GrammarMaker, seeds: range) -> Counter[str]:
    """Make a text of each schema that can be had; those that end must be valid."""
    count: Counter[str] = Counter()
    schemas = []
    for schema in map(schema_of, seeds):
        jsonschema.Draft202012Validator.check_schema(schema)
        try:
            maker.check({"kind": "json_schema", "value": schema})
            schemas.append(schema)
        except UsageError as error:
            assert str(error).startswith("this structure "), error
            count["refused"] += 1
    made = texts(model, maker, [{"kind": "json_schema", "value": each} for each in schemas])
    for schema, (finish, text) in zip(schemas, made, strict=True):
        count[finish] += 1
        if finish == "stop":
            validator = jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
            faults = [error.message for error in validator.iter_errors(json.loads(text))]
            assert not faults, (schema, text, faults)
    return count


def test_what_ends_is_valid(model: LanguageModel, maker: GrammarMaker) -> None:
    count = check_schemas(model, maker, range(25))
    assert count["stop"] >= 12 and count["refused"] <= 8, count


@pytest.mark.slow
def test_what_ends_is_valid_of_500_schemas(model: LanguageModel, maker: GrammarMaker) -> None:
    count = check_schemas(model, maker, range(1000, 1500))
    print(count)
    assert count["stop"] >= 300 and count["refused"] <= 100, count


def test_company_changes_nothing(model: LanguageModel, maker: GrammarMaker) -> None:
    specs: list[Mapping[str, Any] | None] = [
        {"kind": "json_schema", "value": PERSON},
        None,
        {"kind": "regex", "value": "[a-z]{3,9}(-[0-9]{2}){2}"},
        {"kind": "grammar", "value": 'start: s\ns: "(" s ")" | WORD\nWORD: /[a-z]+/'},
        None,
        {"kind": "choice", "value": ["yes", "no", "perhaps"]},
    ]
    together = texts(model, maker, specs, 40)
    for index, spec in enumerate(specs):
        padded: list[Mapping[str, Any] | None] = [None] * index
        assert texts(model, maker, [*padded, spec], 40)[index] == together[index]


@pytest.mark.parametrize(
    ("option", "pattern"),
    [
        ({"regex": "[a-c]{2,4}/[0-9]+\n"}, r"[a-c]{2,4}/[0-9]+\n"),
        ({"regex": ""}, ""),
        ({"choice": ["left\n", 'r"ight', "größe"]}, 'left\n|r"ight|größe'),
        ({"grammar": 'start: "a" b\nb: /[0-9]{2}/ | "(" b ")"'}, r"a\(*[0-9]{2}\)*"),
        ({"grammar": 'root ::= "x" ("y" | "z") [0-9]'}, "x[yz][0-9]"),
    ],
    ids=str,
)
def test_the_whole_text_matches(
    model: LanguageModel, option: Mapping[str, Any], pattern: str
) -> None:
    import re

    for seed in range(4):
        done = model.complete("begin ", temperature=1, seed=seed, max_new=60, **option)
        assert done.finish_reason == "stop" and re.fullmatch(pattern, done.text), done


def test_a_structure_in_the_python_api(model: LanguageModel) -> None:
    done = model.complete("A dog: ", json_schema=PERSON, temperature=1, seed=3, max_new=200)
    assert done.finish_reason == "stop"
    jsonschema.validate(json.loads(done.text), PERSON)
    greedy = model.complete("{", json_object=True, max_new=30, repetition_penalty=1.2)
    assert greedy.text.startswith("{")
    batch = model.complete_batch(["1", "2"], choice=["red", "green"], temperature=1)
    assert {each.text for each in batch} <= {"red", "green"}
    chat = model.chat(
        [{"role": "user", "content": "hi"}], json_schema=PERSON, temperature=1, seed=3, max_new=300
    )
    head, _, answer = chat.text.rpartition("<|message|>")
    assert chat.finish_reason == "stop" and "<|channel|>final" in head
    jsonschema.validate(json.loads(answer), PERSON)


# What follows needs no model.


def steps(constraint: Any) -> np.ndarray:
    """Return the tokens that may come next."""
    mask = np.full(words_for(VOCABULARY + 100), 0xFFFFFFFF, np.uint32)
    constraint.fill(mask)
    return tokens_of(mask, VOCABULARY + 100)


def accepts(maker: GrammarMaker, model: LanguageModel, spec: Mapping[str, Any], text: str) -> bool:
    """Whether a text, special tokens spelled out, may be made, and is whole."""
    maker.check(spec)
    constraint = maker.compile(spec)
    mask = np.zeros(words_for(VOCABULARY), np.uint32)
    for token in model.tokenizer.encode(text, special=False):
        constraint.fill(mask)
        if token not in tokens_of(mask, VOCABULARY):
            return False
        constraint.take(token)
    constraint.fill(mask)
    return constraint.is_over or 0 in tokens_of(mask, VOCABULARY)


WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
FUNCTIONS = [WEATHER, {"name": "now"}]
FINAL = "<|channel|>final <|constrain|>json<|message|>"
THOUGHT = "<|channel|>analysis<|message|>Hm {\n}<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("style", "kind", "text", "whole"),
    [
        ("harmony", "json_object", FINAL + '{"a": 1}', True),
        ("harmony", "json_object", '<|channel|>final<|message|>{"a": 1}', True),
        ("harmony", "json_object", THOUGHT + FINAL + '{"a": 1}', True),
        ("harmony", "json_object", THOUGHT, False),
        ("harmony", "json_object", '{"a": 1}', False),
        ("harmony", "json_object", FINAL + "no", False),
        ("harmony", "tools", THOUGHT + CALL + '{"city": "Rome"}', True),
        ("harmony", "tools", CALL + '{"town": "Rome"}', False),
        ("harmony", "tools", FINAL + "{}", False),
        ("hermes", "json_object", '{"a": 1}', True),
        ("hermes", "json_object", '<think>\n{"a" <b>\n</think>\n\n{"a": 1}', True),
        ("hermes", "json_object", "<think>\nno\n</think>\n\nno", False),
        (
            "hermes",
            "tools",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
            True,
        ),
        ("hermes", "tools", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', True),
        ("hermes", "tools", '<tool_call>\n{"name": "then", "arguments": {}}\n</tool_call>', False),
        ("hermes", "tools", "The weather is fine", False),
        ("llama3", "tools", '{"name": "get_weather", "parameters": {"city": "Rome"}}', True),
        ("llama3", "tools", '{"name": "get_weather", "parameters": {}}', False),
    ],
)
def test_styles(
    maker: GrammarMaker, model: LanguageModel, style: str, kind: str, text: str, whole: bool
) -> None:
    value = FUNCTIONS if kind == "tools" else True
    assert accepts(maker, model, {"kind": kind, "value": value, "style": style}, text) == whole


@pytest.mark.parametrize("style", [name for name in STYLES if name != "harmony"])
def test_calls_of_every_style(maker: GrammarMaker, model: LanguageModel, style: str) -> None:
    """Only calls of known functions, one or several; what is accepted is read as calls."""
    form = STYLES[style]
    one = form.written([("get_weather", '{"city": "Rome"}')])
    two = form.written([("now", "{}"), ("now", "{}")])
    spec = {"kind": "tools", "value": FUNCTIONS, "style": style}
    assert accepts(maker, model, spec, one)
    assert not accepts(maker, model, spec, two)
    assert accepts(maker, model, {**spec, "several": True}, two)
    if not form.end:  # what stands between calls may also end the answer
        assert accepts(maker, model, {**spec, "several": True}, one + form.between)
    for wrong in ([("then", "{}")], [("get_weather", "{}")], []):
        assert not accepts(maker, model, spec, form.written(wrong))
    parts = make_reader(model.tokenizer, style, tools=True)
    read = read_tokens(parts, model.tokenizer.encode(two, special=False))
    assert [(kind, text) for kind, text, _ in read] == [
        ("tool_call", "now"),
        ("arguments", "{}"),
    ] * 2


def test_marks_that_are_tokens_are_made_as_tokens(maker: GrammarMaker) -> None:
    tokenizer = json.loads(TOKENIZER)
    for name in ("[TOOL_CALLS]", "[ARGS]"):
        token = {**tokenizer["added_tokens"][0], "id": VOCABULARY + len(name), "content": name}
        tokenizer["added_tokens"].append(token)
    marked = GrammarMaker(json.dumps(tokenizer).encode(), VOCABULARY + 100, [0])
    spec = {"kind": "tools", "value": FUNCTIONS, "style": "mistral"}
    marked.check(spec)
    constraint = marked.compile(spec)
    assert VOCABULARY + len("[TOOL_CALLS]") in steps(constraint)
    constraint.take(VOCABULARY + len("[TOOL_CALLS]"))
    assert VOCABULARY + len("[TOOL_CALLS]") not in steps(constraint)


def test_a_thought_that_the_prompt_began_goes_on(maker: GrammarMaker, model: LanguageModel) -> None:
    spec = {"kind": "tools", "value": FUNCTIONS, "style": "hermes", "opened": True}
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts(maker, model, spec, f"so {{it}} is\n</think>\n\n{call}")
    assert not accepts(maker, model, spec, call)


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "number", "exclusiveMinimum": 20, "maximum": 20.5}, "20.25", "20"),
        ({"type": "number", "minimum": -21.25, "exclusiveMaximum": -21}, "-21.1", "-21"),
        ({"allOf": [{"exclusiveMinimum": 0.0}, {"type": "number", "maximum": 0.5}]}, "0.5", "0"),
        ({"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": -1}, "-2", "-1"),
        ({"type": "number", "exclusiveMaximum": 4, "maximum": 3}, "3", "3.5"),
        ({"properties": {"const": {"exclusiveMinimum": 1, "maximum": 1.5, "type": "number"}}},
         '{"const": 1.25}', '{"const": 1}'),
    ],
    ids=str,
)  # fmt: skip
def test_excluded_bounds_are_excluded(
    maker: GrammarMaker, model: LanguageModel, schema: dict[str, Any], inside: str, outside: str
) -> None:
    spec = {"kind": "json_schema", "value": schema}
    assert accepts(maker, model, spec, inside) and not accepts(maker, model, spec, outside)


def test_a_format_that_is_not_checked_is_no_error(
    maker: GrammarMaker, model: LanguageModel
) -> None:
    """As for validators; what a schema quotes, and names of properties, stay."""
    schema = {
        "properties": {
            "path": {"type": "string", "format": "path", "maxLength": 3, "uniqueItems": False},
            "kind": {"const": {"format": "pdf", "exclusiveMinimum": 1}},
            "format": {"type": "string", "format": "date"},
        },
        "required": ["path", "kind", "format"],
    }
    spec = {"kind": "json_schema", "value": schema}
    text = (
        '{"path": "/a", "kind": {"format": "pdf", "exclusiveMinimum": 1}, "format": "2026-11-28"}'
    )
    assert accepts(maker, model, spec, text)
    for right, wrong in (("/a", "/abc"), ("pdf", "png"), ("2026-11-28", "today")):
        assert not accepts(maker, model, spec, text.replace(right, wrong))


def test_ids_that_no_token_has_are_never_allowed() -> None:
    maker = GrammarMaker(TOKENIZER.encode(), VOCABULARY + 100, [0])
    for spec in (
        {"kind": "regex", "value": "(.|\n)*"},
        {"kind": "grammar", "value": "start: <[4100]> | /a*/"},
    ):
        maker.check(spec)
        allowed = steps(maker.compile(spec))
        assert allowed.size and allowed.max() < VOCABULARY


def test_a_token_that_is_not_allowed_is_an_error(maker: GrammarMaker) -> None:
    constraint = maker.compile({"kind": "choice", "value": ["yes"]})
    with pytest.raises(ConstraintFailed, match="rejected a sampled token"):
        constraint.take(2000)
    with pytest.raises(ConstraintFailed, match="rejected a sampled token"):
        constraint.fill(np.zeros(words_for(VOCABULARY), np.uint32))


def chain(count: int, inner: str) -> dict[str, Any]:
    """Return a schema whose definitions refer to each other."""
    names: dict[str, Any] = {
        f"d{i}": json.loads(inner.replace("NEXT", f"#/$defs/d{i + 1}")) for i in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**names, f"d{count}": {"type": "string"}}}


HOSTILE: dict[str, tuple[str, Any]] = {
    "no schema": ("json_schema", {"type": "strange"}),
    "list": ("json_schema", [1]),
    "NaN": ("json_schema", {"minimum": float("nan")}),
    "huge": ("json_schema", {"enum": ["x" * 100] * 2000}),
    "deep": ("json_schema", json.loads('{"items":' * 900 + "{}" + "}" * 900)),
    "loop": ("json_schema", {"$ref": "#"}),
    "long chain of arrays": (
        "json_schema",
        chain(1500, '{"type":"array","items":{"$ref":"NEXT"}}'),
    ),
    "patterns at once": (
        "json_schema",
        {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(20)]},
    ),
    "divisors": (
        "json_schema",
        {"allOf": [{"type": "integer", "multipleOf": p} for p in (2, 3, 5, 7, 11, 13, 17, 19)]},
    ),
    "not obeyed": ("json_schema", {"type": "array", "uniqueItems": True}),
    "impossible": ("json_schema", {"type": "string", "minLength": 5, "maxLength": 2}),
    "open": ("regex", "(a"),
    "look-ahead": ("regex", "(?=a)b"),
    "long": ("regex", "a" * 20_000),
    "number": ("regex", 3),
    "end of line": ("regex", "\\"),
    "nested": ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "no rule": ("grammar", "start: nothing"),
    "nested GBNF": ("grammar", "root ::= " + "(" * 30_000),
    "chain": ("grammar", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(2000))),
    "nothing": ("choice", []),
    "numbers": ("choice", [1]),
    "surrogate": ("choice", ["\ud800"]),
    "false": ("json_object", False),
    "kind": ("xml", "<a>"),
}


def test_what_is_wrong_with_a_regular_expression_is_said(maker: GrammarMaker) -> None:
    with pytest.raises(UsageError, match=r'invalid regex "\(a": unclosed group$'):
        maker.check({"kind": "regex", "value": "(a"})


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.one_in(2)
def test_what_cannot_be_had_is_refused_in_one_line_and_in_time(
    maker: GrammarMaker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "CHECK_SECONDS", 0.5)  # what takes longer is ended
    kind, value = HOSTILE[name]
    began = time.monotonic()
    with pytest.raises(UsageError) as caught:
        maker.check({"kind": kind, "value": value, "style": "plain"})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert time.monotonic() - began < 60
    maker.check({"kind": "choice", "value": [name]})  # and the next one is served


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", {"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}),
        ("json_schema", {"type": "string", "maxLength": 10**6}),
        ("json_schema", {"enum": [f"number {i}" for i in range(5000)]}),
        ("json_schema", chain(100, '{"type":"array","items":{"$ref":"NEXT"}}')),
        ("regex", "(a|b){1,100000}"),
        ("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
        ("regex", "(a*)*b"),
        ("grammar", "start: s\ns: s s s | s s | T\nT: /[a-z]/"),
    ],
    ids=["items", "length", "enum", "chain", "many", "nested", "stars", "ambiguous"],
)
def test_what_is_large_takes_a_bounded_time_for_a_token(
    maker: GrammarMaker, kind: str, value: Any
) -> None:
    maker.check({"kind": kind, "value": value})
    constraint = maker.compile({"kind": kind, "value": value})
    rng = np.random.default_rng(0)
    mask = np.zeros(words_for(VOCABULARY), np.uint32)
    worst = 0.0
    for _ in range(100):
        began = time.thread_time()
        try:
            constraint.fill(mask)
            tokens = tokens_of(mask, VOCABULARY)
            constraint.take(int(rng.choice(tokens[tokens > 0])) if tokens[-1] else 0)
        except UsageError as error:
            assert "cannot go on" in str(error)
            break
        finally:
            worst = max(worst, time.thread_time() - began)
        if constraint.is_over:
            break
    assert worst < 1.0


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        return None if name == "llguidance" else find_spec(name)

    monkeypatch.setattr(grammar, "find_spec", missing)
    with pytest.raises(UsageError, match=r"pip install '\.\[serve\]' in a clone"):
        GrammarMaker(TOKENIZER.encode(), VOCABULARY, [0])


def test_a_model_without_an_end_has_none() -> None:
    with pytest.raises(UsageError, match="leave it out"):
        GrammarMaker(TOKENIZER.encode(), VOCABULARY, [])


def test_an_answer_comes_after_the_thoughts_that_the_prompt_began(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{# <tool_call> #}<think>"
    directory = model_with_template(tmp_path / "hermes", embedded_model(), template)
    without_harmony(directory)
    with clocher_runtime.load(directory) as thinker:
        found = thinker.chat([{"role": "user", "content": "Hello"}], max_new=16, choice=["Yes"])
    assert not found.text.startswith("Yes")
    assert found.finish_reason == "length" or found.text.endswith("</think>Yes")


def test_two_structures_at_once(model: LanguageModel) -> None:
    with pytest.raises(UsageError, match="regex and choice cannot both be obeyed"):
        model.complete("a", regex="b", choice=["c"])
