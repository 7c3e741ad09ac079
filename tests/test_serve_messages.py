"""/v1/messages: what may be asked, the chat that it stands for, and the answer; continued turns."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from commands import python
from serving import Served, example_of, model_with_template, serving
from test_serve_responses import CALLS, TEMPLATE

from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.serve.answers import Answer
from clocher_runtime.serve.anthropic import CountTokensRequest, MessagesRequest, MessageStream
from clocher_runtime.serve.errors import ApiError, failure, invalid
from clocher_runtime.serve.requests import ChatRequest, TokenizeRequest
from clocher_runtime.text.answers import Delta

KEY = "a key"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Tell it.", "input_schema": SCHEMA}
HI = [{"role": "user", "content": "Hi"}]
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}


def asked(template: str = "", **fields: object) -> ChatRequest:
    body = {"model": "m", "max_tokens": 9, "messages": HI} | fields
    return MessagesRequest.parse(json.dumps(body).encode()).chat(template)


def text(said: str, **more: object) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


# -- what is asked --


def test_the_request_of_an_agent_is_a_chat() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    chat = asked(
        "{{ enable_thinking }}",
        system=[text("You are an agent.", **cached), text("Be brief.", **cached)],
        messages=[
            {"role": "system", "content": "It is June."},
            {"role": "user", "content": [text("<reminder>"), text("Where is it warm?", **cached)]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "look", "signature": "x"},
                    text("I look."),
                    USE,
                    USE | {"id": "toolu_2"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("sun")]},
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "content": "none",
                        "is_error": True,
                    },
                    text("And?"),
                ],
            },
            {"role": "system", "content": [text("Now.")]},
            {"role": "user", "content": "Quick."},
        ],
        tools=[WEATHER | cached, {"name": "none", "input_schema": {"type": "object"}}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 4096},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        stop_sequences=["END"],
        temperature=1,
        top_k=5,
        stream=True,
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    assert chat.dialogue() == [
        {"role": "system", "content": "You are an agent.\nBe brief.\nIt is June."},
        {"role": "user", "content": "<reminder>\nWhere is it warm?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "look",
            "tool_calls": [{"id": "toolu_1", **call}, {"id": "toolu_2", **call}],
        },
        {"role": "tool", "content": "sun", "tool_call_id": "toolu_1", "name": "weather"},
        {"role": "tool", "content": "Error: none", "tool_call_id": "toolu_2", "name": "weather"},
        {"role": "user", "content": "And?\nNow.\nQuick."},
    ]
    assert [tool["function"]["name"] for tool in chat.functions] == ["weather", "none"]
    assert chat.functions[0]["function"]["parameters"] == SCHEMA
    assert chat.parallel_tool_calls is False and not chat.must_call and chat.budget == 9
    assert chat.stop == ["END"] and chat.sampling()["top_k"] == 5 and chat.stream
    assert chat.template_variables == {"enable_thinking": True}


def test_settings_that_a_template_does_not_read_are_left_out() -> None:
    wanted = {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}
    assert asked("", **wanted).template_variables == {}
    assert asked("reasoning_effort", **wanted).template_variables == {"reasoning_effort": "high"}
    assert asked("enable_thinking", **wanted).template_variables == {"enable_thinking": False}
    adaptive = asked("enable_thinking", thinking={"type": "adaptive"})
    assert adaptive.template_variables == {}


def test_choices_and_formats_are_those_of_chats() -> None:
    assert asked(tools=[WEATHER], tool_choice={"type": "any"}).must_call
    assert asked(tools=[WEATHER], tool_choice={"type": "none"}).functions == []
    named = asked(
        tools=[WEATHER, WEATHER | {"name": "b"}], tool_choice={"type": "tool", "name": "b"}
    )
    assert named.must_call and [f["function"]["name"] for f in named.functions] == ["b"]
    formed = asked(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert formed.constraint == {"json_schema": SCHEMA}


@pytest.mark.parametrize(
    ("content", "continues"),
    [("(", True), ([text("(")], True), ([text(" ")], False), ([text("x"), USE], False)],
)
def test_a_last_turn_of_the_model_is_continued(content: object, continues: bool) -> None:
    chat = asked(messages=[*HI, {"role": "assistant", "content": content}])
    assert chat.continue_final_message is continues


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool'"),
        ({"messages": []}, "messages is a list of 0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice asks for a tool"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": None}, "max_tokens is null"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError) as raised:
        asked(**fields)
    assert raised.value.status == 400 and said in raised.value.message
    told = raised.value.body_at("/v1/messages")
    assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"


def test_errors_have_the_types_of_the_api() -> None:
    kinds = {
        "invalid_api_key": "authentication_error",
        "model_not_found": "not_found_error",
        "request_too_large": "request_too_large",
        "unsupported_media_type": "invalid_request_error",
        "loading": "overloaded_error",
        "engine_failed": "api_error",
        "timeout": "timeout_error",
    }
    facts = {"got": "x", "served": "y", "most": 1, "seconds": 1.0}
    for code, kind in kinds.items():
        assert failure(code, **facts).body_at("/v1/messages/x")["error"]["type"] == kind
    assert "param" in failure("loading").body_at("/v1/chat/completions")["error"]


def test_counting_needs_no_length() -> None:
    body = json.dumps({"messages": HI, "system": "s"}).encode()
    assert len(CountTokensRequest.parse(body).chat("").dialogue()) == 2


# -- the events of the answer --


def events_of(deltas: list[Delta], finish: str, stop: str | None = None) -> list[dict[str, Any]]:
    stream = MessageStream(Answer("msg_", "m", 5, made=3, cached=2))
    events = list(stream.start())
    for delta in deltas:
        events += stream.push([delta], CALLS)
    return [*events, *stream.finish(finish, stop)]


def added(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the content that a client adds up from events."""
    blocks: list[dict[str, Any]] = []
    partial: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                kind, value = event["delta"].values()
                name = kind.removesuffix("_delta")
                if name == "input_json":
                    partial[event["index"]] = partial.get(event["index"], "") + value
                else:
                    blocks[-1][name] += value
    for index, whole in partial.items():
        blocks[index]["input"] = json.loads(whole)
    return blocks


