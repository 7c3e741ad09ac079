"""Tune the factors of rows of a quantised model by what the whole model then says.

GPTQ fits each matrix by itself, to the inputs of the float model. Here the codes stay, and a factor
of every row moves so that the KL divergence of the model's predictions from the float model's
falls: Adam, a sequence of the calibration text a step. Decoded weights live in unnamed temporary
files; what a step's calls read stays in memory until their derivatives are taken.

Source: QuIP# (arXiv 2402.04396), section 5, which tunes what its codes are multiplied by; Adam:
Kingma and Ba 2015 (arXiv 1412.6980), algorithm 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from clocher_kernels.dtypes import from_f32, to_f32
from clocher_kernels.formats import Float
from clocher_kernels.plan import Call
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.quality.evaluate import Progress
from clocher_runtime.quantize.calibration_text import Text, make_text
from clocher_runtime.quantize.capture import RowStore, Walk
from clocher_runtime.quantize.gradients import Note, backwards, decoded_blocks, has_derivative

STEPS, _JUDGED = 24, 2
"""Sequences that it learns from, one a step, and that judge it."""
_LENGTH = 512
"""Tokens of a sequence, the others are left out: what its calls read takes memory."""
RATE, _WARM = 1e-3, 4
"""Largest change of a factor in a step, reached after so many; it falls as a cosine."""
_MEAN, _SQUARE = 0.9, 0.99


class Tuned(NamedTuple):
    """The factors that were found, and what they do to sequences held out."""

    rows: Mapping[str, np.ndarray]  # matrix -> its plane, bf16 [N]
    before: float  # KL divergence from the float model, nats a token
    after: float


class _Matrix:
    """A decoded matrix, and the factors that its rows have been multiplied by since."""

    def __init__(self, tensor: QuantTensor) -> None:
        self._rows = tensor.planes["rows"]
        self._store = RowStore(*tensor.shape)
        for rows, values in decoded_blocks(tensor):
            self._store[rows] = values
            self._store.release()
        self.floats = QuantTensor(tensor.shape, Float("f32"), {"data": self._store.array})
        self._factors = np.ones(len(self._store.array), np.float32)
        self._slopes, self._mean, self._square = (np.zeros_like(self._factors) for _ in range(3))

    def note(self, x: np.ndarray, slope: np.ndarray) -> None:
        """Take gradients by the factors from inputs [m, K] and gradients by outputs [m, N]."""
        self._slopes = np.einsum("ij,ij->j", slope, x @ self._store.array.T) / self._factors

    def step(self, number: int, rate: float) -> None:
        """Move the factors against the slopes."""
        self._mean += (1 - _MEAN) * (self._slopes - self._mean)
        self._square += (1 - _SQUARE) * (self._slopes**2 - self._square)
        mean, square = self._mean / (1 - _MEAN**number), self._square / (1 - _SQUARE**number)
        self._become(self._factors - np.float32(rate) * mean / (np.sqrt(square) + 1e-12))

    def stored(self) -> np.ndarray:
        """Round the factors as they are stored, and return that plane."""
        before = to_f32(self._rows, "bf16")
        plane = from_f32(before * self._factors, "bf16")
        after = to_f32(plane, "bf16")
        self._become(np.divide(after, before, out=np.ones_like(after), where=before > 0))
        return plane

    def _become(self, factors: np.ndarray) -> None:
        self._store.array *= (factors / self._factors)[:, None]
        self._store.release()
        self._factors = factors


def tune(
    checkpoint: Checkpoint,
    made: Mapping[str, QuantTensor],
    text_ids: Sequence[Sequence[int]],
    threads: int = 1,
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> Tuned | None:
    """Return better factors of the rows of trellises; `made` replaces tensors of the checkpoint.

    None if a call of the model, such as one of experts, has no derivative.
    """
    text = make_text(text_ids, seed)
    walk = Walk(checkpoint, text.judged(), threads)
    if not has_derivative(walk):
        return None
    decoded = {name: _Matrix(tensor) for name, tensor in made.items() if tensor.format.turned}
    known = {name for layer in range(walk.spec.num_layers) for name in walk.matrices(layer)}
    own = {name: matrix for name, matrix in decoded.items() if name in known}
    floats = {name: matrix.floats for name, matrix in decoded.items()}
    models = checkpoint, replace(checkpoint, tensors={**checkpoint.tensors, **made, **floats})
    parts = [_part(text, *ends) for ends in pairwise(accumulate((0, *text.lengths)))]
    judged = [part for part in parts if part.held[0]][:_JUDGED]
    taught = [part for part in parts if not part.held[0]]
    rng, total, done = np.random.default_rng([seed, 3]), STEPS + 2 * len(judged), 0

    def apart(part: Text, note: Note | None = None) -> float:
        nonlocal done
        exact, walk = (Walk(model, part, threads) for model in models)
        found = _divergence(exact, walk, note)
        done += 1
        progress("tuning", done, total)
        return found

    def note(call: Call, x: np.ndarray, slope: np.ndarray) -> None:
        if matrix := own.get(call.args["w"]):
            matrix.note(x, slope)

    before = [apart(part) for part in judged]
    order = np.concatenate([rng.permutation(len(taught)) for _ in range(STEPS)])
    for step, place in enumerate(order[:STEPS], 1):
        apart(taught[place], note)
        rate = RATE * min(1, step / _WARM) * (1 + np.cos(np.pi * step / STEPS)) / 2
        for matrix in own.values():
            matrix.step(step, rate)
    rows = {name: matrix.stored() for name, matrix in own.items()}
    after = [apart(part) for part in judged]
    return Tuned(rows, float(np.mean(before)), float(np.mean(after)))


def _part(text: Text, start: int, stop: int) -> Text:
    stop = min(stop, start + _LENGTH)
    return Text(text.ids[start:stop], (stop - start,), text.held[start:stop])


def _divergence(exact: Walk, walk: Walk, note: Note | None) -> float:
    """Return the mean KL divergence of a sequence from the exact model; note gradients of it."""
    layers, count = range(exact.spec.num_layers), len(exact.text.ids)
    exact.layers(layers)
    tapes = []
    for layer in layers:
        for place, tape, buffers in walk.replay(layer, walk.state):
            walk.state[place] = buffers["h"]
            tapes.append(tape if note else [])
    slopes, total = walk.store(), 0.0
    heads = (each.replay(None, each.state) for each in (exact, walk))
    for (place, _, wanted), (_, tape, buffers) in zip(*heads, strict=True):
        total += _apart(wanted["logits"], buffers["logits"], count)
        if note:
            slopes[place] = backwards(walk, tape, {"logits": buffers["logits"]}, note)["last"]
    if note:
        grads = {"h": slopes[:]}
        for tape in reversed(tapes):
            grads = {"h": backwards(walk, tape, grads, note)["h"]}
    return total / count


def _apart(wanted: np.ndarray, logits: np.ndarray, count: int) -> float:
    """Return the sum of the rows' KL divergences; make logits the gradient of it over `count`.

    Row by row: a vocabulary is large.
    """
    total = 0.0
    for exact, own in zip(wanted, logits, strict=True):
        p, q = (each - each.max() for each in (exact, own))
        apart = p - q
        sums = []
        for each in (p, q):
            np.exp(each, out=each)
            sums.append(float(each.sum(dtype=np.float64)))
            each /= np.float32(sums[-1])
        total += float(p @ apart) - np.log(sums[0] / sums[1])
        own[:] = (q - p) / np.float32(count)
    return total
