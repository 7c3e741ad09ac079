"""Requests of the HTTP API: what they may hold, what is refused, and how it is said."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clocher_kernels.errors import (
    DeviceError,
    ModelError,
    NonFinite,
    OutOfMemory,
    SessionBusy,
    UsageError,
)
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.serve import errors
from clocher_runtime.serve.errors import ApiError, failure
from clocher_runtime.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from clocher_runtime.serve.schemas import Schema

MESSAGES = [{"role": "user", "content": "Hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def parsed(schema: type[Schema], fields: object) -> Any:
    data = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return schema.parse(data)


def chat(**fields: object) -> ChatRequest:
    return parsed(ChatRequest, {"messages": MESSAGES} | fields)


def completion(**fields: object) -> CompletionRequest:
    return parsed(CompletionRequest, {"prompt": "x"} | fields)


def refusal(schema: type[Schema], fields: object) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parsed(schema, fields)
    error = raised.value
    assert error.status == 400 and error.type == "invalid_request_error"
    assert len(error.message) < 400 and not re.search(r"(?<!\S)--\w", error.message)
    json.dumps(error.body).encode()
    return error


def chat_refusal(**fields: object) -> ApiError:
    return refusal(ChatRequest, {"messages": MESSAGES} | fields)


# -- what clients send --


def test_what_a_bench_of_vllm_sends_is_read() -> None:
    request = chat(
        model="m",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        max_completion_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
        ignore_eos=True,
        temperature=0,
    )
    assert request.dialogue() == [{"role": "user", "content": "Hi"}]
    assert request.budget == 32 and request.options.include_usage and request.ignore_eos
    request = completion(repetition_penalty=1.0, logprobs=None, best_of=1, max_tokens=7)
    assert (request.prompt, request.budget, request.top) == (["x"], 7, -1)


def test_what_guidellm_sends_is_read() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = chat(stop=None, ignore_eos=True, stream=True, stream_options=options)
    assert request.options.continuous_usage_stats and request.stop is None


def test_what_lm_eval_sends_is_read() -> None:
    request = completion(
        prompt=[[1, 2, 3], [4]], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )
    assert request.prompt == [[1, 2, 3], [4]] and request.top == 1 and request.echo
    assert Sampling(**request.sampling()) == Sampling(seed=1234)


def test_fields_that_nobody_knows_are_ignored() -> None:
    request = chat(
        user="u", store=True, metadata={"a": "b"}, service_tier="auto", chat_id="x", keep_alive=-1
    )
    assert request.dialogue() == MESSAGES


@pytest.mark.parametrize("mode", ["auto", "off", "lossless", "static:2", "joint:.5,.9"])
def test_how_blocks_are_denoised_is_one_of_the_ways(mode: str) -> None:
    assert chat(diffusion=mode).diffusion == completion(diffusion=mode).diffusion == mode
    options = {"include_canvas": True}
    assert chat(stream=True, stream_options=options).options.include_canvas
    assert not chat(stream=True).options.include_canvas


def test_null_is_as_good_as_absent() -> None:
    names = set(ChatRequest.model_fields) - {"messages"}
    assert chat(**dict.fromkeys(names)) == chat()
    names = set(CompletionRequest.model_fields) - {"prompt"}
    assert completion(**dict.fromkeys(names)) == completion()


def test_defaults_are_those_of_openai() -> None:
    assert chat().budget is None and completion().budget == 16
    assert chat().choices == 1 and not chat().stream
    sampling = Sampling(**chat().sampling())
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert not sampling.on_host


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_come_in_four_shapes(given: object, prompts: object) -> None:
    assert completion(prompt=given).prompt == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        3,
        {},
        [],
        [[]],
        [[1], []],
        [[1], "a"],
        ["a", [1]],
        ["a", None],
        [1, True],
        [1, 2.0],
        [1, "2"],
        [-1],
        [1 << 31],
        [[1 << 64]],
        ["a"] * 65,
        [[[1]]],
    ],
)
def test_other_prompts_are_refused(prompt: object) -> None:
    assert refusal(CompletionRequest, {"prompt": prompt}).param == "prompt"


# -- sampling --


def test_sampling_is_what_the_engine_takes() -> None:
    request = chat(
        temperature=0.5,
        top_k=-1,
        top_p=0,
        min_p=0.1,
        seed=-1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.1,
        logit_bias={"0": -100, "7": 100, "12": 0.5},
    )
    sampling = Sampling(**request.sampling())
    assert sampling == Sampling(
        temperature=0.5,
        top_p=1e-9,
        min_p=0.1,
        seed=(1 << 64) - 1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.1,
        logit_bias={0: -100.0, 7: 100.0, 12: 0.5},
    )


def test_the_repetition_penalty_has_the_name_of_llama_cpp_too() -> None:
    assert chat(repeat_penalty=1.1).sampling()["repetition_penalty"] == 1.1
    error = chat_refusal(repeat_penalty=0)
    assert (error.param, error.message[:19]) == ("repeat_penalty", "repeat_penalty is 0")


@given(seed=st.integers(-(1 << 63), (1 << 64) - 1))
@settings(max_examples=50, deadline=None)
def test_each_choice_has_its_own_seed(seed: int) -> None:
    request = chat(seed=seed, n=16)
    seeds = [request.sampling(choice)["seed"] for choice in range(16)]
    assert seeds[0] == seed % (1 << 64) and len(set(seeds)) == 16
    assert seeds == [request.sampling(choice)["seed"] for choice in range(16)]
    assert seeds[1] not in {chat(seed=seed % (1 << 63) + i).sampling()["seed"] for i in range(16)}


def test_without_a_seed_answers_differ() -> None:
    assert chat().sampling()["seed"] != chat().sampling()["seed"]


NUMBERS = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "top_k": (-1, (1 << 31) - 1),
    "n": (1, 16),
    "max_tokens": (1, (1 << 31) - 1),
    "max_completion_tokens": (1, (1 << 31) - 1),
    "seed": (-(1 << 63), (1 << 64) - 1),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_bounded_and_strict(name: str) -> None:
    low, high = NUMBERS[name]
    for value in (low, high):
        assert getattr(chat(**{name: value}), name) == value
        assert Sampling(**chat(**{name: value}).sampling(15))
    wrong: list[object] = [low - 1, high + 1, 10**300, -(10**300), True, False, "1", [1], {"a": 1}]
    for value in wrong:
        error = chat_refusal(**{name: value})
        assert error.param == name and error.message.startswith(f"{name} is ")


@pytest.mark.parametrize("name", ["top_k", "n", "max_tokens", "seed", "top_logprobs"])
def test_a_float_is_no_integer(name: str) -> None:
    assert chat_refusal(**{name: 3.0}).message == f"{name} is 3.0; expected a valid integer"


@pytest.mark.parametrize("name", ["stream", "ignore_eos", "logprobs", "parallel_tool_calls"])
@pytest.mark.parametrize("value", [0, 1, "true", "on", []])
def test_a_switch_is_true_or_false(name: str, value: object) -> None:
    assert chat_refusal(**{name: value}).param == name


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"9" * 5000])
@pytest.mark.parametrize("name", ["temperature", "seed", "whatever"])
def test_what_is_no_number_is_not_json(name: str, number: bytes) -> None:
    body = b'{"messages":[{"role":"user","content":"x"}],"%s":%s}' % (name.encode(), number)
    assert "not valid JSON" in refusal(ChatRequest, body).message


@pytest.mark.parametrize("key", ["x", "07", "-1", "", " 7", "7 ", "\u0667", "9" * 500])
def test_biases_are_of_token_ids(key: str) -> None:
    error = chat_refusal(logit_bias={key: 1})
    assert error.param == "logit_bias" and "key" in error.message


def test_biases_are_bounded() -> None:
    assert chat_refusal(logit_bias={"7": 100.5}).param == "logit_bias.7"
    assert chat_refusal(logit_bias={"7": True}).param == "logit_bias.7"
    assert chat_refusal(logit_bias={str(i): 1 for i in range(1025)}).param == "logit_bias"
    assert len(chat(logit_bias={str(i): 1 for i in range(1024)}).sampling()["logit_bias"]) == 1024


def test_stops() -> None:
    assert chat(stop="a").stop == ["a"] and chat(stop=["a"] * 16).stop == ["a"] * 16
    wrong = ["", [""], ["a"] * 17, ["a" * 257], "a" * 257, [1], 1, {"a": 1}, [["a"]], [None]]
    for stop in wrong:
        assert (chat_refusal(stop=stop).param or "").startswith("stop")


def test_of_two_limits_both_hold() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9).budget == 5
    assert chat(max_tokens=9, max_completion_tokens=5).budget == 5


# -- what cannot be obeyed --


@pytest.mark.parametrize(
    ("schema", "name", "value"),
    [
        (ChatRequest, "functions", [{"name": "f"}]),
        (ChatRequest, "function_call", "auto"),
        (ChatRequest, "modalities", ["text", "audio"]),
        (ChatRequest, "audio", {"voice": "x"}),
        (ChatRequest, "chat_template", "{{ 1 }}"),
        (ChatRequest, "chat_template", ""),
        (ChatRequest, "echo", True),
        (ChatRequest, "min_tokens", 3),
        (ChatRequest, "stop_token_ids", [1]),
        (ChatRequest, "use_beam_search", True),
        (ChatRequest, "top_logprobs", 3),
        (ChatRequest, "stream_options", {"include_usage": True}),
        (ChatRequest, "reasoning_effort", "extreme"),
        (CompletionRequest, "suffix", "x"),
        (CompletionRequest, "best_of", 2),
        (CompletionRequest, "max_tokens", 0),
        (CompletionRequest, "prompt_logprobs", 1),
        (TokenizeRequest, "chat_template", "{{ 1 }}"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(schema: type[Schema], name: str, value: object) -> None:
    body = {"prompt": "x"} if schema is not ChatRequest else {"messages": MESSAGES}
    error = refusal(schema, body | {name: value})
    assert error.param == name and name in error.message


def test_what_asks_for_nothing_is_not_refused() -> None:
    chat(modalities=["text"], functions=[], min_tokens=0, use_beam_search=False, best_of=1)
    completion(suffix="", best_of=3, n=3, max_tokens=0, echo=True, skip_special_tokens=True)


def test_many_answers_to_many_prompts_are_refused() -> None:
    assert refusal(CompletionRequest, {"prompt": ["a"] * 64, "n": 3}).param == "n"


# -- messages --


def test_a_dialogue_with_calls() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    request = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": t} for t in "ab"]},
            {"role": "assistant", "tool_calls": [call], "reasoning": "hm", "refusal": None},
            {"role": "tool", "tool_call_id": "c1", "content": "sun", "extra": 1},
            {"role": "assistant", "content": None},
        ]
    )
    assert request.dialogue() == [
        {"role": "developer", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "sun", "tool_call_id": "c1", "name": "weather"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (3, "messages[0]"),
        ({}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "USER", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": {"a": "b"}}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": "x", "name": "n" * 257}, "messages[0].name"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a b"}}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {
                "role": "user",
                "content": "x",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}],
            },
            "messages[0].tool_calls",
        ),
    ],
)
def test_wrong_messages_are_refused_at_their_place(message: object, param: str) -> None:
    assert chat_refusal(messages=[message]).param == param


def test_a_refusal_does_not_repeat_what_was_sent() -> None:
    secret = "secret " * 1000
    for fields in (
        {"messages": secret},
        {"messages": [{"role": secret, "content": secret}]},
        {"messages": [{"role": "user", "content": [{"type": secret}]}]},
        {"response_format": {"type": secret}},
        {"tool_choice": secret},
        {"tools": [{"type": "function", "function": {"name": secret}}]},
        {"chat_template_kwargs": {secret: 1}},
        {"logit_bias": {secret: 1}},
        {secret: 1, "n": 0},
    ):
        assert chat_refusal(**fields).message.count("secret") < 12


# -- tools and formats --


def test_tool_choice() -> None:
    other = {"type": "function", "function": {"name": "b.c-d_1"}}
    request = chat(tools=[WEATHER, other])
    assert [t["function"]["name"] for t in request.functions] == ["weather", "b.c-d_1"]
    assert request.functions[1]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert not request.must_call and not chat(tools=[WEATHER], tool_choice="auto").must_call
    assert chat(tools=[WEATHER], tool_choice="none").functions == []
    assert chat(tools=[WEATHER], tool_choice="required").must_call
    named = {"type": "function", "function": {"name": "weather"}}
    request = chat(tools=[WEATHER, other], tool_choice=named)
    assert request.must_call and len(request.functions) == 1
    assert chat(tools=[], tool_choice="none").functions == []
    assert chat_refusal(tool_choice="required").param == "tool_choice"
    assert chat_refusal(tools=[other], tool_choice=named).param == "tool_choice"
    assert chat_refusal(tools=[WEATHER, WEATHER]).param == "tools"
    assert chat_refusal(tools=[{"type": "web_search"}]).param == "tools[0].type"


def test_the_tools_that_may_be_called() -> None:
    other = {"type": "function", "function": {"name": "play"}}

    def allowed(mode: str, *names: str) -> dict[str, object]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        return {"tools": [WEATHER, other], "tool_choice": choice}

    request = chat(**allowed("auto", "play"))
    assert [tool["function"]["name"] for tool in request.functions] == ["play"]
    assert not request.must_call
    request = chat(**allowed("required", "play", "weather"))
    assert [tool["function"]["name"] for tool in request.functions] == ["weather", "play"]
    assert request.must_call and request.may_call_again
    error = chat_refusal(**allowed("auto", "play", "sing"))
    wrong = "tool_choice asks for the tool 'sing'; expected one of weather, play"
    assert (error.message, error.param) == (wrong, "tool_choice")
    assert chat_refusal(**allowed("auto")).param == "tool_choice.allowed_tools.tools"


NAMED = {"type": "function", "function": {"name": "play"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"stop": ["a"] * 17},
            "stop is a list of 17; expected a valid string or a list of at most 16",
        ),
        ({"stop": "a" * 257}, "expected a string of at most 256 characters or a valid list"),
        ({"messages": []}, "messages is a list of 0; expected a list of at least 1"),
        (
            {"logit_bias": {"foo": 1}},
            "logit_bias has the key 'foo'; expected a token id in digits, as \"42\"",
        ),
        (
            {"logit_bias": {str(n): 1 for n in range(1025)}},
            "logit_bias is an object of 1025; expected an object of at most 1024",
        ),
        (
            {"tool_choice": "maybe"},
            "tool_choice is 'maybe'; expected 'none', 'auto' or 'required' or an object",
        ),
        (
            {"tool_choice": {"type": "x"}},
            "tool_choice.type is 'x'; expected 'function', 'allowed_tools'",
        ),
        ({"tool_choice": {}}, "tool_choice.type is missing"),
        (
            {"tool_choice": {"type": "allowed_tools"}},
            "tool_choice.allowed_tools is missing",
        ),
        (
            {"tool_choice": "required"},
            "tool_choice asks for a tool, but there are no tools; give tools",
        ),
        (
            {"tool_choice": NAMED, "tools": [WEATHER]},
            "tool_choice asks for the tool 'play'; expected one of weather",
        ),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs is 3; expected an object"),
        (
            {"chat_template_kwargs": {"x": 1}},
            "'x' is not known; expected enable_thinking, reasoning_effort",
        ),
        (
            {"structured_outputs": {"y": 1}},
            "'y' is not known; expected json, json_object, regex, grammar, choice",
        ),
        ({"request_id": "a b"}, "expected 1 to 128 letters (A-Z, a-z), digits, _ . : or -"),
        ({"response_format": 3}, "response_format is 3; expected an object"),
    ],
)
def test_errors_are_said_in_plain_words(fields: dict[str, object], message: str) -> None:
    assert chat_refusal(**fields).message.endswith(message)


@pytest.mark.parametrize(("body", "got"), [(b"null", "null"), (b"[]", "a list of 0")])
def test_a_body_that_is_no_object(body: bytes, got: str) -> None:
    assert refusal(ChatRequest, body).message == f"the body is {got}; expected an object"


@pytest.mark.parametrize(
    "name", ["", "a" * 65, "wéather", "a b", "a\n", "<|call|>", "天気", "a/b", 3, None, ["a"]]
)
def test_functions_have_plain_names(name: object) -> None:
    error = chat_refusal(tools=[{"type": "function", "function": {"name": name}}])
    assert error.param == "tools[0].function.name"


def test_schemas_are_bounded() -> None:
    large = {"type": "object", "description": "x" * (1 << 20)}
    tool = {"type": "function", "function": {"name": "f", "parameters": large}}
    assert chat_refusal(tools=[tool]).param == "tools[0].function.parameters"
    described = {"type": "json_schema", "json_schema": {"name": "x", "schema": large}}
    assert chat_refusal(response_format=described).param == "response_format.json_schema.schema"
    assert chat_refusal(guided_json=large).param == "guided_json"
    assert chat_refusal(guided_regex="a" * 8193).param == "guided_regex"
    assert chat_refusal(tools=[WEATHER] * 129).param == "tools"


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": {"type": "array"}},
                }
            },
            {"json_schema": {"type": "array"}},
        ),
        ({"guided_json": {"type": "array"}}, {"json_schema": {"type": "array"}}),
        ({"guided_json": '{"type": "array"}'}, {"json_schema": {"type": "array"}}),
        ({"structured_outputs": {"json": {}}}, {"json_schema": {}}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ],
)
def test_what_the_answer_follows_comes_under_many_names(
    fields: dict[str, object], constraint: object
) -> None:
    assert chat(**fields).constraint == constraint
    assert completion(**fields).constraint == constraint


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a", "guided_choice": ["a"]},
        {"response_format": {"type": "json_object"}, "guided_json": {}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"structural_tag": "x"}},
        {"structured_outputs": {"json_object": False}},
        {"guided_json": "{"},
        {"guided_json": "[1]"},
        {"guided_json": "[" * 100_000},
        {"guided_choice": []},
        {"response_format": {}},
        {"response_format": "json"},
        {"response_format": {"type": "json_schema"}},
    ],
)
def test_other_wishes_of_that_kind_are_refused(fields: dict[str, object]) -> None:
    chat_refusal(**fields)


def test_variables_of_the_template_are_from_a_list() -> None:
    request = chat(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert request.template_variables == {"enable_thinking": False, "reasoning_effort": "low"}
    assert chat(add_generation_prompt=False).template_variables == {"add_generation_prompt": False}
    for name in ("chat_template", "tokenize", "messages", "tools", "bos_token"):
        error = chat_refusal(chat_template_kwargs={name: True})
        assert error.param == f"chat_template_kwargs.{name}"
    twice = {"chat_template_kwargs": {"reasoning_effort": "high"}, "reasoning_effort": "low"}
    assert chat_refusal(**twice).param == "reasoning_effort"


# -- the small routes --


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh"])
def test_the_efforts_of_openai_are_read(effort: str) -> None:
    assert chat(reasoning_effort=effort).template_variables == {"reasoning_effort": effort}


def test_tokenize() -> None:
    request = parsed(TokenizeRequest, {"prompt": "x", "add_special_tokens": False})
    assert request.prompt == "x" and request.add_special_tokens is False
    request = parsed(TokenizeRequest, {"messages": MESSAGES, "tools": [WEATHER]})
    assert request.dialogue() == MESSAGES and len(request.functions) == 1
    assert refusal(TokenizeRequest, {}).message == "neither prompt nor messages; expected one"
    assert refusal(TokenizeRequest, {"prompt": "x", "messages": MESSAGES}).param == "prompt"


def test_detokenize() -> None:
    assert parsed(DetokenizeRequest, {"tokens": [0, 5]}).tokens == [0, 5]
    for tokens in ([-1], [1 << 31], [True], [1.0], "x", None, [[1]]):
        assert (refusal(DetokenizeRequest, {"tokens": tokens}).param or "").startswith("tokens")


# -- bodies --


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff",
        b'{"a": 1, "a": 2}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b'{"messages": [' + b"[" * 70 + b"]" * 70 + b"]}",
        b'{"messages": [' + b'{"role":"user","content":"a"},' * 1_000_000 + b"{}]}",
    ],
    ids=range(13),
)
def test_hostile_bodies_are_refused(body: bytes) -> None:
    assert refusal(ChatRequest, body).param is None


def test_a_body_of_many_messages_is_refused() -> None:
    error = chat_refusal(messages=MESSAGES * 4097)
    assert error.param == "messages" and "4097" in error.message


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest, TokenizeRequest])
def test_every_field_refuses_other_types(schema: type[Schema]) -> None:
    """Whatever stands in a field, a request is read or refused with a reason; nothing else."""
    values = (3, -1, 0.5, True, "x", "", [], [[]], [1], ["x"], {}, {"x": {}}, [{}], {"type": []})
    base = {"messages": MESSAGES} if schema is ChatRequest else {"prompt": "x"}
    for name in schema.model_fields:
        taken = 0
        for value in values:
            try:
                parsed(schema, base | {name: value})
                taken += 1
            except ApiError as error:
                assert error.status == 400
        assert taken < len(values), name


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_any_json_is_read_or_refused(schema: type[Schema], data: st.DataObject) -> None:
    names = st.sampled_from([*schema.model_fields, *schema.unsupported])
    fields = data.draw(st.dictionaries(names, JSON, max_size=5))
    base = {"messages": MESSAGES} if schema is ChatRequest else {"prompt": "x"}
    try:
        request = parsed(schema, base | fields)
    except ApiError as error:
        assert error.status == 400
    else:
        Sampling(**request.sampling(3))
        json.dumps([request.constraint, request.budget, request.top])


# -- errors --


def test_the_body_of_an_error_is_openais() -> None:
    error = failure("model_not_found", param="model", got="x" * 1000, served="a, b")
    assert error.status == 404 and len(error.message) < 200
    assert error.body["error"].keys() == {"message", "type", "param", "code"}
    assert error.body["error"]["code"] == "model_not_found"
    assert failure("rate_limit_exceeded", waiting=64, retry_after=3).headers == {"retry-after": "3"}
    assert failure("invalid_api_key").status == 401


@pytest.mark.parametrize(
    ("made", "status", "code"),
    [
        (errors.invalid("x"), 400, None),
        (failure("invalid_api_key"), 401, "invalid_api_key"),
        (failure("unknown_url", got="/" + "x" * 10_000), 404, "unknown_url"),
        (failure("method_not_allowed", got="PUT" * 1000, allowed="GET"), 405, "method_not_allowed"),
        (failure("request_too_large", most=10), 413, "request_too_large"),
        (failure("unsupported_media_type", got="text/plain"), 415, "unsupported_media_type"),
        (failure("rate_limit_exceeded", waiting=64), 429, "rate_limit_exceeded"),
        (failure("internal_error"), 500, "internal_error"),
        (failure("loading"), 503, "loading"),
        (failure("draining", retry_after=30), 503, "draining"),
    ],
)
def test_each_error_has_its_status(made: ApiError, status: int, code: str | None) -> None:
    assert (made.status, made.code) == (status, code)
    assert len(made.message) < 300 and made.body["error"]["message"] == made.message


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("the prompt has 9 tokens; shorten it or raise --context"), 400),
        (SessionBusy("x"), 503),
        (OutOfMemory("/secret/path"), 503),
        (MemoryError(), 503),
        (ModelError("/secret/path"), 500),
        (NonFinite("/secret/path"), 500),
        (DeviceError("/secret/path"), 500),
        (RuntimeError("/secret/path"), 500),
        (KeyError("user text"), 500),
        (failure("rate_limit_exceeded", waiting=3), 429),
    ],
)
def test_exceptions_become_errors(error: Exception, status: int) -> None:
    made = errors.from_exception(error)
    assert made.status == status
    assert "--" not in made.message and "secret" not in made.message
    if not isinstance(error, ApiError):
        assert errors.from_failure(type(error).__name__, str(error)).status in (status, 500)


def test_advice_about_flags_stays_inside() -> None:
    made = errors.from_exception(UsageError("9 tokens, room for 8; shorten it or raise --context"))
    assert made.message == "9 tokens, room for 8"
    assert errors.from_exception(UsageError("raise --context")).status == 400
