"""Calibration: quantise a model's linears layer by layer, with their inputs on a text.

One forward of the float model collects each layer's inputs, then the layer is quantised and
written. Layers are independent: feeding GPTQ the quantised layers' outputs gained nothing at four
bits. Experts are quantised one by one, to hold one Hessian at a time. Equal inputs, seed and BLAS
threads give equal bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.convert.q4_entries import PlaneFile, part_of
from clocher_runtime.convert.rounding import look_up, row_part, whole_steps
from clocher_runtime.models.inventory import layer_name
from clocher_runtime.quality.evaluate import Progress
from clocher_runtime.quantize.calibration_text import make_text
from clocher_runtime.quantize.capture import ExpertInputs, Hidden, Observer, Walk
from clocher_runtime.quantize.gptq import (
    HELD_ROWS,
    MIN_HELD,
    MIN_TOKENS,
    Inputs,
    InputStats,
    Outcome,
    make_inputs,
    solve_matrix,
)
from clocher_runtime.quantize.plan import PlannedTensor, QuantPlan

POOL_ROWS = 2048
"""Tokens of a layer shown to every expert with few of its own."""

_BLOCK_ELEMENTS = 1 << 25

Counts = Callable[[], Mapping[str, np.ndarray]]
"""Returns what `Walk.counts` becomes; it takes minutes, so it is called only if needed."""


class LayerJob(Observer):
    """Observes a layer and quantises its wanted tensors, with `records` of each."""

    def __init__(
        self, walk: Walk, wanted: Mapping[str, PlannedTensor], threads: int, seed: int
    ) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self._walk, self._wanted, self._threads = walk, wanted, threads
        self.stats: dict[str, InputStats] = {}
        self._planes: dict[str, dict[str, np.ndarray]] = {}
        self._outcomes: dict[str, list[Outcome]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._own: dict[str, InputStats] = {}
        self._router = 0.0
        held = walk.text.held
        rng = np.random.default_rng([seed, 1])
        fit = rng.permutation(np.flatnonzero(~held))[:POOL_ROWS]
        judge = rng.permutation(np.flatnonzero(held))[:HELD_ROWS]
        self._pool = np.sort(np.concatenate([fit, judge]))

    def linear(self, weights: tuple[str, ...], x: np.ndarray, rows: slice) -> None:
        """Sum the inputs of linears that share them, of each if tokens count differently."""
        mine = [name for name in weights if name in self._wanted]
        counts, held = self._walk.counts, self._walk.text.held[rows]
        alike = [name for name in mine if name not in counts]
        for names in ([alike] if alike else []) + [[name] for name in mine if name in counts]:
            if names[0] not in self.stats:
                self.stats |= dict.fromkeys(names, self._new_stats(x.shape[1], *names))
            if (count := counts.get(names[0])) is None:
                self.stats[names[0]].add(x, held)
            else:
                mean = max(float(count.mean()), 1e-30)
                self.stats[names[0]].add(x, held, np.sqrt(count[rows] / mean))

    def expert(
        self, weights: tuple[str, str], expert: int, inputs: ExpertInputs, rows: np.ndarray
    ) -> None:
        """Sum the inputs of an expert's matmuls."""
        x, gated, router = inputs
        for name, seen, weight in ((weights[0], x, None), (weights[1], gated, router)):
            if name in self._wanted:
                if name not in self._own:
                    self._own[name] = self._new_stats(seen.shape[1], name)
                self._own[name].add(seen, self._walk.text.held[rows], weight)
        self._router += float(np.square(router).sum())

    def expert_done(self, weights: tuple[str, str], expert: int, hidden: Hidden) -> None:
        """Quantise an expert."""
        up, down = weights
        for name in weights:
            if name not in self._wanted:
                continue
            own = self._own.pop(name, None)
            if own is None:
                own = self._new_stats(self._wanted[name].shape[2], name)
            pooled = self.stats[up] if name == up else self._pooled(down, own, hidden)
            turned = self._wanted[name].format.turned
            inputs = make_inputs(own, pooled, hessian=self._needs_hessian(name), turned=turned)
            self._solve(name, expert, inputs)
            self._tokens.setdefault(name, []).append(own.tokens)
        self._router = 0.0

    def finish(self) -> dict[str, QuantTensor]:
        """Quantise the rest and return the layer's wanted tensors in order."""
        # Those that share inputs and a rotation share a factor.
        dense: dict[tuple[InputStats | None, int], list[str]] = {}
        for name, tensor in self._wanted.items():
            if name not in self._planes:
                dense.setdefault((self.stats.get(name), tensor.format.turned), []).append(name)
        for (stats, turned), names in dense.items():
            if stats:
                hessian = self._needs_hessian(*names)
                inputs = make_inputs(stats, None, hessian=hessian, turned=turned)
            for name in names:
                if not stats:  # an embedding: every row is read as it is
                    columns = self._wanted[name].shape[-1]
                    inputs = Inputs(np.ones(columns), np.zeros((0, columns), np.float32))
                self._quantise(name, inputs, stats.tokens if stats else 0)
        self.records = {name: self._record(name) for name in self._wanted}
        return {
            name: QuantTensor(tensor.shape, tensor.format, self._planes[name])
            for name, tensor in self._wanted.items()
        }

    def _quantise(self, name: str, inputs: Inputs, tokens: int) -> None:
        """Quantise a dense matrix in blocks of rows, which are independent."""
        rows, columns = self._wanted[name].shape
        step = whole_steps(self._wanted[name].format, max(1, _BLOCK_ELEMENTS // columns))
        for start in range(0, rows, step):
            self._solve(name, slice(start, min(start + step, rows)), inputs)
            self._walk.checkpoint.release()
        self._tokens[name] = [tokens]

    def _solve(self, name: str, place: int | slice, inputs: Inputs) -> None:
        tensor, values = self._wanted[name], look_up(self._walk.tensor(name), place)
        outcome = solve_matrix(values, tensor.format, tensor.method, inputs, threads=self._threads)
        if name not in self._planes:
            planes = tensor.format.planes(tensor.shape)
            self._planes[name] = {k: np.empty(p.shape, p.storage) for k, p in planes.items()}
        for key, plane in outcome.tensor.planes.items():
            where = place
            if isinstance(place, slice):
                where = row_part(tensor.format, key, place.start, place.stop)
            self._planes[name][key][where] = plane
        self._outcomes.setdefault(name, []).append(outcome)

    def _record(self, name: str) -> dict[str, Any]:
        tensor, outcomes, tokens = self._wanted[name], self._outcomes[name], self._tokens[name]
        experts = len(tensor.shape) == 3
        falls = [o.fallback for o in outcomes if o.fallback]
        notes = [f"{fall} in {falls.count(fall)} of {len(outcomes)}" for fall in sorted(set(falls))]
        if few := sum(n < MIN_TOKENS for n in tokens) if experts else 0:
            notes.append(f"pooled statistics in {few} of {len(outcomes)}")
        errors = [o.nmse for o in outcomes]
        err = {
            "out_nmse": float(np.mean(errors)),
            "out_nmse_rtn": float(np.mean([o.nmse_rtn for o in outcomes])),
        }
        if experts:
            err["out_nmse_worst"] = max(errors)
        spread = [int(q) for q in np.quantile(tokens, (0, 0.05, 0.5, 1), method="lower")]
        fallback = "; ".join(notes) if len(outcomes) > 1 else outcomes[0].fallback
        seen = {"method": tensor.method, "tokens_seen": spread if experts else tokens, "err": err}
        return seen | ({"fallback": fallback} if fallback else {})

    def _pooled(self, name: str, own: InputStats, hidden: Hidden) -> InputStats | None:
        """Return the statistics of the layer's tokens sent through an expert with few tokens."""
        columns = self._wanted[name].shape[2]
        enough = 4 * columns if self._needs_hessian(name) else MIN_TOKENS
        if own.tokens >= enough and len(own.held) >= MIN_HELD:
            return None
        pooled = self._new_stats(columns, name)
        count = max(1, own.tokens + len(own.held))
        weight = np.float32((self._router / count) ** 0.5 or 1.0)
        for start in range(0, len(self._pool), POOL_ROWS):
            rows = self._pool[start : start + POOL_ROWS]
            alike = np.full(len(rows), weight, np.float32)
            pooled.add(hidden(rows), self._walk.text.held[rows], alike)
        return pooled

    def _new_stats(self, columns: int, *names: str) -> InputStats:
        return InputStats(columns, hessian=self._needs_hessian(*names))

    def _needs_hessian(self, *names: str) -> bool:
        return any(self._wanted[name].method == "gptq" for name in names)


def calibrate(
    checkpoint: Checkpoint,
    plan: QuantPlan,
    text_ids: Sequence[Sequence[int]],
    *,
    planes: PlaneFile,
    counts: Counts = dict,
    threads: int = 1,
    seed: int = 0,
    progress: Progress = lambda *_: None,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Quantise "imx" and "gptq" tensors by layers; 1 in 16 sequences is held out. UsageError."""
    wanted = {name: plan.tensors[name] for name in sorted(plan.calibrated, key=part_of)}
    found = planes.resume({name: (each.format, each.shape) for name, each in wanted.items()})
    if found:
        note(
            f"goes on where a killed run ended: {found} of {len(wanted)} calibrated tensors are "
            f"there, {len(wanted) - found} are left"
        )
    left: dict[str, dict[str, PlannedTensor]] = {}
    for name, tensor in wanted.items():
        if name not in planes.records:
            left.setdefault(part_of(name), {})[name] = tensor
    walk = Walk(checkpoint, make_text(text_ids, seed), threads)
    # Square roots: of thousands of tokens some would outweigh all others, by what one draw says.
    walk.counts = {name: np.sqrt(count) for name, count in counts().items()} if left else {}
    known = {name for i in range(walk.spec.num_layers) for name in walk.matrices(i)}
    known |= {name for name in wanted if part_of(name) == "rest"}
    if strange := sorted(set(wanted) - known):
        raise UsageError(
            f"tensor {strange[0]!r} cannot be calibrated: the {walk.spec.family} model does not "
            "multiply by it; give it the method rtn"
        )

    def finish(job: LayerJob) -> None:
        for name, tensor in job.finish().items():
            planes.add(name, tensor, job.records[name])

    total = walk.spec.num_layers + ("rest" in left)
    for index in range(walk.spec.num_layers):
        if not left:
            break
        part = part_of(layer_name(index, ""))
        job = LayerJob(walk, left.pop(part), threads, seed) if part in left else None
        progress(f"calibrating: {part}", index, total)
        walk.layer(index, job)
        if job:
            finish(job)
        walk.advance()
        progress(f"calibrating: {part}", index + 1, total)
    if left:
        job = LayerJob(walk, left.pop("rest"), threads, seed)
        progress("calibrating: rest", total - 1, total)
        walk.head_inputs(job)
        finish(job)
        progress("calibrating: rest", total, total)