def test_the_events_add_up_to_the_message() -> None:
    deltas = [
        Delta("reasoning", "th"),
        Delta("reasoning", "ink"),
        Delta("content", "Look"),
        Delta("content", "."),
        Delta("tool_call", "weather", 0),
        Delta("arguments", '{"city": ', 0),
        Delta("arguments", '"Oslo"}', 0),
        Delta("tool_call", "none", 1),
    ]
    stream = MessageStream(Answer("msg_", "m", 5, made=3, cached=2))
    events = [*stream.start(), *stream.push(deltas, CALLS), *stream.finish("tool_calls", None)]
    expected = [
        {"type": "thinking", "thinking": "think", "signature": ""},
        {"type": "text", "text": "Look."},
        {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "call_1", "name": "none", "input": {}},
    ]
    assert added(events) == expected == stream.response()["content"]
    usage = {"input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2}
    assert stream.response()["usage"] == usage | {"output_tokens": 3}
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    starts = sum(event["type"] == "content_block_start" for event in events)
    assert starts == sum(event["type"] == "content_block_stop" for event in events) == 4


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [("stop", None, "end_turn"), ("length", None, "max_tokens"), ("stop", "END", "stop_sequence")],
)
def test_why_it_stopped(finish: str, stop: str | None, reason: str) -> None:
    events = events_of([], finish, stop)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": stop}
    assert added(events) == [{"type": "text", "text": ""}]


@pytest.mark.parametrize("said", ['{"a": [1, 2, {"b": tr', "[1]", "x", "[" * 9999])
def test_arguments_that_are_no_object_are_kept_as_text(said: str) -> None:
    stream = MessageStream(Answer("msg_", "m", 5))
    list(stream.push([Delta("tool_call", "f"), Delta("arguments", said)], CALLS))
    list(stream.finish("length", None))
    assert stream.response()["content"][0]["input"] == {"arguments": said}


def test_a_failed_stream_ends_with_the_error() -> None:
    (event,) = MessageStream(Answer("msg_", "m", 5)).fail(invalid("no"))
    assert event == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "no"},
    }


# -- a real server --


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("models") / "caller"
    model = model_with_template(directory, embedded_model(), TEMPLATE)
    with serving("--model-dir", model, "--batch", 4, env={"CLOCHER_API_KEY": KEY}) as running:
        running.client.headers["x-api-key"] = KEY
        yield running


def body(**fields: object) -> dict[str, Any]:
    return {"max_tokens": 16, "messages": HI, "temperature": 0, "ignore_eos": True, **fields}


def test_a_stream_says_what_the_whole_answer_says(server: Served) -> None:
    whole = server.ask("/v1/messages?beta=true", **body()).json()
    events = server.events("/v1/messages", **body())
    assert added(events) == whole["content"] and whole["type"] == "message"
    assert events[0]["message"]["content"] == [] and events[-1] == {"type": "message_stop"}
    assert events[-2]["usage"] == whole["usage"] and whole["usage"]["output_tokens"] == 16
    chat = server.ask("/v1/chat/completions", **body()).json()["choices"][0]["message"]
    texts = [block["text"] for block in whole["content"] if block["type"] == "text"]
    assert "".join(texts) == chat["content"]


