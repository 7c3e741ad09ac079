"""Log probabilities of texts are those that transformers' logits give, alone and side by side."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from clocher_kernels.errors import UsageError
from clocher_runtime.api import LanguageModel, load
from clocher_runtime.quality.likelihood import (
    Likelihood,
    Pair,
    Question,
    Scorer,
    Target,
    metrics,
    pairs_of,
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


def test_choices_and_continuations_have_the_metrics_of_the_harness(
    scorer: Scorer, theirs: torch.nn.Module
) -> None:
    items = [
        Question("for index in", (" range(", " a very long and odd one"), 0),
        Question("import ", ("zebra", "os", "sys"), 0),
        Target("for index in", " range"),
    ]
    found = metrics(items, scorer.grouped([*pairs_of(scorer, items)]))
    right, normed = 0, 0
    for each in items[:2]:
        sums = [plain(theirs, scorer.pair(each.context, c)).logprob for c in each.choices]
        means = [total / len(c) for total, c in zip(sums, each.choices, strict=True)]
        right += int(np.argmax(sums)) == each.answer
        normed += int(np.argmax(means)) == each.answer
    questions = found["questions"]
    assert questions["acc"] == right / 2 == 0.5 and questions["acc_stderr"] == pytest.approx(0.5)
    assert questions["acc_norm"] == normed / 2 and questions["chance"] == pytest.approx(5 / 12)
    loss = -plain(theirs, scorer.pair("for index in", " range")).logprob
    assert found["targets"]["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)


def test_the_command_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "task.jsonl"
    question = {"question": "Why?", "choices": ["a b", "c"], "labels": ["A", "B"], "answer": "B"}
    task.write_text(f"{json.dumps(question)}\n" * 2, encoding="utf-8")
    words = [str(LLAMA), "--context", "64", "--task", "arc_challenge", "--data", str(task)]
    assert quality.run([*words, "--limit", "1", "--threads", "1"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["questions"]["count"] == 1 and line["questions"]["acc_stderr"] is None
    assert (line["context"], line["model"], line["kv_dtype"]) == (64, str(LLAMA), "f32")
    task.write_text(json.dumps({**question, "choices": ["a", "b " * 200]}))
    assert quality.run(words) == 2
    got = capsys.readouterr()
    assert got.out == "" and "clocher bench quality: error: a continuation has" in got.err
    assert quality.run([str(LLAMA), "--task", str(task)]) == 2
    assert "expected one of mmlu, hellaswag, arc_challenge" in capsys.readouterr().err
