"""A draft, its acceptance rates, and the drafter that reads nothing but the sequence itself.

A class of draft tokens stands for a drafter and how sure it was, such as the length of the match
that it found. The first draft token counts whether it was verified or not: the next token tells.
So what is not sent, because it does not pay, goes on being judged.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

_PRIOR = 10.0
"""Draft tokens that the mean of the session counts as: fewer make short sequences miss early."""
_DECAY = 0.97
"""Weight of older draft tokens when another one is judged: the last 30 or so count."""


class Draft(NamedTuple):
    """Tokens that may come next, one after the other; of each the class of its acceptance rate."""

    tokens: Sequence[int] = ()
    classes: Sequence[int] = ()

    def first(self, count: int) -> "Draft":
        """Return its first tokens."""
        return Draft(self.tokens[:count], self.classes[:count])


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Follows one sequence and drafts how it goes on."""

    def draft(self, ids: Sequence[int], most: int) -> Draft:
        """Return up to `most` tokens; between two calls `ids` only grows at its end."""


class Reader(Protocol):
    """What a draft model knows of one sequence."""

    def behind(self, ids: Sequence[int]) -> int:
        """Note the sequence so far; return how many tokens are to be read before a draft, or 0."""

    def leave(self) -> None:
        """Hold nothing for the sequence any more; it may go on later."""


class AcceptanceRates:
    """Of each class, the chance that a token is accepted if all before it were.

    Args:
        mean: the rates to begin with, in `mean` too as they are learnt.
    """

    def __init__(self, mean: Sequence[float]) -> None:
        self.mean = list(mean)
        self._hits = [_PRIOR * rate for rate in self.mean]
        self._count = [_PRIOR] * len(self.mean)

    def note(self, kind: int, hit: bool) -> None:
        """Learn that a token of a class was right, or wrong."""
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
        """Return the chance of each token of a draft that it and all before it are accepted."""
        found, chance = [], 1.0
        for kind in classes:
            chance *= self.mean[kind]
            found.append(chance)
        return found


class Automaton(Protocol):
    """A sequence, and what followed where its end stands earlier in it."""

    def follow(self, ids: Sequence[int], most: int) -> tuple[list[int], int]:
        """Append ids; return what followed the longest suffix that occurred before, and its length.

        That is up to `most` ids; none and 0 if the last id is new.
        """


LEVELS = 6
"""Classes of the length of a match: 1, 2-3, 4-7, 8-15, 16-31 and longer ones."""
_LONGEST = 1 << (LEVELS - 1)
_LEVEL_OF = [min(max(n, 1).bit_length(), LEVELS) - 1 for n in range(_LONGEST + 64)]


class SuffixDrafter:
    """Drafts that a sequence goes on as after the longest passage that its end repeats.

    Args:
        automaton: of an empty sequence.

    Source: suffix automata as drafters, Hu et al., SAM Decoding, 2024.
    """

    def __init__(self, automaton: Automaton, kind: int) -> None:
        self._automaton, self._seen = automaton, 0
        self._classes = [kind + each for each in _LEVEL_OF]

    def draft(self, ids: Sequence[int], most: int) -> Draft:
        """Return what followed; see `Drafter`."""
        tokens, length = self._automaton.follow(ids[self._seen :], most)
        self._seen = len(ids)
        # A token that is accepted makes the match longer that the next one rests on.
        first = min(length, _LONGEST)
        return Draft(tokens, self._classes[first : first + len(tokens)]) if tokens else NO_DRAFT
