"""Guesses change how fast tokens come and never which: alone, in batches, on branches, cut."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
from sessions import make_session, pages_used
from test_session import MODELS, ids_of, model_of

from clocher_kernels.errors import UsageError
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.session import Session
from clocher_runtime.speculation.draft import Draft, SuffixDrafter
from clocher_runtime.speculation.gate import ForwardCosts, Trial, choose
from clocher_runtime.speculation.speculator import Counts, Speculator

SAMPLINGS = {
    "greedy": Sampling(),
    "T=1": Sampling(temperature=1.0, seed=5),
    "top_p": Sampling(temperature=0.8, top_p=0.9, top_k=50, seed=2),
    "penalties": Sampling(temperature=0.7, seed=3, repetition_penalty=1.2, min_p=0.05),
}
NEW = 40
PROMPTS = tuple(ids_of(seed, 20 + 13 * seed) for seed in range(4))


class Free(ForwardCosts):
    """Passes of any size take the same time, so every guess is worth it."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.ns = [1.0] * (most + 1)

    def note(self, tokens: int, ns: int) -> float:
        """Learn nothing."""
        return ns


class Oracle(SuffixDrafter):
    """Knows the texts; its drafts go wrong somewhere."""

    def __init__(self, texts: Sequence[Sequence[int]], seed: int) -> None:
        super().__init__()
        self._texts = texts
        self._random = np.random.default_rng(seed)

    def draft(self, ids: Sequence[int], most: int) -> Draft:
        """Return a draft with a part of the truth in it."""
        n = len(ids)
        text = next((t for t in self._texts if list(t[:n]) == list(ids)), ids)
        truth = list(text[n : n + int(self._random.integers(0, most + 1))])
        wrong = self._random.integers(0, 4096, most).tolist()
        tokens = (truth + wrong)[:most]
        return Draft(tokens, [0] * len(tokens))


@contextmanager
def session_of(name: str, batch: int, **more: object) -> Iterator[Session]:
    made = make_session(model_of(name), threads=2, batch=batch, context=256, chunk=32, **more)
    with closing(made):
        yield made


def texts_of(
    session: Session,
    sampling: Sampling,
    constraints: list[object] | None = None,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[list[int]]:
    texts = [list(prompt) for prompt in prompts]
    made = session.generate(prompts, NEW, sampling, stop_ids=frozenset(), constraints=constraints)
    for token in made:
        texts[token.sequence].append(token.id)
    return texts


@cache
def expected(name: str, sampling: str) -> list[list[int]]:
    with session_of(name, 1) as session:
        return texts_of(session, SAMPLINGS[sampling])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(3)
def test_guesses_change_no_token(name: str, sampling: str, batch: int) -> None:
    truth = expected(name, sampling)
    with session_of(name, batch, speculate="suffix") as session:
        rows = session.executor.plan.rows
        speculator = Speculator(lambda _: Oracle(truth, batch), rows)
        speculator.costs = Free(rows)
        session.scheduler.forwards.speculator = speculator
        assert texts_of(session, SAMPLINGS[sampling]) == truth
        counts = speculator.counts
        assert counts.accepted > 30
        assert counts.drafted > counts.accepted
        assert counts.tokens == len(PROMPTS) * (NEW - 1)
        assert counts.forwards + counts.accepted == counts.tokens
        assert pages_used(session) == 0


@pytest.mark.parametrize("name", MODELS)
def test_the_suffix_drafter_changes_no_token(name: str) -> None:
    with session_of(name, 2, speculate="auto") as session:
        for sampling in SAMPLINGS:
            assert texts_of(session, SAMPLINGS[sampling]) == expected(name, sampling)


EDITS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.25, "temperature": 0.8, "min_p": 0.02},
    {"logit_bias": {i: (i % 9) - 4.0 for i in range(0, 4096, 5)}, "temperature": 0.9},
    {"logit_bias": {i: i % 3 - 1.0 for i in range(2000)}, "repetition_penalty": 1.1},  # on the host
    {
        "repetition_penalty": 0.9,
        "frequency_penalty": -0.1,
        "logit_bias": {7: -np.inf, 12: 3.5, 4095: -1e38},
        "temperature": 1.1,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
    },
)
LONG = (*PROMPTS[:3], ids_of(9, 200))


