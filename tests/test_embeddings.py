"""Hidden states and embeddings: against transformers, and /v1/embeddings of a real server."""

import base64
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from commands import python
from random_models import make, prompt_of
from serving import Served, example_of, serving, settled
from sessions import make_session
from transformers import PreTrainedModel

from clocher_kernels.errors import UsageError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.engine.load import load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.serve.embeddings import EmbeddingsRequest
from clocher_runtime.serve.errors import ApiError

TEXTS = ["def a loop:", "while True", "x", "for each of them, the same again and again " * 20]


def states_of(session: Session, ids: Sequence[int], **options: bool) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for _ in session.states(ids, lambda at, row: found.__setitem__(at, row.copy()), **options):
        pass
    return found


def reference_states(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        told = model.model(torch.tensor([ids])).last_hidden_state[0]
    states: np.ndarray = told.float().numpy()
    return states


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "granite"])
def test_states_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = make(family, 5, tmp_path)
    ids = prompt_of(family, reference.config.vocab_size)
    model = load_model(open_checkpoint(tmp_path))
    options = {"act_prec": "fp32", "kv_dtype": "f32", "chunk": 16, "batch": 2}
    with closing(make_session(model, **options)) as session:
        expected = reference_states(reference, ids)
        found = states_of(session, ids)
        assert sorted(found) == list(range(len(ids)))
        scale = expected[0] @ found[0] / (found[0] @ found[0])
        assert family == "granite" or abs(scale - 1) < 1e-4  # of its logits, in the norm
        for at, state in found.items():
            np.testing.assert_allclose(state * scale, expected[at], rtol=2e-4, atol=2e-4)
        (last,) = states_of(session, ids, last_only=True).items()
        assert last[0] == len(ids) - 1
        np.testing.assert_array_equal(last[1], found[last[0]])


def test_states_do_not_depend_on_what_runs_beside_them(tmp_path: Path) -> None:
    make("llama", 6, tmp_path)
    model = load_model(open_checkpoint(tmp_path))
    ids = prompt_of("beside", model.spec.vocab_size)
    with closing(make_session(model, chunk=16, batch=3, score_rows=8)) as session:
        alone = states_of(session, ids)
        tokens = session.generate([ids[:20], ids[5:30]], 40, stop_ids=frozenset())
        next(tokens)
        scored: list[int] = []
        scoring = session.scoring(ids, lambda at, row: scored.append(at))
        scoring.begin()
        beside = states_of(session, ids)
        list(scoring)
        assert len(list(tokens)) == 79 and scored == list(range(len(ids)))
        for at in alone:
            np.testing.assert_array_equal(alone[at], beside[at])
        with pytest.raises(UsageError):
            states_of(session, [])


# -- what is asked --


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("x", ["x"]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["x"] * 2048, ["x"] * 2048),
    ],
)
def test_what_may_be_embedded(given: object, expected: list[Any]) -> None:
    assert EmbeddingsRequest.parse(json.dumps({"input": given}).encode()).input == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": ["x", 1]}, "input"),
        ({"input": None}, "input"),
        ({}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_what_cannot_be_embedded_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        EmbeddingsRequest.parse(json.dumps(fields).encode())
    assert raised.value.param == param and param in raised.value.message


# -- pooling, as the files say --


def with_pooling(directory: Path, pooling: dict[str, Any] | None) -> Path:
    shutil.copytree(embedded_model(), directory)
    if pooling is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (None, ""),
        ({"word_embedding_dimension": 64, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_max_tokens": True}, "max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "mean+cls"),
    ],
)
def test_pooling_of_sentence_transformers(pooling: Any, expected: str, tmp_path: Path) -> None:
    assert open_checkpoint(with_pooling(tmp_path / "m", pooling)).pooling == expected


# -- a real server --


