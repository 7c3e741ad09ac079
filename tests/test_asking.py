"""When a draft model is asked: as deep as it pays, hardly ever if it does not, in pieces."""

from collections.abc import Callable, Mapping, Sequence

import pytest

from clocher_runtime.speculation.draft import CONFIDENCE, UNSEEN, Draft, Pending, Track
from clocher_runtime.speculation.gate import DraftModelGate, ForwardCosts, draft_depth, goes_on
from clocher_runtime.speculation.speculator import Speculator

Wanted = Callable[[Mapping["Reader", Draft]], bool]

FLAT = [0.0, *[100.0] * 8]
"""Passes of up to 8 tokens that take as long as one of a single token."""


def chain(chance: float, count: int = 7) -> list[float]:
    return [chance**i for i in range(1, count + 1)]


def best(chance: float, step: float, ns: Sequence[float] = FLAT, entry: float = 0.0) -> int:
    return draft_depth([chain(chance)], [[]], 1, ns, [entry], [0.0, step])


def test_guesses_are_made_as_deep_as_they_pay() -> None:
    assert best(0.9, 10) == 7
    assert best(0.9, 1000) == 0  # a guess that takes ten passes
    assert best(0.5, 10) == 2
    assert best(0.1, 10) == 0
    rates = [(1 + sum(chain(0.7, k))) / (100 + 15 * k) for k in range(8)]
    assert best(0.7, 15) == rates.index(max(rates)) == 3
    # 1 % more tokens a second are within the margin.
    assert best(0.111, 10) == 0 and best(0.2, 10) == 1


def test_it_goes_on_while_it_is_sure_enough() -> None:
    steps = [0.0, 30.0, 40.0]

    def more(*chances: float, expected: float = 0.7, ns: Sequence[float] = FLAT) -> bool:
        return goes_on([chances], [expected], 1, ns, steps)

    assert more(0.9) and more(0.9, 0.85, 0.82)
    assert not more(0.3)  # 0.21 tokens for 30, where 1.3 take 130
    assert not more(0.9, expected=0.2) and not more(0.9, 0.2)
    assert not more(0.9, ns=FLAT[:3])  # no room for a second one
    assert not more(0.9, ns=[0.0, 100, 100, 200, 300])
    # One that is sure pays for another one.
    assert goes_on([[0.95], [0.3]], [0.9, 0.9], 2, FLAT, steps)
    assert not goes_on([[0.3], [0.3]], [0.9, 0.9], 2, FLAT, steps)


def test_tokens_of_each_confidence_are_judged_by_themselves() -> None:
    run = Run(step=20, more=0.01)
    run.model.level = 1 + len(CONFIDENCE)
    run.passes(40, right=7)
    assert set(run.model.depths[-9:]) == {7}
    run.model.level = 1  # what it is not sure of is wrong
    run.passes(40, right=0)
    run.model.depths.clear()
    run.model.level = 1 + len(CONFIDENCE)
    run.passes(10, right=7)
    assert max(run.model.depths) == 7
    rates = run.track.rates.mean
    assert rates[UNSEEN + 1 + len(CONFIDENCE) - 1] == pytest.approx(0.97)  # it had no token
    assert rates[UNSEEN + 1] < 0.2 < rates[UNSEEN] < rates[UNSEEN + len(CONFIDENCE) + 1]


def test_the_pass_counts_too() -> None:
    steep = [0.0, *(100.0 * m for m in range(1, 9))]
    assert best(0.9, 1, steep) == 0
    assert best(0.9, 1, FLAT[:4]) == 2  # room for two guesses
    assert best(0.9, 10, entry=1000) == 0  # much to read
    assert best(0.9, 10, entry=100) == 7


def test_nothing_is_known_at_first() -> None:
    assert best(0.9, 0.0) == 0
    assert best(0.9, 10, [0.0] * 9) == 0


def test_only_texts_are_asked_for_that_others_guess_worse() -> None:
    steps = [0.0, 1.0, 2.0]
    ns = [0.0, *[100.0] * 16]
    sure, vague = [0.95] * 7, []
    assert draft_depth([chain(0.6)] * 2, [sure, sure], 2, ns, [0, 0], steps) == 0
    assert draft_depth([chain(0.6)] * 2, [sure, vague], 2, ns, [0, 0], steps) == 4
    assert draft_depth([[], chain(0.9)], [vague, vague], 2, ns, [0, 0], steps) > 1


class Model:
    """Guesses 1 2 3 ... and takes as long as it is told to."""

    level = 0  # how sure it is, 0 if it does not say

    def __init__(self, step: float, more: float) -> None:
        self.costs = ForwardCosts(64)
        self.costs.ns = [0.0, *(step * (1 + more * n) for n in range(64))]
        self.spent, self.depths, self.most = 0.0, [], []

    def draft(
        self, readers: Sequence["Reader"], depth: int, most: int, wanted: Wanted
    ) -> list[Draft]:
        self.most.append(most)
        (reader,) = readers
        count = min(reader.left, most)
        reader.left -= count
        self.spent += self.costs.ns[count]
        made = 0 if reader.left else 1
        while 0 < made < depth and wanted({reader: self._guess(made)}):
            made += 1
            self.spent += self.costs.ns[1]
        self.depths.append(made)
        return [self._guess(made)]

    def _guess(self, count: int) -> Draft:
        return Draft(range(1, count + 1), (UNSEEN + self.level,) * count)

    def reset(self) -> None:
        """Nothing is held."""


