"""Task files: what `clocher bench quality` asks of a model, a JSON object a line.

{"context": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0}
{"text": "A whole text, of which the model tells how likely it is."}

A file may have lines of both kinds. Metrics have the names and definitions of lm-evaluation-harness
0.4 (lm_eval/api/task.py, lm_eval/api/metrics.py), with an empty `target_delimiter`.
"""

import re
from collections.abc import Sequence
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

import msgspec

from clocher_kernels.errors import FormatError, UsageError
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.schema import read_as
from clocher_runtime.disk.strict_json import parse_object
from clocher_runtime.quality.likelihood import Likelihood, Pair, Progress, Scorer

_MOST_BYTES = 1 << 30
_KINDS = 'expected {"context", "choices", "answer"} or {"text"}'


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A context and what may follow it."""

    context: str  # may be empty
    # two or more, which follow the context as they are, without a space between
    choices: tuple[str, ...]
    answer: int  # index of the right one


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text that is scored as a whole."""

    text: str


Item = Question | Text


def read_task(path: Path) -> list[Item]:
    """Return the items of a task file; blank lines are none.

    Raises ModelError: there is no such file, it has no items, or a line is not one.
    """
    items = [
        _item(line, f"{path}:{number}")
        for number, line in enumerate(read_bytes(path, _MOST_BYTES).splitlines(), start=1)
        if line.strip()
    ]
    if not items:
        raise FormatError(f"{path}: it has no lines; {_KINDS}, an object a line")
    return items


def _item(line: bytes, where: str) -> Item:
    value = parse_object(line, where)
    if "choices" not in value and "text" not in value:
        raise FormatError(f"{where}: its keys are {sorted(value)!r:.80}; {_KINDS}")
    if "choices" not in value:
        text = read_as(value, Text, where)
        if not text.text:
            raise FormatError(f"{where}: the text is empty")
        return text
    question = read_as(value, Question, where)
    count = len(question.choices)
    if count < 2 or not all(question.choices):
        raise FormatError(f"{where}: expected two choices or more, none of them empty")
    if not 0 <= question.answer < count:
        raise FormatError(f"{where}: answer is {question.answer}; expected 0 to {count - 1}")
    return question


def score_task(
    scorer: Scorer, items: Sequence[Item], progress: Progress | None = None
) -> dict[str, Any]:
    """Score the items of a task and return its metrics by kind, "questions" and "texts".

    `scorer`: of the model; `items`: from `read_task`. Raises UsageError: an item cannot be scored;
    the message says which; ClocherError: see `Scorer.scores`.
    """
    pairs: list[list[Pair]] = []
    for number, item in enumerate(items, start=1):
        try:
            pairs.append(_pairs(scorer, item))
        except UsageError as error:
            raise UsageError(f"item {number}: {error}") from None
    found = iter(scorer.scores([pair for of in pairs for pair in of], progress))
    questions, texts = [], []
    for item, of in zip(items, pairs, strict=True):
        scores = [next(found) for _ in of]
        if isinstance(item, Question):
            questions.append((item, scores))
        else:
            tokens = sum(len(pair.continuation) for pair in of)
            texts.append((item.text, sum(each.logprob for each in scores), tokens))
    results: dict[str, Any] = {}
    if questions:
        results["questions"] = _of_questions(questions)
    if texts:
        results["texts"] = _of_texts(texts)
    return results


def _pairs(scorer: Scorer, item: Item) -> list[Pair]:
    if isinstance(item, Question):
        return [scorer.pair(item.context, choice) for choice in item.choices]
    windows = scorer.windows(item.text)
    if not windows:
        raise UsageError(f"the text {item.text!r:.80} has no tokens; leave it out")
    return windows


def _of_questions(scored: Sequence[tuple[Question, Sequence[Likelihood]]]) -> dict[str, Any]:
    """Return accuracies, with standard errors of the mean.

    `acc` takes the likeliest choice, `acc_norm` the one that is likeliest per character.
    """
    right = {"acc": 0, "acc_norm": 0}
    for question, scores in scored:
        sums = [each.logprob for each in scores]
        means = [each / len(choice) for each, choice in zip(sums, question.choices, strict=True)]
        right["acc"] += sums.index(max(sums)) == question.answer
        right["acc_norm"] += means.index(max(means)) == question.answer
    count = len(scored)
    found: dict[str, Any] = {"count": count}
    for name, sum_ in right.items():
        mean = sum_ / count
        found[name] = mean
        found[f"{name}_stderr"] = sqrt(mean * (1 - mean) / (count - 1)) if count > 1 else None
    chance = sum(1 / len(question.choices) for question, _ in scored) / count
    return {**found, "chance": chance}


def _of_texts(scored: Sequence[tuple[str, float, int]]) -> dict[str, Any]:
    """Return perplexities of all texts together: sums of logarithms over sums of lengths."""
    total = -sum(logprob for _, logprob, _ in scored)
    tokens = sum(count for _, _, count in scored)
    words = sum(len(re.split(r"\s+", text)) for text, _, _ in scored)
    nbytes = sum(len(text.encode()) for text, _, _ in scored)
    return {
        "count": len(scored),
        "tokens": tokens,
        "loss_nats": total / tokens,
        "perplexity": _exp(total / tokens),
        "word_perplexity": _exp(total / words),
        "byte_perplexity": _exp(total / nbytes),
        "bits_per_byte": total / nbytes / log(2),
    }


def _exp(value: float) -> float:
    try:
        return exp(value)
    except OverflowError:  # a text without spaces is one word
        return float("inf")
