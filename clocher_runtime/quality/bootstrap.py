"""What a comparison says of a whole text, with 95 % intervals by bootstrap over documents.

Tokens of one document are alike, so whole documents are resampled. Source: Efron and Tibshirani,
An Introduction to the Bootstrap, chapter 13; the widening for few documents is the expanded
percentile interval of Hesterberg, What Teachers Should Know About the Bootstrap, 2015.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, sqrt
from statistics import NormalDist

import numpy as np

from clocher_kernels.errors import ModelError
from clocher_runtime.quality.compare import Comparison

RESAMPLES = 2000
FEWEST_DOCUMENTS = 8
"""With fewer documents there is no interval."""

_COUNTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval; infinite bounds where there are too few documents."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of a comparison.

    Attributes:
        tokens: scored tokens.
        documents: documents that they come from.
        nonfinite: tokens left out, for which the model's logits were not finite.
        perplexity_reference: of the reference.
        perplexity: of the model.
        ppl_ratio: perplexity of the model over that of the reference, paired by token.
        kld: mean KL divergence in nats.
        same_top: share of tokens with the same most likely token.
        rms_dp: root mean square of the change of the true token's probability.
        kld_p999: 99.9 % quantile of the divergence.
        kld_max: its maximum.
        lower_bound: the divergences are lower bounds; see `Comparison`.
    """

    tokens: int
    documents: int
    nonfinite: int
    perplexity_reference: float
    perplexity: float
    ppl_ratio: Estimate
    kld: Estimate
    same_top: Estimate
    rms_dp: Estimate
    kld_p999: float
    kld_max: float
    lower_bound: bool


def summarise(comparison: Comparison, resamples: int = RESAMPLES, seed: int = 0) -> Summary:
    """Return the statistics of a comparison.

    Args:
        comparison: from `compare`.
        resamples: bootstrap resamples.
        seed: of the resampling; the same seed gives the same intervals.

    Raises:
        ModelError: no token has finite logits.
    """
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
    means = block_means(values, comparison.owner, resamples, seed)
    documents = len(np.unique(comparison.owner))

    def estimate(row: int, shape: Callable[[np.ndarray], np.ndarray] = np.asarray) -> Estimate:
        value = float(shape(values[row].mean()))
        return interval(value, shape(means[row]), documents)

    return Summary(
        tokens=len(scores.kld),
        documents=documents,
        nonfinite=comparison.nonfinite,
        perplexity_reference=exp(scores.nll_reference.mean()),
        perplexity=exp(min(scores.nll_model.mean(), 700.0)),
        ppl_ratio=estimate(0, _bounded_exp),
        kld=estimate(1),
        same_top=estimate(2),
        rms_dp=estimate(3, np.sqrt),
        kld_p999=float(np.quantile(scores.kld, 0.999)),
        kld_max=float(scores.kld.max()),
        lower_bound=comparison.lower_bound,
    )


def block_means(values: np.ndarray, owner: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Return means over tokens of resampled documents.

    Args:
        values: [S, N], statistics by token.
        owner: [N], document of each token.
        resamples: number of resamples.
        seed: of the generator.

    Returns:
        [S, resamples]: each the sum over the drawn documents, divided by their tokens.
    """
    names, index = np.unique(owner, return_inverse=True)
    count = len(names)
    sums = np.stack([np.bincount(index, row, count) for row in (*values, np.ones(len(owner)))])
    random = np.random.default_rng(seed)
    share = np.full(count, 1 / count)
    step = max(1, _COUNTS // count)
    drawn = [
        random.multinomial(count, share, size=min(step, resamples - start)) @ sums.T
        for start in range(0, resamples, step)
    ]
    totals = np.concatenate(drawn).T
    return np.asarray(totals[:-1] / totals[-1])


def interval(value: float, resampled: np.ndarray, documents: int) -> Estimate:
    """Return the expanded percentile interval of resampled values."""
    if documents < FEWEST_DOCUMENTS:
        return Estimate(value, -np.inf, np.inf)
    z = sqrt(documents / (documents - 1)) * _t975(documents - 1)
    tail = NormalDist().cdf(-z)
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def _t975(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, within 0.2 % from 7 degrees of freedom.

    Source: Abramowitz and Stegun 26.7.5.
    """
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _bounded_exp(values: np.ndarray) -> np.ndarray:
    """Return exp, at most what fp64 holds: a wrecked model may be 10^400 times worse."""
    return np.asarray(np.exp(np.minimum(values, 700.0)))
