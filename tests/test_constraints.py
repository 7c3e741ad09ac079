"""Texts of allowed tokens only: alone, in company, after preemption, drawn on the host."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from masks import masks_of
from sessions import make_session, pages_used

from clocher_kernels.errors import UsageError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.engine.arguments import Constraint, Sampling
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.stub import stub_model

VOCABULARY = 4096
HOT = Sampling(temperature=1, seed=7)


def allowed_after(seed: int, tokens: Sequence[int]) -> np.ndarray:
    """Return 40 tokens that depend on those before."""
    rng = np.random.default_rng([seed, *tokens])
    return np.sort(rng.permutation(VOCABULARY)[:40])


class Some:
    """Allows other tokens after each token, and is over after `length`."""

    def __init__(self, seed: int, length: int = 10**9) -> None:
        self.seed, self.length = seed, length
        self.taken: list[int] = []

    def fill(self, mask: np.ndarray) -> None:
        allowed = np.zeros((1, VOCABULARY), bool)
        allowed[0, allowed_after(self.seed, self.taken)] = True
        mask[...] = masks_of(allowed)[0]

    def take(self, token: int) -> None:
        assert token in allowed_after(self.seed, self.taken)
        self.taken.append(token)

    @property
    def is_over(self) -> bool:
        return len(self.taken) >= self.length


class Nothing(Some):
    """Allows no token."""

    def fill(self, mask: np.ndarray) -> None:
        mask[...] = 0


class Broken(Some):
    """Fails after some tokens, when asked or when told."""

    def __init__(self, seed: int, what: str) -> None:
        super().__init__(seed)
        self.what = what

    def fill(self, mask: np.ndarray) -> None:
        if self.what == "fill" and len(self.taken) == 3:
            raise ValueError("it is broken")
        super().fill(mask)

    def take(self, token: int) -> None:
        if self.what == "take" and len(self.taken) == 3:
            raise ValueError("it is broken")
        super().take(token)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(open_checkpoint(embedded_model()))


Make = Callable[..., Session]


@pytest.fixture
def make(model: Model) -> Iterator[Make]:
    made = []

    def session(**settings: object) -> Session:
        made.append(make_session(model, threads=2, chunk=32, context=256, **settings))
        return made[-1]

    yield session
    for each in made:
        each.close()


def prompt(seed: int, length: int = 12) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCABULARY, length).tolist()


def texts(
    session: Session,
    prompts: Sequence[Sequence[int]],
    constraints: Sequence[Constraint | None] | None,
    sampling: Sampling = HOT,
    max_new: int = 24,
) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in prompts]
    ends = frozenset[int]()
    for token in session.generate(prompts, max_new, sampling, ends, constraints=constraints):
        out[token.sequence].append(token.id)
    return out


@pytest.mark.parametrize(
    "sampling",
    [
        HOT,
        Sampling(),
        Sampling(temperature=1.3, top_k=12, top_p=0.9, seed=3),
        Sampling(temperature=1, repetition_penalty=1.3, seed=5),
        Sampling(temperature=1, min_p=0.2, logit_bias={5: 3.0}, seed=5),
    ],
    ids=["hot", "greedy", "cut", "on the host", "min_p on the host"],
)
def test_company_changes_nothing_and_only_allowed_tokens_are_made(
    make: Make, sampling: Sampling
) -> None:
    prompts = [prompt(i, 5 + 9 * i) for i in range(5)]
    which = [Some(0), None, Some(2), Some(3), None]
    together = texts(make(batch=3), prompts, which, sampling)
    alone = make(batch=1)
    for index, (ids, constraint) in enumerate(zip(prompts, which, strict=True)):
        again = None if constraint is None else Some(constraint.seed)
        assert texts(alone, [ids], [again], sampling) == [together[index]]
        # `take` has checked that each was allowed; the last one is told too.
        assert constraint is None or constraint.taken == together[index]
    free = texts(alone, [prompts[0]], None, sampling)
    assert free != [together[0]]


def test_preemption_keeps_what_a_constraint_knows(make: Make) -> None:
    prompts = [prompt(i, 50) for i in range(4)]
    narrow, wide = make(batch=4, kv_pages=6), make(batch=4)
    expected = texts(wide, prompts, [Some(i) for i in range(4)], max_new=90)
    constraints = [Some(i) for i in range(4)]
    assert texts(narrow, prompts, constraints, max_new=90) == expected
    assert narrow.scheduler.preempted and not wide.scheduler.preempted
    assert [each.taken for each in constraints] == expected


def test_what_is_over_has_stopped(make: Make) -> None:
    tokens = list(make().generate([prompt(0)], 30, HOT, constraints=[Some(0, 5)]))
    assert len(tokens) == 5 and [t.finish for t in tokens] == ["", "", "", "", "stop"]


@pytest.mark.parametrize("what", ["fill", "take", "nothing"])
@pytest.mark.parametrize("sampling", [HOT, Sampling(temperature=1, min_p=0.1)], ids=["op", "host"])
def test_what_fails_ends_its_own_call_only(make: Make, what: str, sampling: Sampling) -> None:
    session = make(batch=3)
    expected = texts(session, [prompt(1)], [Some(1)], sampling)
    good = session.generate([prompt(1)], 24, sampling, frozenset(), constraints=[Some(1)])
    bad = session.generate(
        [prompt(0)],
        24,
        sampling,
        frozenset(),
        constraints=[Nothing(0) if what == "nothing" else Broken(0, what)],
    )
    good.begin()
    kind, message = (UsageError, "allows no token") if what == "nothing" else (ValueError, "broken")
    made = []
    with pytest.raises(kind, match=message):
        made.extend(bad)
    assert [token.id for token in good] == expected[0]
    assert len(made) <= 3
    assert pages_used(session) == 0


def test_a_processor_that_forbids_what_is_allowed_is_named(make: Make) -> None:
    def forbid(ids: list[int], logits: np.ndarray) -> np.ndarray:
        return np.where(np.arange(VOCABULARY) == 17, 0.0, -np.inf)

    class Not17(Some):
        def fill(self, mask: np.ndarray) -> None:
            mask[...] = masks_of(np.arange(VOCABULARY)[None] != 17)[0]

    with pytest.raises(UsageError, match="left no token that is allowed"):
        texts(make(), [prompt(0)], [Not17(0)], Sampling(processors=[forbid]))


def test_constraints_that_cannot_be_used(make: Make) -> None:
    with pytest.raises(UsageError, match="1 constraint for 2 prompts"):
        texts(make(), [prompt(0), prompt(1)], [Some(0)])
    stub = make_session(stub_model(), backend="stub", context=64, chunk=4)
    with pytest.raises(UsageError, match="leave constraints out"):
        texts(stub, [[1, 2]], [Some(0)])
    assert texts(stub, [[1, 2]], [None], max_new=3)
    stub.close()
