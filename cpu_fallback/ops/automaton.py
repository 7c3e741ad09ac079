"""Drafts of a text from itself: what followed the last place where its end stood before.

Adding a token and finding the longest suffix that occurred before takes amortised constant time.

A suffix automaton in flat memory: the compiled part of `automaton`.

The automaton of a text has a state for each class of substrings that end at the same places. A text
of n tokens has at most 2n states, and at most n edges besides the first of each state. So arrays
for n tokens never overflow, and only the number of tokens has to be watched.

    text    [n]      i32  the tokens
    states  [2n, 6]  i32  length of the longest substring, suffix link, where it ended last, token
                          and target of the first edge, number of the newest other edge or 0
    edges   [n, 4]   i32  from, token, target, number of the next edge of the same state or 0
    table   [2n]     i32  open addressing by (from, token): number of an edge, or 0; n a power of 2

A negative token is a mark: it stands in the text and is an edge of no state, so no match and no
draft goes across it.

The hash has secret factors, so that no text can be written whose edges all collide.
"""

import ctypes
import secrets
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from clocher_kernels.errors import OutOfMemory
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device, i64, warm

# Words of the head, int64. The first four are addresses.
TEXT, STATES, EDGES, TABLE, MASK, FACTOR, FACTOR_2, SIZE, STATE_COUNT, EDGE_COUNT, LAST, BEFORE = (
    range(12)
)
WORDS = 12

STATE_WORDS, EDGE_WORDS = 6, 4
_STATE, _EDGE = 4 * STATE_WORDS, 4 * EDGE_WORDS
_LENGTH, _LINK, _END, _TOKEN, _TARGET, _MORE = range(0, _STATE, 4)
_FROM, _BY, _TO, _NEXT = range(0, _EDGE, 4)

FRESHENED = 16  # States of a token's suffixes, from the longest on, whose last place is noted


_word = device(lambda head, index: v.read_i64(head + 8 * index))
_state = device(lambda head, number: _word(head, STATES) + _STATE * number)


_edge = device(lambda head, number: _word(head, EDGES) + _EDGE * (number - 1))


@device
def _slot(head, state, token):
    """Return the address in the table where the search for an edge begins, as an index."""
    mixed = ((state << 32) | token) * _word(head, FACTOR)
    mixed = (mixed ^ (mixed >> 32)) * _word(head, FACTOR_2)
    return (mixed >> 24) & _word(head, MASK)


@device
def _target(head, state, token):
    """Return the address of the target of an edge, 0 if the state has no such edge."""
    at = _state(head, state)
    if v.read_i32(at + _TOKEN) == token:
        return at + _TARGET
    if v.read_i32(at + _MORE) == 0:
        return 0
    slot = _slot(head, state, token)
    number = v.read_i32(_word(head, TABLE) + 4 * slot)
    while number:
        edge = _edge(head, number)
        if v.read_i32(edge + _FROM) == state and v.read_i32(edge + _BY) == token:
            return edge + _TO
        slot = (slot + 1) & _word(head, MASK)
        number = v.read_i32(_word(head, TABLE) + 4 * slot)
    return 0


@device
def _enter(head, number):
    edge = _edge(head, number)
    slot = _slot(head, v.read_i32(edge + _FROM), v.read_i32(edge + _BY))
    while v.read_i32(_word(head, TABLE) + 4 * slot):
        slot = (slot + 1) & _word(head, MASK)
    v.write_i32(_word(head, TABLE) + 4 * slot, number)


@device
def _connect(head, state, token, target):
    """Add an edge that the state does not have."""
    at = _state(head, state)
    if v.read_i32(at + _TOKEN) < 0:
        v.write_i32(at + _TOKEN, token)
        v.write_i32(at + _TARGET, target)
        return
    number = _word(head, EDGE_COUNT) + 1
    v.write_i64(head + 8 * EDGE_COUNT, number)
    edge = _edge(head, number)
    v.write_i32(edge + _FROM, state)
    v.write_i32(edge + _BY, token)
    v.write_i32(edge + _TO, target)
    v.write_i32(edge + _NEXT, v.read_i32(at + _MORE))
    v.write_i32(at + _MORE, number)
    _enter(head, number)


@device
def _new_state(head, length, link, end):
    number = _word(head, STATE_COUNT)
    v.write_i64(head + 8 * STATE_COUNT, number + 1)
    at = _state(head, number)
    v.write_i32(at + _LENGTH, length)
    v.write_i32(at + _LINK, link)
    v.write_i32(at + _END, end)
    v.write_i32(at + _TOKEN, -1)
    v.write_i32(at + _TARGET, 0)
    v.write_i32(at + _MORE, 0)
    return number


@device
def _split(head, state, by, token):
    """Give the substrings of a state as long as `by` and one token a state of their own."""
    old = _state(head, state)
    length = v.read_i32(_state(head, by) + _LENGTH) + 1
    made = _new_state(head, length, v.read_i32(old + _LINK), v.read_i32(old + _END))
    if v.read_i32(old + _TOKEN) >= 0:
        _connect(head, made, v.read_i32(old + _TOKEN), v.read_i32(old + _TARGET))
    number = v.read_i32(old + _MORE)
    while number:
        edge = _edge(head, number)
        _connect(head, made, v.read_i32(edge + _BY), v.read_i32(edge + _TO))
        number = v.read_i32(edge + _NEXT)
    v.write_i32(old + _LINK, made)
    while by >= 0:
        target = _target(head, by, token)
        if target == 0 or v.read_i32(target) != state:
            break
        v.write_i32(target, made)
        by = v.read_i32(_state(head, by) + _LINK)
    return made


