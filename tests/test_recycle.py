"""Recycled tokens: the table and its tree against one written out, and ids that stay the same."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_session import MODELS
from test_speculation import NEW, PROMPTS, SAMPLINGS, Free, expected, session_of, texts_of

from clocher_runtime.speculation.draft import ROOT
from clocher_runtime.speculation.recycle import PLACES, RecycleDrafter, RecycledTokens
from clocher_runtime.speculation.speculator import MOST_GUESSES, PRIORS, first_class

V = 12
Rows = list[tuple[int, list[int]]]

some_ids = st.one_of(st.integers(0, V - 1), st.sampled_from([-1, V, -(1 << 31), (1 << 31) - 1]))
some_rows = st.lists(st.tuples(some_ids, st.lists(some_ids, min_size=4, max_size=4)), max_size=30)


def written_out(rows: Rows, last: int, most: int) -> list[tuple[int, int, int]]:
    """Return (token, parent, place) of each node, by the words of the module."""
    after: dict[int, list[int]] = {}
    for id_, ids in rows:
        if 0 <= id_ < V:
            after[id_] = ids

    def ranked(token: int, rank: int) -> int | None:
        return next((t for t in after.get(token, [])[rank : rank + 1] if 0 <= t < V), None)

    nodes: list[tuple[int, int, int]] = []
    token: int | None = last
    for place in range(4):
        token = None if token is None else ranked(token, 0)
        if token is not None:
            nodes.append((token, place - 1, place))
    first = nodes[0][0] if nodes else -1
    beside = [(last, 1, ROOT, 4), (last, 2, ROOT, 5), (first, 1, 0, 6)]
    for of, rank, parent, place in beside:
        token = ranked(of, rank)
        if token is not None:
            nodes.append((token, parent, place))
    return nodes[:most]


def learnt(rows: Rows) -> RecycledTokens:
    table = RecycledTokens(V)
    for start in range(0, len(rows), 5):
        part = rows[start : start + 5]
        ids = np.array([id_ for id_, _ in part], np.int32)
        table.learn(ids, np.array([ids for _, ids in part], np.int32).reshape(-1, 4))
    return table


@given(some_rows, some_ids, st.integers(0, 9))
def test_the_tree_is_the_one_written_out(rows: Rows, last: int, most: int) -> None:
    tokens, parents, places = learnt(rows).propose(last, most)
    assert list(zip(tokens, parents, places, strict=True)) == written_out(rows, last, most)
    assert all(ROOT <= parent < node for node, parent in enumerate(parents))


def test_a_tree_with_all_its_places() -> None:
    table = RecycledTokens(100)
    table.learn(
        np.array([7, 1, 10], np.int32), np.int32([[1, 2, 3, 4], [10, 11, 12, 13], [20, 1, 2, 3]])
    )
    assert table.propose(7, MOST_GUESSES) == (
        [1, 10, 20, 2, 3, 11],
        [-1, 0, 1, -1, -1, 0],
        [0, 1, 2, 4, 5, 6],
    )
    assert table.propose(20, 7) == table.propose(-1, 7) == table.propose(100, 7) == ([], [], [])
    draft = RecycleDrafter(table, 30).draft([5, 7], 2)
    assert (draft.tokens, draft.parents, draft.classes) == ([1, 10], [-1, 0], [30, 31])
    assert not RecycleDrafter(table, 30).draft([5], 2).tokens


def test_there_is_a_class_for_every_place() -> None:
    assert len(PRIORS["recycle"]) == PLACES
    assert first_class("suffix") == 0
    assert first_class("recycle") == len(PRIORS["suffix"]) + len(PRIORS["shared"])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", ["greedy", "T=1"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(3)
def test_recycling_changes_no_token(name: str, sampling: str, batch: int) -> None:
    with session_of(name, batch, speculate="recycle") as session:
        speculator = session.scheduler.speculator
        assert speculator is not None
        speculator.costs = Free(session.executor.plan.rows)
        for _ in range(2):  # the second time it knows the texts
            assert texts_of(session, SAMPLINGS[sampling]) == expected(name, sampling)
        counts = speculator.counts
        assert counts.by_source["recycle"] == [counts.drafted, counts.accepted]
        assert counts.accepted > 10
        assert counts.tokens == 2 * len(PROMPTS) * (NEW - 1)
        assert [census.used for census in session.census()] == [0] * len(session.census())


def test_branches_come_true() -> None:
    with session_of("llama", 1, speculate="recycle") as session:
        speculator = session.scheduler.speculator
        assert speculator is not None and session._guessing is not None
        speculator.costs = Free(session.executor.plan.rows)
        # Only the second of each token's candidates is ever right.
        truth = expected("llama", "T=1")
        table = session._guessing._table(b"")

        def learn(ids: np.ndarray, candidates: np.ndarray) -> None:
            assert candidates.shape == (len(ids), 4)

        for text in truth:
            pairs = np.array(list(itertools.pairwise(text)), np.int32)
            wrong = (pairs[:, 1] + 1) % 4096
            table.learn(pairs[:, 0], np.stack([wrong, pairs[:, 1], wrong, wrong], 1))
        table.learn = learn  # type: ignore[method-assign]
        assert texts_of(session, SAMPLINGS["T=1"]) == truth
        assert speculator.counts.accepted > 20


def test_the_table_learns_from_every_row() -> None:
    with session_of("llama", 1, speculate="recycle") as session:
        assert session._guessing is not None
        made = session.generate(PROMPTS[:1], 3, stop_ids=frozenset(), logits=True, salt="a")
        text, ranked = list(PROMPTS[0]), {}
        for token in made:
            assert token.logits is not None
            ranked[text[-1]] = np.argsort(-token.logits, kind="stable")[:4].tolist()
            text.append(token.id)
        for id_, first in ranked.items():
            assert session._guessing._table(b"a")._after[id_].tolist() == first
            # Who has another salt is not guessed from it.
            assert session._guessing._table(b"b")._after[id_].tolist() == [-1] * 4


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    for mode in ("off", "suffix"):
        with session_of("llama", 1, speculate=mode) as session:
            assert "candidates" not in session.executor.plan.buffers
            assert "top_tokens" not in {call.op for call in session.executor.plan.calls}
