"""Drafts of a sequence, acceptance rates, and the drafter that reads text: its own, and answers.

A class is a drafter and its confidence. First draft tokens are judged even if not sent.
"""

from array import array
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from clocher_runtime.models.builder import DRAWN

MAX_DRAFT = DRAWN - 1
"""Draft tokens of a sequence in a forward: many kernels do eight tokens at the cost of one."""
CONFIDENCE = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
"""Probabilities that a draft model gives its tokens, between which the classes of these lie."""
PRIORS = MappingProxyType(
    {
        "suffix": (0.15, 0.3, 0.45, 0.6, 0.75, 0.9),
        "answers": (0.15, 0.3, 0.45, 0.6, 0.75, 0.9),
        "draft": (0.6, 0.3, 0.5, 0.7, 0.85, 0.92, 0.97, 0.99),
    }
)
"""Source -> the acceptance rate of each of its classes before anything is known.

A draft model's first class has all its tokens, so what is expected of one that is not drafted yet.
"""
SOURCES = [source for source, rates in PRIORS.items() for _ in rates]
"""Source of each class; those of a source follow each other."""
UNSEEN = SOURCES.index("draft")
"""The class of a draft model's tokens whose confidence is not known."""

_PRIOR = 10.0
"""Weight of the session's mean, in draft tokens."""
_DECAY = 0.97
"""Weight of older draft tokens per new one: about the last 30 count."""


class Draft(NamedTuple):
    """Tokens that may come next, and the acceptance class of each."""

    tokens: Sequence[int] = ()
    classes: Sequence[int] = ()

    def first(self, count: int) -> "Draft":
        """Return its first tokens."""
        return Draft(self.tokens[:count], self.classes[:count])


NO_DRAFT = Draft()


