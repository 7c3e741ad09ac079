"""What a run of any length remembers of its steps: exact totals, and an even sample."""

import random
from collections.abc import Iterable
from typing import Generic, TypeVar

from clocher_runtime.engine.metrics import span_ns, span_tokens
from clocher_runtime.engine.timing import Span

T = TypeVar("T")
SAMPLE = 1 << 16
"""Values that a percentile is taken of, at most."""


class Reservoir(Generic[T]):
    """An even random sample of values as they come: all of them while they are few.

    The same values in the same order give the same sample.

    Args:
        size: values to keep.

    Attributes:
        values: the sample.
        count: values that came.

    Source: Vitter, Random sampling with a reservoir, 1985, algorithm R.
    """

    def __init__(self, size: int = SAMPLE) -> None:
        self.values: list[T] = []
        self.count = 0
        self._size = size
        self._random = random.Random(0)

    def add(self, value: T) -> None:
        """Take a value."""
        self.count += 1
        if len(self.values) < self._size:
            self.values.append(value)
        elif (place := self._random.randrange(self.count)) < self._size:
            self.values[place] = value


class StepTotals:
    """What the spans of a window add up to.

    Attributes:
        passes: spans.
        prefill_tokens: prompt tokens.
        prefill_ns: time in prefill spans.
        decode: sample of the decode spans.
    """

    def __init__(self) -> None:
        self.passes = self.prefill_tokens = self.prefill_ns = 0
        self.decode: Reservoir[Span] = Reservoir()

    def add(self, spans: Iterable[Span]) -> None:
        """Count some spans."""
        spans = list(spans)
        self.passes += len(spans)
        self.prefill_tokens += span_tokens(spans, "prefill")
        self.prefill_ns += span_ns(spans, "prefill")
        for span in spans:
            if span.kind == "decode":
                self.decode.add(span)
