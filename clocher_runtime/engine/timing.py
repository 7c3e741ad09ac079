"""The strict window. No other code in the project reads the clock."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from clocher_kernels.guards import close_window, open_window

SpanKind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Span:
    """One measured step.

    Attributes:
        tokens: prompt tokens of a prefill step; tokens made by a decode step.
        ns: duration in nanoseconds.
    """

    kind: SpanKind
    tokens: int
    ns: int


class TimedWindow:
    """A measurement: the steps of a run, and nothing between them.

    While a span is open, compiling, tuning, loading weights and reading files refuse to run. What
    the consumer of the tokens does between two spans is outside the window.

    Args:
        name: what is measured, for the messages of those refusals.
        clock: returns nanoseconds that never go back.
        synchronize: waits until the device has finished; called at both ends of a span.

    Attributes:
        spans: the finished spans, in order. A step that raises leaves none.
        total_ns: their sum.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], int] = time.perf_counter_ns,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.spans: list[Span] = []
        self.total_ns = 0
        self._clock = clock
        self._synchronize = synchronize

    @contextmanager
    def span(self, kind: SpanKind, tokens: int) -> Iterator[None]:
        """Measure one step.

        Args:
            kind: "prefill" or "decode".
            tokens: see `Span`.

        Raises:
            WindowError: another window or span is open.
        """
        open_window(self.name)
        try:
            self._wait()
            start = self._clock()
            yield
            self._wait()
            ns = self._clock() - start
        finally:
            close_window()
        self.spans.append(Span(kind, tokens, ns))
        self.total_ns += ns

    def _wait(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
