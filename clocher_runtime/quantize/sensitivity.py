"""Measured harm of low-bit formats by unit of a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.convert import imx
from clocher_runtime.convert.rounding import round_tensor
from clocher_runtime.quantize.calibrate import LayerJob
from clocher_runtime.quantize.capture import Walk
from clocher_runtime.quantize.inputs import (
    ExpertInputs,
    Hidden,
    InputStats,
    RowStore,
    Site,
    expert_matrix,
    look_up_rows,
    make_text,
)
from clocher_runtime.quantize.plan import PlannedTensor

TOKENS = 8192
"""Calibration tokens used: half to fit, half to measure on."""

_SAMPLED_ROWS = 256
_SAMPLED_EXPERTS = 4

Progress = Callable[[int, int, str], None]
Importance = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors of one layer that get the same format."""

    name: str  # layer and part: "3.qkv"
    tensors: tuple[PlannedTensor, ...]  # at least one

    @property
    def layer(self) -> int:
        """Index of the layer."""
        return int(self.name.partition(".")[0])

    @property
    def params(self) -> int:
        """Number of weights."""
        return sum(tensor.params for tensor in self.tensors)

    def nbytes(self, fmt: Format) -> int:
        """Bytes of the unit in a format."""
        return sum(fmt.nbytes(tensor.shape) for tensor in self.tensors)


class Measured(NamedTuple):
    """A text's measurements of units."""

    kld: tuple[float, ...]  # mean KL divergence in nats with one unit quantised, for each unit
    importance: Importance  # E[x^2] of the inputs of each matrix, [K]; experts together
    tokens: int  # tokens that were measured on


def measure_units(
    checkpoint: Checkpoint,
    units: Sequence[Unit],
    fmt: Format,
    text_ids: Sequence[Sequence[int]],
    threads: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
    directory: Path | None = None,
) -> Measured:
    """Measure each unit's harm alone in a format; half of the sequences fit, half measure."""
    text = make_text(_first(text_ids), seed, held_out=2)
    walk = Walk(checkpoint, text, directory)
    collector = _Importance()
    for layer in range(walk.num_layers):
        walk.layer(layer, collector)
        walk.advance()
    importance = collector.importance()
    missing = [t.name for unit in units for t in unit.tensors if t.name not in importance]
    if missing:
        raise UsageError(
            f"tensor {missing[0]!r} cannot be measured: the {walk.spec.family} model does not "
            "multiply by it; leave it out of the plan"
        )
    reference = RowStore(text.tokens, walk.spec.vocab_size, directory)
    for rows, logits in walk.logits():
        reference[rows] = log_softmax(logits)
        reference.release()
    before = RowStore(text.tokens, walk.spec.hidden_size, directory)
    walk.restart()
    kld: dict[str, float] = {}
    for layer in range(walk.num_layers):
        walk.save(before)
        for unit in (unit for unit in units if unit.layer == layer):
            walk.layer(layer, None, _quantise_unit(walk, unit, fmt, threads, seed))
            walk.advance()
            for later in range(layer + 1, walk.num_layers):
                walk.layer(later)
                walk.advance()
            kld[unit.name] = _divergence(walk, reference)
            walk.restore(before)
            if progress is not None:
                progress(len(kld), len(units), unit.name)
        walk.layer(layer)
        walk.advance()
    measured = int(text.held.sum())
    return Measured(tuple(kld[unit.name] for unit in units), importance, measured)


def _quantise_unit(
    walk: Walk, unit: Unit, fmt: Format, threads: int, seed: int
) -> dict[str, QuantTensor]:
    """Quantise a unit's tensors as calibration would, with the tokens that fit."""
    tensors = {
        t.name: round_tensor(walk.tensor(t.name), fmt, t.clip, threads)
        for t in unit.tensors
        if t.method == "rtn"
    }
    fitted = {t.name: replace(t, format=fmt) for t in unit.tensors if t.method != "rtn"}
    if fitted:
        job = LayerJob(walk, fitted, threads, seed)
        walk.layer(unit.layer, job)
        tensors |= job.finish()
    return tensors


def candidate_errors(
    checkpoint: Checkpoint,
    unit: Unit,
    candidates: Sequence[Format],
    importance: Importance,
    seed: int = 0,
    threads: int = 1,
) -> list[float]:
    """Return a unit's weighted squared error in each format, on sampled rows."""
    totals = np.zeros(len(candidates))
    for tensor in unit.tensors:
        rng = np.random.default_rng([seed, crc32(tensor.name.encode())])
        stored, h = checkpoint.tensor(tensor.name), importance[tensor.name]
        matrices: list[np.ndarray] = []
        if len(tensor.shape) == 3:
            for expert in rng.permutation(tensor.shape[0])[:_SAMPLED_EXPERTS]:
                matrices.append(_sample(expert_matrix(stored, int(expert)), rng))
        else:
            rows = np.sort(rng.permutation(tensor.shape[0])[:_SAMPLED_ROWS])
            matrices.append(look_up_rows(stored, rows))
        sampled = sum(len(matrix) for matrix in matrices)
        scale = tensor.params / tensor.shape[-1] / sampled
        for number, fmt in enumerate(candidates):
            for values in matrices:
                wrong = values - _quantise(values, fmt, tensor.method, h, threads).decode()
                energy = np.einsum("ij,ij->j", wrong, wrong, dtype=np.float64) @ h
                totals[number] += scale * float(energy)
        checkpoint.release()
    return [float(total) for total in totals]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities [m, V] fp32."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    return np.asarray(shifted - np.log(total).astype(np.float32))


def _quantise(
    values: np.ndarray, fmt: Format, method: str, importance: np.ndarray, threads: int
) -> QuantTensor:
    if method == "rtn":
        return encode(values, fmt)
    return imx.search(values, fmt, importance, threads=threads)


def _sample(matrix: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return matrix[np.sort(rng.permutation(len(matrix))[: _SAMPLED_ROWS // _SAMPLED_EXPERTS])]


def _divergence(walk: Walk, reference: RowStore) -> float:
    """Return the mean KL divergence of the held-out tokens from the reference."""
    total = 0.0
    for rows, logits in walk.logits():
        held = walk.text.held[rows]
        expected = reference[rows][held]
        difference = expected - log_softmax(logits[held])
        difference *= np.exp(expected)
        total += float(difference.sum(dtype=np.float64))
        reference.release()
    return total / int(walk.text.held.sum())


def _first(text_ids: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Return the first sequences, about `TOKENS` tokens, at least two."""
    chosen: list[Sequence[int]] = []
    for sequence in text_ids:
        if len(chosen) > 1 and sum(map(len, chosen)) >= TOKENS:
            break
        chosen.append(sequence)
    return chosen


class _Importance:
    def __init__(self) -> None:
        self._stats: dict[str, InputStats] = {}

    def importance(self) -> dict[str, np.ndarray]:
        return {name: stats.importance for name, stats in self._stats.items()}

    def linear(self, site: Site, x: np.ndarray, rows: slice) -> None:
        for name in site.weights:
            self._add(name, x, None)

    def expert(
        self, weights: tuple[str, str], expert: int, inputs: ExpertInputs, rows: np.ndarray
    ) -> None:
        self._add(weights[1], inputs.gated, inputs.router)

    def expert_done(self, weights: tuple[str, str], expert: int, hidden: Hidden) -> None:
        """Wait for nothing."""

    def _add(self, name: str, x: np.ndarray, weights: np.ndarray | None) -> None:
        stats = self._stats.setdefault(name, InputStats(x.shape[1]))
        stats.add(x, np.zeros(len(x), bool), weights)
