"""Perplexity of a model on a text: the quality measure that later gates are built on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_runtime.engine.arguments import token_ids, whole
from clocher_runtime.engine.session import Session


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Mean negative log-likelihood over windows of a text.

    Attributes:
        windows: windows scored, each alone, from an empty cache.
        window_tokens: tokens of a window; the first of them is not predicted.
        loss: mean of the windows' mean losses, in nats per token.
    """

    windows: int
    window_tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        """Return exp(loss)."""
        return exp(self.loss)


def window_loss(logits: np.ndarray, ids: Sequence[int]) -> float:
    """Return the mean negative log-likelihood of ids[1:] under the logits before them.

    Args:
        logits: [T, V] fp32, after each token.
        ids: [T].
    """
    scores = logits[:-1].astype(np.float64)
    top = scores.max(axis=1)
    normalizer = top + np.log(np.exp(scores - top[:, None]).sum(axis=1))
    chosen = scores[np.arange(len(ids) - 1), np.asarray(ids[1:])]
    return float(np.mean(normalizer - chosen))


def perplexity(
    session: Session,
    ids: Sequence[int],
    window: int = 256,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Score consecutive windows of a text.

    Args:
        session: made with all_logits.
        ids: the text's tokens; a last partial window is left out.
        window: tokens of a window.
        limit: score at most this many windows.
        progress: called with (done, total).

    Raises:
        SessionBusy: a generation is under way.
        UsageError: the text has less than one window, or a window less than two tokens; or an
            argument cannot be used.
    """
    ids, window = token_ids(ids), whole("window", window)
    limit = None if limit is None else whole("limit", limit, 0)
    if window < 2:
        raise UsageError(f"a window of {window} tokens predicts nothing; give at least 2")
    total = len(ids) // window
    if limit is not None:
        total = min(total, limit)
    if total < 1:
        raise UsageError(
            f"the text has {len(ids)} tokens, a window takes {window}; give a longer text"
        )
    losses = []
    for number in range(total):
        part = ids[number * window : (number + 1) * window]
        losses.append(window_loss(session.logits(part), part))
        if progress is not None:
            progress(number + 1, total)
    return Perplexity(total, window, float(np.mean(losses)))
