"""A draft model changes how fast tokens come and never which, on the threads that are there."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from sessions import make_session, page_stats
from test_session import ids_of, model_of
from test_speculation import PROMPTS, SAMPLINGS, Even, Free, expected, texts_of

from clocher_kernels.errors import UsageError
from clocher_runtime.engine import draft_model
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.draft_model import DraftModel
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.session import Session
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.speculation.speculator import Speculator


@cache
def cut(name: str = "llama", layers: int = 2) -> Model:
    """The first layers of a model."""
    model = model_of(name)
    config = {**model.checkpoint.config, "num_hidden_layers": layers}
    return replace(model, spec=spec_from_config(config))


DRAFTS = {
    "same": lambda: model_of("llama"),
    "int4": lambda: model_of("llama", "int4w"),
    "cut": cut,
}


class Cheap(Free):
    """A draft model's steps take a hundredth of a pass."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.ns = [0.01] * (most + 1)


@contextmanager
def session_of(
    draft: Model | None, batch: int = 1, name: str = "llama", free: bool = True, **more: object
) -> Iterator[Session]:
    sizes = {"threads": 2, "context": 256, "chunk": 32, "speculate": "draft"}
    made = make_session(model_of(name), batch=batch, draft=draft, **{**sizes, **more})
    if free:
        made.scheduler.forwards.speculator.costs = Free(made.executor.plan.rows)
        draft_of(made).costs = Cheap(32)
    with closing(made):
        yield made


def draft_of(session: Session) -> DraftModel:
    assert session._draft_model is not None
    return session._draft_model


def speculator_of(session: Session) -> Speculator:
    assert session.scheduler.forwards.speculator is not None
    return session.scheduler.forwards.speculator


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.one_in(5)
def test_a_draft_model_changes_no_token(
    draft: str, sampling: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "_READ", 256)  # as much as the model itself
    # Steps with prompt tokens have no drafts, and prompts are cut by measured times: not here.
    with session_of(DRAFTS[draft](), batch, itl_ms=60_000) as session:
        assert texts_of(session, SAMPLINGS[sampling]) == expected("llama", sampling)
        counts = speculator_of(session).counts
        assert counts.forwards + counts.accepted == counts.tokens
        assert counts.drafted > 0
        if draft == "same" and sampling != "penalties":
            # It draws the same numbers, and computes the same bits.
            assert counts.accepted == counts.drafted > 0.7 * counts.tokens
        if draft == "int4" and sampling != "penalties":
            assert counts.accepted > 0.3 * counts.tokens
        assert all(stats.used == 0 for stats in page_stats(draft_of(session).pages))
        assert len(draft_of(session).pages.slots) == batch


def test_it_drops_what_the_request_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "_READ", 256)
    with session_of(model_of("llama"), itl_ms=60_000) as session:
        texts_of(session, Sampling(temperature=1.0, min_p=0.3, seed=5))
        counts = speculator_of(session).counts
        assert counts.accepted == counts.drafted > 0.7 * counts.tokens


@pytest.mark.parametrize("sampling", ["greedy", "T=1"])
def test_its_guesses_obey_a_constraint(sampling: str) -> None:
    chosen = SAMPLINGS[sampling]
    with session_of(None, 2, speculate="off", free=False) as session:
        truth = texts_of(session, chosen, [Even() for _ in PROMPTS])
    with session_of(model_of("llama"), 2) as session:
        assert texts_of(session, chosen, [Even() for _ in PROMPTS]) == truth
        assert speculator_of(session).counts.accepted > 0


def test_it_shares_the_texts_with_other_drafters() -> None:
    code = ids_of(9, 12) * 4  # what stands in the text already needs no model
    with session_of(None, speculate="off", free=False) as session:
        truth = [token.id for token in session.generate([code], 60, stop_ids=frozenset())]
    with session_of(cut(), speculate="auto") as session:
        assert [token.id for token in session.generate([code], 60, stop_ids=frozenset())] == truth
        assert set(speculator_of(session).counts.by_source) >= {"suffix", "draft"}


def test_it_needs_no_thread_of_its_own() -> None:
    before = set(threading.enumerate())  # of other tests; some may end meanwhile

    def started() -> int:
        return len(set(threading.enumerate()) - before)

    with session_of(None, speculate="off", free=False):
        alone = started()
    with session_of(model_of("llama")) as session:
        texts_of(session, Sampling())
        assert started() == alone == 1
    assert started() == 0


class Steps:
    """Counts the tokens of each step of a draft model."""

    def __init__(self, session: Session) -> None:
        self.tokens: list[int] = []
        executor = draft_of(session)._executor
        step = executor.step

        def counted(tokens: int, rows: int) -> None:
            self.tokens.append(tokens)
            step(tokens, rows)

        executor.step = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("draft", ["same", "cut"])
