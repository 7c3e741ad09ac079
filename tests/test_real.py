"""Published models: the default one, which pip brings, and those of a directory of yours.

`CLOCHER_TEST_MODELS` names a directory of GGUF files, which `-m slow` runs.
"""

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import pytest
import torch
import transformers
from commands import clocher as clocher_command
from commands import here
from serving import Served, serving

import clocher_runtime as clocher
from clocher_runtime.api import LanguageModel
from clocher_runtime.checkpoints.locate import DEFAULT, locate

pytestmark = pytest.mark.real

DIRECTORY = os.environ.get("CLOCHER_TEST_MODELS", "")
MODELS = sorted(Path(DIRECTORY).glob("*.gguf")) if DIRECTORY else []
TEXTS = (
    "The capital of France is",
    "The old bell tower stood at the end of the village, and",
    'def fibonacci(n):\n    """Return the nth number."""\n',
)
NEW = 24
ASK = [{"role": "user", "content": "Name the capital of France."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
EXACT = {"act_prec": "fp32", "kv_dtype": "f32", "threads": 2}


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return locate(DEFAULT)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[LanguageModel]:
    with clocher.load(smollm2, threads=2, batch=4, context=512) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Served]:
    with serving("--model-dir", smollm2, "--context", 512) as served:
        yield served


def greedy(path: Path, **settings: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids of TEXTS, and those that follow."""
    with clocher.load(path, context=256, **EXACT, **settings) as model:
        done = [model.complete(text, max_tokens=NEW, temperature=0) for text in TEXTS]
        return [model.tokenizer.encode_prompt(text) for text in TEXTS], [list(d.ids) for d in done]


def check_against_transformers(path: Path) -> None:
    """Compare greedy ids; where two logits tie within rounding, either is right."""
    prompts, texts = greedy(path)
    # transformers reads a file three times, most of the time the texts of its vocabulary, and makes
    # the same table of names for each of its modules.
    reader = gguf.GGUFReader(path)
    for name in ("token_type", "merges", "scores"):
        reader.fields.pop(f"tokenizer.ggml.{name}", None)
    names = patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    with patch.object(gguf, "GGUFReader", lambda _: reader), names:
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
        ).eval()
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1).values
        chosen = logits[torch.arange(len(text)), torch.tensor(text)]
        assert np.allclose(chosen, best, rtol=0, atol=2e-4), (best - chosen).max()


def test_ids_are_those_of_transformers(smollm2: Path) -> None:
    check_against_transformers(smollm2)


@pytest.mark.slow
@pytest.mark.skipif(not MODELS, reason="CLOCHER_TEST_MODELS names no directory of GGUF files")
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_ids_of_other_models(path: Path) -> None:
    check_against_transformers(path)


def test_it_knows_the_capital_of_france(model: LanguageModel) -> None:
    answer = model.chat(ASK, temperature=0, max_tokens=24)
    assert "Paris" in answer.text and answer.finish_reason == "stop"


def test_alone_and_in_a_batch(model: LanguageModel) -> None:
    options = {"temperature": 0.8, "seed": 3, "max_tokens": NEW}
    alone = [model.complete(text, **options).ids for text in TEXTS]
    assert [done.ids for done in model.complete_batch(TEXTS, **options)] == alone


def test_drafts_change_no_id(smollm2: Path, model: LanguageModel) -> None:
    text = "one two three four five six one two three four five six one two three"
    with clocher.load(smollm2, threads=2, context=512, speculate="off") as plain:
        for options in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}):
            expected = plain.complete(text, max_tokens=48, **options)
            assert model.complete(text, max_tokens=48, **options).ids == expected.ids


def test_json_of_a_schema(model: LanguageModel) -> None:
    prompt = [{"role": "user", "content": "Describe a person as JSON."}]
    answer = model.chat(prompt, json_schema=PERSON, temperature=0, max_tokens=60)
    person = json.loads(answer.text)
    assert sorted(person) == ["age", "name"] and isinstance(person["age"], int)


def test_a_server_answers_as_the_library(server: Served, model: LanguageModel) -> None:
    expected = model.chat(ASK, temperature=0, max_tokens=24).text
    body = {"messages": ASK, "temperature": 0, "max_tokens": 24}
    answer = server.ask("/v1/chat/completions", **body)
    assert answer.json()["choices"][0]["message"]["content"] == expected
    *events, done = server.events("/v1/chat/completions", **body)
    assert done == "[DONE]"
    parts = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(parts) == expected


def test_a_chat_in_a_pipe(smollm2: Path) -> None:
    flags = ("--temperature", "0", "--no-stats")
    code, said, errors = clocher_command("chat", str(smollm2), *flags, input=ASK[0]["content"])
    assert code == 0, errors
    assert "Paris" in said


def test_tools_that_a_template_does_not_know_are_called(server: Served) -> None:
    city: dict[str, Any] = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    city["additionalProperties"] = False  # such a small model would go on inventing some
    tool = {"type": "function", "function": {"name": "weather", "parameters": city}}
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    body: dict[str, Any] = {"tools": [tool], "temperature": 0, "max_tokens": 60}
    body |= {"tool_choice": "required", "parallel_tool_calls": False}
    answer = server.ask("/v1/chat/completions", messages=messages, **body)
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert "Paris" in json.loads(call["function"]["arguments"])["city"]


def test_four_bits_of_it_still_predict_text(smollm2: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((Path(__file__).parents[1] / "LICENSE").read_text()[:3000])
    scores = []
    small = tmp_path / "int4"
    code, _, errors = here("quantize", smollm2, small, "--requantize")
    assert code == 0, errors
    for path in (smollm2, small):
        code, said, errors = here("perplexity", path, "--text", text)
        assert code == 0, errors
        scores.append(json.loads(said)["perplexity"])
    assert 0.9 * scores[0] < scores[1] < 1.3 * scores[0]
