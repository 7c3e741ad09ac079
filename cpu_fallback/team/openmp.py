"""A step by the threads of an OpenMP runtime that the process has already, torch's for one.

Such threads spin for milliseconds after each parallel region. Workers of our own would share cores
with them for as long, and be woken for each call besides. Here the calling thread opens a region,
and all that are in it walk the tape. How many there are the runtime says, which may give fewer than
were asked for. After a fork the child must not open regions: the runtime would wait for threads
that are not there.

The entry points are those of GCC's libgomp, which other runtimes on Linux have, too.
"""

import ctypes
from typing import NamedTuple, Self

import numpy as np
from llvmlite import ir

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, i64, void
from cpu_fallback.team import tape
from cpu_fallback.team.tape import begin, now_ns, walk

_PARALLEL, _RANK, _SIZE, _BODY = range(tape.STOP + 1, tape.STOP + 5)


class OpenMP(NamedTuple):
    """Addresses of a runtime's functions."""

    parallel: int  # `GOMP_parallel`
    rank: int  # `omp_get_thread_num`
    size: int  # `omp_get_num_threads`

    @classmethod
    def of(cls, library: str) -> Self | None:
        """Return that of a loaded library, or of what it was linked with; None: it has none."""
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        try:
            loaded = ctypes.CDLL(library)
            found = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value for name in names]
        except (OSError, AttributeError):
            return None
        return cls(*[address or 0 for address in found])

    def write(self, control: np.ndarray) -> None:
        """Write into a team's control block what `lead` reads there."""
        control[[_PARALLEL, _RANK, _SIZE, _BODY]] = (*self, take_part.address)


@v.op(void, i64, i64, i64, i64)
def _open_region(b, address, body, ctl, size):
    v.call_at(b, address, v.VOID, body, ctl, b.trunc(size, v.INT32), ir.Constant(v.INT32, 0))


_number = v.op(i64, i64)(lambda b, address: b.sext(v.call_at(b, address, v.INT32), v.INT64))


@Kernel
def take_part(ctl):
    """Execute a step as the thread of the runtime that this is."""
    walk(ctl, _number(v.read_i64(ctl + 8 * _RANK)), _number(v.read_i64(ctl + 8 * _SIZE)))


@Kernel
def lead(ctl, tokens, rows, size):
    """Execute one step with up to `size` threads, the calling one included."""
    start = now_ns()
    begin(ctl, tokens, rows, size)
    if size == 1:
        walk(ctl, 0, 1)
    else:
        _open_region(v.read_i64(ctl + 8 * _PARALLEL), v.read_i64(ctl + 8 * _BODY), ctl, size)
    v.write_i64(ctl + 8 * tape.STEP_NS, now_ns() - start)
