"""What guesses cost and win: passes of M tokens, and texts that are made with guesses and without.

The texts are those of a small trained model, so that a drafter finds in them what it finds in text.
They have to be the same with guesses and without.
"""

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from bench.gpu import decode
from bench.gpu.decode import Model, Precision
from bench.gpu.generate import device_of
from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting
from clocher_kernels.cuda.launch import Launch
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.load import load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.text.tokenizer import Tokenizer

SIZES, _DRY_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32), (1, 2)
MODELS = decode.PRECISIONS[:3]
_CONTEXT, _DRY_CONTEXT = 1024, 70
_STEPS, _REPEATS = 24, 5
_DATA = Path(__file__).parents[2] / "tests/data"
_SMALL = _DATA / "clocher-tiny-llama"
_PROMPT, _DRY_PROMPT = 512, 4
_NEW, _DRY_NEW = 256, 3
_SAMPLINGS = {"greedy": Sampling(), "temperature 1": Sampling(temperature=1.0, seed=1)}


def items(dry: bool) -> list[Item]:
    """Return one item for each model: what its passes cost."""
    models = decode.TINY if dry else MODELS
    return [Item(f"{p.label}-passes", partial(_measure_passes, precision=p)) for p in models]


def text_items(dry: bool) -> list[Item]:
    """Return the item that makes texts with guesses and without."""
    return [Item(f"texts of {_SMALL.name}", _measure_texts)]


def launches(setting: Setting, precision: Precision) -> list[Launch]:
    """Return the launches of passes of two layers."""
    return decode.launches(setting, _at_one_context(setting, precision), max(SIZES))


def _at_one_context(setting: Setting, precision: Precision) -> Precision:
    return decode.at_contexts(precision, (_DRY_CONTEXT if setting.dry else _CONTEXT,))


def _measure_passes(setting: Setting, precision: Precision) -> list[Row]:
    """Time passes of M tokens of one sequence, in turns; graphs of a size are filled up to it."""
    sizes = _DRY_SIZES if setting.dry else SIZES
    precision = _at_one_context(setting, precision)
    with closing(Model(setting, precision, max(sizes), None)) as model:
        times: dict[int, list[float]] = {m: [] for m in sizes}
        for _ in range(1 if setting.dry else 1 + _REPEATS):
            for m in sizes:
                times[m].append(_pass_us(setting, model, m))
    rows: list[Row] = []
    for m in sizes:
        row: Row = {"kind": "pass", "model": precision.label, "m": m}
        if not setting.dry:  # the first round captured the graphs
            us = statistics.median(times[m][1:])
            row |= {"us": us, "ratio": us / statistics.median(times[1][1:])}
        rows.append(row)
    return rows


def _pass_us(setting: Setting, model: Model, m: int) -> float:
    steps = 1 if setting.dry else _STEPS
    model.start(_DRY_CONTEXT if setting.dry else _CONTEXT, steps, is_one=True)
    model.executor.step(m, m)  # sends the inputs
    model.executor.synchronize()
    began = time.perf_counter()
    for _ in range(steps - 1):
        model.executor.step(m, m)
    model.executor.synchronize()
    return (time.perf_counter() - began) * 1e6 / max(steps - 1, 1)


def _measure_texts(setting: Setting) -> list[Row]:
    """Make texts in turns, with guesses and without; other ids are a failure."""
    model = load_model(open_checkpoint(_SMALL))
    prompts = _prompts(_DRY_PROMPT if setting.dry else _PROMPT)
    if setting.dry:
        prompts = {"copy": prompts["copy"]}
    context = 2 * (_DRY_PROMPT + _DRY_NEW if setting.dry else _PROMPT + _NEW)
    chunk = 4 if setting.dry else None
    with device_of(setting):
        off, on = (
            Session(
                model,
                EngineConfig(backend="cuda", context=context, chunk=chunk, speculate=mode),
            )
            for mode in ("off", "auto")
        )
    with closing(off), closing(on):
        if not setting.dry:
            off.warm()
            on.warm()  # which measures what passes cost
        return [
            {"kind": "speculation", "model": _SMALL.name, "what": what, **row}
            for what, prompt in prompts.items()
            for row in _race(setting, off, on, prompt)
        ]


def _prompts(length: int) -> dict[str, list[int]]:
    """Return ids of a text to go on with, of one that has begun to repeat itself, of no text."""
    small = open_checkpoint(_SMALL)
    tokenizer = Tokenizer(small.tokenizer_source, small.tokenizer_config)
    text = tokenizer.encode((_DATA / "valid.txt").read_text(encoding="utf-8")[: 16 * length])
    size = load_model(small).spec.vocab_size
    return {
        "go on": text[:length],
        "copy": (text[: length * 2 // 3] + text)[:length],
        "random": np.random.default_rng(1).integers(1, size, length).tolist(),
    }


def _race(setting: Setting, off: Session, on: Session, prompt: Sequence[int]) -> list[Row]:
    """Return a row of each way to choose tokens."""
    rows: list[Row] = []
    new = _DRY_NEW if setting.dry else _NEW
    for name, sampling in list(_SAMPLINGS.items())[: 1 if setting.dry else None]:
        speculator = on.scheduler.speculator
        assert speculator is not None
        times: dict[Session, list[float]] = {off: [], on: []}
        texts: list[list[int]] = []
        before = speculator.counts.forwards, speculator.counts.tokens
        for _ in range(1 if setting.dry else 1 + _REPEATS):
            for session in (off, on):
                us, ids = _generate(session, prompt, new, sampling)
                times[session].append(us)
                texts.append(ids)
        passes = speculator.counts.forwards - before[0]
        row: Row = {"sampling": name, "per_pass": (speculator.counts.tokens - before[1]) / passes}
        if any(text != texts[0] for text in texts):
            row |= {"status": "failed", "reason": "other ids with guesses than without"}
        if not setting.dry:
            plain, guessed = (statistics.median(times[session][1:]) for session in (off, on))
            row |= {"us": guessed, "us_off": plain, "tokens_per_s": 1e6 / guessed}
            row["gain"] = plain / guessed
        rows.append(row)
    return rows


def _generate(
    session: Session, prompt: Sequence[int], new: int, sampling: Sampling
) -> tuple[float, list[int]]:
    """Return the microseconds of a token after the first, and the ids."""
    tokens = session.generate([prompt], new, sampling, stop_ids=frozenset())
    ids = [next(tokens).id]
    began = time.perf_counter()
    ids += [token.id for token in tokens]
    return (time.perf_counter() - began) * 1e6 / (new - 1), ids
