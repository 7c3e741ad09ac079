"""Drafts of a sequence, acceptance rates, and the drafter that reads only the sequence itself.

A class is a drafter and its confidence. First draft tokens are judged even if not sent.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from clocher_runtime.models.builder import DRAWN

MAX_DRAFT = DRAWN - 1
"""Draft tokens of a sequence in a forward: many kernels do eight tokens at the cost of one."""
PRIORS = MappingProxyType({"suffix": (0.15, 0.3, 0.45, 0.6, 0.75, 0.9), "draft": (0.6,)})
"""Source -> the acceptance rate of each of its classes before anything is known."""
SOURCES = [source for source, rates in PRIORS.items() for _ in rates]

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
_LEVEL_OF = [min(max(n, 1).bit_length(), LEVELS) - 1 for n in range(_LONGEST + 64)]


class SuffixDrafter:
    """Drafts what followed the longest repeated suffix (Hu et al. 2024, SAM Decoding).

    `automaton`: a `cpu_fallback.ops.automaton.SuffixAutomaton`.
    """

    def __init__(self, automaton: Any, kind: int) -> None:
        self._automaton, self._seen = automaton, 0
        self._classes = [kind + each for each in _LEVEL_OF]

    def draft(self, ids: Sequence[int], most: int) -> Draft:
        """Return up to `most` tokens that followed; `ids` only grows between calls."""
        tokens, length = self._automaton.follow(ids[self._seen :], most)
        self._seen = len(ids)
        # Each accepted token lengthens the match behind the next one.
        first = min(length, _LONGEST)
        return Draft(tokens, self._classes[first : first + len(tokens)]) if tokens else NO_DRAFT


def first_class(source: str) -> int:
    """Return the first class of a source; the others follow it."""
    return SOURCES.index(source)


class Track:
    """What is drafted for one sequence.

    Attributes:
        drafter: what drafts from the sequence itself; None without one.
        offer: the draft that expects most; it is judged, `sent` or not, as `asides` are.
        tried: how many of its tokens are sent whatever they promise, to learn what they are worth.
        reader: `engine.draft_model.SequenceReader` of the sequence; None without one.
    """

    __slots__ = ("asides", "drafter", "offer", "rates", "reader", "sent", "tried")

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


class Pending(NamedTuple):
    """A sequence that drafts are wanted for: its tokens so far, and how many may be sent."""

    track: Track
    ids: Sequence[int]
    most: int
