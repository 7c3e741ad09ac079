"""Drafts, acceptance rates, and the drafter that reads only the sequence itself.

A class is a drafter and its confidence. First draft tokens are judged even if not sent.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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


class Drafter(Protocol):
    """Follows one sequence and drafts its next tokens."""

    def draft(self, ids: Sequence[int], most: int) -> Draft:
        """Return up to `most` tokens; `ids` only grows between calls."""


class Reader(Protocol):
    """A draft model's state of one sequence."""

    def behind(self, ids: Sequence[int]) -> int:
        """Note the sequence so far; return how many tokens have to be read before a draft."""

    def leave(self) -> None:
        """Release the sequence's resources; it may continue later."""


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


class Automaton(Protocol):
    """A sequence, and what followed earlier occurrences of its suffix."""

    def follow(self, ids: Sequence[int], most: int) -> tuple[list[int], int]:
        """Append ids; return up to `most` that followed the longest known suffix; its length."""


LEVELS = 6
"""Classes of match length: 1, 2-3, 4-7, 8-15, 16-31 and longer."""
_LONGEST = 1 << (LEVELS - 1)
_LEVEL_OF = [min(max(n, 1).bit_length(), LEVELS) - 1 for n in range(_LONGEST + 64)]


class SuffixDrafter:
    """Drafts what followed the longest repeated suffix (Hu et al. 2024, SAM Decoding)."""

    def __init__(self, automaton: Automaton, kind: int) -> None:
        self._automaton, self._seen = automaton, 0
        self._classes = [kind + each for each in _LEVEL_OF]

    def draft(self, ids: Sequence[int], most: int) -> Draft:
        """Return what followed; see `Drafter`."""
        tokens, length = self._automaton.follow(ids[self._seen :], most)
        self._seen = len(ids)
        # Each accepted token lengthens the match behind the next one.
        first = min(length, _LONGEST)
        return Draft(tokens, self._classes[first : first + len(tokens)]) if tokens else NO_DRAFT
