"""How often the guesses of a class come true: learnt for a text, beginning with what others had.

A class stands for a drafter and how sure it was, such as the length of the match that it found. The
first guess counts whether it was verified in a pass or not: the next token tells. So what is not
sent, because it does not pay, goes on being judged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

_PRIOR = 10.0
"""Guesses that what others had is worth: fewer, and short texts pay for a few early misses."""
_KEPT = 0.97
"""What of older guesses counts when another one is judged: the last 30 or so do."""


@dataclass(slots=True)
class Chances:
    """The chance that a guess of a class is right, given that all before it were.

    Attributes:
        mean: of each class.
    """

    mean: list[float]
    _hits: list[float] = field(init=False)
    _count: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._hits = [_PRIOR * mean for mean in self.mean]
        self._count = [_PRIOR] * len(self.mean)

    def note(self, kind: int, hit: bool) -> None:
        """Learn that a guess of a class was right, or wrong."""
        hits = self._hits[kind] = self._hits[kind] * _KEPT + hit
        count = self._count[kind] = self._count[kind] * _KEPT + 1
        self.mean[kind] = hits / count

    def along(self, parents: Sequence[int], classes: Sequence[int]) -> list[float]:
        """Return the chance of each node of a draft that it and all its ancestors are right."""
        mean = self.mean
        found: list[float] = []
        for parent, kind in zip(parents, classes, strict=True):
            found.append(mean[kind] * (1.0 if parent < 0 else found[parent]))
        return found

    def copy(self) -> "Chances":
        """Return chances of another text that begin here."""
        return Chances(list(self.mean))
