"""Likelihoods of continuations, choices and whole texts, by lm-evaluation-harness 0.4's rules.

Source: its lm_eval/api/model.py, task.py, metrics.py and lm_eval/utils.py, with an empty
`target_delimiter` where a question has no `delimiter`.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp, inf, sqrt
from statistics import fmean, stdev
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from clocher_kernels.errors import UsageError
from clocher_runtime.engine.generation import Generation
from clocher_runtime.engine.session import Session
from clocher_runtime.text.completion import logprob_of
from clocher_runtime.text.tokenizer import Tokenizer

Progress = Callable[[int, int], None]

_WAITING = 2  # times the batch: who waits fills the steps in which a text ends


class Pair(NamedTuple):
    """Token ids to score, and their context."""

    context: Sequence[int]
    continuation: Sequence[int]


class Likelihood(NamedTuple):
    """The scores of a continuation."""

    logprob: float  # sum of the natural logarithms of its tokens' probabilities
    is_greedy: bool  # whether each of its tokens is the top-1


class Scorer:
    """Scores sequences in a session that keeps logits, one batch at a time."""

    def __init__(self, session: Session, tokenizer: Tokenizer) -> None:
        self._session, self._tokenizer = session, tokenizer
        begins = tokenizer.bos_id
        self._prefix = session.model.spec.eos_ids[0] if begins is None else begins

    def pair(self, context: str, continuation: str) -> Pair:
        """Return the ids of a continuation and its context, tokenised as one text.

        Trailing spaces of the context count to the continuation. An empty context becomes BOS, else
        EOS. Raises UsageError if the continuation has no token of its own.
        """
        kept, whole = context.rstrip(), context + continuation
        if kept:
            before = self._tokenizer.encode_prompt(kept)
            pair = Pair(before, self._tokenizer.encode_prompt(whole)[len(before) :])
        else:
            ids = self._tokenizer.encode(whole, special=False)
            pair = Pair([self._prefix], ids[ids[:1] == [self._prefix] :])
        if not pair.continuation:
            raise UsageError(
                f"the continuation {continuation!r:.80} adds no token to its context; give more"
            )
        return pair

    def windows(self, text: str) -> list[Pair]:
        """Return a text as pairs that score each token once, with the longest context that fits."""
        ids, longest = self._tokenizer.encode_prompt(text), self._session.longest
        pairs = [Pair([self._prefix], ids[:longest])] if ids else []
        for start in range(longest, len(ids), longest):
            end = min(start + longest, len(ids))
            pairs.append(Pair(ids[end - longest - 1 : start], ids[start:end]))
        return pairs

    def scores(
        self, pairs: Sequence[Pair], progress: Progress = lambda *_: None
    ) -> list[Likelihood]:
        """Score continuations, sharing forwards; contexts that are too long lose their beginning.

        Raises UsageError for an empty or too long continuation, ClocherError.
        """
        groups: dict[tuple[int, ...], _Reading] = {}
        for number, pair in enumerate(pairs):
            fed, first = self._cut(pair)
            groups.setdefault(fed, _Reading(fed)).targets[number] = first, pair.continuation
        # Longest first, so that the last, half-empty batches are short.
        waiting = deque(sorted(groups.values(), key=lambda each: -len(each.fed)))
        found: dict[int, Likelihood] = {}
        running: deque[tuple[_Reading, Generation]] = deque()
        try:
            while waiting or running:
                while waiting and len(running) < _WAITING * self._session.config.batch:
                    reading = waiting.popleft()
                    generation = self._session.scoring(reading.fed, reading.take)
                    generation.begin()
                    running.append((reading, generation))
                reading, generation = running[0]
                for _ in generation:  # it has no token: this does steps until it ends
                    pass
                running.popleft()
                found |= reading.scores
                progress(len(found), len(pairs))
        finally:
            for _, generation in running:
                generation.close()
        return [found[number] for number in range(len(pairs))]

    def grouped(
        self, groups: Sequence[Sequence[Pair]], progress: Progress = lambda *_: None
    ) -> list[list[Likelihood]]:
        """Return the scores of each group of continuations; see `scores`."""
        found = iter(self.scores([pair for pairs in groups for pair in pairs], progress))
        return [[next(found) for _ in pairs] for pairs in groups]

    def _cut(self, pair: Pair) -> tuple[tuple[int, ...], int]:
        """Return the ids to read, and the first position whose logits count."""
        longest, count = self._session.longest, len(pair.continuation)
        if not 0 < count <= longest:
            raise UsageError(
                f"a continuation has {count} tokens; expected 1 to {longest}, as the context holds"
            )
        fed = [*pair.context, *pair.continuation][-(longest + 1) : -1]
        if len(fed) < count:
            raise UsageError(
                "a continuation has nothing before it; give a context of 1 token or more"
            )
        return tuple(fed), len(fed) - count


class _Reading:
    """A sequence to read, and the scores that its logits give to the pairs that share it."""

    def __init__(self, fed: tuple[int, ...]) -> None:
        self.fed = fed
        # By number of the pair: the position whose logits give its first token, and its tokens.
        self.targets: dict[int, tuple[int, Sequence[int]]] = {}
        self.scores: dict[int, Likelihood] = {}  # of each pair, up to the last position

    def take(self, position: int, logits: np.ndarray) -> None:
        """Take the logits after a position, [V] fp32."""
        for number, (first, ids) in self.targets.items():
            if position >= first:
                token, (total, greedy) = ids[position - first], self.scores.get(number, (0.0, True))
                total += logprob_of(logits, token, 0).logprob
                self.scores[number] = Likelihood(total, greedy and int(logits.argmax()) == token)


_Filled = Annotated[str, msgspec.Meta(min_length=1)]


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A context and its possible continuations."""

    context: str  # may be empty
    # they follow the context as they are, without a space between
    choices: Annotated[tuple[_Filled, ...], msgspec.Meta(min_length=2)]
    answer: int  # index of the right one
    delimiter: str = ""  # before each choice, no part of its length


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A context, and what should follow it."""

    context: str
    continuation: str


Item = Question | Target
Scores = Sequence[Likelihood]


def metrics(items: Sequence[Item], scores: Sequence[Scores]) -> dict[str, Any]:
    """Return metrics of scored items by kind: "questions" and "targets"."""
    both = list(zip(items, scores, strict=True))
    questions = [(item, found) for item, found in both if isinstance(item, Question)]
    targets = [found[0] for item, found in both if isinstance(item, Target)]
    results = {"questions": _of_questions(questions)} if questions else {}
    return results | ({"targets": _of_targets(targets)} if targets else {})


def pairs_of(scorer: Scorer, items: Sequence[Item]) -> Iterator[list[Pair]]:
    """Yield what is scored of each item: its choices, or its continuation. Raises UsageError."""
    for number, item in enumerate(items, start=1):
        if isinstance(item, Target):
            ends = [item.continuation]
        else:
            ends = [item.delimiter + choice for choice in item.choices]
        try:
            yield [scorer.pair(item.context, end) for end in ends]
        except UsageError as error:
            raise UsageError(f"item {number}: {error}") from None


def means(values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the count of values, the mean of each name, and its standard error."""
    found: dict[str, Any] = {"count": len(next(iter(values.values())))}
    for name, each in values.items():
        found[name] = fmean(each)
        found[f"{name}_stderr"] = stdev(each) / sqrt(len(each)) if len(each) > 1 else None
    return found


def _of_questions(scored: Sequence[tuple[Question, Scores]]) -> dict[str, Any]:
    """Return accuracies: `acc` by log-probability, `acc_norm` by that per character."""
    acc, norm = [], []
    for question, scores in scored:
        sums = [each.logprob for each in scores]
        per = [each / len(choice) for each, choice in zip(sums, question.choices, strict=True)]
        acc.append(float(sums.index(max(sums)) == question.answer))
        norm.append(float(per.index(max(per)) == question.answer))
    chance = fmean(1 / len(question.choices) for question, _ in scored)
    return {**means({"acc": acc, "acc_norm": norm}), "chance": chance}


def _of_targets(scored: Scores) -> dict[str, Any]:
    """Return how often the model would have said it, and exp of its mean loss."""
    found = means({"acc": [float(each.is_greedy) for each in scored]})
    loss = means({"loss": [-each.logprob for each in scored]})
    ppl = exp(loss["loss"]) if loss["loss"] < 700 else inf
    error = loss["loss_stderr"]
    return {**found, "perplexity": ppl, "perplexity_stderr": error and ppl * error}
