"""The strict timing window and its figures (NaN: unknown). No other module reads the clock."""

import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np

from clocher_kernels.guards import close_window, open_window

SpanKind = Literal["prefill", "decode"]
T = TypeVar("T")
NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
SAMPLE = 1 << 16
"""Values a percentile is computed from, at most."""


@dataclass(frozen=True, slots=True)
class Span:
    """One step of `ns` nanoseconds: prompt tokens, or tokens made for `sequences` (0: one each)."""

    kind: SpanKind
    tokens: int
    ns: int
    sequences: int = 0


@dataclass(slots=True)
class Tally:
    """What a step did, where known only at its end; see `Span`. `ahead`: the next is launched."""

    tokens: int
    sequences: int = 0
    ahead: bool = False


class TimedWindow:
    """A measurement of a run's steps and nothing between them, unless a device worked on the next.

    While a span is open, compiling, tuning, loading and reading files raise, with `name` in the
    message. A failed step leaves no span. `clock` returns monotonic ns; `synchronize` waits for the
    device, at both ends of a span, but not where the next step is launched `ahead`: the span ends
    when its own tokens are read, and the next begins there.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], int] = time.perf_counter_ns,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.spans: list[Span] = []
        self.total_ns = self._ended = 0
        self._clock = clock
        self._synchronize = synchronize or (lambda: None)

    @contextmanager
    def span(self, kind: SpanKind, tokens: int, launched: bool = False) -> Iterator[Tally]:
        """Measure one step, whose tally may be changed inside. Raises WindowError.

        `launched`: in the last span, whose tally says `ahead`.
        """
        open_window(self.name)
        tally = Tally(tokens)
        try:
            if not launched:
                self._synchronize()
                self._ended = self._clock()
            start = self._ended
            yield tally
            if not tally.ahead:
                self._synchronize()
            self._ended = self._clock()
            ns = self._ended - start
        finally:
            close_window()
        self.spans.append(Span(kind, tally.tokens, ns, tally.sequences))
        self.total_ns += ns


class Reservoir(Generic[T]):
    """A uniform sample of the `count` values added; deterministic (Vitter 1985, algorithm R)."""

    def __init__(self, size: int = SAMPLE) -> None:
        self.values: list[T] = []
        self.count = 0
        self._size = size
        self._random = random.Random(0)

    def add(self, value: T) -> None:
        """Add a value."""
        self.count += 1
        if len(self.values) < self._size:
            self.values.append(value)
        elif (place := self._random.randrange(self.count)) < self._size:
            self.values[place] = value


class StepTotals:
    """Totals of a window's spans; `decode` is a sample of the decode spans."""

    def __init__(self) -> None:
        self.forwards = self.prefill_tokens = self.prefill_ns = 0
        self.decode: Reservoir[Span] = Reservoir()

    def add(self, spans: Iterable[Span]) -> None:
        """Count some spans."""
        for span in spans:
            self.forwards += 1
            if span.kind == "decode":
                self.decode.add(span)
            else:
                self.prefill_tokens += span.tokens
                self.prefill_ns += span.ns


def per_second(count: float, ns: int) -> float:
    """Return count / time in 1/s; NaN when no time has passed."""
    return count * NS_PER_S / ns if ns > 0 else math.nan


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile (0 < percent <= 100), nearest rank, never interpolated; NaN if empty."""
    if not values:
        return math.nan
    rank = math.ceil(percent * len(values) / 100)
    return sorted(values)[max(rank, 1) - 1]


def token_latencies_ms(spans: Sequence[Span]) -> list[float]:
    """Return the latency in ms of each decoded token: its step's time / its tokens in that step."""
    return [
        span.ns * (span.sequences or span.tokens) / span.tokens / NS_PER_MS
        for span in spans
        if span.kind == "decode"
        for _ in range(span.tokens)
    ]


@dataclass(slots=True)
class StepSums:
    """Totals of all steps in ns; a step with any prompt tokens counts as prefill."""

    decode_steps: int = 0
    decode_tokens: int = 0
    decode_ns: int = 0
    prompt_steps: int = 0
    prompt_tokens: int = 0
    prompt_ns: int = 0

    def add(self, prompt: int, decodes: int, ns: int) -> None:
        """Count a step of so many prompt tokens and decoding sequences."""
        self.decode_tokens += decodes
        if prompt:
            self.prompt_steps += 1
            self.prompt_tokens += prompt
            self.prompt_ns += ns
        else:
            self.decode_steps += 1
            self.decode_ns += ns


class StepTimes:
    """Expected step time by tokens: moving averages, four per doubling, linear between."""

    _NEW = 0.3  # weight of the newest time

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.now = clock
        self._known: dict[int, tuple[float, float]] = {}  # class -> tokens, ns

    def add(self, tokens: int, ns: int) -> None:
        """Record the time of a step."""
        place = round(4 * math.log2(tokens))
        size, mean = self._known.get(place, (tokens, ns))
        new = self._NEW
        self._known[place] = (size + new * (tokens - size), mean + new * (ns - mean))

    def expected_ms(self, tokens: int) -> float:
        """Return the expected time of a step of so many tokens, 0 while unknown."""
        sizes, times = zip((0.0, 0.0), *sorted(self._known.values()), strict=True)
        return float(np.interp(tokens, sizes, times)) / NS_PER_MS

    def most(self, limit_ms: float) -> int:
        """Return the most tokens that a step is expected to compute within a time."""
        known = [(0.0, 0.0), *sorted(self._known.values())]
        largest, longest = known[-1]
        limit = limit_ms * NS_PER_MS
        if longest <= limit:
            return int(largest * min(2.0, limit / longest)) if longest else 1
        most = 0.0
        for (low, low_ns), (high, high_ns) in itertools.pairwise(known):
            if high_ns <= limit:
                most = high
            elif low_ns <= limit:
                most = max(most, low + (high - low) * (limit - low_ns) / (high_ns - low_ns))
        return int(most)
