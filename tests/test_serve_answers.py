"""Structured output, reasoning and calls: grammars make a tiny model say what is looked for."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from serving import Served, model_with_template, serving, that_ends, without_harmony

from clocher_runtime.checkpoints.locate import embedded_model

TEMPLATE = (
    "{%- if tools -%}<|start|>system<|message|>Tools: {{ tools | tojson }}<|end|>{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{%- endif -%}"
    "{%- for call in m.tool_calls or [] -%}<|start|>assistant<|channel|>commentary to=functions."
    "{{ call.function.name }}<|message|>{{ call.function.arguments | tojson }}<|call|>"
    "{%- endfor -%}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "unit": {"enum": ["m", "km"]}},
    "required": ["count", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("measure", "geo.measure-2")
]
MESSAGES = [{"role": "user", "content": "How far?"}]
THOUGHT = '<|channel|> "analysis" <|message|> "It is far." <|end|> <|start|> "assistant" '


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("models") / "speaker"
    with serving("--model-dir", model_with_template(directory, embedded_model(), TEMPLATE)) as one:
        yield one


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(server: Served, **body: Any) -> dict[str, Any]:
    response = server.ask(
        "/v1/chat/completions", **{"messages": MESSAGES, "max_tokens": 500, "seed": 3} | body
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def joined(server: Served, **body: Any) -> dict[str, Any]:
    """Return the message that the chunks of a stream add up to, and why it ended."""
    text: dict[str, str] = {}
    calls: dict[int, dict[str, str]] = {}
    finish = None
    for event in server.events("/v1/chat/completions", messages=MESSAGES, **body)[:-1]:
        delta = event["choices"][0]["delta"]
        for key in ("content", "reasoning_content"):
            text[key] = text.get(key, "") + (delta.get(key) or "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] not in calls, "an id comes once"
                calls[call["index"]] = {"name": call["function"]["name"], "arguments": ""}
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
        finish = finish or event["choices"][0]["finish_reason"]
    return {**text, "calls": list(calls.values()), "finish": finish}


def ended(server: Served, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an answer that came to its end, whole and streamed."""

    def ask(seed: int) -> dict[str, Any] | None:
        body.update(seed=seed, max_tokens=100)
        choice = chat(server, **body)
        return choice if choice["finish_reason"] != "length" else None

    return that_ends(ask), joined(server, **body)


def test_reasoning_is_apart_from_the_answer(server):
    grammar = f'start: {THOUGHT} <|channel|> "final" <|message|> "Yes, 鐘." <|return|>'
    choice, streamed = ended(server, guided_grammar=grammar)
    message = choice["message"]
    assert message["content"] == "Yes, 鐘."
    assert message["reasoning_content"].endswith("It is far.")
    assert message["reasoning_content"] == message["reasoning"] == streamed["reasoning_content"]
    assert streamed["content"] == message["content"]
    assert streamed["finish"] == "stop"


@pytest.mark.parametrize(
    "header",
    [
        '" to=functions.measure" <|channel|> "commentary " <|constrain|> "json" <|message|>',
        '<|channel|> "commentary to=functions.measure " <|constrain|> "json" <|message|>',
        '<|channel|> "analysis to=functions.measure" <|message|>',
    ],
)
def test_calls_have_names_without_marks(server, header):
    arguments = r'"{\"count\": 3, \"unit\": \"km\"}"'
    grammar = f"start: {THOUGHT} {header} {arguments} <|call|>"
    choice, streamed = ended(server, guided_grammar=grammar, tools=TOOLS)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert call["function"] == {"name": "measure", "arguments": '{"count": 3, "unit": "km"}'}
    assert streamed["calls"] == [call["function"]]
    assert streamed["finish"] == "tool_calls"
    assert streamed["reasoning_content"].endswith("It is far.")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"measure", "geo.measure-2"}),
        ({"type": "function", "function": {"name": "geo.measure-2"}}, {"geo.measure-2"}),
    ],
)
def test_a_call_that_is_wanted_is_made(server, choice, names):
    found = set()
    for seed in range(20):
        answer = chat(server, tools=TOOLS, tool_choice=choice, seed=seed, max_tokens=120)
        if answer["finish_reason"] != "length":
            (call,) = answer["message"]["tool_calls"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
            found.add(call["function"]["name"])
        if found == names:
            break
    assert found and found <= names


def test_a_conversation_with_calls_goes_on(server, client):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "measure", "arguments": '{"count": 1, "unit": "m"}'},
    }
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": "1 m"},
    ]
    body = {"messages": history, "tools": TOOLS}
    tokens = server.ask("/tokenize", **body).json()["tokens"]
    text = server.ask("/detokenize", tokens=tokens).json()["prompt"]
    assert 'to=functions.measure<|message|>{"count": 1, "unit": "m"}<|call|>' in text
    assert "<|channel|>analysis<|message|>Hm.<|end|>" in text
    assert chat(server, messages=history, tools=TOOLS, max_tokens=5)["finish_reason"]


