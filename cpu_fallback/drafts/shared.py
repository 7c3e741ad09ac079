"""Drafts of a text from other texts: finished ones, of callers who may see each other's.

Texts of one salt share an automaton. It has room for some number of tokens; when it is full, one
that was begun half of that ago, and has the newest half, takes its place. So nothing is ever built
again, and each text is added twice.
"""

import ctypes
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from cpu_fallback.drafts.automaton import SuffixAutomaton

_MARK = -1


class SharedSuffixes:
    """Finished texts, by salt. One thread at a time, its readers' too.

    Args:
        tokens: of texts to keep of each salt. Of a text that is longer than half of that only the
            end is kept. A power of two takes up to 114 bytes for each.
        salts: how many to keep; the one that was not used for longest is dropped first.
    """

    def __init__(self, tokens: int = 1 << 16, salts: int = 16) -> None:
        self._half, self._salts = max(tokens // 2, 2), max(salts, 1)
        self._generations: OrderedDict[bytes, tuple[SuffixAutomaton, SuffixAutomaton]]
        self._generations = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all automata."""
        return sum(a.nbytes for pair in self._generations.values() for a in pair)

    def add(self, salt: bytes, ids: Sequence[int]) -> None:
        """Add a finished text.

        Args:
            salt: of those who may get drafts from it.
            ids: its tokens.

        Raises:
            OutOfMemory: there is no memory for it.
        """
        text = [*ids[-(self._half - 1) :], _MARK]
        current, coming = self._generations.pop(salt, None) or (
            SuffixAutomaton(),
            SuffixAutomaton(),
        )
        if len(current) + len(text) > 2 * self._half:
            current, coming = coming, SuffixAutomaton()
        if len(current) >= self._half:
            coming.extend(text)
        current.extend(text)
        self._generations[salt] = current, coming
        while len(self._generations) > self._salts:
            self._generations.popitem(last=False)

    def reader(self, salt: bytes) -> "SharedReader":
        """Return what follows one text through the texts of a salt."""
        return SharedReader(self, salt)

    def of(self, salt: bytes) -> SuffixAutomaton | None:
        """Return the automaton of a salt as it is now, None if it has no text."""
        if salt not in self._generations:
            return None
        self._generations.move_to_end(salt)
        return self._generations[salt][0]


class SharedReader:
    """A text that grows, and the longest suffix of it that stands in finished texts.

    Args:
        shared: the finished texts.
        salt: of those that it may see.
    """

    def __init__(self, shared: SharedSuffixes, salt: bytes) -> None:
        self._shared, self._salt = shared, salt
        self._read: SuffixAutomaton | None = None
        self._match = (ctypes.c_int64 * 2)()

    def follow(self, ids: Sequence[int] | np.ndarray, most: int) -> tuple[list[int], int]:
        """Go on with tokens, and return what followed them in a finished text.

        Args:
            ids: of 32 bits, that the text goes on with.
            most: ids to return, at most `automaton.MOST_DRAFTED`.

        Returns:
            The ids that followed the longest suffix of the text that stands in a finished one,
            where it was found last, and its length; fewer ids before the end of that text. Begins
            anew with these tokens when another automaton took the place of the one before.
        """
        automaton = self._shared.of(self._salt)
        if automaton is not self._read:
            self._read = automaton
            self._match[:] = 0, 0
        if automaton is None:
            return [], 0
        return automaton.read(self._match, ids, most)
