"""Read bandwidth of the memory: a team that reads a buffer and does nothing else.

Each thread reads a contiguous share, as the matrix kernels do. A step reads the clock in compiled
code, so neither the interpreter nor its lock is in the time.
"""

from typing import NamedTuple

import numpy as np

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, i64
from cpu_fallback.lanes.record import reader, words
from cpu_fallback.team.large_pages import HUGE, allocate
from cpu_fallback.team.placement import Hints
from cpu_fallback.team.tape import Launch, encode, now_ns
from cpu_fallback.team.team import Team

_LINES = 512
_LEAST_BYTES = 64 << 20
_SUM = 16 * 0x01010101


class _Share(NamedTuple):
    """What a team reads: some runs of 512 bytes, some times over."""

    start: int
    runs: int
    passes: int
    sums: int  # address of what each thread has read, 64 bytes apart


_share_at = reader(_Share)


@v.op(v.I32, v.I32, i64)
def _with_run(b, seen, at):
    """Return the bits that are set in a vector or in the lines of a run."""
    lines = [v.emit_load(b, v.I32.llvm, v.behind(b, at, i)) for i in range(0, _LINES, 64)]
    while len(lines) > 1:
        lines = [b.or_(*pair) for pair in zip(lines[::2], lines[1::2], strict=True)]
    return b.or_(seen, *lines)


@Kernel
def read_share(rec, ctl, rank, size, scratch):
    """Read this thread's share; write a value that depends on every byte of it."""
    share = _share_at(rec)
    passes, out, seen = share.passes, share.sums + 64 * rank, v.izero()
    end = share.start + share.runs * (rank + 1) // size * _LINES
    while passes > 0:
        at = share.start + share.runs * rank // size * _LINES
        while at < end:
            seen = _with_run(seen, at)
            at += _LINES
        passes -= 1
        # In the loop, for the compiler must not take one pass for all: a foreign call may write.
        v.write_i64(out, now_ns())
    v.write_i64(out, v.ihsum(seen))


class Reader:
    """A buffer to read, of `nbytes` rounded down to 2 MiB, at least that. Raises OSError.

    `pages`: "4k" or "2m": 2 MiB pages where the system gives them, or refused.
    """

    def __init__(self, pages: str, nbytes: int) -> None:
        self.nbytes = max(nbytes // HUGE, 1) * HUGE
        self._data = allocate(self.nbytes, large=pages == "2m")
        self._data[:] = 1

    def gbps(self, threads: int, at_least: float = 0.2) -> float:
        """Read the buffer with some threads; return 10^9 bytes a second. Raises DeviceError.

        It goes on for `at_least` seconds, for the rate of a shared machine's memory changes.
        """
        passes, sums = -(-_LEAST_BYTES // self.nbytes), np.zeros((threads, 8), np.int64)
        share = _Share(self._data.ctypes.data, self.nbytes // _LINES, passes, sums.ctypes.data)
        launch = Launch(read_share, tuple(words(share)))
        team = Team(threads, encode([launch]), 0, Hints(adaptive=False))
        times: list[int] = []
        try:
            with team.running():
                team.step(0, 0)  # which wakes the threads
                while sum(times) < at_least * 1e9:
                    team.step(0, 0)
                    times.append(team.step_ns)
        finally:
            team.close()
        if not (sums[:, 0] == _SUM).all():
            raise RuntimeError("the read loop did not read what is there")
        return len(times) * passes * self.nbytes / sum(times)