def test_json_of_a_schema(server, client):
    class Distance(pydantic.BaseModel):
        count: int
        unit: str

    wanted = {"type": "json_schema", "json_schema": {"name": "distance", "schema": SCHEMA}}
    complete = 0
    for seed in range(20):
        choice = chat(server, response_format=wanted, seed=seed, temperature=1, max_tokens=120)
        if choice["finish_reason"] == "stop":
            complete += 1
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        if complete == 3:
            break
    assert complete
    parsed = that_ends(
        lambda seed: client.chat.completions.parse(
            model=server.facts["model"],
            messages=MESSAGES,
            response_format=Distance,
            max_tokens=200,
            seed=seed,
        )
    )
    assert isinstance(parsed.choices[0].message.parsed, Distance)


def test_other_forms(server):
    choice, _ = ended(server, guided_choice=["a/b", 'say "no"'])
    assert choice["message"]["content"] in ("a/b", 'say "no"')
    choice, _ = ended(server, guided_regex="[0-9]{3}/x")
    assert choice["message"]["content"].endswith("/x")
    choice, streamed = ended(server, response_format={"type": "json_object"})
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert streamed["content"] == choice["message"]["content"]
    text = server.ask(
        "/v1/completions", prompt="x", max_tokens=50, structured_outputs={"regex": "(ab)+"}
    ).json()["choices"][0]["text"]
    assert set(text) == {"a", "b"}


def test_numbers_of_a_schema_may_be_beyond_64_bits(server):
    schema = {"type": "object", "properties": {"n": {"const": 10**30}}, "required": ["n"]}
    schema |= {"additionalProperties": False}
    choice, _ = ended(server, guided_json=schema)
    assert json.loads(choice["message"]["content"]) == {"n": 10**30}


def test_the_same_constrained_text_in_company(server):
    from concurrent.futures import ThreadPoolExecutor

    wanted = {"type": "json_schema", "json_schema": {"name": "distance", "schema": SCHEMA}}

    def one(seed: int) -> str:
        form = {"response_format": wanted} if seed % 2 else {}
        return chat(server, seed=seed, max_tokens=60, **form)["message"]["content"]

    alone = [one(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(6))) == alone


@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "[0-9"},
        {"guided_grammar": "start: nothing"},
        {"guided_json": {"type": "nonsense"}},
        {"guided_json": {"$ref": "#/nowhere"}},
        {"guided_regex": "a", "guided_choice": ["b"]},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
    ],
)
def test_what_cannot_be_followed_is_refused_and_harms_nobody(server, body):
    response = server.ask("/v1/chat/completions", messages=MESSAGES, max_tokens=5, **body)
    assert response.status_code == 400, response.text
    assert server.health()["restarts"] == 0
    assert chat(server, max_tokens=3)["finish_reason"] == "length"


