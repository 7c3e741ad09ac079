"""How long calls take: CUDA graphs and events on a GPU, the wall clock in a dry run.

This is the only place where a dry run and a run on a GPU differ in how they execute things.
"""

import itertools
import time
from collections.abc import Mapping, Sequence

from clocher_kernels.cuda.timer import Call, GpuTimer, Timing, reason

__all__ = ["Call", "DryTimer", "GpuTimer", "Timer", "Timing", "reason"]


class DryTimer:
    """Executes everything once or twice on the CPU. Its numbers mean nothing."""

    dry = True
    calls = 2

    def race(self, contenders: Mapping[str, Sequence[Call]]) -> dict[str, Timing | str]:
        """Run each contender's calls; return a time, or why there is none, by name."""
        results: dict[str, Timing | str] = {}
        for name, calls in contenders.items():
            try:
                start = time.perf_counter()
                for call in itertools.islice(itertools.cycle(calls), self.calls):
                    call()
                us = (time.perf_counter() - start) / self.calls * 1e6
                results[name] = Timing(us, us, us, 1)
            except Exception as error:
                results[name] = reason(error)
        return results

    def replay(self, calls: Sequence[Call]) -> Call:
        """Return a function that makes the calls again."""

        def again() -> None:
            for call in calls:
                call()

        return again

    def synchronize(self) -> None:
        """Wait for nothing."""


Timer = DryTimer | GpuTimer
