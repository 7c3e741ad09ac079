"""Clients that people have, from PyPI as they are, against a real server."""

import asyncio
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import httpx
import openai
import pytest
from commands import python
from pydantic import BaseModel
from serving import Served, model_with_template, serving, settled, that_ends
from test_serve_answers import TEMPLATE
from weight_files import ROOT

from clocher_runtime.checkpoints.locate import embedded_model

KEY = "a key"
BATCH, QUEUE = 4, 4
TALK = [{"role": "user", "content": "Write a loop."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("models") / "speaker"
    model = model_with_template(directory, embedded_model(), TEMPLATE)
    flags = ("--model-dir", model, "--batch", BATCH, "--queue", QUEUE)
    with serving(*flags, env={"CLOCHER_API_KEY": KEY}) as running:
        running.client.headers["authorization"] = f"Bearer {KEY}"
        yield running
        settled(running)


class Verdict(BaseModel):
    """What tests have the model say."""

    fine: bool
    colour: Literal["red", "green"]


def weather(city: Literal["Oslo", "Rome"], now: bool) -> str:
    """Tell the weather of a city."""
    return f"rain in {city}"


def openai_client(server: Served, **options: Any) -> openai.OpenAI:
    options = {"api_key": KEY, "max_retries": 0, **options}
    return openai.OpenAI(base_url=f"{server.url}/v1", **options)


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai_client(server)


@pytest.fixture
def asked(server: Served) -> dict[str, Any]:
    """What all chats here ask."""
    return {
        "model": server.facts["model"],
        "messages": TALK,
        "seed": 3,
        "extra_body": {"ignore_eos": True},
    }


@contextmanager
def all_places_taken(server: Served) -> Iterator[threading.Event]:
    """Make sequences until the event is set: as many as the server takes."""
    begun, enough = threading.Event(), threading.Event()

    def hold() -> None:
        body = {"prompt": "x", "n": BATCH + QUEUE, "max_tokens": 1500, "ignore_eos": True}
        with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as held:
            for _ in held.iter_lines():
                begun.set()
                if enough.is_set():
                    return

    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(hold)
        try:
            assert begun.wait(30)
            yield enough
        finally:
            enough.set()
            holder.result()


@pytest.mark.parametrize("package", ["openai", "langchain_openai"])
def test_the_page_about_clients_is_true(server, package):
    pytest.importorskip(package, reason=f"{package} is not installed")
    page = (ROOT / "docs" / "serving-clients.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"^```python\n(from {package} .*?)^```$", page, re.M | re.S)
    for shown, here in {
        "http://127.0.0.1:8000": server.url,
        '"none"': repr(KEY),
        "clocher-tiny-gptoss": server.facts["model"],
    }.items():
        block = block.replace(shown, here)
    done = python("-c", block)
    # A tiny model may think until there is no room, and the client says so: the page tells of it.
    if "LengthFinishReasonError: " not in done.stderr:
        assert done.returncode == 0, done.stderr
        assert re.search(r"fine\W+(True|False)", done.stdout)


# openai-python.


def test_openai_a_stream_says_what_a_whole_answer_says(client, asked):
    whole = client.chat.completions.create(**asked, max_tokens=12)
    chunks = list(
        client.chat.completions.create(
            **asked, max_completion_tokens=12, stream=True, stream_options={"include_usage": True}
        )
    )
    *parts, last = chunks
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage == whole.usage
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12


def test_openai_choices_seeds_and_stops(client, asked):
    options = {**asked, "max_tokens": 16, "temperature": 1.2}
    many = client.chat.completions.create(**options, n=3)
    texts = [choice.message.content for choice in many.choices]
    assert texts[0] == client.chat.completions.create(**options).choices[0].message.content
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**options, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    stop = texts[0][4:6]
    cut = client.chat.completions.create(**options, stop=stop).choices[0]
    assert cut.message.content == texts[0][: texts[0].index(stop)]
    assert cut.finish_reason == "stop"


def test_openai_reads_log_probabilities(client, asked):
    options = {**asked, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**options)
    told = whole.choices[0].logprobs.content
    assert len(told) == 5 and all(len(token.top_logprobs) == 3 for token in told)
    said = b"".join(bytes(token.bytes) for token in told)
    assert said.decode("utf-8", "replace") == whole.choices[0].message.content
    chunks = client.chat.completions.create(**options, stream=True)
    logprobs = [chunk.choices[0].logprobs for chunk in chunks]
    assert list(itertools.chain.from_iterable(each.content for each in logprobs if each)) == told


def test_openai_stream_helper_follows_an_answer(client, asked):
    whole = client.chat.completions.create(**asked, max_tokens=24).choices[0].message.content
    options = {**asked, "max_tokens": 24, "stop": whole[8:12]}
    with client.chat.completions.stream(**options) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
        final = events.get_final_completion()
    assert final.choices[0].message.content == text == whole[: whole.index(whole[8:12])]
    assert final.choices[0].finish_reason == "stop"


def test_openai_parses_structured_output(client, asked):
    def ask(seed: int) -> Any:
        asked.update(seed=seed, max_tokens=200)
        return client.chat.completions.parse(**asked, response_format=Verdict)

    parsed = that_ends(ask)
    verdict = parsed.choices[0].message.parsed
    assert isinstance(verdict, Verdict) and parsed.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked, response_format=Verdict) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert final.choices[0].message.parsed == verdict
    assert {"content.delta", "content.done"} <= kinds


def test_openai_calls_a_function_and_goes_on(client, asked):
    tools = [openai.pydantic_function_tool(Verdict, name="judge")]
    options = {**asked, "tools": tools, "tool_choice": "required"}

    def ask(seed: int) -> Any:
        options.update(seed=seed, max_tokens=200)
        return client.chat.completions.parse(**options).choices[0]

    choice = that_ends(ask)
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.function.name == "judge"
    assert isinstance(call.function.parsed_arguments, Verdict)
    with client.chat.completions.stream(**options) as events:
        fragments = [
            event.arguments_delta
            for event in events
            if event.type == "tool_calls.function.arguments.delta"
        ]
        final = events.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls
    assert "".join(fragments) == streamed.function.arguments == call.function.arguments
    assert len(fragments) > 1 and streamed.id != call.id
    history = [
        *TALK,
        choice.message.model_dump(exclude_none=True, exclude={"parsed"}),
        {"role": "tool", "tool_call_id": call.id, "content": "so it is"},
    ]
    further = client.chat.completions.create(**{**asked, "messages": history}, max_tokens=4)
    assert further.usage.completion_tokens == 4


def test_openai_responses(client, server):
    body = {"model": server.facts["model"], "input": "Write a loop.", "max_output_tokens": 12}
    body["extra_body"] = {"seed": 2, "ignore_eos": True}
    whole = client.responses.create(**body)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 12
    events = list(client.responses.create(**body, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == whole.output_text


def test_openai_completions(client, server):
    body = {"model": server.facts["model"], "prompt": "def area(", "max_tokens": 8, "seed": 1}
    body["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**body, logprobs=2)
    (choice,) = whole.choices
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset[0] == 0
    streamed = list(client.completions.create(**body, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    both = client.completions.create(**{**body, "prompt": ["def area(", "import "]}, echo=True)
    assert [c.text.startswith(p) for c, p in zip(both.choices, ("def", "imp"), strict=True)]
    assert both.choices[0].text == "def area(" + choice.text


def test_openai_models(client, server):
    (model,) = client.models.list()
    assert model == client.models.retrieve(model.id)
    assert (model.id, model.object) == (server.facts["model"], "model")


def test_openai_raises_the_error_of_each_status(client, server, asked):
    def error_of(kind: type[openai.APIStatusError], **wrong: Any) -> openai.APIStatusError:
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**{**asked, **wrong})
        assert caught.value.message.startswith("Error code: ")
        return caught.value

    warm = error_of(openai.BadRequestError, temperature=3)
    assert (warm.param, warm.type) == ("temperature", "invalid_request_error")
    long = error_of(openai.BadRequestError, messages=[{"role": "user", "content": "x " * 9000}])
    assert (long.code, long.param) == ("context_length_exceeded", "messages")
    # The status of an error is there even if a stream was asked for.
    unknown = error_of(openai.NotFoundError, model="gpt-9", stream=True)
    assert unknown.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as caught:
        openai_client(server, api_key="another").models.list()
    assert caught.value.code == "invalid_api_key"


def test_openai_raw_responses_have_headers(client, asked):
    raw = client.chat.completions.with_raw_response.create(**asked, max_tokens=2)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().usage.completion_tokens == 2
    streamed = client.chat.completions.with_raw_response.create(**asked, max_tokens=2, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["cache-control"] == "no-cache"
    assert list(streamed.parse())[-1].choices[0].finish_reason == "length"


def test_openai_comes_back_when_it_is_told_to(server, client, asked):
    waits: list[str | None] = []
    notes = {"response": [lambda response: waits.append(response.headers.get("retry-after"))]}
    patient = openai_client(
        server, max_retries=2, http_client=openai.DefaultHttpxClient(event_hooks=notes)
    )
    with all_places_taken(server) as enough:
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**asked, max_tokens=2)
        assert caught.value.code == "rate_limit_exceeded"
        threading.Timer(0.2, enough.set).start()
        begin = time.monotonic()
        answer = patient.chat.completions.create(**asked, max_tokens=2)
    refused, answered = waits
    # Without the header this client comes back after half a second.
    assert time.monotonic() - begin >= int(refused) >= 1
    assert answered is None and answer.usage.completion_tokens == 2


def test_openai_async_cancellation_leaves_nothing(server, asked):
    async def give_up_on_many() -> int:
        given_up = 0
        options = {**asked, "max_tokens": 3000}
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=KEY, max_retries=0
        ) as client:

            async def ask(stream: bool, seconds: float) -> None:
                nonlocal given_up
                try:
                    async with asyncio.timeout(seconds):
                        answer = await client.chat.completions.create(**options, stream=stream)
                        if stream:
                            async for _ in answer:
                                pass
                except TimeoutError:
                    given_up += 1

            for seconds in (0.01, 0.05, 0.2):
                await asyncio.gather(*(ask(at % 2 == 0, seconds) for at in range(BATCH)))
        return given_up

    assert asyncio.run(give_up_on_many()) == 3 * BATCH
    settled(server)


def test_openai_when_the_engine_dies(asked):
    with serving("--batch", 2) as mortal:
        client, patient = openai_client(mortal), openai_client(mortal, max_retries=8)
        asked["model"] = mortal.facts["model"]
        options = {**asked, "max_tokens": 3000}
        stream = client.chat.completions.create(**options, stream=True)
        next(stream)
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(client.chat.completions.create, **options)
            while mortal.metric("num_requests_running") < 2:  # with the engine, not on the way
                time.sleep(0.005)
            os.kill(mortal.facts["engine_pid"], signal.SIGKILL)
            with pytest.raises(openai.APIError) as caught:
                list(stream)
            # Not one of a status: that was sent before the engine died.
            assert type(caught.value) is openai.APIError
            assert caught.value.code == "engine_failed" and "engine" in caught.value.message
            with pytest.raises(openai.InternalServerError) as failed:
                whole.result()
            assert failed.value.code == "engine_failed"
        # Who comes back as told sees nothing of the death.
        assert patient.chat.completions.create(**asked, max_tokens=2).usage.completion_tokens == 2
        assert mortal.health()["restarts"] == 1
        settled(mortal)


# LangChain.


def test_langchain_chats(server):
    chat_models = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not installed: pip install langchain-openai"
    )
    model = chat_models.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key=KEY,
        model=server.facts["model"],
        max_tokens=10,
        seed=4,
        max_retries=0,
        stream_usage=True,
        extra_body={"ignore_eos": True},
    )
    questions = [[("system", "You write Python."), ("user", f"Question {i}")] for i in range(3)]
    answers = [model.invoke(question) for question in questions]
    assert {answer.response_metadata["finish_reason"] for answer in answers} == {"length"}
    texts = [answer.content for answer in answers]
    assert all(texts)
    assert [answer.content for answer in model.batch(questions)] == texts
    assert [answer.content for answer in asyncio.run(model.abatch(questions))] == texts
    parts = list(model.stream(questions[0]))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert whole.content == texts[0]
    assert whole.usage_metadata == answers[0].usage_metadata
    assert whole.usage_metadata["output_tokens"] == 10
    assert whole.response_metadata["finish_reason"] == "length"
    cut = model.bind(stop=[texts[0][3:6]]).invoke(questions[0])
    assert cut.content == texts[0][: texts[0].index(texts[0][3:6])]


def test_langchain_has_structured_output_and_calls(server):
    chat_models = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not installed: pip install langchain-openai"
    )

    def model_of(seed: int) -> Any:
        return chat_models.ChatOpenAI(
            base_url=f"{server.url}/v1",
            api_key=KEY,
            model=server.facts["model"],
            seed=seed,
            temperature=0.5,
            max_tokens=200,
            max_retries=0,
        )

    # Strict: no further properties. A tiny model would make them up until there is no room.
    for method in ("json_schema", "function_calling"):

        def judged(seed: int, method: str = method) -> Any:
            judge = model_of(seed).with_structured_output(Verdict, method=method, strict=True)
            return judge.invoke("Is it fine?")

        assert isinstance(that_ends(judged), Verdict), method
    for wanted in ("any", "weather"):

        def called(seed: int, wanted: str = wanted) -> Any:
            caller = model_of(seed).bind_tools([weather], tool_choice=wanted, strict=True)
            answer = caller.invoke("What is the weather?")
            cut = answer.response_metadata["finish_reason"] == "length"
            return None if cut else (model_of(seed), caller, answer)

        model, caller, answer = that_ends(called)
        (call,) = answer.tool_calls
        assert call["name"] == "weather" and answer.invalid_tool_calls == []
        assert weather(**call["args"]) in ("rain in Oslo", "rain in Rome")
    parts = list(caller.stream("What is the weather?"))
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    assert [call["args"] for call in whole.tool_calls] == [call["args"]]
    said = {"role": "tool", "tool_call_id": call["id"], "content": weather(**call["args"])}
    further = model.bind_tools([weather], tool_choice="none").bind(max_tokens=4)
    reply = further.invoke([("user", "What is the weather?"), answer, said])
    assert reply.tool_calls == [] and reply.response_metadata["finish_reason"] in ("length", "stop")


def test_langchain_completes_texts(server):
    models = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not installed: pip install langchain-openai"
    )
    model = models.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=KEY,
        model=server.facts["model"],
        max_tokens=10,
        seed=4,
        max_retries=0,
        extra_body={"ignore_eos": True},
    )
    text = model.invoke("def area(")
    assert text and "".join(model.stream("def area(")) == text
    made = model.generate(["def area(", "import "])
    assert made.generations[0][0].text == text
    assert made.llm_output["token_usage"]["completion_tokens"] == 20