def by_processor(prompt: int, options: dict[str, Any]) -> Sampling:
    """Penalties and biases by a function of the caller's, in NumPy and from the start each time."""
    rest = {n: x for n, x in options.items() if n in ("temperature", "top_k", "top_p", "min_p")}

    def process(ids: list[int], row: np.ndarray) -> np.ndarray:
        strength = np.float32(options.get("repetition_penalty", 1))
        seen = np.unique(ids)
        row[seen] = np.where(row[seen] > 0, row[seen] / strength, row[seen] * strength)
        made, counts = np.unique(np.array(ids[prompt:], np.int64), return_counts=True)
        row[made] -= np.float32(options.get("presence_penalty", 0)) + np.float32(
            options.get("frequency_penalty", 0)
        ) * counts.astype(np.float32)
        for token, bias in options.get("logit_bias", {}).items():
            row[token] += np.float32(bias)
        return row

    return Sampling(seed=4, processors=[process], **rest)


@pytest.mark.parametrize("options", EDITS, ids=lambda options: "-".join(options))
def test_penalties_and_biases_are_those_of_a_plain_function(options: dict[str, Any]) -> None:
    name, truth, sampling = next(iter(MODELS)), [], Sampling(seed=4, **options)
    with session_of(name, 1, speculate="off") as session:
        for prompt in LONG:
            naive = by_processor(len(prompt), options)
            made = session.generate([prompt], NEW, naive, stop_ids=frozenset())
            truth.append([*prompt, *(token.id for token in made)])
        assert texts_of(session, sampling, prompts=LONG) == truth
    with session_of(name, 3, speculate="suffix") as session:
        rows = session.executor.plan.rows
        speculator = Speculator(lambda _: Oracle(truth, 1), rows)
        speculator.costs = Free(rows)
        session.scheduler.forwards.speculator = speculator
        assert texts_of(session, sampling, prompts=LONG) == truth
        assert speculator.counts.accepted > 30
        assert speculator.counts.drafted > speculator.counts.accepted


def test_an_answer_speeds_up_the_next_one_unless_it_is_salted() -> None:
    with session_of("llama", 1, speculate="auto") as session:
        speculator = session.scheduler.forwards.speculator
        assert speculator is not None
        speculator.costs = Free(session.executor.plan.rows)

        def answers(salt: str) -> tuple[list[int], Sequence[int]]:
            before = session.speculation().counts
            made = session.generate(PROMPTS[:1], NEW, None, frozenset(), salt=salt)
            ids = [token.id for token in made]
            return ids, session.speculation(before).counts.by_source.get("answers", (0, 0))

        for salt in ("", "own", "own"):
            ids, (drafted, _) = answers(salt)
            assert drafted == 0
        same, (drafted, accepted) = answers("")
        assert same == ids
        assert drafted >= accepted > NEW // 2