def test_tools_are_called_and_their_results_are_read(server: Served) -> None:
    calling = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}}
    first = server.ask("/v1/messages", **body(max_tokens=256, **calling)).json()
    use = first["content"][-1]
    assert use["type"] == "tool_use" and use["name"] == "weather"
    if first["stop_reason"] == "tool_use":
        assert isinstance(use["input"]["city"], str)
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "sun"}
    turns = [{"role": "assistant", "content": first["content"]}]
    turns += [{"role": "user", "content": [result]}]
    more = server.ask("/v1/messages", **body(messages=HI + turns, tools=[WEATHER]))
    assert more.status_code == 200, more.text


def test_a_stop_sequence_is_named(server: Served) -> None:
    (said,) = server.ask("/v1/messages", **body()).json()["content"]
    stop = said["text"][2:5]
    stopped = server.ask("/v1/messages", **body(stop_sequences=[stop])).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    assert stopped["content"][0]["text"] == said["text"].partition(stop)[0]


def test_the_prompt_is_counted(server: Served) -> None:
    fields = {"messages": HI, "system": "Be brief.", "tools": [WEATHER]}
    counted = server.ask("/v1/messages/count_tokens", **fields).json()
    usage = server.ask("/v1/messages", **body(**fields)).json()["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_errors_have_the_shape_of_the_route(server: Served) -> None:
    wrong = server.ask("/v1/messages", **body(max_tokens=-1))
    assert wrong.status_code == 400 and wrong.json()["type"] == "error"
    other = server.ask("/v1/messages", **body(model="claude"))
    assert other.status_code == 404 and other.json()["error"]["type"] == "not_found_error"
    long = server.ask("/v1/messages", **body(messages=[{"role": "user", "content": "x " * 9999}]))
    assert long.status_code == 400 and "maximum context" in long.json()["error"]["message"]
    for headers in ({"x-api-key": "other"}, {"x-api-key": "", "authorization": "Bearer other"}):
        refused = server.client.post("/v1/messages", json=body(), headers=headers)
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
    assert server.client.get("/v1/messages").json()["type"] == "error"  # 405
    bearer = {"x-api-key": "", "authorization": f"Bearer {KEY}"}
    assert server.client.post("/v1/messages", json=body(), headers=bearer).status_code == 200


def test_the_sdk_speaks_with_it(server: Served) -> None:
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    client = anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0)
    fields = {"model": server.facts["model"], "max_tokens": 16, "messages": HI}
    greedy = {"extra_body": {"temperature": 0, "ignore_eos": True}}
    whole = client.messages.create(**fields, **greedy)
    with client.messages.stream(**fields, **greedy) as stream:
        streamed = stream.get_final_message()
    assert [block.text for block in streamed.content] == [block.text for block in whole.content]
    assert streamed.usage.output_tokens == whole.usage.output_tokens == 16
    shown = example_of("serving-clients.md", "import anthropic", server)
    done = python("-c", shown.replace('"none"', repr(KEY)))
    assert done.returncode == 0, done.stderr
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**fields, "model": "other"})


# -- the tokenizer, as lm-eval's remote one reads it --


def test_the_tokenizer_is_told(server: Served) -> None:
    info = server.client.get("/tokenizer_info").json()
    for name in ("bos_token", "eos_token"):
        ids = server.ask("/tokenize", prompt=info[name], add_special_tokens=False).json()["tokens"]
        assert (
            len(ids) == 1 and server.ask("/detokenize", tokens=ids).json()["prompt"] == info[name]
        )
    assert info["chat_template"] == TEMPLATE and info["tokenizer_class"]


# -- continued turns --


def test_a_turn_goes_on_where_it_ends(server: Served) -> None:
    def tokens(**more: object) -> list[int]:
        ids: list[int] = server.ask("/tokenize", **more).json()["tokens"]
        return ids

    turns = [*HI, {"role": "assistant", "content": "It is (  "}]
    continued = tokens(messages=turns, continue_final_message=True)
    plain = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|message|>It is (  "
    assert continued == tokens(prompt=plain, add_special_tokens=False)
    without = tokens(messages=turns, add_generation_prompt=False)
    assert without == tokens(prompt=f"{plain}<|end|>", add_special_tokens=False)
    fields = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    chat = server.ask(
        "/v1/chat/completions", messages=turns, continue_final_message=True, **fields
    ).json()
    text = server.ask("/v1/completions", prompt=continued, **fields).json()["choices"][0]["text"]
    assert chat["choices"][0]["message"]["content"] == text
    filled = server.ask("/v1/messages", **fields, messages=turns).json()
    assert filled["content"] == [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": HI},
        {"messages": [*HI, {"role": "assistant", "content": " "}]},
        {
            "messages": [*HI, {"role": "assistant", "content": "x"}],
            "add_generation_prompt": True,
        },
    ],
)
def test_what_cannot_be_continued_is_refused(fields: dict[str, Any]) -> None:
    for kind in (ChatRequest, TokenizeRequest):
        with pytest.raises(ApiError) as raised:
            kind.parse(json.dumps(fields | {"continue_final_message": True}).encode())
        assert raised.value.param == "continue_final_message"
