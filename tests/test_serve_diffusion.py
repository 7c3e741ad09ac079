"""A server whose model denoises blocks: usage, refusals, streams, canvases, and mixed company."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from scripted import scripted_app
from serving import Served, serving, settled
from starlette.testclient import TestClient

TRAINED = Path(__file__).parent / "data" / "clocher-tiny-blocks"
BLOCK, CONTEXT = 4, 1022
RULE = "threshold:0.3"
MODES = ("off", "lossless", RULE, "static:2", "joint:0.1,0.2", "entropy:3")
PROMPT = list(range(40, 56))
"""Whole blocks, so that answers begin with a block."""

CANVAS = {"include_canvas": True, "include_usage": True}


def denoising(to: Path, context: str) -> Path:
    """Return a copy of a trained model whose blocks have this context; " =" ends a text, too."""
    to.mkdir(parents=True)
    for file in TRAINED.iterdir():
        shutil.copyfile(file, to / file.name)
    vocabulary = json.loads((to / "tokenizer.json").read_text())["model"]["vocab"]
    config = json.loads((to / "config.json").read_text())
    assert config["block_diffusion"]["block_size"] == BLOCK
    config["block_diffusion"]["context"] = context
    (to / "generation_config.json").unlink()
    config["eos_token_id"] = [config["eos_token_id"], vocabulary["Ġ="]]
    (to / "config.json").write_text(json.dumps(config))
    return to


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = denoising(tmp_path_factory.mktemp("models") / "causal", "causal")
    with serving(model, "--batch", 16, "--context", CONTEXT) as one:
        yield one


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = denoising(tmp_path_factory.mktemp("models") / "block", "block")
    with serving(model, "--diffusion", RULE, "--context", 100) as one:
        yield one


def completed(server: Served, **body: Any) -> dict[str, Any]:
    """Return a completion, not cut by an end token unless that is wanted."""
    asked = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **body}
    response = server.ask("/v1/completions", **asked)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def streamed(server: Served, **body: Any) -> list[Any]:
    asked = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **body}
    chunks = server.events("/v1/completions", **asked)
    assert chunks.pop() == "[DONE]"
    return chunks


def text_of(chunks: list[Any]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


# What an answer tells of its passes.


def test_usage_and_metrics_tell_the_passes(server: Served) -> None:
    passes, tokens = (server.metric(f"diffusion_{of}_total") for of in ("passes", "tokens"))
    usage = completed(server, max_tokens=16, diffusion="static:2")["usage"]
    # Two positions in each pass.
    assert (usage["nfe"], usage["tokens_per_nfe"]) == (8, 2.0)
    plain = completed(server, max_tokens=16, diffusion="off")["usage"]
    assert "nfe" not in plain and "tokens_per_nfe" not in plain
    two = completed(server, max_tokens=16, diffusion="static:2", n=2)["usage"]
    assert (two["nfe"], two["completion_tokens"]) == (16, 32)
    settled(server)
    assert server.metric("diffusion_passes_total") - passes == 8 + 16
    assert server.metric("diffusion_tokens_total") - tokens == 16 + 32


def test_every_api_tells_the_passes_streamed_or_not(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    extra = {"diffusion": RULE, "ignore_eos": True}
    asked: dict[str, Any] = {"model": "causal", "temperature": 0, "extra_body": extra}
    talk: Any = [{"role": "user", "content": "Write a loop."}]
    chat = client.chat.completions.create(messages=talk, max_completion_tokens=20, **asked)
    *_, last = client.chat.completions.create(
        messages=talk,
        max_completion_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
        **asked,
    )
    answer = client.responses.create(input=talk, max_output_tokens=20, **asked)
    *_, ended = client.responses.create(input=talk, max_output_tokens=20, stream=True, **asked)
    assert ended.type == "response.incomplete"
    passes = set()
    for usage in (chat.usage, last.usage, answer.usage, ended.response.usage):
        assert usage is not None and usage.model_extra is not None
        passes.add(nfe := usage.model_extra["nfe"])
        assert 1 <= nfe < 20 and usage.model_extra["tokens_per_nfe"] == 20 / nfe
    assert len(passes) == 1
    chunks = streamed(server, diffusion=RULE, stream_options={"continuous_usage_stats": True})
    counts = [chunk["usage"]["nfe"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1
    assert counts[-1] == completed(server, diffusion=RULE)["usage"]["nfe"]


def test_lossless_answers_are_those_of_no_diffusion(server: Served) -> None:
    for more in ({}, {"temperature": 1, "seed": 4}, {"guided_regex": "[a-z ]{9,40}"}):
        off, lossless = (
            completed(server, diffusion=mode, logprobs=1, **more) for mode in ("off", "lossless")
        )
        assert off["choices"] == lossless["choices"]
        assert lossless["usage"]["nfe"] <= lossless["usage"]["completion_tokens"]


# What is refused.


def refused(answer: httpx.Response, param: str, *told: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and all(part in error["message"] for part in told), error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"diffusion": "often"}, "expected one of static"),
        ({"diffusion": "threshold:2"}, "from 0 to 1"),
        ({"diffusion": "x" * 65}, "64"),
        ({"diffusion": 3}, "string"),
        ({"diffusion": "static:4", "guided_regex": "a+"}, "use lossless or off"),
        ({"diffusion": "joint", "response_format": {"type": "json_object"}}, "tokens in order"),
    ],
)
def test_what_cannot_be_asked_for(
    server: Served, more: dict[str, Any], told: str, stream: bool
) -> None:
    refused(server.ask("/v1/completions", prompt="x", stream=stream, **more), "diffusion", told)


def test_a_text_under_a_rule_has_whole_blocks(server: Served) -> None:
    asked = {"prompt": [5] * (CONTEXT - 12), "ignore_eos": True}
    whole = server.ask("/v1/completions", max_tokens=10, diffusion="static:1", **asked).json()
    assert whole["usage"]["completion_tokens"] == 10
    answer = server.ask("/v1/completions", max_tokens=11, diffusion="static:1", **asked)
    refused(answer, "prompt", f"{CONTEXT // BLOCK * BLOCK} tokens")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert server.ask("/v1/completions", max_tokens=11, diffusion="off", **asked).is_success


def test_what_a_model_of_whole_blocks_does_not_have(blocked: Served) -> None:
    for mode in ("off", "lossless"):
        answer = blocked.ask("/v1/completions", prompt="x", diffusion=mode)
        refused(answer, "diffusion", "see each other")
    answer = blocked.ask("/v1/completions", prompt="x", echo=True, logprobs=1)
    refused(answer, "echo", "no likelihood")
    answer = blocked.ask("/v1/completions", prompt="x", guided_choice=["a"])
    refused(answer, "diffusion", RULE)
    assert completed(blocked)["usage"]["nfe"] == completed(blocked, diffusion=RULE)["usage"]["nfe"]
    echo = completed(blocked, prompt="a b", echo=True, max_tokens=0)
    assert echo["choices"][0]["text"] == "a b"


def test_a_model_that_denoises_nothing_says_so() -> None:
    with scripted_app() as (app, _):
        client = TestClient(app, base_url="http://127.0.0.1")
        talk = {"messages": [{"role": "user", "content": "hi"}]}
        for mode in ("lossless", "static:4"):
            answer = client.post("/v1/chat/completions", json={**talk, "diffusion": mode})
            refused(answer, "diffusion", "decodes no blocks")
        for mode in ("auto", "off"):
            answer = client.post("/v1/chat/completions", json={**talk, "diffusion": mode})
            assert answer.status_code == 200 and "nfe" not in answer.json()["usage"]


# What is sure is sent; what is not is shown to those who want that.


@pytest.mark.parametrize("rule", [RULE, "static:4"])
def test_a_stream_sends_what_is_sure_and_shows_what_is_not(server: Served, rule: str) -> None:
    body = {"diffusion": rule, "temperature": 1, "seed": 3, "logprobs": 0, "max_tokens": 40}
    whole = completed(server, **body)
    tokens = whole["choices"][0]["logprobs"]["tokens"]
    chunks = streamed(server, **body, stream_options=CANVAS)
    assert text_of(chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["usage"]["nfe"] == whole["usage"]["nfe"]
    made = canvases = partly = 0
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        made += len((choice["logprobs"] or {"tokens": ()})["tokens"])
        if "canvas" not in choice:
            continue
        canvases += 1
        canvas = choice["canvas"]
        assert canvas[0] is None and len(canvas) == BLOCK - made % BLOCK
        partly += len(canvas) < BLOCK
        for at, piece in enumerate(canvas, made):  # what is written stays, and is sent later
            assert piece is None or piece == tokens[at] or "\ufffd" in piece
    assert made == len(tokens) == 40
    assert canvases == whole["usage"]["nfe"] - 1 and partly


def test_a_canvas_that_is_edited_changes(server: Served) -> None:
    body = {"diffusion": "joint:0.05,0.1", "max_tokens": 40, "logprobs": 0}
    body["stream_options"] = CANVAS
    shown: dict[tuple[int, int], set[str]] = {}  # by place in the text
    made = 0
    for choice in (choice for chunk in streamed(server, **body) for choice in chunk["choices"]):
        made += len((choice["logprobs"] or {"tokens": ()})["tokens"])
        if "canvas" in choice:
            assert len(choice["canvas"]) == BLOCK and made % BLOCK == 0  # blocks come whole
            for at, piece in enumerate(choice["canvas"], made):
                shown.setdefault((made, at), set()).update({piece} - {None})
    assert max(map(len, shown.values())) > 1, "no place changed"


def test_who_does_not_ask_sees_no_canvas(server: Served) -> None:
    for body in ({"diffusion": RULE}, {"diffusion": "off", "stream_options": CANVAS}):
        chunks = streamed(server, **body)
        assert text_of(chunks) and not any("canvas" in c for x in chunks for c in x["choices"])


@pytest.mark.parametrize("rule", [RULE, "static:2", "lossless"])
def test_a_stop_string_cuts_inside_a_block(server: Served, rule: str) -> None:
    body = {"diffusion": rule, "temperature": 1, "seed": 8, "max_tokens": 40}
    whole = completed(server, **body, logprobs=0)
    text, tokens = whole["choices"][0]["text"], whole["choices"][0]["logprobs"]["tokens"]
    at = next(at for at in range(BLOCK + 1, 38) if at % BLOCK == 1 and len(tokens[at].strip()) > 0)
    stop = "".join(tokens[at : at + 2])
    cut = completed(server, **body, stop=[stop])
    choice = cut["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    assert cut["usage"]["completion_tokens"] < 40
    assert 1 <= cut["usage"]["nfe"] <= whole["usage"]["nfe"]
    chunks = streamed(server, **body, stop=[stop], stream_options=CANVAS)
    assert text_of(chunks) == choice["text"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    settled(server)


@pytest.mark.parametrize("rule", [RULE, "static:2", "lossless"])
def test_an_end_token_cuts_inside_a_block(server: Served, rule: str) -> None:
    for seed in range(60):
        body = {"diffusion": rule, "temperature": 1, "seed": seed, "max_tokens": 24, "logprobs": 0}
        choice = completed(server, **body)["choices"][0]
        tokens = choice["logprobs"]["tokens"]
        if " =" in tokens and tokens.index(" =") % BLOCK in range(1, BLOCK - 1):
            break
    else:
        raise AssertionError("no text has an end inside a block")
    at = tokens.index(" =")
    cut = completed(server, **body, ignore_eos=False)
    assert cut["choices"][0]["text"] == "".join(tokens[:at])
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] == at + 1
    chunks = streamed(server, **body, ignore_eos=False)
    assert text_of(chunks) == cut["choices"][0]["text"]


# Company.


def mixed(count: int, most: int) -> list[dict[str, Any]]:
    """Return requests of all kinds with prompts of their own, some longer than a page."""
    return [
        {
            "prompt": [(7 * at + 3 * place) % 4000 + 1 for place in range(5 + 9 * at)],
            "diffusion": MODES[at % len(MODES)],
            "temperature": at % 3 / 2,
            "seed": at,
            "max_tokens": most - at,
            "logprobs": 0,
        }
        for at in range(count)
    ]


def told(server: Served, body: dict[str, Any]) -> tuple[list[str], str, int]:
    """Return the tokens of a stream, why it ended, and the passes of a rule."""
    chunks = streamed(server, **body, stream_options=CANVAS)
    assert not any("error" in chunk for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    tokens = [token for c in choices if c["logprobs"] for token in c["logprobs"]["tokens"]]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    is_rule = body["diffusion"] not in ("off", "lossless")
    assert len(tokens) == chunks[-1]["usage"]["completion_tokens"] == body["max_tokens"]
    return tokens, ends[0], chunks[-1]["usage"]["nfe"] if is_rule else 0


def in_company(server: Served, most: int, rounds: int) -> None:
    asked = mixed(16, most)
    alone = [told(server, body) for body in asked]
    assert len({tuple(tokens) for tokens, *_ in alone}) == 16
    # Half of them find what they computed before, half compute all of it again.
    salts = [{"cache_salt": "fresh"} if at % 2 else {} for at in range(16)]
    with ThreadPoolExecutor(16) as pool:
        for _ in range(rounds):
            found = list(
                pool.map(
                    lambda pair: told(server, pair[0] | pair[1]),
                    zip(asked, salts, strict=True),
                )
            )
            assert found == alone
    settled(server)


def test_sixteen_mixed_streams_are_what_each_is_alone(server: Served) -> None:
    in_company(server, 20, 1)


@pytest.mark.slow
def test_sixteen_mixed_streams_for_long(server: Served) -> None:
    in_company(server, 200, 8)
