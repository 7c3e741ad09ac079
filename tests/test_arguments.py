"""What callers of the Python API hand over: wrong types and sizes are UsageErrors that say so."""

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clocher_runtime
from clocher_kernels.errors import ClocherError, ModelNotFound, UsageError
from clocher_runtime.api import LanguageModel
from clocher_runtime.config.values import integer, shown
from clocher_runtime.engine.arguments import Sampling

PROMPT = [5, 6, 7]


class Odd:
    """An argument that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    with clocher_runtime.load(threads=1, context=64, batch=2) as loaded:
        yield loaded


@pytest.mark.parametrize(
    "prompt",
    [
        np.array(PROMPT),
        np.array(PROMPT, np.uint16),
        tuple(PROMPT),
        range(5, 8),
        [np.int32(5), 6, np.uint64(7)],
        torch.tensor(PROMPT),
    ],
    ids=lambda p: type(p).__name__,
)
def test_integers_of_any_kind_are_ids(model: LanguageModel, prompt: Any) -> None:
    expected = model.generate(PROMPT, 6)
    assert model.generate(prompt, np.int64(6), temperature=np.float32(0), top_k=np.int8(3)) == (
        expected
    )
    assert model.generate_batch([prompt, PROMPT], 6) == [expected] * 2


def test_a_matrix_of_ids_is_a_batch(model: LanguageModel) -> None:
    assert model.generate_batch(np.array([PROMPT, PROMPT]), 6) == [model.generate(PROMPT, 6)] * 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, 6.0], "token 1 is 6.0; expected an integer"),
        ([True, 5], "token 0 is True; expected an integer"),
        ([np.True_], "expected an integer"),
        ([5, None], "token 1 is None"),
        ([5, "6"], "token 1 is '6'"),
        ([[5, 6]], r"token 0 is \[5, 6\]"),
        ([{"role": "user", "content": "hi"}], "list of messages; .*chat"),
        ({"role": "user"}, "expected a list of token ids"),
        (b"text", "got b'text'; expected a list"),
        (None, "got None"),
        (5, "got 5"),
        (5.5, "got 5.5"),
        (np.array(5), "expected a list"),
        (np.array([1.5]), "expected an integer"),
        (np.array([[5]]), "expected an integer"),
        ({5, 6}, "expected a list"),
        (iter(PROMPT), "expected a list"),
        (Odd(), "got <Odd instance"),
        ([Odd()], "token 0 is "),
        ([], "no tokens"),
        ("", "no tokens"),
        ([-1], r"outside 0\.\.4095"),
        ([4096], "outside"),
        ([1 << 70], "outside"),
        ([10**5000], "outside"),
        ([5] * 65, "65 tokens, the context holds 64"),
        ([5] * 9000, "shorten it: the model takes at most "),
        ("\udcff", "Unicode"),
    ],
)
def test_prompts(model: LanguageModel, prompt: Any, message: str) -> None:
    calls = (model.generate, model.stream_generate, lambda p: model.generate_batch([p]))
    for call in (*calls, lambda p: model.session.check(p)) if prompt != "" else calls:
        if call is not calls[0] and isinstance(prompt, str) and prompt:
            continue
        with pytest.raises(UsageError, match=message):
            call(prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new": float("nan")}, "max_new: got nan, expected an integer, at least 1"),
        ({"max_new": 3.0}, "max_new: got 3.0"),
        ({"max_new": "3"}, "max_new: got '3'"),
        ({"max_new": True}, "max_new: got True"),
        ({"max_new": None}, "max_new: got None"),
        ({"max_new": 0}, "max_new: got 0"),
        ({"max_new": -(10**30)}, "max_new: got -1"),
        ({"max_new": np.array([3])}, "max_new: got array"),
        ({"temperature": "0.5"}, "temperature: got '0.5', expected a number from 0"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"temperature": float("inf")}, "temperature: got inf"),
        ({"temperature": 1e39}, "temperature: got 1e"),
        ({"temperature": 10**400}, "temperature: got "),
        ({"temperature": -0.5}, "temperature: got -0.5"),
        ({"temperature": True}, "temperature: got True"),
        ({"temperature": None}, "temperature: got None"),
        ({"temperature": Decimal(1)}, "temperature: got Decimal"),
        ({"top_k": 2.0}, "top_k: got 2.0"),
        ({"top_k": -1}, "top_k: got -1"),
        ({"top_k": 1 << 31}, "top_k: got 2147483648"),
        ({"top_p": 0}, "top_p: got 0"),
        ({"top_p": 1.5}, "top_p: got 1.5"),
        ({"top_p": "1"}, "top_p: got '1'"),
        ({"seed": 1.0}, "seed: got 1.0"),
        ({"seed": -1}, "seed: got -1"),
        ({"seed": 1 << 64}, "seed: got 18446744073709551616"),
        ({"seed": False}, "seed: got False"),
        (
            {"sed": 1},
            "no option 'sed'; it has adapter, choice, .*, seed, stop, temperature, top_k, top_p",
        ),
    ],
    ids=str,
)
def test_options(model: LanguageModel, options: dict[str, Any], message: str) -> None:
    calls = (model.generate, model.stream_generate, lambda p, **o: model.generate_batch([p], **o))
    for call in calls:
        with pytest.raises(UsageError, match=message):
            call(PROMPT, **options)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("text", "got 'text'; expected a list of prompts"),
        (b"text", "expected a list of prompts"),
        (None, "expected a list of prompts"),
        ({"prompt": PROMPT}, "expected a list of prompts"),
        (PROMPT, "a prompt is text or a list of token ids: got 5"),
        ([], "0 prompts"),
        ([PROMPT, None], "got None"),
        ([PROMPT, []], "prompt 1: no tokens"),
    ],
)
def test_batches(model: LanguageModel, prompts: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model.generate_batch(prompts)


def test_more_tokens_than_the_context_holds_are_fewer(model: LanguageModel) -> None:
    tokens = list(model.session.generate([PROMPT], 10**30, stop_ids=frozenset()))
    assert len(tokens) == 61


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache": "no"}, "prefix_cache: got 'no', expected True or False"),
        ({"all_logits": 1}, "all_logits: got 1, expected True or False"),
        ({"itl_ms": True}, "itl_ms: got True, expected a number"),
        ({"itl_ms": 0}, "itl_ms: got 0, expected a number"),
        ({"kv_pages": 0}, "kv_pages: got 0, expected an integer from 1"),
        *(
            ({name: value}, f"{name}: got ")
            for name in ("threads", "context", "batch", "chunk")
            for value in (float("nan"), "2", True, 1.0, 0, -1, [2], 10**30, 10**5000)
        ),
        ({"threads": 1025}, "from 1 to 1024"),
        ({"context": 4097}, "this model takes 1 to 4096"),
        ({"batch": (1 << 31) - 1}, "from 1 to 1024"),
        ({"chunk": (1 << 31) - 1}, "KV cache and buffers need"),
        ({"kv_dtype": 32}, "kv_dtype: got 32, expected one of f32"),
        ({"kv_dtype": ["f32"]}, "kv_dtype: got "),
        ({"device": 0}, "device: got 0, expected one of auto"),
        ({"device": None}, "device: got None"),
        ({"device": np.array(["cpu"])}, "device: got array"),
        ({"precision": 8}, "precision: got 8, expected one of fp32"),
        ({"act_prec": []}, r"act_prec: got \[\], expected one of int8"),
        ({"pretranspose": {}}, "pretranspose: got {}"),
        ({"progress": 1}, "progress is 1; expected a function or None"),
        ({"bacth": 2}, "load has no option 'bacth'; it has act_calibration, act_prec"),
        ({"backend": "cpu"}, "load has no option 'backend'"),
        ({"path": 3}, "model_dir: got 3, expected a path"),
        ({"path": b"model"}, "model_dir: got b'model'"),
        ({"path": ["a"]}, r"model_dir: got \['a'\]"),
        ({"path": "\0"}, "expected a path"),
        ({"path": ""}, "model_dir: got ''"),
        ({"tuning": 5}, "load has no option 'tuning'"),
        ({"path": Path("no-such-model")}, "path: no model 'no-such-model' here"),
    ],
    ids=lambda v: shown(v),
)
def test_loading(options: dict[str, Any], message: str) -> None:
    given = {"device": "cpu", **options}
    with pytest.raises(ClocherError, match=message):
        clocher_runtime.load(**given)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (5, {}, "a prompt is text or a list of token ids: got 5"),
        ("a", {"path": ""}, "path is empty"),
        ("a", {"max_new": 0}, "max_new: got 0"),
        ("a", {"top_p": 2}, "top_p: got 2"),
        ("a", {"sed": 1}, "no option 'sed'"),
    ],
)
def test_a_stream_of_its_own_model_checks_at_the_call(
    prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        clocher_runtime.stream_generate(prompt, **options)


def test_a_stream_of_a_model_that_is_not_there_fails_at_the_call() -> None:
    with pytest.raises(ModelNotFound, match="path: no model 'no-such-model' here"):
        clocher_runtime.stream_generate("a", path="no-such-model")


def test_sampling_keeps_plain_numbers() -> None:
    made = Sampling(np.float32(0.5), np.int64(3), Fraction(1, 2), np.uint64(1 << 63))
    assert made == Sampling(0.5, 3, 0.5, 1 << 63)
    assert {type(n) for n in (made.temperature, made.top_p)} == {float}
    assert {type(n) for n in (made.top_k, made.seed)} == {int}


def test_what_is_shown_is_short() -> None:
    assert len(shown(list(range(10**6)))) < 80
    assert len(shown("x" * 10**6)) < 80
    assert shown(10**5000) == "a int" or len(shown(10**5000)) < 80
    assert len(shown(Odd())) < 80
    assert integer(1, 3).check("n", np.uint8(3)) == 3


@pytest.mark.parametrize("value", [1e-320, 1e-300, 1e38, 0.001])
def test_a_penalty_that_leaves_the_floats_is_refused_by_name(value: float) -> None:
    with pytest.raises(
        UsageError, match=r"repetition_penalty: got .*, expected a number from 0.01"
    ):
        Sampling(repetition_penalty=value)
    with pytest.raises(UsageError, match="frequency_penalty: got 1e"):
        Sampling(frequency_penalty=1e30)
