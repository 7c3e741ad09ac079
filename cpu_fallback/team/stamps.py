"""Time stamps between launches: where the time of a step goes, thread by thread.

A stamp is a launch like any other, a kernel that writes the clock into a table. Two of them come
before every launch: one when the thread arrives, one when the team has met. They cost a fraction of
a microsecond each, so a profiled step is a little slower than another; its results are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import kernel
from cpu_fallback.lanes.record import reader, words
from cpu_fallback.team.sync import now_ns
from cpu_fallback.team.tape import Launch

_NOTHING: frozenset[str] = frozenset()


class Column(NamedTuple):
    """Where a time goes: address of the first thread's, bytes from one thread to the next."""

    address: int
    stride: int


_column_at = reader(Column)


@kernel
def stamp(rec, ctl, rank, size, scratch):
    """Write the time of this thread."""
    column = _column_at(rec)
    v.write_i64(column.address + rank * column.stride, now_ns())


@dataclass(frozen=True, slots=True, eq=False)
class Stamps:
    """The times of a step."""

    calls: tuple[int, ...]  # for each launch, the index of its call in the Plan
    # int64 ns [threads, 2 * launches + 1]: arrival and start of each launch, then the end
    times: np.ndarray

    @classmethod
    def table(cls, calls: Sequence[int], threads: int) -> "Stamps":
        """Return an empty table for these launches."""
        return cls(tuple(calls), np.zeros((threads, 2 * len(calls) + 1), np.int64))

    def at(self, column: int) -> Launch:
        """Return the launch that stamps a column."""
        place = Column(self.times.ctypes.data + 8 * column, self.times.strides[0])
        return Launch(stamp, tuple(words(place)), _NOTHING, _NOTHING)
