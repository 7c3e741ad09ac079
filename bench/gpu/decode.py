"""Decode steps of whole models: published shapes, random weights, the executor's CUDA graphs."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.gpu.products import without_pdl
from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting
from bench.gpu.weights import random_tensor
from clocher_kernels.cuda.executor import CudaExecutor
from clocher_kernels.cuda.launch import Launch
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.cuda.timer import reason
from clocher_kernels.dtypes import STORAGE
from clocher_kernels.formats import parse_format
from clocher_kernels.formats.base import Format
from clocher_runtime.checkpoints.opening import Checkpoint
from clocher_runtime.convert.synthetic import find_preset
from clocher_runtime.models.build import Sizes, build_plan, page_table
from clocher_runtime.models.families import spec_from_config
from clocher_runtime.models.inventory import EMBED, Need, head_name, inventory
from clocher_runtime.models.spec import ModelSpec

_KV = "bf16"
_STEPS, _REPEATS, _WARM_STEPS = 24, 5, 4
_PROFILED_CONTEXT = 1024
_TOP_KERNELS = 14

Weights = dict[str, DeviceTensor | torch.Tensor]


@dataclass(frozen=True)
class Precision:
    """A model as it is measured.

    Attributes:
        label: name in the table.
        preset: name of the published model.
        linear: format of the block linears.
        experts: format of the experts.
        head: format of the head; a tied head has the embedding's, bf16.
        batches: sequences that step together.
    """

    label: str
    preset: str
    linear: str
    experts: str = ""
    head: str = "bf16"
    batches: tuple[int, ...] = (1, 4, 8)
    contexts: tuple[int, ...] = (128, 1024, 8192)

    def format_of(self, name: str, need: Need) -> Format:
        """Return the format of a matrix."""
        if need.kind == "linear":
            return parse_format(self.experts if len(need.shape) == 3 else self.linear)
        return parse_format(self.head if need.kind == "head" else "bf16")


_INT8 = "int8_row_f32"
PRECISIONS = (
    Precision("gpt-oss-20b", "gpt-oss-20b", "bf16", "mxfp4"),
    Precision("llama-8b int4", "llama-8b", "int4_sym_g128_f16"),
    Precision("bitnet-2b", "bitnet-2b", "ternary"),
    Precision("gpt-oss-20b int8 attn+head", "gpt-oss-20b", _INT8, "mxfp4", _INT8, (1,), (1024,)),
)
_NO_FILES = Checkpoint(Path(), "callable", {}, {}, ())
"""What random weights were opened from: no file that could change during a run."""
TINY = (Precision("tiny-gpt-oss", "tiny-gpt-oss", "bf16", "mxfp4", "bf16", (1, 2), (70,)),)


def items(dry: bool) -> list[Item]:
    """Return one item for each model: one sequence at a time."""
    return _items(TINY if dry else PRECISIONS, measure, batches=(1,))


def batch_items(dry: bool) -> list[Item]:
    """Return one item for each model and batch of more."""
    return _items(TINY if dry else PRECISIONS, measure, batches=(2, 4, 8))


def variant_items(dry: bool) -> list[Item]:
    """Return the item that times a model's steps without early launches; `items` has them with."""
    model = (TINY if dry else PRECISIONS)[0]
    model = replace(model, label=f"{model.label} without PDL", contexts=model.contexts[:2])
    return [Item("steps-without-pdl", lambda setting: measure(without_pdl(setting), model, 1))]


def short_items(dry: bool) -> list[Item]:
    """Return items that step the same models cut to two layers.

    They check that steps repeat bit by bit, and leave the compiled kernels in Triton's cache.
    """
    return [] if dry else _items(PRECISIONS, _check_short, layers=2)


def _items(
    precisions: tuple[Precision, ...],
    run: object,
    *,
    batches: tuple[int, ...] = (1, 4, 8),
    layers: int | None = None,
) -> list[Item]:
    suffix = f"-{layers}-layers" if layers else ""
    return [
        Item(
            f"{p.label}{suffix}-b{batch}",
            partial(run, precision=p, batch=batch, layers=layers),  # type: ignore[arg-type]
        )
        for p in precisions
        for batch in p.batches
        if batch in batches
    ]