def test_what_came_true_is_not_computed_again(draft: str) -> None:
    with session_of(DRAFTS[draft]()) as session:
        steps = Steps(session)
        ids = ids_of(3, 30)
        list(session.generate([ids], 60, stop_ids=frozenset()))
        passes = speculator_of(session).counts.forwards
        # The prompt and its first token, later one or two tokens, and one for each further guess.
        assert steps.tokens[0] == 31
        assert max(steps.tokens[1:]) <= 2
        assert len(steps.tokens) <= 7 * passes


def test_of_a_long_prompt_the_end_is_read() -> None:
    with session_of(None, speculate="off", free=False) as session:
        truth = [t.id for t in session.generate([ids_of(4, 200)], 30, stop_ids=frozenset())]
    with session_of(model_of("llama")) as session:
        steps = Steps(session)
        made = session.generate([ids_of(4, 200)], 30, Sampling(), stop_ids=frozenset())
        assert [token.id for token in made] == truth
        assert steps.tokens[0] == 32 and max(steps.tokens[1:]) <= 2
        assert speculator_of(session).counts.accepted > 0


def test_a_pass_waits_for_no_more_of_a_prompt_than_it_takes_itself() -> None:
    with session_of(model_of("llama")) as session:
        draft_of(session).costs.ns = [0.0, *(0.05 * n for n in range(1, 33))]
        steps = Steps(session)
        list(session.generate([ids_of(4, 200)], 40, stop_ids=frozenset()))
        assert steps.tokens[:2] == [20, 13]  # the last 32, and one that came meanwhile


def test_it_guesses_as_far_as_its_context_goes() -> None:
    short = replace(cut(), spec=replace(cut().spec, max_positions=70))
    with session_of(short, 3) as session:
        assert texts_of(session, Sampling()) == expected("llama", "greedy")
        assert speculator_of(session).counts.drafted > 0
        assert draft_of(session).longest == 70
        assert len(draft_of(session).pages.slots) == 3


def test_preempted_requests_go_on_the_same() -> None:
    with session_of(cut(), 3, kv_pages=3) as session:
        assert texts_of(session, SAMPLINGS["T=1"]) == expected("llama", "T=1")
        assert session.scheduler.preempted > 0
        assert speculator_of(session).counts.drafted > 0
        assert len(draft_of(session).pages.slots) == 3
        assert [stats.used for stats in page_stats(draft_of(session).pages)] == [0]


def test_requests_that_leave_hold_nothing() -> None:
    with session_of(cut(), 2) as session:
        made = session.generate(PROMPTS, 30, stop_ids=frozenset())
        for _ in range(12):
            next(made)
        assert len(draft_of(session).pages.slots) < 2
        made.close()
        assert len(draft_of(session).pages.slots) == 2


def test_a_guess_that_is_cut_off_leaves_a_session_that_works() -> None:
    with session_of(model_of("llama"), 2) as session:
        executor = draft_of(session)._executor
        step, left = executor.step, [9]

        def cut_off(tokens: int, rows: int) -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            step(tokens, rows)

        executor.step = cut_off  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            texts_of(session, Sampling())
        assert texts_of(session, Sampling()) == expected("llama", "greedy")
        assert len(draft_of(session).pages.slots) == 2


def test_a_model_that_computes_nonsense_is_not_asked_again() -> None:
    weights = dict(model_of("llama").weights)
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], np.nan)
    with session_of(replace(model_of("llama"), weights=weights)) as session:
        steps = Steps(session)
        assert texts_of(session, Sampling()) == expected("llama", "greedy")
        assert len(steps.tokens) < 7 * len(PROMPTS) + 4
        assert speculator_of(session).counts.drafted == 0


def test_it_costs_what_was_measured() -> None:
    with session_of(cut(), free=False) as session:
        session.warm()
        costs = draft_of(session).costs
        assert 0 < costs.ns[1] <= costs.ns[32]
        assert texts_of(session, Sampling()) == expected("llama", "greedy")


@pytest.mark.parametrize(
    ("has_draft", "mode", "message"),
    [
        (False, "draft", "without a draft model"),
        (True, "off", "expected 'auto' or 'draft'"),
        (True, "suffix", "expected 'auto' or 'draft'"),
    ],
)
def test_what_cannot_be_used_is_refused(has_draft: bool, mode: str, message: str) -> None:
    draft = model_of("llama") if has_draft else None
    with pytest.raises(UsageError, match=message):
        make_session(model_of("llama"), speculate=mode, draft=draft)
