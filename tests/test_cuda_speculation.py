"""Guesses on the CUDA back end change no token: its executor on references, its own kernels too.

With the references in the place of kernels whole texts take seconds, and cells that nobody may read
any more are made NaN before each step. The kernels run in Triton's interpreter, a few tokens long.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cuda_cases import INTERPRETER
from sessions import make_session
from test_cuda_executor import log, model  # noqa: F401  a fixture
from test_session import ids_of
from test_speculation import Free, Oracle

from clocher_kernels.cuda.executor import CudaExecutor
from clocher_kernels.plan import Plan
from clocher_runtime.engine import binding
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.session import Session
from clocher_runtime.speculation.speculator import Speculator

SAMPLINGS = {"greedy": Sampling(), "T=1": Sampling(temperature=1.0, seed=5)}
TRUTH: dict[str, list[list[int]]] = {}
"""Sampling -> the texts without guesses."""
CACHES = ("k_cache", "v_cache")
PROMPTS = tuple(ids_of(seed, 3 + 30 * (seed % 2)) for seed in range(3))


@contextmanager
def session_of(texts: Sequence[Sequence[int]], **options: Any) -> Iterator[Session]:
    """Yield a session; with texts they are guessed, rightly or wrongly."""
    options |= {"speculate": "auto"} if texts else {}
    session = make_session(model(), backend="cuda", kv_dtype="bf16", **options)
    if texts:
        rows = session.executor.plan.rows
        speculator = Speculator(lambda _: Oracle(texts, 3), rows)
        speculator.costs = Free(rows)
        session.scheduler.forwards.speculator = speculator
    try:
        yield session
    finally:
        session.close()


def generate(
    session: Session, prompts: Sequence[Sequence[int]], new: int, sampling: Sampling
) -> list[list[int]]:
    texts = [list(prompt) for prompt in prompts]
    for token in session.generate(prompts, new, sampling, stop_ids=frozenset()):
        texts[token.sequence].append(token.id)
    return texts


def poisoned(session: Session) -> None:
    """Make the cells beyond each text NaN before a step is staged, as a rejected guess could be."""
    inputs, executor = session.scheduler.forwards._inputs, session.executor
    assert isinstance(executor, CudaExecutor)
    stage, host = inputs.stage, executor._inputs.host
    calls = [call.args for call in executor.plan.calls if call.op == "attention"]
    caches = {(args["pages"], executor._values[args[n]]) for args in calls for n in CACHES}
    assert {table for table, _ in caches} == {"pages", "window_pages"}

    def staged(parts: Any) -> tuple[int, int]:
        for table, cache in caches:
            free = torch.ones(cache.shape[0], cache.shape[2], dtype=torch.bool)
            for request, _ in parts:
                for cell in range(request.cells):
                    page = int(host[table][request.slot, cell // 64])
                    free[max(page, 0), cell % 64] &= page < 0
            cache.transpose(1, 2)[free] = float("nan")
        return stage(parts)

    inputs.stage = staged  # type: ignore[method-assign]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.one_in(3)
def test_rejected_guesses_leave_nothing_that_is_read(
    log: list[tuple[str, int]],  # noqa: F811
    sampling: str,
    batch: int,
) -> None:
    options: dict[str, Any] = {"context": 64, "chunk": 32}
    if sampling not in TRUTH:
        with session_of([], **options) as session:
            TRUTH[sampling] = generate(session, PROMPTS, 16, SAMPLINGS[sampling])
        log.clear()
    with session_of(TRUTH[sampling], batch=batch, **options) as session:
        poisoned(session)
        assert generate(session, PROMPTS, 16, SAMPLINGS[sampling]) == TRUTH[sampling]
        counts = session.scheduler.forwards.speculator.counts  # type: ignore[union-attr]
        buckets = {tokens for tokens, _, _ in session.executor.buckets()}  # type: ignore[attr-defined]
    assert counts.drafted > counts.accepted > 10
    assert len({count for op, count in log if op == "embed"} & buckets - {32}) > 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("sampling", "batch"), [("greedy", 1), ("T=1", 1), ("greedy", 3), ("T=1", 3)]
)
def test_the_kernels_draw_the_same_tokens(
    sampling: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(plan: Plan, weights: Mapping[str, Any], *how: object, **more: object) -> CudaExecutor:
        return CudaExecutor(plan, weights, device=INTERPRETER)

    monkeypatch.setattr(binding, "make_executor", make)
    prompts, options = PROMPTS[:batch], {"batch": batch, "context": 64, "chunk": 32}
    with session_of([], **options) as session:
        truth = generate(session, prompts, 8, SAMPLINGS[sampling])
    with session_of(truth, **options) as session:
        assert generate(session, prompts, 8, SAMPLINGS[sampling]) == truth
        assert session.scheduler.forwards.speculator.counts.accepted > 0  # type: ignore[union-attr]
