"""What a user waits for: prompts, the first token, and tokens through `Session.generate`.

Beside raw steps, which never ask the device for a result, `generate` shows what the host costs.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

from bench.gpu import decode
from bench.gpu.decode import Made, Precision
from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting
from clocher_kernels.cuda import executor
from clocher_kernels.cuda.launch import Launch
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.session import Session

CHUNKS, _DRY_CHUNKS = (128, 512), (4,)
_PROMPTS, _DRY_PROMPTS = (20, 1024), (3,)
_NEW, _DRY_NEW = 64, 2
_REPEATS = 3
MODELS = decode.PRECISIONS[:3]
_SAMPLINGS = {
    "generate, greedy": Sampling(),
    "generate, temperature 0.7": Sampling(temperature=0.7, top_p=0.95, seed=1),
    "generate, top 50 of 0.7": Sampling(temperature=0.7, top_k=50, top_p=0.95, seed=1),
}


def items(dry: bool) -> list[Item]:
    """Return one item for each model."""
    models = decode.TINY if dry else MODELS
    return [Item(p.label, partial(_measure, precision=p)) for p in models]


def launches(setting: Setting, precision: Precision, chunk: int) -> list[Launch]:
    """Return the launches of a session's steps, of two layers: kernels know the context's size.

    Args:
        setting: where.
        precision: the model.
        chunk: tokens of a prompt's step.
    """
    shown = decode.at_contexts(precision, (_context(setting) - 1,))
    return decode.launches(setting, shown, 1, chunk)


def _context(setting: Setting) -> int:
    """Return the cells of a session that holds the longest prompt and what follows it."""
    prompts, new = (_DRY_PROMPTS, _DRY_NEW) if setting.dry else (_PROMPTS, _NEW)
    return max(prompts) + 2 * new


def _measure(setting: Setting, precision: Precision) -> list[Row]:
    made = Made.make(setting, precision)
    setting.timer.synchronize()
    prompts = _DRY_PROMPTS if setting.dry else _PROMPTS
    rows: list[Row] = []
    with device_of(setting):
        for chunk in _DRY_CHUNKS if setting.dry else CHUNKS:
            new = _DRY_NEW if setting.dry else _NEW
            context = _context(setting)
            session = Session(
                made, EngineConfig(backend="cuda", context=context, chunk=chunk, speculate="off")
            )  # type: ignore[arg-type]
            try:
                rows += [_first_token(setting, session, length) for length in prompts]
                if chunk == (_DRY_CHUNKS if setting.dry else CHUNKS)[-1]:
                    rows += _tokens(setting, session, max(prompts), new)
            finally:
                session.close()
    return [{"kind": "generate", "model": precision.label, **row} for row in rows]


def _first_token(setting: Setting, session: Session, length: int) -> Row:
    """Return the time from a prompt to its first token, greedy, and the prompt's tokens in it."""
    row: Row = {"what": "first token", "prompt": length, "chunk": session.executor.plan.tokens}
    run = partial(_generate, session, length, 1, Sampling())
    return row | _timed(setting, run, lambda us: length / us * 1e6)


def _tokens(setting: Setting, session: Session, length: int, new: int) -> list[Row]:
    """Return the time of a token after the first: raw steps, then through `generate`."""
    rows = []
    for what, sampling in _SAMPLINGS.items():
        row: Row = {"what": what, "prompt": length}
        run = partial(_generate, session, length, new, sampling)
        rows.append(row | _timed(setting, run, lambda us: 1e6 / us))
    raw: Row = {"what": "raw steps", "prompt": length}
    steps = partial(_steps, session, length, new)
    return [raw | _timed(setting, steps, lambda us: 1e6 / us), *rows]


def _timed(setting: Setting, run: Callable[[], float], speed: Callable[[float], float]) -> Row:
    """Run once to capture graphs, then a few times; return the median of what it returns, in us."""
    run()
    if setting.dry:
        return {}
    us = statistics.median(run() for _ in range(_REPEATS))
    return {"us": us, "tokens_per_s": speed(us)}


def _generate(session: Session, length: int, new: int, sampling: Sampling) -> float:
    """Return the microseconds of the first token, or of each token after it if there are more."""
    ids = _prompt(session, length)
    began = time.perf_counter()
    tokens = session.generate([ids], new, sampling, stop_ids=frozenset())
    next(tokens)
    if new > 1:
        began = time.perf_counter()
        for _ in tokens:
            pass
    return (time.perf_counter() - began) * 1e6 / max(new - 1, 1)


def _steps(session: Session, length: int, count: int) -> float:
    """Return the microseconds of a step when nobody reads what it sampled."""
    # The second token's step leaves inputs on the device that step on from there.
    for _ in session.generate([_prompt(session, length)], 2, stop_ids=frozenset()):
        pass
    session.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        session.executor.step(1, 1)
    session.synchronize()
    return (time.perf_counter() - began) * 1e6 / count


def _prompt(session: Session, length: int) -> list[int]:
    return [(7919 * i + 11) % session.model.spec.vocab_size for i in range(length)]


@contextmanager
def device_of(setting: Setting) -> Iterator[None]:
    """Let a `Session` on "cuda" use the setting's device: a dry run has none of its own."""
    with patch.object(executor, "current_device", lambda: setting.device):
        yield
