"""Numbers of a run: pure functions of the spans of a window. Unknown is NaN, never 0."""

import math
from collections.abc import Sequence

from clocher_runtime.engine.timing import Span, SpanKind

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


def per_second(count: float, ns: int) -> float:
    """Return count / time in 1/s; NaN when no time has passed."""
    return count * NS_PER_S / ns if ns > 0 else math.nan


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by the nearest-rank method; NaN without values.

    It is the smallest value that at least `percent` per cent of the values do not exceed: always
    a value that was measured, never an interpolation.

    Args:
        values: in any order.
        percent: above 0, at most 100.
    """
    if not values:
        return math.nan
    rank = math.ceil(percent * len(values) / 100)
    return sorted(values)[max(rank, 1) - 1]


def token_latencies_ms(spans: Sequence[Span]) -> list[float]:
    """Return the latency of each decoded token in milliseconds.

    A token's latency is the duration of the decode step that made it. The step of a batch counts
    once for each of its tokens: every sequence waited that long. First tokens are made by prefill
    steps and are counted by the time to first token instead.
    """
    return [
        span.ns / NS_PER_MS for span in spans if span.kind == "decode" for _ in range(span.tokens)
    ]


def span_ns(spans: Sequence[Span], kind: SpanKind) -> int:
    """Return the time in spans of one kind, in nanoseconds."""
    return sum(span.ns for span in spans if span.kind == kind)


def span_tokens(spans: Sequence[Span], kind: SpanKind) -> int:
    """Return the tokens of spans of one kind."""
    return sum(span.tokens for span in spans if span.kind == kind)