class Reader:
    """A text of which some tokens were not read."""

    def __init__(self, left: int, new: int = 1) -> None:
        self.left, self.new = left, new

    def behind(self, ids: Sequence[int]) -> int:
        self.left = max(1, self.left + self.new)
        return self.left

    def leave(self) -> None:
        """Nothing is held."""


class Run:
    """Passes over one text of which a share of the guesses comes true."""

    def __init__(self, step: float, more: float = 0.1, left: int = 0, most: int = 7) -> None:
        self.model = Model(step, more)
        self.speculator = Speculator(lambda _: None, 8, gate=DraftModelGate(self.model))
        self.speculator.costs.ns = list(FLAT)
        self.track: Track = self.speculator.track()
        self.track.reader = Reader(left)
        self.most, self.tokens, self.time = most, 0, 0.0

    def passes(self, count: int, right: int) -> None:
        """Do some passes in which so many guesses come true, if they are made."""
        for _ in range(count):
            (sent,) = self.speculator.draft([Pending(self.track, [0], self.most)], 1, 7)
            verified = min(right, len(sent.tokens))
            came = [*range(1, verified + 1), verified + 1 if right > verified else 99]
            self.speculator.learn(self.track, came, verified)
            self.tokens += len(came)
            self.time += 100
        self.time += self.model.spent
        self.model.spent = 0


def test_a_model_that_is_never_right_costs_little() -> None:
    run = Run(step=20, more=0.01)
    run.passes(30, right=0)  # until that is known
    run.model.depths.clear()
    run.time = 0
    run.passes(2000, right=0)
    assert len(run.model.depths) > 10
    assert run.time <= 1.0101 * 2000 * 100 + 40


def test_a_model_that_becomes_right_is_asked_again() -> None:
    run = Run(step=5)
    run.passes(200, right=0)
    run.passes(500, right=7)
    run.tokens, run.time = 0, 0
    run.passes(50, right=7)
    assert run.tokens == 50 * 8
    assert set(run.model.depths[-50:]) == {7}


def said(run: Run) -> str:
    return run.speculator.account(run.speculator.counts).reason


def test_a_slow_model_is_only_looked_at() -> None:
    run = Run(step=300)
    run.track.reader = Reader(0, new=0)
    run.passes(299, right=7)
    assert not run.model.depths  # it could not pay, were every guess right
    assert "draft model: not asked, a token costs 3.00 of a forward" in said(run)
    run.time = 0
    run.passes(1000, right=7)
    assert run.model.depths == [1] * 4  # each takes a hundredth of 300 passes
    assert run.time <= 1.01 * 1000 * 100 + 300


def test_a_model_is_tried_before_it_is_judged() -> None:
    run = Run(step=70)
    for _ in range(8):
        (sent,) = run.speculator.draft([Pending(run.track, [0], run.most)], 1, 7)
        assert len(sent.tokens) == 1
        run.speculator.learn(run.track, [99], 0)
    assert run.speculator.draft([Pending(run.track, [0], run.most)], 1, 7)[0].tokens in ([], ())
    assert run.speculator.counts.by_source == {"draft": [8, 0]}
    assert "draft model: 0 of 8 tokens accepted, a token costs 0.70 of a forward" in said(run)


def test_a_model_that_is_often_right_goes_on_after_it_was_tried() -> None:
    run = Run(step=70)
    run.passes(8, right=7)
    assert run.model.depths == [1] * 8
    run.passes(20, right=7)
    assert min(run.model.depths[-10:]) > 1


def test_a_long_prompt_is_not_read_for_a_try() -> None:
    run = Run(step=70, more=0.1, left=250)
    run.passes(20, right=7)
    assert not run.model.depths  # to read 250 tokens takes 18 passes


def test_a_text_that_is_dear_to_read_is_not_read_on_and_on() -> None:
    run = Run(step=50, more=0.5)
    run.passes(5000, right=0)
    assert run.time <= 1.01 * 5000 * 100 + 2000
    looked = len(run.model.depths)
    run.track.reader = Reader(0)  # a new text, and what was saved is spent on looking at it
    run.passes(50, right=7)
    assert len(run.model.depths) > looked


def test_pieces_take_no_longer_than_a_pass() -> None:
    run = Run(step=25, left=100)
    run.passes(60, right=7)
    assert run.model.most[0] == 31  # 25 * (1 + 0.1 * 30) = 100
    assert run.model.depths[:5] and run.tokens > 100


def test_a_text_that_is_about_to_end_is_not_read() -> None:
    run = Run(step=25, left=500, most=2)
    run.passes(2, right=2)
    assert not run.model.depths


def test_what_others_guess_is_judged_though_it_is_not_sent() -> None:
    class Other:
        def draft(self, ids: Sequence[int], most: int) -> Draft:
            return Draft([1], [0])

    run = Run(step=5)
    run.track.drafter = Other()
    before = run.track.rates.mean[0]
    run.passes(20, right=7)
    assert run.track.rates.mean[0] > before + 0.4
    assert run.speculator.counts.by_source.keys() == {"draft"}


@pytest.mark.parametrize("base", [1, 9, 40])
def test_a_pass_larger_than_any_is_not_guessed_at(base: int) -> None:
    run = Run(step=5)
    text = Pending(run.track, [0], 7)
    (sent,) = run.speculator.draft([text], base, 0)
    assert not sent.tokens