# vllm bench serve. What it sends, and how it reads; vLLM itself is not installed here.
# Source: vLLM 02cfb53, vllm/benchmarks/lib/endpoint_request_func.py.


class Measured:
    """What `vllm bench serve` notes of a streamed answer.

    Every event with choices is a token to it, the first one tells the time to the first token, and
    the usage is read from events without choices only.
    """

    def __init__(self, server: Served, path: str, **body: Any) -> None:
        self.text, self.usage, self.ttft_s = "", {}, 0.0
        self.gaps_s: list[float] = []
        self.reads = 0
        text_s = 0.0  # when the first text came, which an event with a role only would hide
        begin = last = time.perf_counter()
        rest = b""
        with server.client.stream(
            "POST", path, json=body, headers={"x-request-id": "bench-0"}
        ) as response:
            assert response.status_code == 200, response.read()
            for piece in response.iter_raw():
                self.reads += 1
                *events, rest = (rest + piece).split(b"\n\n")
                for event in events:
                    if event.startswith(b":") or event == b"data: [DONE]":
                        continue
                    said = json.loads(event.removeprefix(b"data: "))
                    now = time.perf_counter()
                    if choices := said["choices"]:
                        delta = choices[0].get("delta")
                        text = choices[0]["text"] if delta is None else delta.get("content")
                        if not self.ttft_s:
                            self.ttft_s = now - begin
                        else:
                            self.gaps_s.append(now - last)
                        self.text += text or ""
                        text_s = text_s or (now - begin if text else 0.0)
                        last = now
                    elif said.get("usage"):
                        self.usage = said["usage"]
        assert rest == b""
        self.latency_s = last - begin
        self.text_s = text_s


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_vllm_bench_measures_what_happens(server, path):
    tokens, prompt = 48, "import os\n" * 40
    model = server.facts["model"]
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,  # of its --temperature
    }
    if path == "/v1/completions":
        body |= {"prompt": prompt, "max_tokens": tokens, "logprobs": None}
        body["repetition_penalty"] = 1.0
        count = server.ask("/tokenize", prompt=prompt).json()["count"]
    else:
        content = [{"type": "text", "text": prompt}]
        body |= {"messages": [{"role": "user", "content": content}]}
        body["max_completion_tokens"] = tokens
        count = server.ask("/tokenize", messages=body["messages"]).json()["count"]
    found = Measured(server, path, **body)
    assert found.usage["completion_tokens"] == tokens
    assert found.usage["prompt_tokens"] == count
    # The time to the first token is that of a token, not of a chunk that was sent before.
    assert found.text and found.text_s - found.ttft_s < 1e-3 * found.latency_s + 1e-3
    # One event a token; besides one for the role and one for the end. Some tokens have no text.
    assert tokens / 2 < len(found.gaps_s) + 1 <= tokens + 2
    # Tokens of a 60th of a second come together, but the first.
    assert found.reads >= 2, "the answer came in one lump"
    assert sum(found.gaps_s) == pytest.approx(found.latency_s - found.ttft_s)
    whole = server.ask(path, **{**body, "stream": False, "stream_options": None}).json()
    choice = whole["choices"][0]
    assert found.text == (choice.get("text") or choice["message"]["content"])