def test_a_fresh_server():
    """What ends a text does not depend on who asked first."""
    with serving() as fresh:
        body = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"regex": "a*"}}
        assert fresh.ask("/v1/completions", ignore_eos=True, **body).status_code == 200
        (end,) = fresh.ask("/tokenize", prompt="<|return|>").json()["tokens"]
        answer = fresh.ask("/v1/completions", logit_bias={end: 100}, logprobs=0, **body).json()
        (choice,) = answer["choices"]
        assert choice["logprobs"]["tokens"] == ["<|return|>"]
        assert choice["text"] == "" and choice["finish_reason"] == "stop"


def test_the_models_of_others_have_their_own_marks(tmp_path: Path):
    template = "{%- for m in messages -%}{{ m.content }}{%- endfor -%}{# <tool_call> #}{{ tools }}"
    directory = model_with_template(tmp_path / "hermes", embedded_model(), template)
    without_harmony(directory)
    with serving("--model-dir", directory) as hermes:
        call = (
            r'"<tool_call>\n{\"name\": \"measure\", \"arguments\": {\"count\": 3}}\n</tool_call>"'
        )
        body = {"guided_grammar": f"start: {call}", "tools": TOOLS, "max_tokens": 60}
        # It may think first, and it may think for ever.
        answers = (joined(hermes, seed=seed, **body) for seed in range(30))
        whole = list(islice((said for said in answers if said["finish"] == "tool_calls"), 2))
        assert whole
        for said in whole:
            assert said["calls"] == [{"name": "measure", "arguments": '{"count": 3}'}]
            assert not said["content"].strip()
        body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        forced, streamed = ended(hermes, **body)
        (call,) = forced["message"]["tool_calls"]
        assert call["function"]["name"] in ("measure", "geo.measure-2")
        assert streamed["calls"] == [call["function"]]


def test_tools_with_a_template_that_knows_none(tmp_path: Path):
    """The prompt lists them, a required call is made, and results reach the prompt."""
    directory = model_with_template(tmp_path / "plain", embedded_model(), "{{ messages }}")
    without_harmony(directory)
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with serving("--model-dir", directory, "--chat-template", template) as plain:
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "measure", "arguments": '{"count": 1, "unit": "m"}'},
        }
        history = [
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "1 m"},
        ]
        tokens = plain.ask("/tokenize", messages=history, tools=TOOLS).json()["tokens"]
        text = plain.ask("/detokenize", tokens=tokens).json()["prompt"]
        assert text.startswith("system: # Tools") and '"name": "geo.measure-2"' in text
        assert '<tool_call>\n{"name": "measure", "arguments": {"count": 1, "unit": "m"}}' in text
        assert text.endswith("user: <tool_response>\n1 m\n</tool_response>\n")
        written = r'"<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>"'
        auto, streamed = ended(plain, guided_grammar=f"start: {written} {written}", tools=TOOLS)
        assert [each["function"]["name"] for each in auto["message"]["tool_calls"]] == ["f", "f"]
        assert streamed["calls"] == [{"name": "f", "arguments": "{}"}] * 2
        one, streamed = ended(
            plain, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=0.5
        )
        (made,) = one["message"]["tool_calls"]
        assert streamed["calls"] == [made["function"]]
        jsonschema.validate(json.loads(made["function"]["arguments"]), SCHEMA)
        for seed in range(20):
            several = chat(plain, tools=TOOLS, tool_choice="required", seed=seed, max_tokens=200)
            calls = several["message"].get("tool_calls", [])
            for made in calls:
                jsonschema.validate(json.loads(made["function"]["arguments"]), SCHEMA)
            if len(calls) > 1:
                break
        assert len(calls) > 1
        named = {"type": "function", "name": "measure"}
        tools = [{"type": "function", "strict": True, **each["function"]} for each in TOOLS]
        output = plain.ask(
            "/v1/responses",
            **{"input": "How far?", "tools": tools, "tool_choice": named, "temperature": 0.5},
        ).json()["output"]
        assert [item["name"] for item in output if item["type"] == "function_call"] == ["measure"]
        refused = plain.ask("/v1/chat/completions", messages=MESSAGES, chat_template="x")
        assert refused.status_code == 400
