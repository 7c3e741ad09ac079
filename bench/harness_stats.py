"""Medians with intervals that hold for a handful of runs, and when "faster" may be said.

The unit that is drawn anew is the run, a process of its own: what happens within one process (its
place in memory, the mood of the machine in its minute) is shared by all its rounds. The bootstrap
interval of a median is too narrow for few runs: of three it never reaches beyond them, and misses
the median in a quarter of cases. So it is stretched, on a logarithmic scale, by Student's factor
over the normal one, which leaves 90 to 98 per cent for 2 to 20 runs, outliers or not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bench.measure import ratio

Verdict = Literal["faster", "slower", "no difference shown", "too few runs"]

WORTH_SAYING = 1.03
"""Smallest ratio of speeds that is called a difference."""

_DRAWS = 4000
_PERCENTILES = (2.5, 97.5)
_Z = 1.96
# 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True)
class Summary:
    """The runs of a cell in one figure.

    Attributes:
        n: runs.
        median: of the runs.
        q1: first quartile.
        q3: third quartile.
        low: lower end of the 95 % interval of the median; None for fewer than two runs.
        high: upper end.
    """

    n: int
    median: float
    q1: float
    q3: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A cell beside its base.

    Attributes:
        ratio: speed of the cell / speed of the base, of medians.
        low: lower end of its 95 % interval; None where there are too few runs.
        high: upper end.
        verdict: what may be said of the cell.
    """

    ratio: float
    low: float | None
    high: float | None
    verdict: Verdict


def summarise(values: Sequence[float], seed: int = 0) -> Summary:
    """Return median, quartiles and interval of positive values, one for each run.

    Raises:
        ValueError: there is no value, or one is not positive.
    """
    data = np.asarray(values, dtype=np.float64)
    if not data.size or not (data > 0).all():
        raise ValueError(f"expected positive values, got {list(values)}")
    middle = float(np.median(data))
    q1, q3 = (float(q) for q in np.percentile(data, [25, 75]))
    low = high = None
    if data.size > 1:
        drawn = np.random.default_rng(seed).integers(data.size, size=(_DRAWS, data.size))
        ends = np.percentile(np.median(data[drawn], axis=1), _PERCENTILES)
        low, high = stretched(middle, float(ends[0]), float(ends[1]), data.size)
    return Summary(data.size, middle, q1, q3, low, high)


def stretched(middle: float, low: float, high: float, n: int) -> tuple[float, float]:
    """Return a bootstrap interval of n runs, stretched for few of them."""
    factor = (_T[n - 2] if n - 2 < len(_T) else _Z) / _Z
    return (
        middle * math.exp(factor * math.log(low / middle)),
        middle * math.exp(factor * math.log(high / middle)),
    )


def compare_paired(base: Sequence[float], other: Sequence[float]) -> Comparison:
    """Compare speeds that were taken in turns: runs of one number shared the machine's mood."""
    if len(base) != len(other):
        raise ValueError(f"{len(base)} runs beside {len(other)}: pairs need as many of each")
    if len(base) < 2:
        return _too_few(base, other)
    found = ratio(other, base)
    low, high = stretched(found.value, found.low, found.high, len(base))
    return Comparison(found.value, low, high, _verdict(found.value, low, high))


def compare_apart(base: Sequence[float], other: Sequence[float]) -> Comparison:
    """Compare speeds that were taken at different times: the two intervals must part.

    The interval of the ratio is that of the worst case, so it leaves out 1 exactly if the
    intervals of the two medians do not touch.
    """
    a, b = summarise(base), summarise(other)
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return _too_few(base, other)
    found = b.median / a.median
    low, high = b.low / a.high, b.high / a.low
    return Comparison(found, low, high, _verdict(found, low, high))


def agree(a: Summary, b: Summary) -> bool:
    """Whether the intervals of two summaries overlap."""
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return True
    return a.low <= b.high and b.low <= a.high


def _too_few(base: Sequence[float], other: Sequence[float]) -> Comparison:
    found = float(np.median(other)) / float(np.median(base))
    return Comparison(found, None, None, "too few runs")


def _verdict(found: float, low: float, high: float) -> Verdict:
    if low > 1 and found >= WORTH_SAYING:
        return "faster"
    if high < 1 and found <= 1 / WORTH_SAYING:
        return "slower"
    return "no difference shown"