@dataclass
class Made:
    """A model of a published shape with random weights on the device; a `Session` takes it.

    Attributes:
        formats: format of each matrix by tensor name.
        checkpoint: one without files.
    """

    spec: ModelSpec
    formats: dict[str, Format]
    weights: Weights
    checkpoint: Checkpoint = _NO_FILES

    @classmethod
    def make(cls, setting: Setting, precision: Precision, layers: int | None = None) -> "Made":
        """Draw the weights."""
        spec = spec_from_config(find_preset(precision.preset).config(layers))
        needs = inventory(spec)
        formats = {
            name: precision.format_of(name, need)
            for name, need in needs.items()
            if need.kind != "vector"
        }
        return cls(spec, formats, _weights(setting, needs, formats))


def at_contexts(precision: Precision, contexts: tuple[int, ...]) -> Precision:
    """Return a model that is measured at other contexts."""
    return replace(precision, contexts=contexts)


def launches(setting: Setting, precision: Precision, batch: int, chunk: int = 1) -> list[Launch]:
    """Return the launches of steps of two layers, in every size that steps are captured for.

    What greedy rows need is among what sampled ones do.

    Args:
        setting: where.
        precision: the model.
        batch: sequences that step together.
        chunk: tokens of a prompt's step, if more.
    """
    model = Model(setting, precision, batch, 2, chunk)
    return [launch for key in model.executor.buckets() for launch in model.executor.lower(key)]


class Model:
    """A model with random weights on the device, bound to its executor."""

    def __init__(
        self,
        setting: Setting,
        precision: Precision,
        batch: int,
        layers: int | None,
        chunk: int = 1,
    ) -> None:
        self.setting, self.precision, self.batch = setting, precision, batch
        made = Made.make(setting, precision, layers)
        self.spec, self.formats, self.weights = made.spec, made.formats, made.weights
        self.plan = build_plan(
            self.spec,
            self.formats,
            Sizes(
                tokens=max(batch, chunk),
                rows=batch,
                slots=batch,
                context=max(precision.contexts) + 1,
                cache_dtype=_KV,
            ),
        )
        self.executor = CudaExecutor(self.plan, self.weights, device=setting.device)
        self._fill_cache()

    def start(self, context: int, steps: int, is_one: bool = False) -> None:
        """Send inputs such that the last of some steps sees `context` keys.

        Args:
            context: of the last token.
            steps: that follow.
            is_one: tokens are one sequence's, one after another, not one of each.
        """
        blocks = self.plan.buffers["pages"].shape[1]
        token = np.arange(self.batch)
        position = context - steps + (token - self.batch + 1 if is_one else 0)
        values: dict[str, object] = {
            "ids": (token * 7919 + context) % self.spec.vocab_size,
            "slots": 0 if is_one else token,
            "positions": position,
            "ends": position + 1,
            "ancestors": 0,
            "pages": page_table(self.batch, blocks),
            "rows": token,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "seeds": 1,
            "draws": 0,
        }
        for name, value in values.items():
            self.executor.array(name)[...] = value
        self.executor.upload()

    def steps(self, count: int) -> None:
        """Put steps on the stream."""
        for _ in range(count):
            self.executor.step(self.batch, self.batch)

    def tokens_after(self, context: int, steps: int) -> np.ndarray:
        """Return the tokens that the last of some steps sampled."""
        self.start(context, steps)
        self.steps(steps)
        return self.executor.fetch("sampled", self.batch).copy()

    def nbytes(self, context: int) -> int:
        """Return the bytes that a step has to read: weights of the batch's experts, keys, values.

        Experts are counted as if each token chose among them evenly.
        """
        moe, total = self.spec.moe, 0
        for name, weight in self.weights.items():
            if name == EMBED and name != head_name(self.spec):
                total += self.batch * weight.nbytes // self.spec.vocab_size
            elif moe is not None and ".mlp.experts." in name:
                unused = (1 - moe.active / moe.experts) ** self.batch
                total += int(weight.nbytes * (1 - unused))
            else:
                total += weight.nbytes
        cell = 2 * self.spec.num_kv_heads * self.spec.head_dim * STORAGE[_KV].itemsize
        keys = sum(min(context, window) if window else context for window in self.spec.windows)
        return total + self.batch * keys * cell

    def close(self) -> None:
        """Free the device's memory."""
        self.executor.close()
        self.weights.clear()

    def _fill_cache(self) -> None:
        """Fill the KV cache with random numbers: zeros draw less power than real keys do."""
        for name, buffer in self.plan.buffers.items():
            if buffer.role == "state":
                self.executor._values[name].normal_(generator=self.setting.random)
        # The executor has a stream of its own, which does not wait for what made the weights.
        self.setting.timer.synchronize()


