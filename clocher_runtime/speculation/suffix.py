"""Guess that a text goes on as it did after the longest passage that its end repeats.

Source: suffix automata as drafters, Hu et al., SAM Decoding, 2024.
"""

from collections.abc import Sequence
from typing import Protocol

from clocher_runtime.speculation.draft import NO_DRAFT, Draft

LEVELS = 6
"""Classes of the length of a match: 1, 2-3, 4-7, 8-15, 16-31 and longer ones."""


class Automaton(Protocol):
    """A text, and what followed where its end stands earlier in it."""

    def follow(self, ids: Sequence[int], most: int) -> tuple[list[int], int]:
        """Add ids to the text; return what followed its longest suffix that occurred before.

        Args:
            ids: what is new.
            most: ids to return.

        Returns:
            Ids, and the length of the suffix; none and 0 if its last id is new.
        """


def level(length: int) -> int:
    """Return the class of a match of some length."""
    return min(length.bit_length(), LEVELS) - 1


_LONGEST = 1 << (LEVELS - 1)
_LEVEL_OF = tuple(level(max(length, 1)) for length in range(_LONGEST + 64))
"""Of lengths as far as classes differ, and of as many more as a draft may have."""


class SuffixDrafter:
    """A drafter that knows nothing but the text itself.

    Args:
        automaton: of an empty text.
        kind: the first of its `LEVELS` classes.
    """

    def __init__(self, automaton: Automaton, kind: int) -> None:
        self._automaton, self._seen = automaton, 0
        self._classes = [kind + each for each in _LEVEL_OF]

    def draft(self, ids: Sequence[int], most: int) -> Draft:
        """Return a chain; see `draft.Drafter`."""
        tokens, length = self._automaton.follow(ids[self._seen :], most)
        self._seen = len(ids)
        if not tokens:
            return NO_DRAFT
        count = len(tokens)
        # A guess that comes true makes the match that the next one rests on longer.
        first = min(length, _LONGEST)
        classes = self._classes[first : first + count]
        return Draft(tokens, range(-1, count - 1), classes)
