"""What callers of the Python API read: text, stop strings, reasons, log probabilities, chats."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import pages_used

import clocher_runtime
from clocher_kernels.errors import UsageError
from clocher_runtime.api import LanguageModel
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.requests import OutputQueue, Request
from clocher_runtime.text.tokenizer import Tokenizer

PROMPT = "def read_lines(path):"
CHAT = [{"role": "user", "content": "What does a list do?"}]
LLAMA = Path(__file__).parent / "data" / "clocher-tiny-llama"


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    with clocher_runtime.load(threads=2, batch=3, context=512, all_logits=True) as loaded:
        yield loaded


def test_a_completion_tells_all(model: LanguageModel) -> None:
    found = model.complete(PROMPT, max_new=12, logprobs=3)
    assert found.text == model.generate(PROMPT, 12) == str(found)
    assert found.finish_reason == "length" and found.completion_tokens == len(found.ids) == 12
    prompt = model.tokenizer.encode(PROMPT)
    assert found.prompt_tokens == len(prompt)
    rows = model.session.logits([*prompt, *found.ids[:-1]])[len(prompt) - 1 :]
    assert found.logprobs is not None
    for row, each, token in zip(rows.astype(np.float64), found.logprobs, found.ids, strict=True):
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert each.id == token
        assert each.logprob == pytest.approx(expected[token], abs=1e-6)
        assert each.top[0] == (token, each.logprob)  # greedy; the same float twice
        likeliest = sorted(expected, reverse=True)[:3]
        assert [p for _, p in each.top] == pytest.approx(likeliest, abs=1e-6)


def test_lengths_have_the_names_that_others_use(model: LanguageModel) -> None:
    for name in ("max_new", "max_tokens", "max_new_tokens"):
        assert model.complete(PROMPT, **{name: 5}).completion_tokens == 5
        assert len(model.tokenizer.encode(model.generate(PROMPT, **{name: 2}))) <= 4
    with pytest.raises(UsageError, match="mean the same"):
        model.complete(PROMPT, max_tokens=5, max_new_tokens=5)
    with pytest.raises(UsageError, match="max_tokens: got 0"):
        model.complete(PROMPT, max_tokens=0)


def test_a_stop_string_ends_the_text_before_it(model: LanguageModel) -> None:
    whole = model.generate(PROMPT, 40)
    for at in (3, 9, 17):
        stop = whole[at : at + 4]
        found = model.complete(PROMPT, max_new=40, stop=["never there", stop])
        assert found.text == whole[: whole.index(stop)]
        assert found.finish_reason == "stop" and found.completion_tokens < 40
    pieces = list(model.stream_generate(PROMPT, 40, stop=whole[9:13]))
    assert "".join(pieces) == whole[: whole.index(whole[9:13])]
    assert model.complete(PROMPT, max_new=40, stop=whole + "x").text == whole
    assert pages_used(model.session) == 0


@pytest.mark.parametrize("stop", ["", 5, [""], [5], {"a": 1}])
def test_bad_stops(model: LanguageModel, stop: Any) -> None:
    with pytest.raises(UsageError, match="stop"):
        model.generate(PROMPT, stop=stop)


def test_any_number_of_prompts(model: LanguageModel) -> None:
    prompts = [f"{PROMPT}  # {i}" for i in range(10)]
    together = model.complete_batch(prompts, max_new=8, logprobs=0)
    assert [c.text for c in together] == [model.generate(p, 8) for p in prompts]
    whole = together[0].text
    ended = model.complete_batch(prompts, max_new=8, stop=whole[2:5])
    assert ended[0].text == whole[: whole.index(whole[2:5])]


def test_a_chat_is_the_template_and_one_beginning(model: LanguageModel) -> None:
    text = model.tokenizer.apply_chat_template(CHAT)
    ids = model.tokenizer.encode(text, special=False)
    answer = model.chat(CHAT, max_tokens=6)
    assert answer.ids == model.complete(ids, max_tokens=6).ids
    assert answer.prompt_tokens == len(ids)
    assert "".join(model.stream_chat(CHAT, max_tokens=6)) == answer.text


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, ["hi"], [{"content": "x"}], None, 5])
def test_bad_messages(model: LanguageModel, messages: Any) -> None:
    with pytest.raises(UsageError, match="message"):
        model.chat(messages)


def test_an_option_that_nothing_reads_is_refused(model: LanguageModel) -> None:
    with pytest.raises(UsageError, match="'temprature' is neither an option nor a variable"):
        model.chat(CHAT, temprature=0.5)


def test_tools_that_a_template_does_not_read_are_told_as_text() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    tokenizer = Tokenizer(LLAMA / "tokenizer.json", {"chat_template": template})
    text = tokenizer.apply_chat_template(CHAT, tools=[{"name": "f"}], variables={})
    assert text.startswith("system: # Tools") and '<tools>\n{"name": "f"}\n</tools>' in text
    with pytest.raises(UsageError, match="tools are not JSON values"):
        tokenizer.apply_chat_template(CHAT, tools=[{"name": object()}], variables={})


def test_the_error_of_one_prompt_ends_its_batch(model: LanguageModel) -> None:
    def fail(ids: list[int], row: np.ndarray) -> np.ndarray:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        model.complete_batch([PROMPT, "import"], max_new=50, processors=[fail])
    assert model.session.scheduler.is_idle or pages_used(model.session) == 0


def test_a_text_that_begins_like_a_template_begins_once() -> None:
    content = json.loads((LLAMA / "tokenizer.json").read_bytes())
    begins = content["added_tokens"][0]["content"]
    tokenizer = Tokenizer(LLAMA / "tokenizer.json", {"bos_token": begins, "add_bos_token": True})
    plain = tokenizer.encode_prompt("import os")
    assert plain[0] == content["added_tokens"][0]["id"]
    assert tokenizer.encode_prompt(f"{begins}import os") == plain
    assert tokenizer.encode(f"{begins}import os") == [plain[0], *plain]  # as transformers do


def test_the_second_turn_computes_what_is_new(model: LanguageModel) -> None:
    first = [5 + i % 90 for i in range(300)]
    answer = model.complete(first, max_new=8)
    before = model.session.scheduler.kv_misses
    turn = [*first, *answer.ids, 7, 8, 9]
    again = model.complete(turn, max_new=1)
    assert model.session.scheduler.kv_misses - before <= 3 + len(answer.ids) + 64
    with clocher_runtime.load(threads=1, context=512, prefix_cache=False) as cold:
        assert cold.complete(turn, max_new=1).ids == again.ids


SETTINGS: tuple[dict[str, Any], ...] = (
    {"min_p": 0.2, "temperature": 1.1},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"logit_bias": {7: 50.0}},
    {"repetition_penalty": 1.2, "min_p": 0.05, "temperature": 0.8, "top_p": 0.9, "top_k": 30},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_of_the_host_are_the_same_alone_and_in_company(
    model: LanguageModel, settings: dict[str, Any]
) -> None:
    alone = model.complete(PROMPT, max_new=10, seed=3, **settings)
    streams = [model.stream_generate(PROMPT, 10, seed=3, **settings)]
    streams += [model.stream_generate(f"{PROMPT} # {i}", 10, temperature=1.0) for i in range(3)]
    for stream in streams:
        stream.begin()
    assert [s.result().ids for s in streams][0] == alone.ids  # noqa: RUF015 - all are read


def test_log_probabilities_are_those_before_penalties_and_biases(model: LanguageModel) -> None:
    settings: dict[str, Any] = {"repetition_penalty": 1.3, "logit_bias": {7: 4.0}, "min_p": 0.01}
    settings |= {"max_new": 8, "temperature": 0.9, "seed": 4}
    found = model.complete(PROMPT, logprobs=1, **settings)
    assert found.ids == model.complete(PROMPT, **settings).ids
    prompt = model.tokenizer.encode(PROMPT)
    rows = model.session.logits([*prompt, *found.ids[:-1]])[len(prompt) - 1 :].astype(np.float64)
    assert found.logprobs is not None
    for row, each in zip(rows, found.logprobs, strict=True):
        expected = row[each.id] - row.max() - np.log(np.exp(row - row.max()).sum())
        assert each.logprob == pytest.approx(expected, abs=1e-6)


def draw(logits: np.ndarray, ids: list[int], prompt: int, number: int, sampling: Sampling) -> int:
    made = len(ids) - prompt
    request = Request(queue=OutputQueue(1), ids=ids, made=made, sampling=sampling)
    return request.draw(logits, number)


def test_drawing_follows_the_formulas() -> None:
    logits = np.array([2.0, 1.5, -1.0, 0.0], np.float32)
    seen = [0, 2, 0, 2]
    assert draw(logits, seen, 2, 2, Sampling(repetition_penalty=2.0)) == 1  # 2/2, 1.5, -2, 0
    assert draw(logits, seen, 2, 2, Sampling(presence_penalty=0.6)) == 1
    assert draw(logits, seen, 4, 0, Sampling(presence_penalty=0.6)) == 0  # nothing made yet
    assert draw(logits, [0, 0, 1], 0, 3, Sampling(frequency_penalty=0.3)) == 0  # 1.4, 1.2
    assert draw(logits, [0, 0, 0], 0, 3, Sampling(frequency_penalty=0.3)) == 1  # 1.1, 1.5
    assert draw(logits, [], 0, 0, Sampling(logit_bias={3: 9})) == 3
    hot = {draw(logits, [], 0, i, Sampling(temperature=1, min_p=0.5)) for i in range(200)}
    assert hot == {0, 1}  # exp(-0.5) = 0.61, exp(-2) = 0.14
    shares = np.bincount(
        [draw(logits, [], 0, i, Sampling(temperature=1, min_p=1e-9)) for i in range(4000)]
    )
    expected = np.exp(logits) / np.exp(logits).sum()
    assert np.allclose(shares / 4000, expected, atol=0.03)

    def only(ids: list[int], row: np.ndarray) -> np.ndarray:
        row[: 3 - len(ids)] = -np.inf
        return row

    assert draw(logits, [0], 0, 1, Sampling(processors=[only], temperature=1)) in (2, 3)


@pytest.mark.parametrize(
    "process", [lambda i, r: None, lambda i, r: r[:5], lambda i, r: r * np.nan, lambda i, r: 1 / 0]
)
def test_the_fault_of_a_processor_is_its_callers(model: LanguageModel, process: Any) -> None:
    good = model.stream_generate(PROMPT, 6)
    next(good)
    with pytest.raises((UsageError, ZeroDivisionError)):
        model.generate(PROMPT, processors=[process])
    assert good.result().text == model.generate(PROMPT, 6)


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"presence_penalty": "1"},
        {"logit_bias": [1]},
        {"logit_bias": {1: "x"}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": {1: 1e39}},
        {"logit_bias": {i: float("-inf") for i in range(4096)}},
        {"logit_bias": {10**6: 1.0}},
        {"processors": 5},
        {"processors": [5]},
        {"logprobs": 21},
        {"logprobs": "all"},
    ],
    ids=lambda options: str(options)[:60],
)
def test_bad_settings(model: LanguageModel, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        model.generate(PROMPT, **options)
