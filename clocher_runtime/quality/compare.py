"""Scores on text: documents, and token-by-token comparison of two models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import exp
from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import ModelError, UsageError, counted
from clocher_runtime.quality.statistics import Estimate, block_means, of_documents

DOCUMENT_TOKENS = 1024

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents, each a run of windows that are read from an empty cache."""

    windows: tuple[tuple[int, ...], ...]  # token ids of each window, at least two
    owner: tuple[int, ...]  # document of each window, counted from 0, never falling
    window: int  # length of the longest window that was allowed

    @property
    def count(self) -> int:
        """Number of documents."""
        return self.owner[-1] + 1

    @property
    def tokens(self) -> int:
        """Scored tokens: all but the first of each window."""
        return sum(len(window) - 1 for window in self.windows)

    @property
    def digest(self) -> bytes:
        """SHA-256 over all windows and their documents."""
        found = sha256(f"clocher.windows/1 {len(self.windows)}".encode())
        for owner, ids in zip(self.owner, self.windows, strict=True):
            found.update(np.array([owner, len(ids), *ids], "<i8").tobytes())
        return found.digest()


def cut(
    text: str,
    encode: Encode,
    window: int,
    *,
    windows_per_document: int | None = None,
    separator: str | None = None,
    limit: int | None = None,
) -> Documents:
    """Cut a text into at most `limit` documents of windows of `window` tokens.

    Without a separator, each `windows_per_document` windows (default: 1024 tokens) are a document,
    the last partial window left out. With one, each part is encoded by itself and its last window
    may be short. Raises UsageError.
    """
    if windows_per_document is None:
        windows_per_document = max(1, DOCUMENT_TOKENS // max(window, 1))
    if separator == "":
        raise UsageError("the document separator is empty; give the text between two documents")
    windows: list[tuple[int, ...]] = []
    owner: list[int] = []
    found = 0
    least = window if separator is None else 2
    for part in [text] if separator is None else text.split(separator):
        ids = encode(part)
        found += len(ids)
        own = [tuple(ids[i : i + window]) for i in range(0, len(ids), window)]
        own = [ids for ids in own if len(ids) >= least]
        windows += own
        if separator is None:
            owner = [number // windows_per_document for number in range(len(own))]
        else:
            owner += [owner[-1] + 1 if owner else 0] * len(own)
    if limit is not None:
        kept = sum(document < limit for document in owner)
        windows, owner = windows[:kept], owner[:kept]
    if not windows:
        raise UsageError(
            f"the text has {counted(found, 'token')}, a window takes {window}; give a longer text, "
            "or a smaller window"
        )
    return Documents(tuple(windows), tuple(owner), window)


Logits = Callable[[Sequence[int]], np.ndarray]
"""Token ids of a window [T] -> logits after each, [T, V] fp32."""
Progress = Callable[[int, int], None]

RESAMPLES = 2000

_STEP = 1 << 20


class TokenScores(NamedTuple):
    """Scores of tokens. Arrays are [N], fp64 unless said otherwise."""

    nll_reference: np.ndarray  # negative log-likelihood of the true token, in nats
    nll_model: np.ndarray
    kld: np.ndarray  # KL divergence of the model's distribution from the reference's, in nats
    same_top: np.ndarray  # whether both have the same top-1 token, bool

    @property
    def delta_p(self) -> np.ndarray:
        """Probability of the true token, less that under the reference."""
        return np.asarray(np.exp(-self.nll_model) - np.exp(-self.nll_reference))


class Comparison(NamedTuple):
    """The scores of a whole text."""

    scores: TokenScores  # of the tokens for which the model gave finite logits
    owner: np.ndarray  # document of each of them, i64 [N]
    nonfinite: int  # tokens for which the model's logits had a NaN or an infinity


def compare(
    reference: Logits, model: Logits, documents: Documents, progress: Progress = lambda *_: None
) -> Comparison:
    """Score every window with both models, two windows of logits in memory; ModelError."""
    parts = []
    for number, ids in enumerate(documents.windows):
        parts.append(score_window(reference(ids), model(ids), ids))
        progress(number + 1, len(documents.windows))
    scores = _joined(parts)
    lengths = [len(ids) - 1 for ids in documents.windows]
    owner = np.repeat(np.array(documents.owner, np.int64), lengths)
    finite = np.isfinite(scores.nll_model) & np.isfinite(scores.kld)
    scores = TokenScores(*(values[finite] for values in scores))
    return Comparison(scores, owner[finite], int(np.count_nonzero(~finite)))


def score_window(reference: np.ndarray, model: np.ndarray, ids: Sequence[int]) -> TokenScores:
    """Score the tokens ids[1:] of a window from logits [T, V] fp32 of both models, in fp64.

    Where the model's logits are not finite, likelihood and divergence are infinite; the reference's
    raise ModelError, as do different vocabularies.
    """
    if reference.shape != model.shape:
        raise ModelError(
            f"logits {list(model.shape)} of the model, {list(reference.shape)} of the reference; "
            "the two must share a vocabulary"
        )
    last, true = len(ids) - 1, np.asarray(ids[1:], np.int64)
    step = max(1, _STEP // model.shape[1])  # a few rows at a time
    pieces = (slice(start, min(start + step, last)) for start in range(0, last, step))
    return _joined([_score(reference[rows], model[rows], true[rows]) for rows in pieces])


def _joined(parts: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(*map(np.concatenate, zip(*parts, strict=True)))


class _Softmax:
    """Rows of a softmax of logits [T, V] in fp64; those not finite hold zeros'."""

    def __init__(self, logits: np.ndarray) -> None:
        self.finite = np.isfinite(logits).all(axis=1)  # [T]
        self.shifted = np.where(self.finite[:, None], logits, 0).astype(np.float64)
        self.shifted -= self.shifted.max(axis=1, keepdims=True)
        self.exp = np.exp(self.shifted)
        self.log_sum = np.log(self.exp.sum(axis=1))  # [T]

    def nll(self, ids: np.ndarray) -> np.ndarray:
        """Return the negative log-likelihood per row, infinite in rows not finite."""
        found = self.log_sum - self.shifted[np.arange(len(ids)), ids]
        return np.asarray(np.where(self.finite, found, np.inf))


def _score(reference: np.ndarray, model: np.ndarray, ids: np.ndarray) -> TokenScores:
    p, q = _Softmax(reference), _Softmax(model)
    if not p.finite.all():
        raise ModelError(
            "the reference model gives logits that are not finite; nothing can be compared with it"
        )
    # sum p (log p - log q), with the logarithms of the sums taken out of the sum.
    kld = np.einsum("tv,tv->t", p.exp, p.shifted - q.shifted) / p.exp.sum(axis=1)
    kld += q.log_sum - p.log_sum
    return TokenScores(
        p.nll(ids),
        q.nll(ids),
        np.where(q.finite, np.maximum(kld, 0), np.inf),
        reference.argmax(axis=1) == np.where(q.finite[:, None], model, 0).argmax(axis=1),
    )


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of a comparison."""

    tokens: int
    documents: int
    nonfinite: int  # tokens left out, for which the model's logits were not finite
    perplexity_reference: float
    perplexity: float
    ppl_ratio: Estimate  # perplexity of the model over that of the reference, paired by token
    kld: Estimate  # mean KL divergence in nats
    same_top: Estimate  # share of tokens with the same top-1 token
    rms_dp: Estimate  # root mean square change of the true token's probability


def summarise(comparison: Comparison) -> Summary:
    """Return a comparison's statistics; ModelError if no token has finite logits."""
    scores = comparison.scores
    if not len(scores.kld):
        raise ModelError("the model gives no finite logits at all; its weights are damaged")
    values = np.stack(
        [
            scores.nll_model - scores.nll_reference,
            scores.kld,
            scores.same_top.astype(np.float64),
            scores.delta_p**2,
        ]
    )
    means = block_means(values, comparison.owner, RESAMPLES, seed=0)
    documents = len(np.unique(comparison.owner))

    def estimate(row: int, shape: Callable[[np.ndarray], np.ndarray] = np.asarray) -> Estimate:
        value = float(shape(values[row].mean()))
        return of_documents(value, shape(means[row]), documents)

    return Summary(
        tokens=len(scores.kld),
        documents=documents,
        nonfinite=comparison.nonfinite,
        perplexity_reference=exp(scores.nll_reference.mean()),
        perplexity=exp(min(scores.nll_model.mean(), 700.0)),
        ppl_ratio=estimate(0, lambda nll: np.exp(np.minimum(nll, 700.0))),  # stays finite
        kld=estimate(1),
        same_top=estimate(2),
        rms_dp=estimate(3, np.sqrt),
    )
