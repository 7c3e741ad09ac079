"""The strict window: what it counts, what it refuses; numbers are pure functions of its spans."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clocher_kernels import guards
from clocher_kernels.errors import WindowError
from clocher_runtime.engine.timing import (
    Span,
    StepTotals,
    TimedWindow,
    per_second,
    percentile,
    token_latencies_ms,
)

SPANS = [
    Span("prefill", 128, 4_000_000),
    Span("prefill", 2, 1_000_000),
    Span("decode", 2, 3_000_000),
    Span("decode", 1, 2_000_000),
]


class Clock:
    """A clock that advances only when told to."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


def test_spans_and_total_hold_only_the_time_inside():
    clock = Clock()
    window = TimedWindow("generate", clock)
    with window.span("prefill", 5):
        clock.now += 70
    clock.now += 1_000_000  # the consumer writes text
    with window.span("decode", 1):
        clock.now += 30
    assert window.spans == [Span("prefill", 5, 70), Span("decode", 1, 30)]
    assert window.total_ns == 100


def test_compiling_and_reading_refuse_inside_and_work_outside():
    window = TimedWindow("generate")
    with (
        window.span("decode", 1),
        pytest.raises(WindowError, match=r"refused to read a file.*'generate'"),
    ):
        guards.refuse_in_window("read a file")
    guards.refuse_in_window("read a file")


def test_spans_never_nest():
    window, other = TimedWindow("generate"), TimedWindow("inner")
    with (
        window.span("decode", 1),
        pytest.raises(WindowError, match=r"'inner' opened inside 'generate'"),
        other.span("decode", 1),
    ):
        pytest.fail("a span opened inside a span")
    assert other.spans == []


def test_step_that_raises_leaves_no_span_and_no_open_window():
    window = TimedWindow("generate", Clock())
    with pytest.raises(ZeroDivisionError), window.span("decode", 1):
        raise ZeroDivisionError
    assert window.spans == []
    assert window.total_ns == 0
    with window.span("decode", 1):
        pass
    assert len(window.spans) == 1


def test_device_is_synchronised_inside_the_span_at_both_ends():
    clock = Clock()
    pending = [50]  # work queued before the span, which must not count

    def synchronize() -> None:
        clock.now += sum(pending)
        pending.clear()

    window = TimedWindow("generate", clock, synchronize)
    with window.span("decode", 1):
        pending.append(7)  # queued by the step: it must count although nobody waits for it
    assert window.spans == [Span("decode", 1, 7)]


def test_default_clock_advances():
    window = TimedWindow("generate")
    with window.span("decode", 1):
        sum(range(1000))
    assert window.total_ns > 0


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7], 50, 7),
        ([7], 95, 7),
        ([1, 2], 50, 1),
        ([3, 1, 2], 50, 2),
        ([4, 3, 2, 1], 50, 2),
        (list(range(1, 21)), 95, 19),
        (list(range(1, 101)), 95, 95),
        (list(range(1, 101)), 100, 100),
    ],
)
def test_percentile_is_the_nearest_rank(values, percent, expected):
    assert percentile(values, percent) == expected


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200), st.integers(1, 100))
def test_percentile_equals_numpy_inverted_cdf(values, percent):
    assert percentile(values, percent) == np.percentile(values, percent, method="inverted_cdf")


def test_unknown_is_nan():
    assert math.isnan(percentile([], 50))
    assert math.isnan(per_second(10, 0))


def test_rate_counts_per_second():
    assert per_second(10, 2_000_000_000) == 5.0


def test_each_token_of_a_batched_step_has_the_latency_of_the_step():
    assert token_latencies_ms(SPANS) == [3.0, 3.0, 2.0]


def test_sums_by_kind():
    totals = StepTotals()
    totals.add(SPANS)
    assert (totals.forwards, totals.prefill_tokens, totals.prefill_ns) == (4, 130, 5_000_000)
    assert totals.decode.values == SPANS[2:]
