"""/v1/responses: what may be asked, the chat that it stands for, and the events of its answer."""

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal, get_args

import openai
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from serving import Served, model_with_template, serving, that_ends

from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.serve import responses
from clocher_runtime.serve.answers import Answer
from clocher_runtime.serve.edge import EventAnswer
from clocher_runtime.serve.errors import ApiError, failure, invalid, to_json
from clocher_runtime.serve.responses import ResponsesRequest, ResponseStore, ResponseStream
from clocher_runtime.text.answers import Delta

CLASSES = {
    get_args(member.model_fields["type"].annotation)[0]: member
    for member in get_args(get_args(ResponseStreamEvent)[0])
}
TEMPLATE = (
    "{%- if tools -%}<|start|>system<|message|>Tools: {{ tools | tojson }}<|end|>{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- for call in m.tool_calls or [] -%}<|start|>assistant<|channel|>commentary to=functions."
    "{{ call.function.name }}<|message|>{{ call.function.arguments | tojson }}<|call|>"
    "{%- endfor -%}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
REPEATED = {
    "instructions": None,
    "previous_response_id": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "top_logprobs": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "store": True,
    "metadata": {},
}
"""Fields that Open Responses wants in every response, as they are unless the request has them."""
OWN = {"object": "response", "background": False, "truncation": "disabled"}
CALLS = {index: f"call_{index}" for index in range(64)}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}


def asked(**fields: object) -> ResponsesRequest:
    return ResponsesRequest.parse(json.dumps({"input": "Hi"} | fields).encode())


def refusal(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as raised:
        asked(**fields).chat()
    assert raised.value.status == 400
    return raised.value


# -- what is asked --


def test_a_text_is_a_chat_with_one_message() -> None:
    chat = asked(
        instructions="Be brief",
        max_output_tokens=7,
        temperature=0,
        seed=3,
        reasoning={"effort": "low"},
    ).chat()
    assert chat.dialogue() == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
    ]
    assert chat.budget == 7 and chat.template_variables == {"reasoning_effort": "low"}
    assert chat.sampling()["temperature"] == 0 and chat.sampling()["seed"] == 3


def test_items_become_the_messages_that_they_were() -> None:
    def call(number: str) -> dict[str, str]:
        return {"type": "function_call", "call_id": number, "name": "weather", "arguments": "{}"}

    items = [
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [_part("think")]},
        {"type": "message", "role": "assistant", "content": [_part("look", "output_text")]},
        call("1"),
        call("2"),
        {"type": "function_call_output", "call_id": "1", "output": "sun"},
        {"type": "function_call_output", "call_id": "2", "output": [_part("rain", "input_text")]},
        {"type": "reasoning", "summary": [_part("again", "summary_text")]},
        call("3"),
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    calls = [
        {"id": n, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        for n in "123"
    ]
    assert asked(input=items).chat().dialogue() == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "look",
            "tool_calls": calls[:2],
            "reasoning_content": "think",
        },
        {"role": "tool", "content": "sun", "name": "weather", "tool_call_id": "1"},
        {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "2"},
        {"role": "assistant", "content": "", "tool_calls": calls[2:], "reasoning_content": "again"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]


def _part(text: str, kind: str = "reasoning_text") -> dict[str, str]:
    return {"type": kind, "text": text}


def test_tools_and_formats_are_those_of_chats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    described = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    chat = asked(
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        text={"format": described},
        parallel_tool_calls=False,
    ).chat()
    assert chat.must_call and chat.functions[0]["function"]["name"] == "weather"
    assert chat.constraint == {"json_schema": schema} and chat.parallel_tool_calls is False
    assert asked(text={"format": {"type": "json_object"}}).chat().constraint == {
        "json_object": True
    }
    assert asked(text={"format": {"type": "text"}}).chat().constraint is None
    assert asked(tools=[WEATHER], tool_choice="none").chat().functions == []
    other = {"type": "function", "name": "play"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [other]}
    request = asked(tools=[WEATHER, other], tool_choice=allowed)
    chat = request.chat()
    assert chat.must_call and [tool["function"]["name"] for tool in chat.functions] == ["play"]
    stream = ResponseStream(request, ResponseStore(), Answer("resp_", "m", prompt_tokens=5))
    assert stream.response()["tool_choice"] == allowed


