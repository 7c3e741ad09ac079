"""Answers of a server are the same byte for byte with guesses and without."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from commands import PYTHON_PATH
from serving import Served, model_with_template, serving, settled
from test_serve_answers import MESSAGES, SCHEMA, TEMPLATE, TOOLS

from clocher_runtime.checkpoints.locate import embedded_model

EAGER = """
import sys

if any("engine_main" in word for word in sys.orig_argv):
    from clocher_runtime.speculation.gate import ForwardCosts

    def measure(self, work):
        self.ns = [1.0] * len(self.ns)

    ForwardCosts.measure = measure
    ForwardCosts.note = lambda self, tokens, ns: ns
"""
"""Makes an engine believe that a larger pass costs nothing, so every guess is sent."""

REPEATS = "import os\nimport sys\nimport os\nimport sys\nimport os\nimport"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """A server that verifies every guess, and one that has none."""
    folder = tmp_path_factory.mktemp("eager")
    model = model_with_template(folder / "speaker", embedded_model(), TEMPLATE)
    (folder / "sitecustomize.py").write_text(EAGER)  # Python imports it before anything else
    path = os.pathsep.join([str(folder), PYTHON_PATH["PYTHONPATH"]])
    with ExitStack() as stack:
        yield (
            stack.enter_context(serving(model, env={"PYTHONPATH": path})),
            stack.enter_context(serving(model, "--speculate", "off")),
        )


def both(servers: tuple[Served, Served], ask: Callable[[Served], Any]) -> Any:
    """Return what both servers answer, which has to be the same and to have been guessed at."""
    eager, plain = servers
    before = eager.metric("spec_decode_num_accepted_tokens_total")
    found = ask(eager)
    assert found == ask(plain)
    assert eager.metric("spec_decode_num_accepted_tokens_total") > before, "nothing was guessed"
    return found


def of(response: httpx.Response) -> Any:
    """Return the body of an answer without its name and time."""
    assert response.status_code == 200, response.text
    body = response.json()
    for name in ("id", "created"):
        del body[name]
    for choice in body["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or []:
            del call["id"]  # random
    return body


def streamed(server: Served, path: str, **body: Any) -> list[Any]:
    """Return the chunks of a stream without their name and time."""
    chunks = server.events(path, **body)
    assert chunks.pop() == "[DONE]"
    return [{k: v for k, v in each.items() if k not in ("id", "created")} for each in chunks]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.7, "seed": 2, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
        {"temperature": 0.5, "seed": 3, "repetition_penalty": 1.05, "presence_penalty": 0.1},
        {"temperature": 0.6, "seed": 4, "frequency_penalty": 0.1, "logit_bias": {"10": 2}},
        {"logprobs": 3},
        {"n": 3, "temperature": 0.4, "seed": 5},
        {"echo": True, "logprobs": 1, "max_tokens": 20},
    ],
    ids=lambda more: "-".join(more) or "greedy",
)
def test_completions(servers: tuple[Served, Served], more: dict[str, Any]) -> None:
    body = {"prompt": REPEATS, "max_tokens": 60, "temperature": 0, **more}
    whole = both(servers, lambda server: of(server.ask("/v1/completions", **body)))
    assert whole["usage"]["completion_tokens"] <= body["max_tokens"] * body.get("n", 1)
    parts = both(servers, lambda server: of_parts(streamed(server, "/v1/completions", **body)))
    assert [text for text, *_ in parts] == [choice["text"] for choice in whole["choices"]]
    assert [end for *_, end in parts] == [choice["finish_reason"] for choice in whole["choices"]]


def of_parts(chunks: list[Any]) -> list[tuple[str, list[Any], str]]:
    """Return text, log probabilities and end of each choice of a stream."""
    found: dict[int, tuple[str, list[Any], str]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text, logprobs, end = found.get(choice["index"], ("", [], ""))
        if choice["logprobs"]:
            logprobs = logprobs + list(zip(*choice["logprobs"].values(), strict=True))
        text, end = text + choice["text"], choice["finish_reason"] or end
        found[choice["index"]] = text, logprobs, end
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("most", range(1, 10))
def test_an_answer_has_as_many_tokens_as_were_asked_for(
    servers: tuple[Served, Served], most: int
) -> None:
    body = {"prompt": REPEATS, "max_tokens": most, "temperature": 0}
    eager, plain = servers
    found = of(eager.ask("/v1/completions", **body))
    assert found == of(plain.ask("/v1/completions", **body))
    assert found["usage"]["completion_tokens"] == most
    assert found["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_ends_a_text_within_what_a_pass_made(servers: tuple[Served, Served]) -> None:
    asked = {"prompt": REPEATS, "max_tokens": 60, "temperature": 0}
    text = of(servers[1].ask("/v1/completions", **asked))["choices"][0]["text"]
    for at in (40, 63, 87):
        body = {**asked, "stop": [text[at : at + 9]]}
        ended = both(servers, lambda server: of(server.ask("/v1/completions", **body)))  # noqa: B023
        assert ended["choices"][0]["text"] == text[: text.index(text[at : at + 9])]
        assert ended["choices"][0]["finish_reason"] == "stop"
        parts = of_parts(streamed(servers[0], "/v1/completions", **body))
        assert parts == [(ended["choices"][0]["text"], [], "stop")]


def test_conversations_with_thoughts_and_calls(servers: tuple[Served, Served]) -> None:
    calls = 0
    for seed in range(6):
        body = {"messages": MESSAGES, "max_tokens": 120, "seed": seed, "tools": TOOLS}
        body |= {"tool_choice": "required", "logprobs": True, "top_logprobs": 2}
        eager, plain = (of(server.ask("/v1/chat/completions", **body)) for server in servers)
        assert eager == plain
        calls += bool(eager["choices"][0]["message"].get("tool_calls"))
    assert calls


def test_a_grammar_holds(servers: tuple[Served, Served]) -> None:
    body = {"prompt": "[1, 1, 1,", "max_tokens": 60, "guided_regex": r"( 1,){12} 2\]"}
    found = both(servers, lambda server: of(server.ask("/v1/completions", **body)))
    assert found["choices"][0]["text"] == " 1," * 12 + " 2]"
    for seed in range(3):
        body = {"prompt": "{", "max_tokens": 40, "seed": seed, "guided_json": SCHEMA}
        eager, plain = (of(server.ask("/v1/completions", **body)) for server in servers)
        assert eager == plain


def test_company_changes_nothing(servers: tuple[Served, Served]) -> None:
    def ask(server: Served) -> list[Any]:
        def one(seed: int) -> Any:
            body = {"prompt": REPEATS[: 60 + seed], "max_tokens": 40, "seed": seed}
            found = of(server.ask("/v1/completions", temperature=0.5, **body))
            del found["usage"]["prompt_tokens_details"]  # who comes first is not found
            return found

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(one, range(12)))

    both(servers, ask)


def test_who_leaves_within_a_run_leaves_nothing(servers: tuple[Served, Served]) -> None:
    eager, _ = servers
    for _ in range(8):
        body = {"prompt": REPEATS, "max_tokens": 2000, "stream": True, "ignore_eos": True}
        with eager.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_bytes())
    settled(eager)


def test_what_is_told_of_guesses(servers: tuple[Served, Served]) -> None:
    eager, plain = servers
    tokens = eager.metric("decode_tokens_total")
    passes = eager.metric("spec_passes_total")
    accepted = eager.metric("spec_decode_num_accepted_tokens_total")
    came = eager.metric("inter_token_latency_seconds_count")
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": REPEATS, "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    body["stream_options"] = options
    chunks = streamed(eager, "/v1/completions", **body)
    usage = chunks[-1]["usage"]
    guessed = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    settled(eager)
    tokens = eager.metric("decode_tokens_total") - tokens
    passes = eager.metric("spec_passes_total") - passes
    accepted = eager.metric("spec_decode_num_accepted_tokens_total") - accepted
    assert tokens == usage["completion_tokens"] - 1 == 79
    assert guessed == accepted == tokens - passes > 20
    assert eager.metric("inter_token_latency_seconds_count") - came == 79
    assert eager.metric("spec_decisions_total") <= eager.metric("spec_passes_total")
    assert plain.metric("spec_decisions_total") == 0 < plain.metric("spec_passes_total")
    told = [server.client.get("/v1/models").json()["data"][0]["speculate"] for server in servers]
    assert told == ["auto", "off"]