class AcceptanceRates:
    """Of each class, the rate of acceptance after accepted tokens; updates `mean`."""

    def __init__(self, mean: Sequence[float]) -> None:
        self.mean = list(mean)
        self._hits = [_PRIOR * rate for rate in self.mean]
        self._count = [_PRIOR] * len(self.mean)

    def note(self, kind: int, hit: bool) -> None:
        """Record whether a token of a class was right."""
        hits = self._hits[kind] = self._hits[kind] * _DECAY + hit
        count = self._count[kind] = self._count[kind] * _DECAY + 1
        self.mean[kind] = hits / count

    def judge(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Compare a draft with the tokens that came."""
        for drafted, kind, token in zip(draft.tokens, draft.classes, tokens, strict=False):
            self.note(kind, drafted == token)
            if kind > UNSEEN:
                self.note(UNSEEN, drafted == token)
            if drafted != token:
                break

    def along(self, classes: Sequence[int]) -> list[float]:
        """Return for each draft token the chance that it and all before it are accepted."""
        found, chance = [], 1.0
        for kind in classes:
            chance *= self.mean[kind]
            found.append(chance)
        return found


LEVELS = 6
"""Classes of match length: 1, 2-3, 4-7, 8-15, 16-31 and longer."""
_LONGEST = 1 << (LEVELS - 1)
_LEVEL_OF = [min(max(n, 1).bit_length(), LEVELS) - 1 for n in range(_LONGEST + MAX_DRAFT)]
_TRIED = 8  # places where two tokens stood that are compared


class TextIndex:
    """Where each token of a growing text stood last, and each two tokens, newest place first."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}  # token -> its newest place
        self._pairs: dict[tuple[int, int], int] = {}  # two tokens -> the newest place of the second
        self._older = array("i")  # place -> the one before it of the same two tokens, or -1

    def read(self, text: Sequence[int], end: int) -> None:
        """Note the places before `end`."""
        tokens, pairs, older = self._tokens, self._pairs, self._older
        for place in range(len(older), end):
            token = text[place]
            pair = text[place - 1] if place else -1, token
            older.append(pairs.get(pair, -1))
            tokens[token] = pairs[pair] = place

    def match(self, text: Sequence[int], ids: Sequence[int], first: int = -1) -> tuple[int, int]:
        """Return the place in `text` where the longest end of `ids` ends, and its length.

        As LZ77 does, it tries the place `first`, the newest `_TRIED` of the last two tokens, and
        the newest of the last token. No length: (0, 0).
        """
        end, found, length = len(ids) - 1, 0, 0
        for place in self._places(ids, first):
            if place < length or text[place - length] != ids[end - length]:
                continue  # no longer than what is known
            same, most = 0, min(place, end, _LONGEST - 1)
            while same <= most and text[place - same] == ids[end - same]:
                same += 1
            if same > length:
                found, length = place, same
            if same == _LONGEST or length > end:
                break
        return found, length

    def _places(self, ids: Sequence[int], first: int) -> Iterator[int]:
        if first >= 0:
            yield first
        place = self._pairs.get((ids[-2], ids[-1]), -1) if len(ids) > 1 else -1
        for _ in range(_TRIED):
            if place < 0:
                break
            yield place
            place = self._older[place]
        if (place := self._tokens.get(ids[-1], -1)) >= 0:
            yield place


_BETWEEN = -1  # no token: stands after each answer
_KEPT = 1 << 16  # tokens of answers; then the older half is dropped


class Answers:
    """The newest answers of a session, to draft from.

    Source: SuffixDecoding (arXiv 2411.04975), whose trees of earlier outputs are an index here.
    """

    def __init__(self) -> None:
        self._text: list[int] = []
        self._index = TextIndex()

    def add(self, answer: Sequence[int]) -> None:
        """Keep an answer."""
        self._text += [*answer, _BETWEEN]
        if len(self._text) > _KEPT:
            self._text, self._index = self._text[-_KEPT // 2 :], TextIndex()
        self._index.read(self._text, len(self._text))

    def after(self, ids: Sequence[int], most: int) -> tuple[Sequence[int], int]:
        """Return up to `most` tokens that followed the longest end of `ids`, and its length."""
        found, length = self._index.match(self._text, ids)
        tokens = self._text[found + 1 : found + 1 + most] if length else []
        return tokens[: tokens.index(_BETWEEN)] if _BETWEEN in tokens else tokens, length


class SuffixDrafter:
    """Drafts what followed the longest end of the sequence that stood there before.

    That is looked for in the sequence, where the last draft's match goes on, too; and in `answers`,
    which win by a longer match.
    """

    def __init__(self, answers: Answers | None = None) -> None:
        self._index, self.answers = TextIndex(), answers
        self._distance = 0  # from the last match to the end

    def draft(self, ids: Sequence[int], most: int) -> Draft:
        """Return `most` tokens that followed, if any did; `ids` only grows between calls.

        A match up to the end is taken to repeat.
        """
        end = len(ids) - 1
        self._index.read(ids, end)
        found, length = self._index.match(ids, ids, end - self._distance if self._distance else -1)
        source, tokens = "suffix", list[int]()
        if length:
            self._distance = end - found
            tokens = [ids[found + 1 + i % self._distance] for i in range(most)]
        if self.answers is not None:
            others, longer = self.answers.after(ids, most)
            if others and longer > length:
                source, tokens, length = "answers", list(others), longer
        # Each accepted token lengthens the match behind the next one.
        first, levels = SOURCES.index(source), _LEVEL_OF[length : length + len(tokens)]
        return Draft(tokens, [first + level for level in levels]) if tokens else NO_DRAFT


class Track:
    """What is drafted for one sequence.

    Attributes:
        drafter: what drafts from the sequence itself; None without one.
        offer: the draft that expects most; it is judged, `sent` or not, as `asides` are.
        tried: how many of its tokens are sent whatever they promise, to learn what they are worth.
        reader: `engine.draft_model.SequenceReader` of the sequence; None without one.
    """

    def __init__(self, drafter: SuffixDrafter | None, rates: AcceptanceRates) -> None:
        self.drafter, self.rates = drafter, rates
        self.offer = self.sent = NO_DRAFT
        self.tried = 0
        self.asides: list[Draft] = []
        self.reader: Any = None

    def draft(self, ids: Sequence[int], most: int, ns: Sequence[float]) -> list[float]:
        """Offer a draft if it may be sent; return the chance of each of its tokens.

        `ns`: time of a forward by number of draft tokens, 0 if unknown.
        """
        draft = self.drafter.draft(ids, most) if self.drafter else NO_DRAFT
        may_be_sent = any(ns[1 : 1 + len(draft.tokens)])
        self.offer, self.asides = (draft, []) if may_be_sent else (NO_DRAFT, [draft])
        return self.rates.along(self.offer.classes)

    def end(self, answer: Sequence[int]) -> None:
        """Keep the whole answer of the sequence for others."""
        if self.drafter is not None and self.drafter.answers is not None:
            self.drafter.answers.add(answer)


class Pending(NamedTuple):
    """A sequence that drafts are wanted for: its tokens so far, and how many may be sent."""

    track: Track
    ids: Sequence[int]
    most: int
