"""Interleaved runs, and estimates with 95 % intervals and verdicts from few samples.

Documents, rounds or runs are resampled. Intervals of few units are widened: of runs by Student's
factor on a logarithmic scale (90 to 98 per cent coverage for 2 to 20), of documents by the expanded
percentile interval. Sources: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13;
Hesterberg, What Teachers Should Know About the Bootstrap, 2015.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, isfinite, lgamma, log, pi, sqrt
from statistics import NormalDist
from typing import Literal, TypeVar

import numpy as np

Key = TypeVar("Key")
Verdict = Literal["faster", "slower", "no difference shown", "too few runs"]

WORTH_SAYING = 1.03
"""Smallest ratio of speeds called a difference."""

FEWEST_DOCUMENTS = 8
"""With fewer documents there is no interval."""

_DRAWS = 2000
_DRAWS_OF_RUNS = 4000
_COUNTS = 1 << 22
_Z = NormalDist().inv_cdf(0.975)


def in_turns(
    runs: Mapping[Key, Callable[[], float]],
    rounds: int,
    before: Callable[[int, Key], object] | None = None,
) -> dict[Key, list[float]]:
    """Run contestants once a round, rotating, after a warm-up round; return their measurements.

    They take turns since a shared machine drifts from minute to minute.
    """
    names = list(runs)
    found: dict[Key, list[float]] = {name: [] for name in names}
    done = 0
    for number in range(-1, rounds):
        turn = number % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            if before:
                before(done, name)
            value = runs[name]()
            done += 1
            if number >= 0:
                found[name].append(value)
    return found


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval; infinite bounds if unknown."""

    value: float
    low: float = -np.inf
    high: float = np.inf

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return isfinite(self.low) and isfinite(self.high)

    @property
    def ends(self) -> list[float] | None:
        """The interval for a result file, or null."""
        return [self.low, self.high] if self.known else None


@dataclass(frozen=True, slots=True)
class Ratio(Estimate):
    """A ratio of speeds and its verdict."""

    @property
    def verdict(self) -> Verdict:
        """Return "faster" or "slower" only if the interval excludes 1 and the ratio matters."""
        if not self.known:
            return "too few runs"
        if self.low > 1 and self.value >= WORTH_SAYING:
            return "faster"
        if self.high < 1 and self.value <= 1 / WORTH_SAYING:
            return "slower"
        return "no difference shown"

    def __str__(self) -> str:
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def ratio(numerator: Sequence[float], denominator: Sequence[float], seed: int = 0) -> Ratio:
    """Return the ratio of medians of interleaved rounds, not widened for few."""
    over, under = np.asarray(numerator), np.asarray(denominator)
    rounds = np.random.default_rng(seed).integers(len(over), size=(_DRAWS, len(over)))
    drawn = np.median(over[rounds], axis=1) / np.median(under[rounds], axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Ratio(float(np.median(over)) / float(np.median(under)), float(low), float(high))


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Return the ratio of medians of interleaved runs, widened for few; ValueError if unequal."""
    if len(numerator) != len(denominator):
        raise ValueError(
            f"{len(numerator)} runs beside {len(denominator)}: pairs need as many of each"
        )
    found, runs = ratio(numerator, denominator), len(numerator)
    return Ratio(found.value, *(_stretched(found, runs) if runs > 1 else ()))


def apart_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Return the ratio of medians of runs at different times, with the worst-case interval."""
    over, under = median_of_runs(numerator), median_of_runs(denominator)
    ends = (over.low / under.high, over.high / under.low) if over.known and under.known else ()
    return Ratio(over.value / under.value, *ends)


def median_of_runs(values: Sequence[float], seed: int = 0) -> Estimate:
    """Return the median of positive values, without an interval if there is one. ValueError."""
    data = np.asarray(values, dtype=np.float64)
    if not data.size or not (data > 0).all():
        raise ValueError(f"expected positive values, got {list(values)}")
    middle = float(np.median(data))
    if data.size < 2:
        return Estimate(middle)
    drawn = np.random.default_rng(seed).integers(data.size, size=(_DRAWS_OF_RUNS, data.size))
    low, high = np.percentile(np.median(data[drawn], axis=1), [2.5, 97.5])
    return Estimate(middle, *_stretched(Estimate(middle, float(low), float(high)), data.size))


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range."""
    q1, q3 = np.percentile(np.asarray(values), [25, 75])
    return float(q3 - q1)


def block_means(values: np.ndarray, owner: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Return resampled means, [S, resamples], of values [S, N] with documents `owner` [N]."""
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


def of_documents(value: float, resampled: np.ndarray, documents: int) -> Estimate:
    """Return a value with the expanded percentile interval of resampled values."""
    if documents < FEWEST_DOCUMENTS:
        return Estimate(value)
    z = sqrt(documents / (documents - 1)) * student(documents - 1)
    tail = NormalDist().cdf(-z)
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


@cache
def student(freedom: int) -> float:
    """Return Student's t 97.5 % quantile, within 0.1 %, from the sum of its density."""
    t = np.arange(5e-5, 13, 1e-4)
    scale = exp(lgamma((freedom + 1) / 2) - lgamma(freedom / 2)) / sqrt(freedom * pi)
    density = scale * (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    return float(np.interp(0.475, np.cumsum(density) * 1e-4, t))


def _stretched(found: Estimate, runs: int) -> tuple[float, float]:
    factor = student(runs - 1) / _Z
    return (
        found.value * exp(factor * log(found.low / found.value)),
        found.value * exp(factor * log(found.high / found.value)),
    )
