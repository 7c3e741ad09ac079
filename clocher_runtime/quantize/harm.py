"""What quantising a part of a model costs, as the KL divergence of the whole, in nats a token.

With gradients (`gradients`) it is predicted. At a token with input x an error E of a matrix of N
rows costs (g^T E x)^2 / 2, or, as rows are rounded independently, |g|^2 |E x|^2 / 2 N. GPTQ moves
what it can to later columns: of the inputs' Hessian H = L D L^T a rounding error of variance s^2
leaves N s^2 tr(D). Of 48 units of SmolLM2 in tcq4, 32 were within a factor of 1.7 of what
was measured (a script, 2026-11-29).

Without them it is measured: the divergence with this unit alone quantised to the largest candidate
that all could have, times its weighted error relative to that. At two bits some units break, which
says nothing of three.

Source: exllamav3's `measure`; llama.cpp's target-bpw proposal (pull request 15550); QuIP
(arXiv 2307.13304), theorem 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple
from zlib import crc32

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Format, Tcq
from clocher_kernels.formats.base import turn
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.convert import imx, trellis
from clocher_runtime.convert.rounding import look_up, round_tensor
from clocher_runtime.disk.kept import Kept
from clocher_runtime.quality.compare import score_window
from clocher_runtime.quality.evaluate import Progress
from clocher_runtime.quantize.calibrate import Counts, LayerJob
from clocher_runtime.quantize.calibration_text import Text, make_text
from clocher_runtime.quantize.capture import ExpertInputs, Observer, RowStore, Walk
from clocher_runtime.quantize.gptq import InputStats, uncompensated
from clocher_runtime.quantize.plan import PlannedTensor

_TOKENS = 8192
"""Calibration tokens predicted from. Of 120 units of SmolLM2 118 got the same format from 32768."""
JUDGED = 1024
"""Calibration tokens measured on, at most half of them; the others fit."""
_SAMPLED_ROWS, _TURNED_ROWS = 256, 32
"""Rows whose error is measured; once rotated, all have much the same."""
_SAMPLED_EXPERTS = 4
_PREDICTED = "predicted"
"""The item of what is kept."""

Units = Mapping[str, Sequence[PlannedTensor]]
"""Layer and part, "3.qkv" -> the tensors that get the same format."""


class Harms(NamedTuple):
    """What quantising each unit costs."""

    signal: str  # "gradients" if it is predicted, "kld" if it is measured
    tokens: int  # that it was predicted from or measured on
    of: Mapping[str, Sequence[float]]  # unit -> divergence in each candidate, in nats a token


def harms_of(
    checkpoint: Checkpoint,
    units: Units,
    candidates: Sequence[Format],
    base: int,
    text_ids: Sequence[Sequence[int]],
    kept: Kept,
    counts: Counts,
    threads: int,
    seed: int,
    progress: Progress,
) -> Harms:
    """Predict or measure the harm of units in each candidate format.

    `base`: the candidate that is measured in; `kept` has what an earlier run found.
    """
    rest = threads, seed, progress
    text, rows = make_text(text_ids, seed).some(_TOKENS)
    if known := kept.get(_PREDICTED, dict[str, list[float]]):
        return Harms("gradients", len(rows), known)
    if found := counts():
        signal, tokens = "gradients", len(rows)
        taken = {name: count[rows] for name, count in found.items()}
        importance = predict(checkpoint, units, candidates[0].turned, text, taken, *rest)
    else:
        signal = "kld"
        kld, importance, tokens = measure_units(
            checkpoint, units, candidates[base], text_ids, kept, *rest
        )
    of = {}
    for name, unit in units.items():
        errors = candidate_errors(checkpoint, unit, candidates, importance, seed, threads)
        if not found:
            errors = [kld[name] * error / max(errors[base], 1e-30) for error in errors]
        of[name] = errors
    if found:
        kept.add(_PREDICTED, of)
    return Harms(signal, tokens, of)


def predict(
    checkpoint: Checkpoint,
    units: Units,
    turned: int,
    text: Text,
    counts: Mapping[str, np.ndarray],
    threads: int,
    seed: int,
    progress: Progress,
) -> dict[str, np.ndarray]:
    """Return by matrix what squared errors of its columns cost, in nats a token, [K]."""
    walk = Walk(checkpoint, text, threads)
    walk.counts = counts
    wanted = {tensor.name: tensor for unit in units.values() for tensor in unit}
    _require(walk, wanted, {name for i in range(walk.spec.num_layers) for name in walk.matrices(i)})
    costs: dict[str, np.ndarray] = {}
    for layer in range(walk.spec.num_layers):
        own = {name: wanted[name] for name in walk.matrices(layer) if name in wanted}
        job = LayerJob(walk, own, threads, seed)
        walk.layers([layer], job)
        for name, stats in job.stats.items():
            cost = float(counts[name].mean()) / 2 / wanted[name].shape[0]
            left = stats.importance
            if own[name].method == "gptq":
                left = np.full(len(left), uncompensated(stats.hessian / 2, turned) / len(left))
            costs[name] = cost * left
        progress("allocating", layer + 1, walk.spec.num_layers)
    return costs


def _require(walk: Walk, wanted: Iterable[str], known: Iterable[str]) -> None:
    if missing := sorted(set(wanted) - set(known)):
        raise UsageError(
            f"tensor {missing[0]!r} cannot be measured: the {walk.spec.family} model does not "
            "multiply by it; leave it out of the plan"
        )


def measure_units(
    checkpoint: Checkpoint,
    units: Units,
    fmt: Format,
    text_ids: Sequence[Sequence[int]],
    kept: Kept,
    threads: int,
    seed: int,
    progress: Progress,
) -> tuple[dict[str, float], dict[str, np.ndarray], int]:
    """Measure each unit's harm alone in a format, on sequences that it was not fitted to.

    Returns by unit the mean KL divergence in nats with it quantised; by matrix E[x^2] of its
    inputs, [K], experts together; and the tokens that were measured on.
    """
    longest = max(map(len, text_ids), default=1)
    text = make_text(text_ids, seed, held_out=max(2, len(text_ids) * longest / JUDGED))
    walk = Walk(checkpoint, text, threads)
    collector = _Importance()
    walk.layers(range(walk.spec.num_layers), collector)
    importance = {name: stats.importance for name, stats in collector.stats.items()}
    _require(walk, (tensor.name for unit in units.values() for tensor in unit), importance)
    # What measures goes through all layers for each unit, what fits only through its own.
    judge = Walk(checkpoint, walk.text.judged(), threads)
    judge.layers(range(walk.spec.num_layers))
    reference = judge.store(walk.spec.vocab_size)
    for rows, logits in judge.logits():
        reference[rows] = logits
        reference.release()
    before = judge.store()
    walk.restart()
    judge.restart()
    kld: dict[str, float] = {}
    for layer in range(walk.spec.num_layers):
        before.take(judge.state)
        own = {name: unit for name, unit in units.items() if name.partition(".")[0] == str(layer)}
        keys = {name: f"{name} {fmt.name}" for name in own}  # other targets measure in others
        left = {name: unit for name, unit in own.items() if kept.get(keys[name], float) is None}
        made = _quantised(walk, layer, left.values(), fmt, threads, seed) if left else {}
        for name, unit in own.items():
            if name in left:
                judge.layer(layer, None, {tensor.name: made[tensor.name] for tensor in unit})
                judge.advance()
                judge.layers(range(layer + 1, walk.spec.num_layers))
                kept.add(keys[name], _divergence(judge, reference))
                judge.state.take(before)
            kld[name] = kept.get(keys[name], float)
            progress(f"allocating: {name}", len(kld), len(units))
        walk.layers([layer])
        judge.layers([layer])
    return kld, importance, int(walk.text.held.sum())


def _quantised(
    walk: Walk,
    layer: int,
    units: Iterable[Sequence[PlannedTensor]],
    fmt: Format,
    threads: int,
    seed: int,
) -> dict[str, QuantTensor]:
    """Quantise a layer's units as calibration would, with the tokens that fit."""
    fitted, made = dict[str, PlannedTensor](), dict[str, QuantTensor]()
    for t in chain.from_iterable(units):
        if t.method == "rtn":
            made[t.name] = round_tensor(walk.tensor(t.name), fmt, t.clip, threads)
        else:
            fitted[t.name] = replace(t, format=fmt)
    if fitted:
        job = LayerJob(walk, fitted, threads, seed)
        walk.layer(layer, job)
        made |= job.finish()
    return made


