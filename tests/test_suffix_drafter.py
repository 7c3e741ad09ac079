"""Drafts of a text from itself, against brute force."""

import random
from pathlib import Path

import pytest

from clocher_runtime.speculation import draft as module
from clocher_runtime.speculation.draft import LEVELS, NO_DRAFT, SOURCES, Answers, SuffixDrafter

PYTHON_TEXT = list(Path(__file__).read_bytes())
MOST = 7
LONGEST = 1 << (LEVELS - 1)


def lengths(text: list[int]) -> list[int]:
    """Return how many tokens up to each place are those at the end, 32 at most."""
    found = []
    for end in range(len(text) - 1):
        length = 0
        while length <= min(end, LONGEST - 1) and text[end - length] == text[-1 - length]:
            length += 1
        found.append(length)
    return found


def followed(text: list[int], place: int) -> list[int]:
    """Return what follows a place of a text; at its end, what was returned."""
    text = list(text)
    for i in range(MOST):
        text.append(text[place + 1 + i])
    return text[-MOST:]


def level(length: int) -> int:
    return min(length.bit_length(), LEVELS) - 1


def texts() -> dict[str, list[int]]:
    rng = random.Random(5)
    code = PYTHON_TEXT[:1500]
    return {
        "nothing twice": list(range(300)),
        "one token": [7] * 300,
        "two tokens": [rng.randrange(2) for _ in range(700)],
        "five tokens": [rng.randrange(5) for _ in range(700)],
        "any int32": [rng.choice((0, 1, 2**31 - 2, 2**31 - 1)) for _ in range(700)],
        "many ids": [rng.randrange(200_000) for _ in range(700)],
        "code": code,
        "a copy": code[:400] + code[100:380] + code[:300],
        "a period": ([3, 1, 4, 1, 5] * 60)[:-2],
        "runs": [i for n in range(1, 25) for i in [1] * n + [2]],
    }


@pytest.mark.parametrize("name", texts())
@pytest.mark.parametrize("tried", [2, 32, 10_000])
def test_drafts_follow_a_match_whose_length_is_told(
    name: str, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TRIED", tried)
    text, rng = texts()[name], random.Random(name)
    drafter, at = SuffixDrafter(), 0
    while at < len(text):
        at += rng.randint(1, 8)
        now = text[:at]
        tokens, classes = drafter.draft(now, MOST)
        known = lengths(now)
        longest = max(known, default=0)
        if not longest:
            assert not tokens
            continue
        of = [n for place, n in enumerate(known) if n and followed(now, place) == tokens]
        assert classes in [[level(n + i) for i in range(MOST)] for n in of]
        assert tried < 10_000 or longest in of
        assert longest == 1 or max(of) > 1  # two tokens are always found


def test_the_newest_of_equal_matches_is_taken() -> None:
    text = [1, 2, 3, 9, 0, 1, 2, 4, 8, 0, 1, 2, 5, 7, 6, 1, 2]
    assert list(SuffixDrafter().draft(text, 2).tokens) == [5, 7]


def test_what_repeats_goes_on_repeating() -> None:
    drafter = SuffixDrafter()
    assert drafter.draft([4, 5, 6, 4, 5], 7).tokens == [6, 4, 5, 6, 4, 5, 6]
    assert drafter.draft([4, 5, 6, 4, 5], 2).tokens == [6, 4]


def test_a_match_goes_on_where_newer_places_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TRIED", 1)
    head = list(range(100, 140))
    text = [*head, *[120, 121, 5] * 3]
    drafter = SuffixDrafter()
    drafts = [drafter.draft(text + head[: count + 1], 1).tokens for count in range(39)]
    assert [list(tokens) for tokens in drafts] == [[token] for token in head[1:]]


def test_a_text_of_one_token_has_no_draft() -> None:
    assert SuffixDrafter().draft([3], 7) is NO_DRAFT


def test_many_calls_draft_what_one_does() -> None:
    rng = random.Random(1)
    text = [rng.randrange(40) for _ in range(5_000)]
    piecewise = SuffixDrafter()
    for at in range(100, len(text), 100):
        piecewise.draft(text[:at], MOST)
    piecewise._distance = 0  # what it found last
    assert piecewise.draft(text, MOST) == SuffixDrafter().draft(text, MOST)


def sources(draft: tuple[object, list[int]]) -> list[str]:
    return [SOURCES[kind] for kind in draft[1]]


def test_an_answer_is_drafted_from_where_the_text_itself_has_less() -> None:
    answers = Answers()
    answers.add([5, 6, 7, 8, 9])
    other = SuffixDrafter(answers)
    draft = other.draft([1, 5, 6], MOST)
    assert list(draft.tokens) == [7, 8, 9]  # and not what follows in another answer
    assert sources(draft) == ["answers"] * 3
    own = other.draft([1, 5, 6, 2, 5, 6], 2)
    assert (list(own.tokens), sources(own)) == ([2, 5], ["suffix"] * 2)  # as long a match: its own
    assert SuffixDrafter(answers).draft([9], MOST) is NO_DRAFT  # nothing follows
    assert SuffixDrafter().draft([1, 5, 6], MOST) is NO_DRAFT
    answers.add([4, 6, 3])
    assert list(SuffixDrafter(answers).draft([6], MOST).tokens) == [3]  # the newest
    assert list(SuffixDrafter(answers).draft([0, 5, 6], 1).tokens) == [7]  # the longest


def test_the_oldest_answers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 64)
    answers = Answers()
    for first in range(0, 1000, 10):
        answers.add(range(first, first + 10))
    drafts = [answers.after([first, first + 1], MOST)[0] for first in range(0, 1000, 10)]
    kept = [bool(tokens) for tokens in drafts]
    assert kept == sorted(kept)
    assert 2 <= sum(kept) <= 6
    assert drafts[-1] == list(range(992, 999))