class Even:
    """Allows tokens of the parity of how many there are, three in a row forbidden by none."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def fill(self, mask: np.ndarray) -> None:
        """Allow every second token."""
        mask[...] = 0x55555555 if len(self.taken) % 2 else 0xAAAAAAAA

    def take(self, token: int) -> None:
        """Count it."""
        assert token % 2 != len(self.taken) % 2
        self.taken.append(token)

    def undo(self, count: int) -> None:
        """Take some back."""
        del self.taken[len(self.taken) - count :]

    @property
    def is_over(self) -> bool:
        """End after a while."""
        return len(self.taken) >= NEW - 5


@pytest.mark.parametrize("sampling", ["greedy", "T=1", "penalties"])
def test_guesses_obey_a_constraint(sampling: str) -> None:
    chosen = SAMPLINGS[sampling]
    with session_of("llama", 2) as session:
        truth = texts_of(session, chosen, [Even() for _ in PROMPTS])
    assert {len(text) - len(prompt) for text, prompt in zip(truth, PROMPTS, strict=True)} == {
        NEW - 5
    }
    with session_of("llama", 2, speculate="suffix") as session:
        rows = session.executor.plan.rows
        speculator = Speculator(lambda _: Oracle(truth, 7), rows)
        speculator.costs = Free(rows)
        session.scheduler.forwards.speculator = speculator
        assert texts_of(session, chosen, [Even() for _ in PROMPTS]) == truth
        assert speculator.counts.accepted > 30


def test_what_ends_a_text_is_not_taken_to_be_undone() -> None:
    class Ended(Even):
        def undo(self, count: int) -> None:
            """Take some back, as llguidance cannot what ended its text."""
            assert stop not in self.taken[len(self.taken) - count :]
            super().undo(count)

    with session_of("llama", 1) as session:
        (truth,) = texts_of(session, SAMPLINGS["greedy"], [Even()], PROMPTS[:1])
    made = truth[len(PROMPTS[0]) :]
    stop = next(token for place, token in enumerate(made) if place > 15 and token not in made[:15])
    with session_of("llama", 1, speculate="suffix") as session:
        rows = session.executor.plan.rows
        for seed in range(5):
            speculator = Speculator(lambda _, seed=seed: Oracle([truth], seed), rows)
            speculator.costs = Free(rows)
            session.scheduler.forwards.speculator = speculator
            generated = session.generate(
                PROMPTS[:1], NEW, None, frozenset({stop}), constraints=[Ended()]
            )
            assert [token.id for token in generated] == made[: made.index(stop) + 1]
            assert speculator.counts.accepted > 3


def test_passes_count_while_drafts_pause_also_beside_a_prompt() -> None:
    with session_of("llama", 2, speculate="auto") as session:
        speculator = session.scheduler.forwards.speculator
        assert speculator is not None
        speculator.trial.is_on, speculator.trial._left = False, 10**6
        texts_of(session, SAMPLINGS["greedy"])
        made = len(PROMPTS) * (NEW - 1)
        assert (speculator.counts.forwards, speculator.counts.tokens) == (made, made)


def test_passes_count_where_a_constraint_cannot_take_back() -> None:
    class Onward:
        def __init__(self) -> None:
            even = Even()
            self.fill, self.take, self._even = even.fill, even.take, even

        @property
        def is_over(self) -> bool:
            return self._even.is_over

    with session_of("llama", 2) as session:
        truth = texts_of(session, SAMPLINGS["greedy"], [Even() for _ in PROMPTS])
    with session_of("llama", 2, speculate="auto") as session:
        assert texts_of(session, SAMPLINGS["greedy"], [Onward() for _ in PROMPTS]) == truth
        speculator = session.scheduler.forwards.speculator
        assert speculator is not None and speculator.counts.drafted == 0
        assert speculator.counts.forwards == len(PROMPTS) * (NEW - 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "ngram"}, "expected one of auto, off, suffix"),
        ({"speculate": "draft"}, "without a draft model"),
    ],
)
def test_what_cannot_be_guessed_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_session(model_of("llama"), context=64, **options)


def test_a_session_tells_what_guessing_came_to() -> None:
    with session_of("llama", 1) as session:
        texts_of(session, SAMPLINGS["greedy"])
        bare = session.speculation()
        made = len(PROMPTS) * (NEW - 1)  # what read a prompt made one, too
        assert (session.speculate, bare.counts) == ("off", Counts(forwards=made, tokens=made))
        assert bare.tokens_per_forward == 1 and session.speculation(bare.counts).counts == Counts()
    with session_of("llama", 1, speculate="auto") as session:
        session.warm()
        texts_of(session, SAMPLINGS["greedy"])
        first = session.speculation()
        counts = first.counts
        assert session.speculate == "auto" and first.cost_of_8 >= 1
        assert counts.tokens == len(PROMPTS) * (NEW - 1) == counts.forwards + counts.accepted
        assert counts.sent + counts.without_draft + counts.not_worth <= counts.forwards
        assert session.speculation(counts).counts.forwards == 0
        texts_of(session, SAMPLINGS["greedy"])
        assert session.speculation(counts).counts.tokens == counts.tokens


def test_costs_of_sizes_between_are_on_a_line() -> None:
    costs = ForwardCosts(10)
    costs.measure(lambda tokens: 100 if tokens < 4 else 90 + 10 * tokens)
    assert costs.known == {1: 100, 2: 100, 3: 100, 4: 130, 6: 150, 8: 170}
    assert costs.ns[1:] == [100, 100, 100, 130, 140, 150, 160, 170, 180, 190]
    costs.note(8, 1000)  # one slow pass weighs little
    assert costs.ns[8] == pytest.approx(187)
    costs.note(11, 5)  # beyond the table
    assert len(costs.ns) == 11


def test_a_time_that_nobody_sees_again_is_doubted() -> None:
    costs = ForwardCosts(8)
    costs.measure(lambda tokens: 1000 * tokens)  # in a bad moment
    passes = 0
    while not choose([[0.5] * 7], 1, costs.ns)[0]:
        costs.doubt(1)
        passes += 1
        assert passes < 4000
    assert 16 * passes > 500  # what is dear indeed is tried seldom
    for _ in range(3000):
        costs.doubt(1)
    assert min(costs.ns[1:]) == 1000


def test_guesses_are_sent_as_far_as_they_pay() -> None:
    flat, steep = [0, *[1.0] * 16], [0, *np.arange(1.0, 17)]
    assert choose([[0.5, 0.25, 0.1]], 1, flat) == [3]
    assert choose([[0.9, 0.8, 0.7]], 1, steep) == [0]
    assert choose([[0.01]], 1, flat) == [0]  # less than the margin
    # Two sequences share a pass: what is likely of one is sent, what is not of the other is not.
    priced = [0, 10, 10, 11, 12, 13, 14]
    assert choose([[0.9, 0.8], [0.3, 0.05]], 2, priced) == [2, 0]
    assert choose([[0.9] * 7], 1, flat[:4]) == [2]  # no more than there is room for
    assert choose([], 0, flat) == []


def test_guessing_that_loses_is_given_up_and_tried_again() -> None:
    trial = Trial()
    on = 0
    for _ in range(20_000):
        on += trial.is_on
        # Guesses win half a token and cost as much as one.
        trial.note(200 if trial.is_on else 100, 1.5 if trial.is_on else 1.0, 100.0)
    assert 900 < on < 1300  # of which half is lost: three per cent of the time
    passes = 0
    while not trial.is_on:
        trial.note(100, 1.0, 100.0)
    for _ in range(1000):  # another text, where they win
        passes += trial.is_on
        trial.note(120, 2.0, 100.0)
    assert passes == 1000
    trial.note(10_000_000, 1.0, 100.0)  # held up once
    for _ in range(100):
        trial.note(120, 2.0, 100.0)
    assert trial.is_on


def test_guessing_is_given_up_where_it_takes_longer_than_it_wins() -> None:
    with session_of("llama", 1, speculate="auto") as session:
        session.warm()
        speculator = session.scheduler.forwards.speculator
        assert speculator is not None
        speculator.judge = lambda sequences, tokens, ns: Speculator.judge(  # type: ignore[method-assign]
            speculator, sequences, tokens, 10 * ns
        )
        made = [t.id for t in session.generate([PROMPTS[0]], 100, stop_ids=frozenset())]
        assert made[:NEW] == expected("llama", "greedy")[0][len(PROMPTS[0]) :]
        counts = speculator.counts
        assert counts.tokens == 99
        assert counts.not_worth > 40