def test_vllm_bench_asks_for_many_at_once(server):
    def ask(at: int) -> Measured:
        return Measured(
            server,
            "/v1/completions",
            model=server.facts["model"],
            prompt=server.ask("/tokenize", prompt=f"class A{at}:\n").json()["tokens"],
            repetition_penalty=1.0,
            max_tokens=24,
            logprobs=None,
            stream=True,
            stream_options={"include_usage": True},
            ignore_eos=True,
        )

    with ThreadPoolExecutor(BATCH) as pool:
        measured = list(pool.map(ask, range(4 * BATCH)))
    assert [each.usage["completion_tokens"] for each in measured] == [24] * 4 * BATCH
    assert all(0 < each.ttft_s <= each.latency_s for each in measured)


# Open WebUI. What 0.12.4 sends, with every parameter of a chat set; it is not installed here.


def test_open_webui_talks(server):
    models = server.client.get("/v1/models").json()
    assert models["object"] == "list"
    model = models["data"][0]["id"]
    chat = {
        "model": model,
        "messages": [{"role": "system", "content": "Be brief."}, *TALK],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 200,
        "ignore_eos": True,
        **{"seed": 0, "stop": ["zebra"], "temperature": 0.8},
        **{"logit_bias": {"1234": -5, "77": 2}, "top_k": 40, "top_p": 0.9, "min_p": 0},
        **{"frequency_penalty": 1.1, "presence_penalty": 0, "repeat_penalty": 1.1},
        # For other servers.
        **{"mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5, "repeat_last_n": 64, "tfs_z": 1},
        **{"use_mmap": True, "use_mlock": True, "think": True, "format": "json", "num_keep": 24},
        **{"num_ctx": 2048, "num_batch": 512, "num_thread": 2, "num_gpu": 0, "keep_alive": "5m"},
    }
    tasks = [
        {
            "model": model,
            "messages": [{"role": "user", "content": f"### Task:\n{task} of the chat\n" * 20}],
            "stream": False,
            "max_tokens": 30,
        }
        for task in ("Generate a concise title", "Predict 3-5 messages", "Generate 1-3 broad tags")
    ]
    with (
        ThreadPoolExecutor(3) as pool,
        server.client.stream("POST", "/v1/chat/completions", json=chat) as response,
    ):
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        next(lines)
        asked = [pool.submit(server.ask, "/v1/chat/completions", **task) for task in tasks]
        events = [line for line in lines if line]
        answers = [each.result() for each in asked]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["usage"]["completion_tokens"] == 200
    assert [answer.status_code for answer in answers] == [200] * 3
    assert all(answer.json()["choices"][0]["message"]["content"] for answer in answers)


def test_open_webui_knows_a_wrong_key(server):
    without = httpx.get(f"{server.url}/v1/models")
    assert without.status_code == 401 and without.json()["error"]["message"]
