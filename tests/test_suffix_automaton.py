"""The suffix automaton against brute force, and against the same automaton in dictionaries."""

import random
from pathlib import Path

import numpy as np
import pytest
from kernel_run import kernel_cache

from clocher_kernels.errors import OutOfMemory
from cpu_fallback.ops.automaton import (
    EDGE_COUNT,
    FRESHENED,
    MOST_DRAFTED,
    STATE_COUNT,
    SuffixAutomaton,
)

pytestmark = pytest.mark.usefixtures(kernel_cache.__name__)
PYTHON_TEXT = list(Path(__file__).read_bytes())


class Reference:
    """The automaton in lists and dictionaries."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.lengths, self.links, self.ends = [0], [-1], [-1]
        self.edges: list[dict[int, int]] = [{}]
        self.last, self.before = 0, -1

    def state(self, length: int, link: int, end: int, edges: dict[int, int]) -> int:
        self.lengths.append(length)
        self.links.append(link)
        self.ends.append(end)
        self.edges.append(edges)
        return len(self.links) - 1

    def append(self, token: int) -> None:
        place, at = len(self.text), self.last
        self.text.append(token)
        self.last = made = self.state(place + 1, 0, place, {})
        self.before = -1
        if token < 0:
            return
        while at >= 0 and token not in self.edges[at]:
            self.edges[at][token] = made
            at = self.links[at]
        if at < 0:
            return
        known = self.edges[at][token]
        if self.lengths[known] != self.lengths[at] + 1:
            old = known
            length = self.lengths[at] + 1
            known = self.state(length, self.links[old], self.ends[old], dict(self.edges[old]))
            self.links[old] = known
            while at >= 0 and self.edges[at].get(token) == old:
                self.edges[at][token] = known
                at = self.links[at]
        self.links[made] = known
        self.before = self.ends[known]
        for _ in range(FRESHENED):
            if known > 0:
                self.ends[known] = place
                known = self.links[known]

    def propose(self, most: int) -> tuple[list[int], int]:
        if self.before < 0:
            return [], 0
        text = list(self.text)
        for i in range(most):
            text.append(text[self.before + 1 + i])
            if text[-1] < 0:
                return text[len(self.text) : -1], self.lengths[self.links[self.last]]
        return text[len(self.text) :], self.lengths[self.links[self.last]]


def longest(text: list[int]) -> tuple[int, set[int]]:
    """Return the length of the longest suffix that occurred before, and where it ended."""
    best, ends = 0, set()
    for end in range(len(text) - 1):
        length = 0
        while length <= end and text[end - length] == text[-1 - length] >= 0:
            length += 1
        if length > best:
            best, ends = length, set()
        if length and length == best:
            ends.add(end)
    return best, ends


def texts() -> dict[str, list[int]]:
    rng = random.Random(5)
    code = PYTHON_TEXT[:1500]
    return {
        "nothing twice": list(range(300)),
        "one token": [7] * 300,
        "two tokens": [rng.randrange(2) for _ in range(700)],
        "five tokens": [rng.randrange(5) for _ in range(700)],
        "any int32": [rng.choice((0, 1, -1, -(2**31), 2**31 - 1)) for _ in range(700)],
        "many ids": [rng.randrange(200_000) for _ in range(700)],
        "code": code,
        "a copy": code[:400] + code[100:380] + code[:300],
        "marks": [-1 if rng.random() < 0.05 else rng.randrange(3) for _ in range(500)],
        "a period": ([3, 1, 4, 1, 5] * 60)[:-2],
        "runs": [i for n in range(1, 25) for i in [1] * n + [2]],
    }


@pytest.mark.parametrize("name", texts())
def test_equals_the_reference_and_brute_force(name: str) -> None:
    text = texts()[name]
    rng = random.Random(name)
    automaton, reference = SuffixAutomaton(), Reference()
    at = 0
    while at < len(text):
        new = text[at : at + rng.randint(1, 8)]
        at += len(new)
        for token in new:
            reference.append(token)
        drafted = automaton.follow(new, 7)
        assert drafted == reference.propose(7) == automaton.follow((), 7)
        length, ends = longest(text[:at])
        assert drafted[1] == length
        if ends:
            assert reference.before in ends


def test_the_last_place_wins() -> None:
    automaton = SuffixAutomaton()
    automaton.follow([1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 5, 7], 0)
    assert automaton.follow([1, 2], 3) == ([5, 7, 1], 2)


def test_the_last_place_wins_for_suffixes_of_what_came_last() -> None:
    automaton = SuffixAutomaton()
    automaton.follow([1, 2, 3, 9, 0, 1, 2, 4, 8, 0, 1, 2, 5, 7, 6], 0)
    assert automaton.follow([1, 2], 2) == ([5, 7], 2)


def test_what_repeats_goes_on_repeating() -> None:
    automaton = SuffixAutomaton()
    assert automaton.follow([4, 5, 6, 4, 5], 7) == ([6, 4, 5, 6, 4, 5, 6], 2)
    assert automaton.follow([], 2) == ([6, 4], 2)


def test_an_empty_text_has_no_draft() -> None:
    automaton = SuffixAutomaton()
    assert automaton.follow((), 7) == ([], 0)
    assert automaton.follow([3], 7) == ([], 0)


@pytest.mark.parametrize("first", [1, 63, 64, 65, 1000])
def test_growing_changes_nothing(first: int) -> None:
    text = texts()["code"]
    roomy, tight = SuffixAutomaton(room=len(text)), SuffixAutomaton()
    roomy.follow(text[:first], 0)
    tight.follow(np.array(text[:first], np.int64), 0)
    for token in text[first:]:
        assert tight.follow([token], 7) == roomy.follow([token], 7)


def test_a_long_text_at_once_and_in_pieces() -> None:
    rng = random.Random(1)
    text = [rng.randrange(40) for _ in range(20_000)]
    at_once, piecewise = SuffixAutomaton(), SuffixAutomaton()
    at_once.follow(text, 0)
    for at in range(0, len(text), 100):
        piecewise.follow(text[at : at + 100], 0)
    assert at_once.follow((), 7) == piecewise.follow((), 7)
    assert at_once._size == piecewise._size == len(text)
    arrays = (at_once._text, at_once._states, at_once._edges, at_once._table)
    assert sum(array.nbytes for array in arrays) <= 2 * 76 * len(text)


@pytest.mark.parametrize("name", texts())
def test_states_and_edges_stay_in_their_arrays(name: str) -> None:
    text = texts()[name]
    automaton = SuffixAutomaton()
    for size, token in enumerate(text, 1):
        automaton.follow([token], 0)
        made = automaton._head[[STATE_COUNT, EDGE_COUNT]]
        assert made[0] <= 2 * size and made[1] <= size
        used = automaton._table[automaton._table > 0]
        assert sorted(used) == list(range(1, made[1] + 1))


def test_no_more_than_its_buffer_is_drafted() -> None:
    automaton = SuffixAutomaton()
    ids, length = automaton.follow([1] * 500, 10**9)
    assert ids == [1] * MOST_DRAFTED and length == 499


def test_a_text_of_absurd_length_is_refused() -> None:
    with pytest.raises(OutOfMemory, match="expected at most"):
        SuffixAutomaton(room=1 << 40)
