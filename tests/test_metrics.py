"""Metrics are pure functions of spans."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clocher_runtime.engine.metrics import (
    per_second,
    percentile,
    span_ns,
    span_tokens,
    token_latencies_ms,
)
from clocher_runtime.engine.timing import Span

SPANS = [
    Span("prefill", 128, 4_000_000),
    Span("prefill", 2, 1_000_000),
    Span("decode", 2, 3_000_000),
    Span("decode", 1, 2_000_000),
]


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
    assert (span_ns(SPANS, "prefill"), span_ns(SPANS, "decode")) == (5_000_000, 5_000_000)
    assert (span_tokens(SPANS, "prefill"), span_tokens(SPANS, "decode")) == (130, 3)