@device
def _append(head, token):
    """Extend the text by a token, and note where its longest known suffix ended before."""
    place = _word(head, SIZE)
    v.write_i32(_word(head, TEXT) + 4 * place, token)
    v.write_i64(head + 8 * SIZE, place + 1)
    at = _word(head, LAST)
    made = _new_state(head, place + 1, 0, place)
    v.write_i64(head + 8 * LAST, made)
    v.write_i64(head + 8 * BEFORE, -1)
    if token < 0:
        return
    target = _target(head, at, token)
    while target == 0:
        _connect(head, at, token, made)
        at = v.read_i32(_state(head, at) + _LINK)
        if at < 0:
            return
        target = _target(head, at, token)
    known = v.read_i32(target)
    if v.read_i32(_state(head, known) + _LENGTH) != v.read_i32(_state(head, at) + _LENGTH) + 1:
        known = _split(head, known, at, token)
    v.write_i32(_state(head, made) + _LINK, known)
    v.write_i64(head + 8 * BEFORE, v.read_i32(_state(head, known) + _END))
    turn = 0
    while known > 0 and turn < FRESHENED:
        v.write_i32(_state(head, known) + _END, place)
        known = v.read_i32(_state(head, known) + _LINK)
        turn += 1


@device
def _copy(head, end, most, out):
    """Write what follows a place in the text, up to a mark; return how many tokens.

    Past the end of the text stands what was written: a text that repeats goes on repeating.
    """
    size = _word(head, SIZE)
    count = 0
    while count < most:
        place = end + 1 + count
        if place < size:
            token = v.read_i32(_word(head, TEXT) + 4 * place)
        else:
            token = v.read_i32(out + 4 * (place - size))
        if token < 0:
            break
        v.write_i32(out + 4 * count, token)
        count += 1
    return count


def _begin(head):
    """Make the state of the empty text in arrays that are empty."""
    v.write_i64(head + 8 * SIZE, 0)
    v.write_i64(head + 8 * STATE_COUNT, 0)
    v.write_i64(head + 8 * EDGE_COUNT, 0)
    v.write_i64(head + 8 * LAST, _new_state(head, 0, -1, -1))
    v.write_i64(head + 8 * BEFORE, -1)


def _follow(head, ids, count, most, out):
    """Extend the text by tokens, then draft what follows its longest suffix that it had before.

    Args:
        head: address of the head; the arrays have room for the tokens.
        ids: address of the new tokens, i32.
        count: how many they are.
        most: tokens to draft.
        out: address of the draft, i32.

    Returns:
        Length of the suffix << 8 | tokens drafted.
    """
    for i in range(count):
        _append(head, v.read_i32(ids + 4 * i))
    end = _word(head, BEFORE)
    if end < 0:
        return 0
    known = v.read_i32(_state(head, _word(head, LAST)) + _LINK)
    return (v.read_i32(_state(head, known) + _LENGTH) << 8) | _copy(head, end, most, out)


def _index(head):
    for number in range(1, _word(head, EDGE_COUNT) + 1):
        _enter(head, number)


begin = Kernel(_begin)
follow = Kernel(_follow, i64)
index = Kernel(_index)


MOST_DRAFTED = 64  # Tokens that a draft may have

_FEW = 16
_LEAST_ROOM = 64
_MOST_ROOM = 1 << 29


@cache
def _calls() -> dict[str, "ctypes._CFunctionType"]:
    """Return the kernels as functions. The quick ones keep the interpreter lock: cheaper."""
    warm([begin, index, follow])

    def function(kernel: Kernel, make: Any = ctypes.CFUNCTYPE) -> "ctypes._CFunctionType":
        return make(ctypes.c_int64, *[ctypes.c_int64] * kernel.params)(kernel.address)

    return {
        "begin": function(begin, ctypes.PYFUNCTYPE),
        "index": function(index),
        "follow": function(follow),
        "follow_quick": function(follow, ctypes.PYFUNCTYPE),
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
        self._head = np.zeros(WORDS, np.int64)
        factors = [secrets.randbits(64) | 1 for _ in range(2)]
        self._head.view(np.uint64)[[FACTOR, FACTOR_2]] = factors
        self._address = self._head.ctypes.data
        self._few, self._out = (ctypes.c_int32 * _FEW)(), (ctypes.c_int32 * MOST_DRAFTED)()
        self._few_at, self._out_at = ctypes.addressof(self._few), ctypes.addressof(self._out)
        self._size = self._room = 0
        self._make_room(max(room, _LEAST_ROOM))
        self._calls["begin"](self._address)

    def follow(self, ids: Sequence[int] | np.ndarray, most: int) -> tuple[list[int], int]:
        """Add tokens to the text, and return what followed its end where that occurred before.

        Args:
            ids: of 32 bits; a negative one is a mark, which matches nothing.
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
                np.empty((2 * room, STATE_WORDS), np.int32),
                np.empty((room, EDGE_WORDS), np.int32),
                np.zeros(2 * room, np.int32),
            )
        except MemoryError:
            raise OutOfMemory(
                f"suffix automaton: no memory for a text of {tokens} tokens ({76 * room >> 20} "
                "MiB); free memory, or switch speculation off"
            ) from None
        if self._room:
            used = (SIZE, STATE_COUNT, EDGE_COUNT)
            olds = (self._text, self._states, self._edges)
            for new, old, word in zip(arrays, olds, used, strict=False):
                new[: self._head[word]] = old[: self._head[word]]
        self._text, self._states, self._edges, self._table = arrays
        self._room = room
        self._head[: len(arrays)] = [array.ctypes.data for array in arrays]
        self._head[MASK] = len(self._table) - 1
        self._calls["index"](self._address)
