"""Whole models: tiny ones beside the CPU, published shapes with random weights timed."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.gpu.setting import Item, Row, Setting
from bench.ops import error
from clocher_kernels.cuda import executor
from clocher_kernels.cuda.prepack import TORCH_DTYPES, DeviceTensor, rearrange
from clocher_kernels.dtypes import STORAGE
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.base import Format
from clocher_runtime.checkpoints import Checkpoint, open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.convert.synthetic import preset_config
from clocher_runtime.engine.load import load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import EMBED, head_name, inventory
from clocher_runtime.models.spec import ModelSpec

_DATA = Path(__file__).parents[2] / "tests/data"
_MODELS = ("embedded", "clocher-tiny-llama", "clocher-tiny-bitnet")
_LOGIT_RMS = 0.02
"""fp16 activations against fp32 ones, relative to the RMS of the logits."""
_TIE = 1e-3
"""Largest lead of the CPU's token, in standard deviations of its logits, that rounding explains."""

_KV, _INT8, _REPEATS = "bf16", "int8_row_f32", 3
_NO_FILES = Checkpoint(Path(), "callable", {}, {}, ())


@dataclass(frozen=True)
class Shape:
    """A preset and the formats of its linears, experts and head; the rest is bf16."""

    preset: str
    linear: str
    experts: str = ""
    head: str = "bf16"

    @property
    def label(self) -> str:
        """Its name in the tables."""
        return " ".join(filter(None, (self.preset, self.linear, self.experts)))


SHAPES = (
    Shape("gpt-oss-20b", "bf16", "mxfp4"),
    Shape("llama-8b", "int4_sym_g128_f16"),
    Shape("bitnet-2b", "ternary"),
    Shape("gpt-oss-20b", _INT8, "mxfp4", _INT8),
)
_TINY = (Shape("tiny-gpt-oss", "bf16", "mxfp4"),)
_RUNS = ((1, 128), (1, 1024), (1, 2048), (1, 8128), (8, 128), (16, 128), (32, 128))
_SIZES = {False: (_RUNS, 64, 2048), True: (((1, 3),), 2, 4)}
"""Dry or not -> runs (sequences, tokens of a prompt), tokens that follow, those of a step."""


def tiny_items(dry: bool) -> list[Item]:
    """Return one item for each tiny model."""
    models = [m for m in _MODELS if m == "embedded" or (_DATA / m).exists()]
    return [(name, partial(_model, name=name)) for name in models[: 1 if dry else None]]


def step_items(dry: bool) -> list[Item]:
    """Return one item for each model."""
    return [(s.label, partial(_measure, shape=s)) for s in (_TINY if dry else SHAPES)]


def _model(setting: Setting, name: str) -> list[Row]:
    """Compare greedy ids and fp32 logits with the CPU's, then logits with fp16 activations."""
    path = embedded_model() if name == "embedded" else _DATA / name
    model = load_model(open_checkpoint(path))
    # The interpreter would take minutes: a dry run compares the CPU with the reference.
    other, prompt, new = "cuda", list(range(40, 60)), 24
    if setting.dry:
        other, prompt, new = "reference", [40, 41, 42], 2

    def run(backend: str, act_prec: str, prompt: list[int]) -> tuple[np.ndarray, list[int]]:
        shared = EngineConfig(chunk=len(prompt), all_logits=True, speculate="off", context=64)
        own = {"backend": backend, "act_prec": act_prec, "kv_dtype": "bf16"}
        session = Session(model, replace(shared, **own))  # type: ignore[arg-type]
        try:
            tokens = session.generate([prompt], new, stop_ids=frozenset())
            return session.logits(prompt), [token.id for token in tokens]
        finally:
            session.close()

    want, ids = run("cpu", "fp32", prompt)
    rows: list[Row] = []
    for act_prec in ("fp32",) if setting.dry else ("fp32", "fp16"):
        logits, got = run(other, act_prec, prompt)
        rms, _ = error(logits, want)
        rows.append({"against": other, "act_prec": act_prec, "rms": rms})
        if not rms <= _LOGIT_RMS:
            rows[-1] |= {"status": "failed", "reason": f"logits are off by {rms:.3g} of their RMS"}
        elif got != ids and act_prec == "fp32":
            at = next(i for i, (a, b) in enumerate(zip(got, ids, strict=True)) if a != b)
            last = run("cpu", "fp32", prompt + ids[:at])[0][-1]
            rows[-1]["tie"] = gap = float(last[ids[at]] - last[got[at]]) / float(np.std(last))
            if gap > _TIE:  # what follows a near-tie differs
                why = f"the tokens are {got}, on the CPU {ids}, {gap:.3g} sigma ahead"
                rows[-1] |= {"status": "failed", "reason": why}
    return rows


