"""Drafts of a text from itself: what followed the last place where its end stood before.

Adding a token and finding the longest suffix that occurred before takes amortised constant time.
"""

import ctypes
import secrets
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from clocher_kernels.errors import OutOfMemory
from cpu_fallback.drafts import states
from cpu_fallback.lanes.jit import Kernel, warm

MOST_DRAFTED = 64  # Tokens that a draft may have

_FEW = 16
_LEAST_ROOM = 64
_MOST_ROOM = 1 << 29


@cache
def _calls() -> dict[str, "ctypes._CFunctionType"]:
    """Return the kernels as functions. The quick ones keep the interpreter lock: cheaper."""
    warm([states.begin, states.index, states.follow])

    def function(kernel: Kernel, make: Any = ctypes.CFUNCTYPE) -> "ctypes._CFunctionType":
        return make(ctypes.c_int64, *[ctypes.c_int64] * kernel.params)(kernel.address)

    return {
        "begin": function(states.begin, ctypes.PYFUNCTYPE),
        "index": function(states.index),
        "follow": function(states.follow),
        "follow_quick": function(states.follow, ctypes.PYFUNCTYPE),
    }


class SuffixAutomaton:
    """The suffix automaton of a text that grows. One thread at a time.

    It takes 76 bytes for each token that it has room for, and doubles when it is full; what a text
    does not need of that is not touched. Python text needs about 60.

    Raises:
        OutOfMemory: there is no memory for it.
    """

    def __init__(self, room: int = 0) -> None:
        self._calls = _calls()
        self._follow = self._calls["follow_quick"]
        self._head = np.zeros(states.WORDS, np.int64)
        factors = [secrets.randbits(64) | 1 for _ in range(2)]
        self._head.view(np.uint64)[[states.FACTOR, states.FACTOR_2]] = factors
        self._address = self._head.ctypes.data
        self._few, self._out = (ctypes.c_int32 * _FEW)(), (ctypes.c_int32 * MOST_DRAFTED)()
        self._few_at, self._out_at = ctypes.addressof(self._few), ctypes.addressof(self._out)
        self._size = self._room = 0
        self._make_room(max(room, _LEAST_ROOM))
        self._calls["begin"](self._address)

    def __len__(self) -> int:
        """Return the tokens of the text, marks among them."""
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in (self._text, self._states, self._edges, self._table))

    def extend(self, ids: Sequence[int] | np.ndarray) -> None:
        """Add tokens to the text, ids of 32 bits; a negative one is a mark, which matches nothing.

        Raises:
            OutOfMemory: there is no memory for more.
        """
        self.follow(ids, 0)

    def propose(self, most: int) -> tuple[list[int], int]:
        """Return what may come next, as `follow` does, without adding anything."""
        return self.follow((), most)

    def follow(self, ids: Sequence[int] | np.ndarray, most: int) -> tuple[list[int], int]:
        """Add tokens to the text, and return what followed its end where that occurred before.

        Args:
            ids: as for `extend`.
            most: ids to return, at most `MOST_DRAFTED`.

        Returns:
            The ids that followed the last place where the longest suffix that occurred before did
            so, and the length of that suffix. If it reached up to the end, it is taken to repeat,
            so there are as many ids as were asked for, or fewer before a mark. No ids and 0 if no
            suffix occurred before.

        Raises:
            OutOfMemory: there is no memory for more.
        """
        count = len(ids)
        if self._size + count > self._room:
            self._make_room(self._size + count)
        most = min(most, MOST_DRAFTED)
        if count <= _FEW:
            self._few[:count] = ids
            found = self._follow(self._address, self._few_at, count, most, self._out_at)
        else:
            many = np.ascontiguousarray(ids, np.int32)
            found = self._calls["follow"](
                self._address, many.ctypes.data, count, most, self._out_at
            )
        self._size += count
        return self._out[: found & 255], found >> 8

    def _make_room(self, tokens: int) -> None:
        """Move to arrays with room for so many tokens; to a power of two."""
        room = 1 << (tokens - 1).bit_length()
        if room > _MOST_ROOM:
            raise OutOfMemory(
                f"suffix automaton: a text of {tokens} tokens; expected at most {_MOST_ROOM}"
            )
        try:
            arrays = (
                np.empty(room, np.int32),
                np.empty((2 * room, states.STATE_WORDS), np.int32),
                np.empty((room, states.EDGE_WORDS), np.int32),
                np.zeros(2 * room, np.int32),
            )
        except MemoryError:
            raise OutOfMemory(
                f"suffix automaton: no memory for a text of {tokens} tokens ({76 * room >> 20} "
                "MiB); free memory, or switch speculation off"
            ) from None
        if self._room:
            used = (states.SIZE, states.STATE_COUNT, states.EDGE_COUNT)
            olds = (self._text, self._states, self._edges)
            for new, old, word in zip(arrays, olds, used, strict=False):
                new[: self._head[word]] = old[: self._head[word]]
        self._text, self._states, self._edges, self._table = arrays
        self._room = room
        self._head[: len(arrays)] = [array.ctypes.data for array in arrays]
        self._head[states.MASK] = len(self._table) - 1
        self._calls["index"](self._address)
