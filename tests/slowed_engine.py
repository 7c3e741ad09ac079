"""Run clocher-run with every step made longer, to see whether the harness finds it.

    python tests/slowed_engine.py PERCENT [FLAGS OF clocher-run]

The time is really spent, inside the strict window, after the work of each step.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from clocher_runtime import cli
from clocher_runtime.command import run
from clocher_runtime.engine.timing import SpanKind, Tally, TimedWindow


def slowed(percent: float) -> type[TimedWindow]:
    """Return a window whose steps take so many per cent longer than their work."""

    class SlowedWindow(TimedWindow):
        @contextmanager
        def span(self, kind: SpanKind, tokens: int, launched: bool = False) -> Iterator[Tally]:
            with super().span(kind, tokens, launched) as tally:
                start = time.perf_counter_ns()
                yield tally
                self._synchronize()
                now = time.perf_counter_ns()
                until = now + (now - start) * percent / 100
                while time.perf_counter_ns() < until:
                    pass

    return SlowedWindow


if __name__ == "__main__":
    run.TimedWindow = slowed(float(sys.argv[1]))  # type: ignore[misc]
    sys.exit(cli.main(sys.argv[2:]))