@dataclass(frozen=True)
class Made:
    """A model with random weights on the device, as a `Session` takes it."""

    spec: ModelSpec
    formats: dict[str, Format]
    weights: dict[str, Any]
    checkpoint: Checkpoint = _NO_FILES
    adapters: None = None

    def nbytes(self, batch: int, context: int) -> int:
        """Return the bytes of a decode step: weights of the batch's experts, keys, values."""
        moe, total = self.spec.moe, 0.0
        for name, weight in self.weights.items():
            share = 1.0
            if name == EMBED and name != head_name(self.spec):
                share = batch / self.spec.vocab_size
            elif moe is not None and ".mlp.experts." in name:
                share = 1 - (1 - moe.active / moe.experts) ** batch
            total += weight.nbytes * share
        cell = 2 * self.spec.num_kv_heads * self.spec.head_dim * STORAGE[_KV].itemsize
        keys = sum(min(context, window) if window else context for window in self.spec.windows)
        return int(total) + batch * keys * cell


def _made(setting: Setting, shape: Shape) -> Made:
    spec = spec_from_config(preset_config(shape.preset))
    formats: dict[str, Format] = {}
    weights: dict[str, Any] = {}
    for name, need in inventory(spec).items():
        if need.kind == "vector":
            weights[name] = setting.randn(*need.shape) * 0.1 + ("norm" in name)
            continue
        linear = shape.experts if len(need.shape) == 3 else shape.linear
        kind = {"linear": linear, "head": shape.head}.get(need.kind, "bf16")
        formats[name] = parse_format(kind)
        weights[name] = _random(setting, formats[name], need.shape)
    setting.synchronize()  # a session's stream does not wait for the default one
    return Made(spec, formats, weights)


def _random(setting: Setting, fmt: Format, shape: tuple[int, ...]) -> DeviceTensor:
    """Return a finite random weight in the kernels' layout."""
    planes = {}
    for name, plane in fmt.planes(shape).items():
        dtype = TORCH_DTYPES[plane.dtype]
        if dtype.is_floating_point:
            planes[name] = (setting.randn(*plane.shape) * shape[-1] ** -0.5).to(dtype)
        else:  # no fp8 code below 120 is NaN
            planes[name] = setting.integers(plane.shape, 120, dtype)
    return rearrange(fmt, shape, planes)


def _measure(setting: Setting, shape: Shape) -> list[Row]:
    setting.measure_bandwidth()
    made, salt = _made(setting, shape), count(1)
    every, new, chunk = _SIZES[setting.dry]
    runs = [(batch, length) for batch, length in every if length + new <= made.spec.max_positions]
    most, context = max(batch for batch, _ in runs), max(length for _, length in runs) + new
    # Prompts enter in whole chunks: their steps may take long.
    own: dict[str, Any] = {"backend": "cuda", "kv_dtype": _KV, "itl_ms": inf}
    config = EngineConfig(speculate="off", chunk=chunk, batch=most, context=context, **own)
    rows: list[Row] = []
    for fast in (False,) if setting.dry else (False, True):
        with patch.object(executor, "current_device", lambda: setting.device):
            session = Session(made, replace(config, fast_batch=fast))  # type: ignore[arg-type]
        try:
            for batch, length in runs:
                if batch > 1 or not fast:
                    facts = {"model": shape.label, "fast_batch": fast, "context": length}
                    size = made.nbytes(batch, length)
                    rows.append(facts | _timed(setting, session, batch, length, size, salt))
        finally:
            session.close()
    return rows


def _timed(
    setting: Setting, session: Session, batch: int, length: int, nbytes: int, salt: Iterator[int]
) -> Row:
    """Return the median step of some sequences, and until each has its first token."""
    turns = 1 + (0 if setting.dry else _REPEATS)  # the first captures graphs
    new = _SIZES[setting.dry][1]
    times = [_generate(session, batch, length, new, next(salt)) for _ in range(turns)]
    prompt = statistics.median(first for first, _ in times[-_REPEATS:])
    us = statistics.median(step for _, step in times[-_REPEATS:])
    row: Row = {"batch": batch, **setting.measured([us], nbytes)}
    if not setting.dry:
        row |= {"tokens_per_s": batch / us * 1e6, "first_token_ms": prompt / 1e3}
        row["prompt_tokens_per_s"] = batch * length / prompt * 1e6
    return row


def _generate(
    session: Session, batch: int, length: int, new: int, salt: int
) -> tuple[float, float]:
    """Return microseconds until every prompt has a token, and of a step of all of them after that.

    Prompts enter in turns, so the first has more tokens by then: what counts are the steps until
    it ends.
    """
    size = session.model.spec.vocab_size
    prompts = [[(7919 * i + 31 * salt + 7 * b) % size for i in range(length)] for b in range(batch)]
    began, first, waiting, counted = time.perf_counter(), 0.0, set(range(batch)), 0
    generation = session.generate(prompts, new, stop_ids=frozenset())
    for token in generation:
        counted += not waiting
        waiting.discard(token.sequence)
        if not (waiting or first):
            first = time.perf_counter()
        if token.last:
            break
    generation.close()
    if not counted:
        raise RuntimeError(f"{new} tokens are over before all {batch} prompts have entered")
    steps = counted / batch
    return (first - began) * 1e6, (time.perf_counter() - first) * 1e6 / steps