def candidate_errors(
    checkpoint: Checkpoint,
    unit: Sequence[PlannedTensor],
    candidates: Sequence[Format],
    importance: Mapping[str, np.ndarray],
    seed: int = 0,
    threads: int = 1,
) -> list[float]:
    """Return a unit's weighted squared error in each format, on sampled rows."""
    totals = np.zeros(len(candidates))
    most = _TURNED_ROWS if candidates[0].turned else _SAMPLED_ROWS
    for tensor in unit:
        rng = np.random.default_rng([seed, crc32(tensor.name.encode())])
        stored, h = checkpoint.tensor(tensor.name), importance[tensor.name]
        matrices: list[np.ndarray] = []
        if len(tensor.shape) == 3:
            for expert in rng.permutation(tensor.shape[0])[:_SAMPLED_EXPERTS].tolist():
                matrix = look_up(stored, expert)
                rows = rng.permutation(len(matrix))[: most // _SAMPLED_EXPERTS]
                matrices.append(matrix[np.sort(rows)])
        else:
            rows = np.sort(rng.permutation(tensor.shape[0])[:most])
            matrices.append(look_up(stored, rows))
        scale = tensor.params / tensor.shape[-1] / sum(map(len, matrices))
        for number, fmt in enumerate(candidates):
            for values in matrices:
                if isinstance(fmt, Tcq):
                    made = trellis.search(turn(values, fmt.turned), fmt, threads=threads)
                elif tensor.method == "rtn":
                    made = encode(values, fmt)
                else:
                    made = imx.search(values, fmt, h, threads=threads)
                wrong = values - made.decode()
                energy = np.einsum("ij,ij->j", wrong, wrong, dtype=np.float64) @ h
                totals[number] += scale * float(energy)
        checkpoint.release()
    return [float(total) for total in totals]


def _divergence(walk: Walk, reference: RowStore) -> float:
    """Return the mean KL divergence of the tokens from the reference's logits."""
    total = 0.0
    for rows, logits in walk.logits():
        ids = [0] * (1 + len(logits))  # the true tokens do not matter
        total += float(score_window(reference[rows], logits, ids).kld.sum())
        reference.release()
    return total / len(walk.text.ids)


class _Importance(Observer):
    def __init__(self) -> None:
        self.stats: dict[str, InputStats] = {}

    def linear(self, weights: tuple[str, ...], x: np.ndarray, rows: slice) -> None:
        for name in weights:
            self._add(name, x, None)

    def expert(
        self, weights: tuple[str, str], expert: int, inputs: ExpertInputs, rows: np.ndarray
    ) -> None:
        self._add(weights[1], *inputs[1:])

    def _add(self, name: str, x: np.ndarray, weights: np.ndarray | None) -> None:
        own = self.stats.setdefault(name, InputStats(x.shape[1]))
        own.add(x, np.zeros(len(x), bool), weights)
