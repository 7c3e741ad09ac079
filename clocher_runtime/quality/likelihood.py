"""How likely a model holds texts: continuations of contexts, and whole texts window by window.

The rules are those of lm-evaluation-harness 0.4 (lm_eval/api/model.py, lm_eval/utils.py), so that
numbers can be compared: where a text is cut into context and continuation, what stands before one
without a context, and what a window of a long text sees.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_runtime.engine.generation import Generation
from clocher_runtime.engine.session import Session
from clocher_runtime.text.completion import logprob_of
from clocher_runtime.text.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
"""Called with (done, total)."""

_WAITING = 2  # times the batch: who waits fills the steps in which a text ends


class Pair(NamedTuple):
    """Token ids to be scored, and those that stand before them."""

    context: Sequence[int]
    continuation: Sequence[int]


class Likelihood(NamedTuple):
    """What a model holds of a continuation.

    Attributes:
        logprob: sum of the natural logarithms of its tokens' probabilities.
        is_greedy: whether each of its tokens is the likeliest one.
    """

    logprob: float
    is_greedy: bool


class Scorer:
    """Scores texts with a session that keeps logits, as many side by side as its batch.

    Args:
        session: made with `all_logits` or `score_rows`.
        tokenizer: of its model.
    """

    def __init__(self, session: Session, tokenizer: Tokenizer) -> None:
        self._session, self._tokenizer = session, tokenizer
        begins = tokenizer.bos_id
        self._prefix = session.model.spec.eos_ids[0] if begins is None else begins

    def pair(self, context: str, continuation: str) -> Pair:
        """Return the ids of a continuation and its context.

        The continuation is what both have, tokenised as one text, beyond the tokens of the context
        alone; spaces that end the context belong to it, as most vocabularies have them. Without a
        context, the token that begins a text, or else ends one, stands before it.

        Raises:
            UsageError: the continuation has no token of its own, or a text cannot be tokenised.
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
        """Return a whole text as pairs that score each token once, with as much before it as fits.

        The first window begins with what `pair` puts before a text; the last one sees as many
        tokens as the others, though it scores fewer.
        """
        ids, longest = self._tokenizer.encode_prompt(text), self._session.longest
        pairs = [Pair([self._prefix], ids[:longest])] if ids else []
        for start in range(longest, len(ids), longest):
            end = min(start + longest, len(ids))
            pairs.append(Pair(ids[end - longest - 1 : start], ids[start:end]))
        return pairs

    def scores(self, pairs: Sequence[Pair], progress: Progress | None = None) -> list[Likelihood]:
        """Score continuations, in any number; the order of the results is that of the pairs.

        A context that is too long loses its beginning. Continuations that differ in their last
        token only are read once.

        Raises:
            UsageError: a continuation is empty or longer than the context of the session.
            ClocherError: see `Session.scoring`.
        """
        groups: dict[tuple[int, ...], _Reading] = {}
        for number, pair in enumerate(pairs):
            fed, first, last = self._cut(pair)
            groups.setdefault(fed, _Reading(fed)).targets.append(_Target(number, first, last))
        # Long ones first: what is left over in the end, with few beside it, is short.
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
                found |= reading.results()
                if progress is not None:
                    progress(len(found), len(pairs))
        finally:
            for _, generation in running:
                generation.close()
        return [found[number] for number in range(len(pairs))]

    def _cut(self, pair: Pair) -> tuple[tuple[int, ...], int, int]:
        """Return the ids that are read, the first position that tells, and the last id."""
        longest, count = self._session.longest, len(pair.continuation)
        if not 0 < count <= longest:
            raise UsageError(
                f"a continuation has {count} tokens; expected 1 to {longest}, as the context holds"
            )
        *fed, last = [*pair.context, *pair.continuation][-(longest + 1) :]
        if len(fed) < count:
            raise UsageError(
                "a continuation has nothing before it; give a context of 1 token or more"
            )
        return tuple(fed), len(fed) - count, last


class _Target(NamedTuple):
    """One of the pairs that are read together: the last token of each is its own."""

    number: int
    first: int
    last: int


class _Reading:
    """A text that is read, and what its logits tell of the pairs that it stands for."""

    def __init__(self, fed: tuple[int, ...]) -> None:
        self.fed = fed
        self.targets: list[_Target] = []
        self._common: dict[int, Likelihood] = {}  # of tokens that are read themselves
        self._ends: list[Likelihood] = []

    def take(self, position: int, logits: np.ndarray) -> None:
        """Take the logits after a position, [V] fp32."""
        if position == len(self.fed) - 1:
            self._ends = [_of_token(logits, each.last) for each in self.targets]
        elif position >= min(each.first for each in self.targets):
            self._common[position] = _of_token(logits, self.fed[position + 1])

    def results(self) -> dict[int, Likelihood]:
        """Return what was found, by number of the pair."""
        found = {}
        for target, end in zip(self.targets, self._ends, strict=True):
            parts = [self._common[at] for at in range(target.first, len(self.fed) - 1)] + [end]
            total = sum(each.logprob for each in parts)
            found[target.number] = Likelihood(total, all(each.is_greedy for each in parts))
        return found


def _of_token(logits: np.ndarray, token: int) -> Likelihood:
    return Likelihood(logprob_of(logits, token, 0).logprob, int(logits.argmax()) == token)
