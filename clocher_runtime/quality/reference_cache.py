"""The reference's distributions in a file, so that the float model need not run again.

A safetensors file. For each scored token it holds the K = min(256, V) most likely tokens and the
mass of all others, about 1.5 KB:

    log_tail, nll  F32 [N]     log of the mass beyond the K tokens; -log p of the true token
    ids            I32 [N, K]  the K tokens, most likely first
    log_probs      F16 [N, K]  their log-probabilities
    fingerprint    U8 [32]     SHA-256 over the model's weights, the windows and the settings

All tokens beyond the K are compared as one, so a divergence from it is a lower bound (the log sum
inequality), short of the exact one by what happens inside the tail.
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np

from clocher_kernels.errors import FormatError, UsageError
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.disk.files import byte_pieces
from clocher_runtime.disk.output_file import replacing
from clocher_runtime.disk.safetensors_file import SafetensorsFile, safetensors_head
from clocher_runtime.engine.load import Model
from clocher_runtime.quality.compare import (
    Comparison,
    Logits,
    Progress,
    TokenScores,
    finite_reference,
    per_rows,
    run,
    softmax,
)
from clocher_runtime.quality.documents import Documents

KEPT = 256
_LEAST_LOG = -60000.0
"""Within f16; exp of it is 0 in any case."""


def fingerprint(model: Model, documents: Documents, settings: str) -> bytes:
    """Return what ties a file to a model, its text and how it was run: 32 bytes."""
    found = sha256(f"clocher.reference/1 {settings}\n".encode())
    found.update(documents.digest)
    for name in sorted(model.weights):
        tensor = model.weights[name]
        if isinstance(tensor, QuantTensor):
            kind, planes = tensor.format.name, tensor.planes
        else:
            kind, planes = "vector", {"data": tensor}
        found.update(f"{name} {kind} {list(tensor.shape)}\n".encode())
        for key in sorted(planes):
            for piece in byte_pieces(planes[key]):
                found.update(piece)
    return found.digest()


def store(
    path: Path,
    reference: Logits,
    documents: Documents,
    vocab: int,
    mark: bytes,
    progress: Progress | None = None,
) -> None:
    """Run the reference over the documents and write the file.

    `reference`: logits of the float model; `vocab`: V of the logits; `mark`: from `fingerprint`.
    Raises ModelError: the reference gives logits that are not finite; OSError: the file cannot be
    written; nothing of it is left.
    """
    kept = min(KEPT, vocab)
    head, places = safetensors_head(_layout(documents.tokens, kept))
    with replacing(path) as file:
        file.write(head)
        _put(file, places["fingerprint"].offset, np.frombuffer(mark, np.uint8))
        done = 0
        for number, (_, ids) in enumerate(documents):
            logits = reference(ids)
            step = max(1, (1 << 20) // vocab)
            for start in range(0, len(ids) - 1, step):
                stop = min(start + step, len(ids) - 1)
                true = np.asarray(ids[start + 1 : stop + 1])
                for name, rows in _rows(logits[start:stop], true, kept).items():
                    row = rows.nbytes // len(rows)
                    _put(file, places[name].offset + done * row, rows)
                done += stop - start
            if progress is not None:
                progress(number + 1, len(documents.windows))


class StoredReference:
    """A file that `store` wrote, checked against the model and the text that it is used for."""

    def __init__(self, path: Path, documents: Documents, vocab: int, mark: bytes) -> None:
        """Open a file.

        Raises FormatError: it is not such a file, or it is damaged; UsageError: it was made from
        another model, text, window or setting.
        """
        self.path, self.documents, self.vocab = path, documents, vocab
        file = SafetensorsFile(path)
        layout = _layout(documents.tokens, min(KEPT, vocab))
        if set(file.tensors) != set(layout):
            raise FormatError(f"{path}: not a file of reference log-probabilities")
        if file.view("fingerprint").tobytes() != mark:
            raise UsageError(
                f"{path}: was made from another model, text, window or setting; delete it, or give "
                "another --reference-cache"
            )
        for name, (dtype, shape) in layout.items():
            info = file.tensors[name]
            if (info.dtype, info.shape) != (dtype, shape):
                raise FormatError(
                    f"{path}: {name} is {info.dtype}{list(info.shape)}, expected "
                    f"{dtype}{list(shape)}"
                )
        self._log_tail, self._nll = file.view("log_tail"), file.view("nll")
        self._ids, self._log_probs = file.view("ids"), file.view("log_probs")

    def compare(self, model: Logits, progress: Progress | None = None) -> Comparison:
        """Score every window with the model against what is stored.

        Raises FormatError: a stored number is impossible.
        """
        done = 0

        def score(ids: Sequence[int]) -> TokenScores:
            nonlocal done
            logits, start = model(ids), done
            done += len(ids) - 1
            return per_rows(
                lambda rows, true: self._score(start, rows, logits[rows], true),
                ids,
                logits.shape[1],
            )

        return run(score, self.documents, progress, lower_bound=self.vocab > KEPT)

    def _score(self, start: int, rows: slice, logits: np.ndarray, true: np.ndarray) -> TokenScores:
        part = slice(start + rows.start, start + rows.stop)
        ids, log_probs = self._ids[part], self._log_probs[part].astype(np.float64)
        nll = self._nll[part].astype(np.float64)
        log_tail = self._log_tail[part].astype(np.float64)
        self._check(ids, log_probs, nll, log_tail)
        tail = np.exp(log_tail)
        p = np.exp(log_probs)
        # f16 does not sum to one; the difference would look like divergence.
        scale = (1 - tail) / p.sum(axis=1)
        p *= scale[:, None]
        log_p = log_probs + np.log(np.maximum(scale, 1e-300))[:, None]
        q = softmax(logits)
        at = np.arange(len(ids))[:, None]
        log_q = q.shifted[at, ids] - q.log_sum[:, None]
        q.exp[at, ids] = 0
        rest = np.maximum(q.exp.sum(axis=1) / np.exp(q.log_sum), 1e-300)
        kld = np.einsum("tk,tk->t", p, log_p - log_q)
        kld += np.where(tail > 0, tail * (log_tail - np.log(rest)), 0)
        model = np.where(q.finite[:, None], logits, 0)
        return TokenScores(
            nll,
            q.nll(true),
            np.where(q.finite, np.maximum(kld, 0), np.inf),
            ids[:, 0] == model.argmax(axis=1),
        )

    def _check(
        self, ids: np.ndarray, log_probs: np.ndarray, nll: np.ndarray, log_tail: np.ndarray
    ) -> None:
        """Refuse stored numbers that no softmax gives."""
        good = ids.min() >= 0 and ids.max() < self.vocab
        good = good and bool(np.isfinite(log_probs).all() and np.isfinite(nll).all())
        good = good and bool(np.isfinite(log_tail).all()) and log_tail.max() <= 0
        good = good and log_probs.max() <= 0 and nll.min() >= 0
        if not good:
            raise FormatError(f"{self.path}: holds impossible probabilities; delete it")


def _rows(logits: np.ndarray, true: np.ndarray, kept: int) -> dict[str, np.ndarray]:
    """Return what the file stores of rows of logits, by name."""
    p = finite_reference(logits)
    vocab = logits.shape[1]
    ids = np.argpartition(-p.shifted, kept - 1, axis=1)[:, :kept]
    order = np.lexsort((ids, -np.take_along_axis(p.shifted, ids, axis=1)), axis=1)
    ids = np.take_along_axis(ids, order, axis=1)
    ids[:, 0] = logits.argmax(axis=1)
    log_probs = np.take_along_axis(p.shifted, ids, axis=1) - p.log_sum[:, None]
    nll = p.nll(true)
    np.put_along_axis(p.exp, ids, 0, axis=1)
    tail = p.exp.sum(axis=1)
    log_tail = np.log(np.maximum(tail, 1e-300)) - p.log_sum
    if kept == vocab:
        log_tail[:] = _LEAST_LOG
    return {
        "log_tail": log_tail.astype("<f4"),
        "nll": np.maximum(nll, 0).astype("<f4"),
        "ids": ids.astype("<i4"),
        "log_probs": np.clip(log_probs, _LEAST_LOG, 0).astype("<f2"),
    }


def _layout(count: int, kept: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of the file."""
    return {
        "log_tail": ("F32", (count,)),
        "nll": ("F32", (count,)),
        "ids": ("I32", (count, kept)),
        "log_probs": ("F16", (count, kept)),
        "fingerprint": ("U8", (32,)),
    }


def _put(file: BinaryIO, offset: int, array: np.ndarray) -> None:
    file.seek(offset)
    file.write(np.ascontiguousarray(array).tobytes())
