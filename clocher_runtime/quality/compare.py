"""Two models on the same text, token by token: likelihood, KL divergence, top token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from clocher_kernels.errors import ModelError
from clocher_runtime.quality.documents import Documents

Logits = Callable[[Sequence[int]], np.ndarray]
"""Token ids of a window [T] -> logits after each of them, [T, V] fp32."""
Progress = Callable[[int, int], None]

_STEP = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """What is known of each scored token. Arrays are [N], fp64 unless said otherwise.

    Attributes:
        nll_reference: negative log-likelihood of the true token under the reference, in nats.
        nll_model: the same under the model.
        kld: KL divergence of the model's distribution from the reference's, in nats.
        same_top: whether both hold the same token for the most likely one, bool.
    """

    nll_reference: np.ndarray
    nll_model: np.ndarray
    kld: np.ndarray
    same_top: np.ndarray

    @property
    def delta_p(self) -> np.ndarray:
        """Probability of the true token under the model, less that under the reference."""
        return np.asarray(np.exp(-self.nll_model) - np.exp(-self.nll_reference))


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """The scores of a whole text.

    Attributes:
        scores: of the tokens for which the model gave finite logits.
        owner: document of each of them, i64 [N].
        documents: number of documents.
        nonfinite: tokens for which the model's logits had a NaN or an infinity.
        lower_bound: `kld` is a lower bound: all tokens beyond the stored ones are one bucket.
    """

    scores: TokenScores
    owner: np.ndarray
    documents: int
    nonfinite: int
    lower_bound: bool = False


def compare(
    reference: Logits, model: Logits, documents: Documents, progress: Progress | None = None
) -> Comparison:
    """Score every window with both models, at most two windows of logits in memory.

    Args:
        reference: logits of the float model, such as `Session.logits`.
        model: logits of the model that is judged.
        documents: the text.
        progress: called with (done, total) windows.

    Raises:
        ModelError: the reference gives logits that are not finite.
    """

    def score(ids: Sequence[int]) -> TokenScores:
        return score_window(reference(ids), model(ids), ids)

    return run(score, documents, progress)


def run(
    score: Callable[[Sequence[int]], TokenScores],
    documents: Documents,
    progress: Progress | None = None,
    lower_bound: bool = False,
) -> Comparison:
    """Score the windows in order and join the results; see `compare`."""
    parts = []
    for number, (_, ids) in enumerate(documents):
        parts.append(score(ids))
        if progress is not None:
            progress(number + 1, len(documents.windows))
    joined = [
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("nll_reference", "nll_model", "kld", "same_top")
    ]
    lengths = [len(ids) - 1 for ids in documents.windows]
    owner = np.repeat(np.array(documents.owner, np.int64), lengths)
    finite = np.isfinite(joined[1]) & np.isfinite(joined[2])
    scores = TokenScores(*(array[finite] for array in joined))
    bad = int(np.count_nonzero(~finite))
    return Comparison(scores, owner[finite], documents.count, bad, lower_bound)


def score_window(reference: np.ndarray, model: np.ndarray, ids: Sequence[int]) -> TokenScores:
    """Score the tokens ids[1:] of a window.

    The whole softmax is summed, in fp64, a few rows at a time. Where the model's logits are not
    finite, its likelihood and the divergence are infinite.

    Args:
        reference: [T, V] fp32, logits after each token.
        model: the same of the model that is judged.
        ids: [T].

    Raises:
        ModelError: the reference's logits are not finite, or the vocabularies differ.
    """
    if reference.shape != model.shape:
        raise ModelError(
            f"logits {list(model.shape)} of the model, {list(reference.shape)} of the reference; "
            "the two must share a vocabulary"
        )
    return per_rows(
        lambda rows, ids: _score_rows(reference[rows], model[rows], ids), ids, model.shape[1]
    )


def per_rows(
    score: Callable[[slice, np.ndarray], TokenScores], ids: Sequence[int], vocab: int
) -> TokenScores:
    """Call `score` for runs of rows of bounded size with the true tokens, and join the results."""
    true = np.asarray(ids[1:], np.int64)
    step = max(1, _STEP // vocab)
    parts = [
        score(slice(start, min(start + step, len(true))), true[start : start + step])
        for start in range(0, len(true), step)
    ]
    names = ("nll_reference", "nll_model", "kld", "same_top")
    return TokenScores(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """Rows of a softmax in fp64.

    Attributes:
        shifted: [T, V] logits less the row's largest.
        exp: [T, V] their exponentials.
        log_sum: [T] logarithm of the sum of `exp`.
        finite: [T] whether all logits of the row were finite; other rows hold zeros.
    """

    shifted: np.ndarray
    exp: np.ndarray
    log_sum: np.ndarray
    finite: np.ndarray

    def nll(self, ids: np.ndarray) -> np.ndarray:
        """Return the negative log-likelihood of a token per row, infinite in rows not finite."""
        found = self.log_sum - self.shifted[np.arange(len(ids)), ids]
        return np.asarray(np.where(self.finite, found, np.inf))


def softmax(logits: np.ndarray) -> Softmax:
    """Return the softmax of rows of logits [T, V]."""
    finite = np.isfinite(logits).all(axis=1)
    shifted = np.where(finite[:, None], logits, 0).astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    exp = np.exp(shifted)
    return Softmax(shifted, exp, np.log(exp.sum(axis=1)), finite)


def finite_reference(logits: np.ndarray) -> Softmax:
    """Return the softmax of the reference's logits.

    Raises:
        ModelError: they are not finite.
    """
    found = softmax(logits)
    if not found.finite.all():
        raise ModelError(
            "the reference model gives logits that are not finite; nothing can be compared with it"
        )
    return found


def _score_rows(reference: np.ndarray, model: np.ndarray, ids: np.ndarray) -> TokenScores:
    p, q = finite_reference(reference), softmax(model)
    # sum p (log p - log q), with the logarithms of the sums taken out of the sum.
    kld = np.einsum("tv,tv->t", p.exp, p.shifted - q.shifted) / p.exp.sum(axis=1)
    kld += q.log_sum - p.log_sum
    return TokenScores(
        p.nll(ids),
        q.nll(ids),
        np.where(q.finite, np.maximum(kld, 0), np.inf),
        reference.argmax(axis=1) == np.where(q.finite[:, None], model, 0).argmax(axis=1),
    )
