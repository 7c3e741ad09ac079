"""Time stamps between launches: where the time of a step goes, thread by thread.

A stamp is a launch like any other, a kernel that writes the clock into a table. Two of them come
before every launch: one when the thread arrives, one when the team has met. They cost a fraction of
a microsecond each, so a profiled step is a little slower than another; its results are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpu_fallback.jit import kernel
from cpu_fallback.memory import field, write_i64
from cpu_fallback.sync import now_ns
from cpu_fallback.tape import Launch

_NOTHING: frozenset[str] = frozenset()


@kernel
def stamp(rec, ctl, rank, size, scratch):
    """Write the time of this thread. Fields: address of its column, bytes of a thread's table."""
    write_i64(field(rec, 0) + rank * field(rec, 1), now_ns())


@dataclass(frozen=True, slots=True, eq=False)
class Stamps:
    """The times of a step.

    Attributes:
        calls: for each launch, the index of its call in the Plan.
        times: int64 ns [threads, 2 * launches + 1]: arrival and start of each launch, then the
            end.
    """

    calls: tuple[int, ...]
    times: np.ndarray

    @classmethod
    def table(cls, calls: Sequence[int], threads: int) -> "Stamps":
        """Return an empty table for these launches."""
        return cls(tuple(calls), np.zeros((threads, 2 * len(calls) + 1), np.int64))

    def at(self, column: int) -> Launch:
        """Return the launch that stamps a column."""
        address = self.times.ctypes.data + 8 * column
        return Launch(stamp, (address, self.times.strides[0]), _NOTHING, _NOTHING)
