"""Drafts from finished texts: who sees which, how many are kept, and that they equal a search."""

import random

import pytest
from kernel_run import kernel_cache

from cpu_fallback.drafts.automaton import SuffixAutomaton
from cpu_fallback.drafts.shared import SharedSuffixes

pytestmark = pytest.mark.usefixtures(kernel_cache.__name__)


def longest(text: list[int], finished: list[list[int]]) -> tuple[int, set[tuple[int, ...]]]:
    """Return the length of the longest suffix that a finished text has, and what follows it."""
    for length in range(len(text), 0, -1):
        suffix = text[-length:]
        found = {
            tuple(other[at + length : at + length + 7])
            for other in finished
            for at in range(len(other) - length + 1)
            if other[at : at + length] == suffix
        }
        if found:
            return length, found
    return 0, {()}


@pytest.mark.parametrize("ids", [2, 5, 40])
def test_a_reader_finds_what_a_search_finds(ids: int) -> None:
    """Texts are added while it reads, so states are split under its feet."""
    rng = random.Random(ids)
    shared, finished = SharedSuffixes(1 << 14), []
    readers = [(shared.reader(b""), []) for _ in range(3)]
    for turn in range(200):
        if turn % 4 == 0:
            finished.append([rng.randrange(ids) for _ in range(rng.randrange(60))])
            shared.add(b"", finished[-1])
            if turn == 0:
                continue
        reader, text = readers[rng.randrange(3)]
        new = [rng.randrange(ids + 1) for _ in range(rng.randint(1, 20))]
        text += new
        if not finished:
            continue
        drafted, length = reader.follow(new, 7)
        best, follows = longest(text, finished)
        assert length == best
        assert tuple(drafted) in follows


def test_the_last_place_wins() -> None:
    shared = SharedSuffixes()
    shared.add(b"", [1, 2, 3, 4])
    shared.add(b"", [1, 2, 5, 6])
    assert shared.reader(b"").follow([9, 1, 2], 7) == ([5, 6], 2)


def test_no_match_goes_across_texts() -> None:
    shared = SharedSuffixes()
    shared.add(b"", [1, 2])
    shared.add(b"", [3, 4])
    assert shared.reader(b"").follow([1, 2, 3], 7) == ([4], 1)
    assert shared.reader(b"").follow([1, 2], 7) == ([], 2)
    assert shared.reader(b"").follow([1, 2, -1, 3], 7) == ([4], 1)
    assert shared.reader(b"").follow([-1], 7) == ([], 0)


def test_a_salt_sees_its_own_texts_only() -> None:
    shared = SharedSuffixes()
    shared.add(b"mine", [1, 2, 3])
    assert shared.reader(b"yours").follow([1, 2], 7) == ([], 0)
    assert shared.reader(b"").follow([1, 2], 7) == ([], 0)
    assert shared.reader(b"mine").follow([1, 2], 7) == ([3], 2)


def test_salts_are_few_and_the_one_not_used_goes() -> None:
    shared = SharedSuffixes(salts=2)
    first = shared.reader(b"a")
    shared.add(b"a", [1, 2])
    shared.add(b"b", [1, 3])
    assert first.follow([1], 7) == ([2], 1)
    shared.add(b"c", [1, 4])
    assert shared.reader(b"b").follow([1], 7) == ([], 0)
    assert shared.reader(b"a").follow([1], 7) == ([2], 1)
    shared.add(b"d", [1, 5])
    shared.add(b"e", [1, 6])
    assert first.follow([1], 7) == ([], 0)


@pytest.mark.parametrize("longest_text", [3, 40, 300])
def test_the_newest_texts_stay_and_the_number_is_bounded(longest_text: int) -> None:
    rng = random.Random(longest_text)
    shared = SharedSuffixes(tokens=128)
    reader, name = shared.reader(b""), 0
    for _ in range(300):
        text = list(range(name, name + rng.randint(2, longest_text)))
        name += len(text)
        shared.add(b"", text)
        assert shared.reader(b"").follow(text[-2:-1], 7) == (text[-1:], 1)
        assert reader.follow(text[-2:-1], 7)[0] == text[-1:]
        current, coming = shared._generations[b""]
        assert len(current) <= 128 and len(coming) <= 64
    assert shared.nbytes <= (76 * (128 + 64))
    assert shared.reader(b"").follow([0], 7) == ([], 0)


def test_a_reader_begins_anew_when_the_automaton_does() -> None:
    shared = SharedSuffixes(tokens=16)
    reader = shared.reader(b"")
    shared.add(b"", [1, 2, 3])
    assert reader.follow([1, 2], 7) == ([3], 2)
    for _ in range(8):
        shared.add(b"", [2, 5, 1, 8])
    assert reader.follow([2], 7) == ([5, 1, 8], 1)


def test_a_long_text_is_read_at_once() -> None:
    rng = random.Random(3)
    text = [rng.randrange(30) for _ in range(5000)]
    shared = SharedSuffixes()
    shared.add(b"", text)
    assert shared.reader(b"").follow(text[:-9], 4) == (text[-9:-5], 4991)
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert automaton.nbytes < shared.nbytes