def _weights(setting: Setting, needs: dict[str, Need], formats: dict[str, Format]) -> Weights:
    made: Weights = {}
    for name, need in needs.items():
        if need.kind != "vector":
            made[name] = random_tensor(formats[name], need.shape, setting)
            continue
        noise = setting.randn(*need.shape) * 0.1
        made[name] = noise + 1 if "norm" in name else noise
    return made


def _check_short(
    setting: Setting, precision: Precision, batch: int, layers: int | None
) -> list[Row]:
    model = Model(setting, precision, batch, layers)
    rows = []
    try:
        for context in precision.contexts:
            first, second = (model.tokens_after(context, 8) for _ in range(2))
            logits = model.executor.fetch("logits", batch)
            good = bool(np.isfinite(logits).all()) and np.array_equal(first, second)
            row: Row = {"op": "decode step", "case": f"{precision.label} b{batch} c{context}"}
            rows.append({**row, "act": "f16", "status": "ok" if good else "failed"})
            if not good:
                rows[-1]["reason"] = "logits are not finite, or a second run chose other tokens"
    finally:
        model.close()
    return rows


def measure(
    setting: Setting, precision: Precision, batch: int, layers: int | None = None
) -> list[Row]:
    """Time decode steps of a model at each context."""
    setting.measure_bandwidth()
    began = time.perf_counter()
    model = Model(setting, precision, batch, layers)
    rows: list[Row] = []
    try:
        for context in precision.contexts:
            us = _step_us(setting, model, context)
            facts: Row = {
                "kind": "decode",
                "model": precision.label,
                "batch": batch,
                "context": context,
                "nbytes": model.nbytes(context),
            }
            if not setting.dry:
                facts |= {"us": us, "tokens_per_s": batch / us * 1e6}
                facts = setting.with_share(facts, facts["nbytes"] / us / 1e3)
                facts["limit_tokens_per_s"] = facts["tokens_per_s"] / facts["share"]
            if context == _PROFILED_CONTEXT or setting.dry:
                facts |= _profile(setting, model, context, us)
            rows.append(facts)
        rows[0]["ready_s"] = time.perf_counter() - began
    finally:
        model.close()
    return rows


def _step_us(setting: Setting, model: Model, context: int) -> float:
    """Return the median time of a step, by the host's clock over many steps on the stream."""
    steps, repeats = (1, 1) if setting.dry else (_STEPS, _REPEATS)
    if not setting.dry:
        model.tokens_after(context, _WARM_STEPS)
    samples = []
    for _ in range(repeats):
        model.start(context, steps)
        model.executor.synchronize()
        start = time.perf_counter()
        model.steps(steps)
        model.executor.synchronize()
        samples.append((time.perf_counter() - start) / steps * 1e6)
    return statistics.median(samples)


def _profile(setting: Setting, model: Model, context: int, us: float) -> Row:
    """Return the time of a step that no kernel fills, and the kernels that take most of it."""
    try:
        from torch.profiler import ProfilerActivity, profile

        activity = ProfilerActivity.CPU if setting.dry else ProfilerActivity.CUDA
        model.start(context, 2)
        model.steps(1)
        model.executor.synchronize()
        with profile(activities=[activity]) as recorded:
            model.steps(1)
            model.executor.synchronize()
        spans = list(_kernel_spans(recorded.events() or ()))
    except Exception as error:
        return {"profile": f"not measured: {reason(error)}"}
    if not spans:
        return {"profile": "not measured: the profiler saw no kernel"}
    by_name: dict[str, list[float]] = {}
    for start, end, name in spans:
        by_name.setdefault(name, []).append(end - start)
    busy = covered(spans)
    top = sorted(by_name.items(), key=lambda entry: -sum(entry[1]))[:_TOP_KERNELS]
    return {
        "kernels": len(spans),
        "kernel_us_sum": sum(end - start for start, end, _ in spans),
        "kernel_us_busy": busy,
        "outside_us": us - busy,
        "top_kernels": [{"name": n[:60], "count": len(t), "us": sum(t)} for n, t in top],
    }


def _kernel_spans(events: object) -> Iterator[tuple[float, float, str]]:
    for event in events:  # type: ignore[attr-defined]
        if event.device_type == torch.autograd.DeviceType.CUDA:
            yield event.time_range.start, event.time_range.end, event.name


def covered(spans: list[tuple[float, float, str]]) -> float:
    """Return the length of the union of spans; kernels may overlap."""
    total, reached = 0.0, float("-inf")
    for start, end, _ in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
