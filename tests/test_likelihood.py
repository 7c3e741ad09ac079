"""Log probabilities of texts are those that transformers' logits give, alone and side by side."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from clocher_kernels.errors import FormatError, UsageError
from clocher_runtime.api import LanguageModel, load
from clocher_runtime.quality.likelihood import (
    Likelihood,
    Pair,
    Scorer,
    metrics,
    read_task,
    score_items,
)
from clocher_runtime.subcommands.quality import quality

DATA = Path(__file__).parent / "data"
LLAMA = DATA / "clocher-tiny-llama"
TEXT = (DATA / "valid.txt").read_text(encoding="utf-8")
CONTEXT = 96


def scored(batch: int) -> LanguageModel:
    return load(
        LLAMA, batch=batch, context=CONTEXT, kv_dtype="f32", act_prec="fp32", all_logits=True
    )


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    with scored(4) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def scorer(model: LanguageModel) -> Scorer:
    return Scorer(model.session, model.tokenizer)


@pytest.fixture(scope="module")
def pairs(scorer: Scorer, model: LanguageModel) -> list[Pair]:
    lines = [line.strip() for line in TEXT.splitlines() if len(line.strip()) > 30][:20]
    halves = [scorer.pair(line[:15], line[15:]) for line in lines]
    context = scorer.pair("for index in", " range")
    last = [Pair(context.context, [*context.continuation[:-1], end]) for end in (7, 300, 11)]
    greedy = Pair(model.tokenizer.encode("def area("), model.complete("def area(", max_new=3).ids)
    long = Pair(list(range(300, 300 + 2 * CONTEXT)), list(range(40, 40 + CONTEXT)))
    return [*halves, context, *last, greedy, long, *scorer.windows(TEXT[:900])]


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()


def plain(theirs: torch.nn.Module, pair: Pair) -> Likelihood:
    """Score a pair by its definition."""
    count = len(pair.continuation)
    ids = [*pair.context, *pair.continuation][-(CONTEXT + 1) :]
    with torch.no_grad():
        logits = theirs(torch.tensor([ids[:-1]])).logits[0, -count:].double()
    told = torch.log_softmax(logits, dim=-1)[torch.arange(count), torch.tensor(ids[-count:])]
    return Likelihood(float(told.sum()), logits.argmax(-1).tolist() == ids[-count:])


def test_scores_are_those_of_transformers(
    scorer: Scorer, pairs: list[Pair], theirs: torch.nn.Module
) -> None:
    found = scorer.scores(pairs)
    expected = [plain(theirs, pair) for pair in pairs]
    lengths = np.array([len(pair.continuation) for pair in pairs])
    differences = np.subtract([f.logprob for f in found], [e.logprob for e in expected])
    assert np.abs(differences / lengths).max() < 5e-6
    assert [f.is_greedy for f in found] == [e.is_greedy for e in expected]
    assert 0 < sum(f.is_greedy for f in found) < len(found)


def test_scores_are_the_same_bits_alone_and_side_by_side(scorer: Scorer, pairs: list[Pair]) -> None:
    together = scorer.scores(pairs)
    with scored(1) as alone:
        other = Scorer(alone.session, alone.tokenizer)
        assert [other.scores([pair])[0] for pair in pairs] == together
    seen: list[tuple[int, int]] = []
    assert scorer.scores(pairs[::-1], lambda *done: seen.append(done)) == together[::-1]
    assert seen[-1] == (len(pairs), len(pairs)) and len(seen) == len(pairs) - 3


def test_texts_are_cut_as_the_harness_cuts_them(scorer: Scorer, model: LanguageModel) -> None:
    encode = model.tokenizer.encode
    end = model.tokenizer.bos_id
    end = model.model.spec.eos_ids[0] if end is None else end
    moved = scorer.pair("return  ", "value")
    assert moved == (encode("return"), encode("return  value")[len(encode("return")) :])
    assert scorer.pair("", "class A") == ([end], encode("class A"))
    assert scorer.pair("  ", "class A") == ([end], encode("  class A"))
    with pytest.raises(UsageError, match="adds no token"):
        scorer.pair("class", "")
    with pytest.raises(UsageError, match="1 to 96"):
        scorer.scores([Pair([1], [2] * (CONTEXT + 1))])
    with pytest.raises(UsageError, match="nothing before it"):
        scorer.scores([Pair([], [1, 2, 3])])


@pytest.mark.parametrize("count", [1, CONTEXT, CONTEXT + 1, 3 * CONTEXT - 1])
def test_windows_score_each_token_once_and_see_a_whole_context(
    scorer: Scorer, model: LanguageModel, count: int
) -> None:
    text = model.tokenizer.decode(model.tokenizer.encode(TEXT)[:count])
    ids = model.tokenizer.encode(text)
    windows = scorer.windows(text)
    assert [token for window in windows for token in window.continuation] == ids
    at = 0
    for window in windows[1:]:
        at += CONTEXT
        whole = [*window.context, *window.continuation]
        assert len(whole) == CONTEXT + 1
        assert whole == ids[at + len(window.continuation) - len(whole) :][: len(whole)]


QUESTIONS = [
    {"context": "for index in", "choices": [" range(", " a very long and odd one"], "answer": 0},
    {"context": "import ", "choices": ["zebra", "os", "sys"], "answer": 0},
]


def test_a_task_has_the_metrics_of_its_items(
    scorer: Scorer, theirs: torch.nn.Module, tmp_path: Path
) -> None:
    texts = [TEXT[:900], "import os\n"]
    lines = [json.dumps(each) for each in [*QUESTIONS, *({"text": text} for text in texts)]]
    (tmp_path / "task.jsonl").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    items = read_task(tmp_path / "task.jsonl")
    found = metrics(scorer, items, score_items(scorer, items))
    right, normed = 0, 0
    for each in QUESTIONS:
        sums = [plain(theirs, scorer.pair(each["context"], c)).logprob for c in each["choices"]]
        means = [total / len(c) for total, c in zip(sums, each["choices"], strict=True)]
        right += int(np.argmax(sums)) == each["answer"]
        normed += int(np.argmax(means)) == each["answer"]
    questions = found["questions"]
    assert questions["acc"] == right / 2 == 0.5 and questions["acc_stderr"] == pytest.approx(0.5)
    assert questions["acc_norm"] == normed / 2 and questions["chance"] == pytest.approx(5 / 12)
    windows = [window for text in texts for window in scorer.windows(text)]
    loss = -sum(plain(theirs, window).logprob for window in windows)
    tokens = sum(len(window.continuation) for window in windows)
    nbytes = sum(len(text.encode()) for text in texts)
    assert found["texts"]["tokens"] == tokens
    assert found["texts"]["perplexity"] == pytest.approx(np.exp(loss / tokens), rel=1e-5)
    assert found["texts"]["bits_per_byte"] == pytest.approx(loss / nbytes / np.log(2), rel=1e-5)
    assert found["texts"]["word_perplexity"] == pytest.approx(
        np.exp(loss / sum(len(text.split()) + text.endswith("\n") for text in texts)), rel=1e-4
    )


WRONG = {
    "[1]": "expected a JSON object",
    '{"context": "a"}': "expected {",
    '{"text": ""}': "text is ''; expected text of length >= 1",
    '{"text": 3}': "text",
    '{"context": "a", "choices": ["b"], "answer": 0}': "length >= 2",
    '{"context": "a", "choices": ["b", ""], "answer": 0}': "choices[1] is ''; expected",
    '{"context": "a", "choices": ["b", "c"], "answer": 2}': "0 to 1",
    '{"context": "a", "choices": ["b", "c"], "answer": true}': "an integer",
    '{"context": "a", "choices": ["b", "c"], "answer": 0, "weight": 1}': "weight",
    '{"text": "a"': "not valid JSON",
}


@pytest.mark.parametrize(("line", "message"), WRONG.items(), ids=list(WRONG))
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text('{"text": "import os"}\n' + line, encoding="utf-8")
    with pytest.raises(FormatError, match=r"task\.jsonl, line 2: ") as caught:
        read_task(path)
    assert message in str(caught.value)
    path.write_text(" \n")
    with pytest.raises(FormatError, match="no lines"):
        read_task(path)


def test_the_command_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "task.jsonl"
    task.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS), encoding="utf-8")
    words = [str(LLAMA), "--context", "64", "--task", str(task)]
    assert quality.run([*words, "--limit", "1", "--threads", "1"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["questions"]["count"] == 1 and line["questions"]["acc_stderr"] is None
    assert (line["context"], line["model"], line["kv_dtype"]) == (64, str(LLAMA), "f32")
    task.write_text(json.dumps({**QUESTIONS[0], "choices": ["a", "b " * 200]}))
    assert quality.run(words) == 2
    got = capsys.readouterr()
    assert got.out == "" and "clocher bench quality: error: a continuation has" in got.err
    assert quality.run([str(LLAMA), "--task", str(tmp_path / "none.jsonl")]) == 3
    assert "no such file" in capsys.readouterr().err
