"""The clock around the one compiled call of a CPU step, below everything public."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class CompiledCalls:
    """Reads the clock around the compiled call of every step of a CPU session.

    Attributes:
        ns: time spent in it since it was last set to 0.
        calls: how many there were since then.
        known: whether the executor has such a call.
    """

    def __init__(self, executor: object) -> None:
        self.ns = self.calls = 0
        self._team: Any = getattr(executor, "_team", None)
        self._call: Callable[..., Any] | None = getattr(self._team, "_lead", None)
        self.known = self._call is not None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Read the clock for as long as this is open."""
        if self._call is None:
            yield
            return
        self._team._lead = self.timed
        try:
            yield
        finally:
            self._team._lead = self._call

    def timed(self, *arguments: int) -> None:
        """Make the compiled call."""
        assert self._call is not None
        start = time.perf_counter_ns()
        self._call(*arguments)
        self.ns += time.perf_counter_ns() - start
        self.calls += 1