def test_what_asks_for_nothing_that_is_missing_is_read() -> None:
    asked(
        store=True,
        include=["reasoning.encrypted_content"],
        truncation="disabled",
        background=False,
        previous_response_id=None,
        reasoning={"summary": "auto"},
        service_tier="auto",
        user="u",
        prompt_cache_key="x",
        stream_options={"include_obfuscation": False},
        text={"verbosity": "medium"},
        stream=True,
    ).chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"store": "yes"}, "store"),
        ({"stop": [""]}, "stop[0]"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "some"}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "weather"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"temperature": 3}, "temperature"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"metadata": {"a": 3}}, "metadata.a"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        ({"input": [{"role": "user", "content": "x"}] * 4097}, "input"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(fields: dict[str, object], param: str | None) -> None:
    error = refusal(**fields)
    assert param is None or error.param == param, error.message
    assert len(error.message) < 400


# -- what is answered --


def streamed(tokens: list[list[Delta]], finish: str, **fields: object) -> list[dict[str, Any]]:
    """Return the events of an answer as a client gets them, each checked by OpenAI's own types."""
    answer = Answer("resp_", "m", prompt_tokens=5)
    stream = ResponseStream(asked(**fields), ResponseStore(), answer)
    events = list(stream.start())
    for deltas in tokens:
        answer.made += 1
        events += stream.push(deltas, CALLS)
    events += stream.finish(finish)
    return checked(events)


def checked(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    sent = [json.loads(to_json(event)) for event in events]
    state = ResponseStreamState(input_tools=[], text_format=omit)
    for event in sent:
        parsed = CLASSES[event["type"]].model_validate(event)
        state.handle_event(parsed)
        assert parsed.type == event["type"]
        if (response := event.get("response")) is not None:
            Response.model_validate(response)
    return sent


def names(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_text_comes_in_the_order_of_openai() -> None:
    events = streamed([[Delta("content", "He")], [], [Delta("content", "llo")]], "stop")
    assert names(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [e["delta"] for e in events if e["type"].endswith(".delta")] == ["He", "llo"]
    response = Response.model_validate(events[-1]["response"])
    assert response.output_text == "Hello" and response.status == "completed"
    assert response.usage is not None and response.usage.output_tokens == 3
    assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None
    assert len({e["response"]["id"] for e in events if "response" in e}) == 1


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    events = streamed(
        [
            [Delta("reasoning", "hm")],
            [Delta("reasoning", "m")],
            [Delta("content", "I look")],
            [Delta("tool_call", "weather", 0)],
            [Delta("arguments", '{"a"', 0)],
            [Delta("arguments", ":1}", 0), Delta("tool_call", "time", 1)],
            [Delta("arguments", "", 1)],
        ],
        "tool_calls",
    )
    assert names(events)[2:] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    output = Response.model_validate(events[-1]["response"]).output
    assert [item.type for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert [(c.name, c.arguments, c.call_id) for c in output if c.type == "function_call"] == [
        ("weather", '{"a":1}', "call_0"),
        ("time", "", "call_1"),
    ]
    assert len({item.id for item in output}) == 4
    usage = events[-1]["response"]["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 2 and usage["total_tokens"] == 12


def test_an_answer_that_was_cut_is_incomplete() -> None:
    events = streamed([[Delta("reasoning", "so")]], "length", max_output_tokens=1)
    response = Response.model_validate(events[-1]["response"])
    assert events[-1]["type"] == "response.incomplete" and response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"
    assert streamed([], "length")[-1]["response"]["output"] == []


@pytest.mark.parametrize("tokens", [[], [[]], [[Delta("reasoning", "hm")]]])
def test_an_answer_without_a_word_has_an_empty_message(tokens: list[list[Delta]]) -> None:
    response = Response.model_validate(streamed(tokens, "stop")[-1]["response"])
    assert response.output[-1].type == "message" and response.output_text == ""


@pytest.mark.parametrize(
    ("error", "code"), [(failure("internal_error"), "server_error"), (invalid("x"), None)]
)
def test_an_answer_that_fails_says_so(error: ApiError, code: str | None) -> None:
    stream = ResponseStream(asked(), ResponseStore(), Answer("resp_", "m", 5))
    text = stream.push([Delta("content", "x")], {})
    events = [*stream.start(), *text, *stream.fail(error)]
    last = checked(events)[-1]
    response = Response.model_validate(last["response"])
    assert last["type"] == "response.failed" and response.status == "failed"
    assert response.error is not None and response.error.code == (code or "invalid_prompt")
    assert response.output[0].status == "incomplete"
    chat: Any = SimpleNamespace(answer=stream.answer)
    assert EventAnswer(chat, stream).failed(error).endswith(b"}\n\ndata: [DONE]\n\n")


def test_log_probabilities_belong_to_the_text() -> None:
    def told(token: str) -> dict[str, Any]:
        top = [{"token": token, "logprob": -0.5, "bytes": list(token.encode())}]
        return {**top[0], "top_logprobs": top}

    stream = ResponseStream(asked(), ResponseStore(), Answer("resp_", "m", 5))
    events = list(stream.start())
    events += stream.push([Delta("reasoning", "hm")], CALLS, [told("hm")])
    events += stream.push([], CALLS, [told("He")])  # held back
    events += stream.push([Delta("content", "Hello")], CALLS, [told("llo")])
    events += stream.push([Delta("content", "!")], CALLS, [told("!")])
    events += stream.push([], CALLS, [told("<|end|>")])
    events = checked([*events, *stream.finish("stop")])
    part = Response.model_validate(events[-1]["response"]).output[-1].content[0]
    assert [each.token for each in part.logprobs] == ["He", "llo", "!"]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[each["token"] for each in d["logprobs"]] for d in deltas] == [["He", "llo"], ["!"]]


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore()
    monkeypatch.setattr(responses, "MAX_STORED", 3)
    for number in range(5):
        store.keep([], {"id": f"r{number}"})
    assert [store.read(f"r{number}")["response"]["id"] for number in (2, 3, 4)] == [
        "r2",
        "r3",
        "r4",
    ]
    for gone in ("r0", "r1"):
        with pytest.raises(ApiError) as raised:
            store.read(gone)
        assert raised.value.status == 404
    monkeypatch.setattr(responses, "MAX_STORED_BYTES", 2000)
    store.keep([{"role": "user", "content": "x" * 1500}], {"id": "big"})
    store.keep([{"role": "user", "content": "x" * 1500}], {"id": "more"})
    store.keep([{"role": "user", "content": "x" * 2500}], {"id": "huge"})
    for gone in ("r4", "big", "more", "huge"):
        with pytest.raises(ApiError):
            store.read(gone)
    store.keep([], {"id": "r9"})
    store.drop("r9")
    with pytest.raises(ApiError):
        store.drop("r9")


def test_a_call_that_nobody_can_name_is_a_refusal_later() -> None:
    item = {"type": "function_call", "call_id": "c", "name": "no name", "arguments": "{}"}
    with pytest.raises(ApiError) as raised:
        asked().after([item])
    assert raised.value.status == 400


def test_an_answer_repeats_what_was_asked() -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    events = streamed(
        [],
        "stop",
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        text={"format": schema},
        metadata={"a": "b"},
        instructions="Be brief",
        temperature=0.5,
        reasoning={"effort": "high"},
    )
    response = Response.model_validate(events[-1]["response"])
    assert response.instructions == "Be brief" and response.metadata == {"a": "b"}
    assert response.temperature == 0.5 and response.top_p == 1.0
    assert response.tools[0].to_dict()["name"] == "weather"
    assert response.text is not None and response.text.format is not None
    assert response.text.format.to_dict()["schema"] == {"type": "object"}


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_response_has_all_fields_of_open_responses(finish: str) -> None:
    """As `ResponseResource` of the specification of 2026-04-24: null, but never absent."""
    first, *_, last = streamed([[Delta("content", "x")]], finish)
    wanted = {**REPEATED, **OWN, "service_tier": "default", "error": None}
    for response in (first["response"], last["response"]):
        assert {name: response.get(name, "absent") for name in wanted} == wanted
        assert response["reasoning"] == {"effort": None, "summary": None}
        assert response["text"] == {"format": {"type": "text"}}
    assert first["response"].get("completed_at", "absent") is None
    done = last["response"]["completed_at"]
    assert (done is None) == (finish == "length")
    assert done is None or 0 <= done - last["response"]["created_at"] < 60


def test_an_answer_repeats_limits_and_names() -> None:
    given = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "top_logprobs": 3,
        "max_tool_calls": 2,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    }
    response = streamed([], "stop", **given)[-1]["response"]
    assert {name: response[name] for name in given} == given


TOKENS = st.lists(
    st.lists(
        st.builds(Delta, st.sampled_from(["content", "reasoning"]), st.text(min_size=1))
        | st.just(Delta("tool_call", "f"))
        | st.just(Delta("arguments", "{}")),
        max_size=3,
    ),
    max_size=12,
)


@given(tokens=TOKENS, finish=st.sampled_from(["stop", "length", "tool_calls"]))
@settings(max_examples=80, deadline=None)
def test_no_text_is_lost(tokens: list[list[Delta]], finish: str) -> None:
    kept: list[list[Delta]] = []
    calls, in_call = -1, False
    for deltas in tokens:  # calls are numbered, and arguments follow the one they belong to
        kept.append([])
        for delta in deltas:
            calls += delta.kind == "tool_call"
            in_call = delta.kind == "tool_call" or (in_call and delta.kind == "arguments")
            if in_call:
                kept[-1].append(delta._replace(index=calls))
            elif delta.kind != "arguments":
                kept[-1].append(delta)
    events = streamed(kept, finish)
    for kind, event in (
        ("content", "response.output_text"),
        ("reasoning", "response.reasoning_text"),
        ("arguments", "response.function_call_arguments"),
    ):
        said = "".join(d.text for deltas in kept for d in deltas if d.kind == kind)
        field = "arguments" if kind == "arguments" else "text"
        assert "".join(e["delta"] for e in events if e["type"] == f"{event}.delta") == said
        assert "".join(e[field] for e in events if e["type"] == f"{event}.done") == said
    added = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert added == [item["id"] for item in done] and len(set(added)) == len(added)
    assert events[-1]["response"]["output"] == done


# -- against a server --


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving("--batch", 2, "--kv-pages", 64) as running:
        yield running


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Run a server whose model is told of tools."""
    directory = tmp_path_factory.mktemp("models") / "speaker"
    with serving("--model-dir", model_with_template(directory, embedded_model(), TEMPLATE)) as one:
        yield one


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openai_client_gets_what_a_chat_says(server, client):
    model, options = server.facts["model"], {"seed": 7}
    got = client.responses.create(
        model=model, input="Hi", instructions="Be brief", max_output_tokens=12, extra_body=options
    )
    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
        max_completion_tokens=12,
        extra_body=options,
    )
    said = chat.choices[0].message
    reasoned = [i.content[0].text for i in got.output if i.type == "reasoning"]
    assert got.output_text == (said.content or "")
    assert "".join(reasoned) == (getattr(said, "reasoning_content", None) or "")
    assert got.usage.input_tokens == chat.usage.prompt_tokens and got.usage.output_tokens == 12
    assert got.status == "incomplete" and got.incomplete_details.reason == "max_output_tokens"


def test_openai_client_streams(server, client):
    body = {"model": server.facts["model"], "input": "Hi", "max_output_tokens": 12}
    whole = client.responses.create(**body, extra_body={"seed": 7})
    events = list(client.responses.create(**body, stream=True, extra_body={"seed": 7}))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    with client.responses.stream(**body, extra_body={"seed": 7}) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.incomplete" and len(kinds) == len(events)
    *sent, done = server.events("/v1/responses", **body, seed=7)
    assert done == "[DONE]" and [event["type"] for event in sent] == kinds


def test_openai_client_is_told_what_cannot_be_obeyed(server, client):
    with pytest.raises(openai.BadRequestError, match="not stored") as raised:
        client.responses.create(model=server.facts["model"], input="Hi", previous_response_id="x")
    assert raised.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="Hi")


def test_a_conversation_goes_on_from_a_stored_response(server, client):
    body = {"model": server.facts["model"], "max_output_tokens": 12, "extra_body": {"seed": 7}}
    first = client.responses.create(**body, input="Hi", instructions="Be brief.")
    assert first.store and client.responses.retrieve(first.id) == first
    more = client.responses.create(**body, input="And?", previous_response_id=first.id)
    assert more.previous_response_id == first.id
    items = [{"role": "user", "content": "Hi"}, *(i.model_dump() for i in first.output)]
    whole = client.responses.create(**body, input=[*items, {"role": "user", "content": "And?"}])
    assert more.output_text == whole.output_text
    assert more.usage.input_tokens == whole.usage.input_tokens
    with client.responses.stream(**body, input="So?", previous_response_id=more.id) as stream:
        last = list(stream)[-1].response
    assert last.usage.input_tokens > more.usage.input_tokens
    assert client.responses.retrieve(last.id).output_text == last.output_text
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(first.id)
    kept_out = client.responses.create(**body, input="Hi", store=False)
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**body, input="x", previous_response_id=kept_out.id)
    assert raised.value.code == "previous_response_not_found"


def test_log_probabilities_and_stop(server, client):
    body = {"model": server.facts["model"], "input": "Hi", "max_output_tokens": 12}
    fields = {"temperature": 0, "ignore_eos": True}
    plain = client.responses.create(
        **body, include=["message.output_text.logprobs"], top_logprobs=2, extra_body=fields
    )
    part = plain.output[-1].content[0]
    assert plain.output[-1].type == "message"
    assert "".join(each.token for each in part.logprobs) == plain.output_text
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)
    stop = plain.output_text[3:6]
    cut = client.responses.create(**body, extra_body={**fields, "stop": stop})
    assert cut.status == "completed" and cut.output_text == plain.output_text.partition(stop)[0]
    assert cut.output[-1].content[0].logprobs == []


def test_the_oldest_turns_go_if_the_input_does_not_fit(server, client):
    turns = []
    for number in range(9):
        turns.append({"role": "user", "content": f"Turn {number}\n" + "x = 1\n" * 200})
        turns.append({"role": "assistant", "content": "Fine."})
    turns.append({"role": "user", "content": "Which turn?"})

    def tokens(given: object, **more: Any) -> int | None:
        """Return the tokens of a prompt, None if it does not fit."""
        body = {"model": server.facts["model"], "instructions": "Be brief", "max_output_tokens": 50}
        try:
            got = client.responses.create(**body, input=given, **more)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            return None
        assert got.truncation == more.get("truncation", "disabled")
        return got.usage.input_tokens

    assert tokens(turns) is None
    fits = next(found for at in range(2, len(turns), 2) if (found := tokens(turns[at:])))
    assert tokens(turns, truncation="auto") == fits
    assert tokens(turns[-1:], truncation="auto") == tokens(turns[-1:])
    assert tokens("x = 1\n" * 2000, truncation="auto") is None


def test_a_client_that_goes_leaves_nothing_behind(server, client):
    stream = client.responses.create(
        model=server.facts["model"], input="Hi", stream=True, extra_body={"ignore_eos": True}
    )
    for _, _event in zip(range(5), stream, strict=False):
        pass
    stream.close()
    deadline = time.monotonic() + 10
    while server.metric("kv_cache_pages_used") or server.health()["sequences"]:
        assert time.monotonic() < deadline, "pages leak"
        time.sleep(0.02)


def test_a_call_and_its_answer(speaker):
    """Tool choice makes the tiny model call; the answer of the tool goes back with the call."""
    client = openai.OpenAI(base_url=f"{speaker.url}/v1", api_key="none", max_retries=0)
    parameters = {
        "type": "object",
        "properties": {"unit": {"enum": ["m", "km"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "name": "measure", "parameters": parameters, "strict": True}
    body = {
        "model": speaker.facts["model"],
        "input": [{"role": "user", "content": "How far?"}],
        "tools": [tool],
        "parallel_tool_calls": False,
        "max_output_tokens": 200,
    }

    def ask(seed: int) -> Any:
        body["extra_body"] = {"seed": seed}
        got = client.responses.create(**body, tool_choice="required")
        return got if got.status == "completed" else None

    got = that_ends(ask)
    (call,) = [item for item in got.output if item.type == "function_call"]
    assert call.name == "measure" and json.loads(call.arguments)["unit"] in ("m", "km")
    assert got.status == "completed" and call.status == "completed"
    *_, last = client.responses.create(**body, tool_choice="required", stream=True)
    (streamed_call,) = [i for i in last.response.output if i.type == "function_call"]
    assert (streamed_call.name, streamed_call.arguments) == (call.name, call.arguments)
    body["input"] += [item.to_dict() for item in got.output]
    body["input"].append({"type": "function_call_output", "call_id": call.call_id, "output": "9"})
    again = client.responses.create(**body)
    assert again.usage.input_tokens > got.usage.input_tokens


def test_a_format_is_followed(speaker):
    class Distance(pydantic.BaseModel):
        unit: Literal["m", "km"]

    client = openai.OpenAI(base_url=f"{speaker.url}/v1", api_key="none", max_retries=0)

    def ask(seed: int) -> Any:
        got = client.responses.create(
            model=speaker.facts["model"],
            input="How far?",
            text={
                "format": {
                    "type": "json_schema",
                    "name": "d",
                    "schema": Distance.model_json_schema(),
                }
            },
            max_output_tokens=200,
            extra_body={"seed": seed},
        )
        return seed if got.status == "completed" else None

    got = client.responses.parse(
        model=speaker.facts["model"],
        input="How far?",
        text_format=Distance,
        max_output_tokens=200,
        extra_body={"seed": that_ends(ask)},
    )
    assert got.output_parsed is not None and got.output_parsed.unit in ("m", "km")