@pytest.fixture(scope="module", params=["last", "mean"])
def server(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    told = {"mean": {"pooling_mode_mean_tokens": True}}.get(request.param)
    model = with_pooling(tmp_path_factory.mktemp("models") / request.param, told)
    with serving("--model-dir", model, "--batch", 2, "--queue", 2) as running:
        yield running
        settled(running)


def embedded(server: Served, given: Any, **more: Any) -> list[Any]:
    response = server.ask("/v1/embeddings", input=given, **more)
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["object"] == "list" and body["model"] == server.facts["model"]
    assert [each["index"] for each in body["data"]] == list(range(len(body["data"])))
    return [each["embedding"] for each in body["data"]]


def test_texts_have_embeddings_of_unit_length(server: Served) -> None:
    found = np.array(embedded(server, TEXTS))
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    tokens = [server.ask("/tokenize", prompt=text).json()["tokens"] for text in TEXTS]
    assert embedded(server, tokens) == found.tolist()  # and in other company
    assert embedded(server, TEXTS[3]) == [found[3].tolist()]
    usage = server.ask("/v1/embeddings", input=TEXTS).json()["usage"]
    assert usage == dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(len, tokens)))


def test_they_are_the_pooled_states(server: Served) -> None:
    ids = server.ask("/tokenize", prompt=TEXTS[3]).json()["tokens"]
    assert len(ids) > 128  # several pieces
    (found,) = embedded(server, [ids])
    model = load_model(open_checkpoint(embedded_model()))
    with closing(make_session(model, batch=2, score_rows=64)) as session:
        states = states_of(session, ids)
    pooled = states[len(ids) - 1]
    if "mean" in server.facts["model"]:
        pooled = np.mean(list(states.values()), axis=0)
    np.testing.assert_allclose(found, pooled / np.linalg.norm(pooled), rtol=1e-5, atol=1e-6)


def test_more_inputs_than_sequences_side_by_side(server: Served) -> None:
    texts = [f"text {n}" for n in range(19)]
    assert embedded(server, texts)[18] == embedded(server, texts[18])[0]


def test_formats_and_dimensions(server: Served) -> None:
    (plain,) = embedded(server, "x")
    (packed,) = embedded(server, "x", encoding_format="base64")
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == plain
    (short,) = embedded(server, "x", dimensions=8)
    first = np.array(plain[:8])
    np.testing.assert_allclose(short, first / np.linalg.norm(first), rtol=1e-5)
    wrong = server.ask("/v1/embeddings", input="x", dimensions=len(plain) + 1)
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "dimensions"


def test_what_does_not_fit_is_refused(server: Served) -> None:
    long = server.ask("/v1/embeddings", input=[[1], [1] * 5000])
    assert long.status_code == 400
    error = long.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].endswith("has 5000 tokens in the input; shorten them")
    outside = server.ask("/v1/embeddings", input=[1 << 20])
    assert outside.status_code == 400 and "out of range" in outside.json()["error"]["message"]


def test_openai_python(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    made = client.embeddings.create(model=server.facts["model"], input=TEXTS[:2])
    np.testing.assert_allclose([e.embedding for e in made.data], embedded(server, TEXTS[:2]))


def test_langchain(server: Served) -> None:
    package = pytest.importorskip("langchain_openai")
    done = python("-c", example_of("serving-clients.md", "import langchain_openai", server))
    assert done.returncode == 0 and int(done.stdout) == len(embedded(server, "x")[0]), done.stderr
    client = package.OpenAIEmbeddings(
        base_url=f"{server.url}/v1",
        api_key="none",
        model=server.facts["model"],
        check_embedding_ctx_length=False,
    )
    np.testing.assert_allclose(client.embed_documents(TEXTS[:2]), embedded(server, TEXTS[:2]))
    np.testing.assert_allclose(client.embed_query("x"), embedded(server, "x")[0])


def test_a_pooling_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    model = with_pooling(tmp_path / "m", {"pooling_mode_max_tokens": True})
    with serving("--model-dir", model) as running:
        refused = running.ask("/v1/embeddings", input="x")
        assert refused.status_code == 400
        assert "max_tokens" in refused.json()["error"]["message"]
