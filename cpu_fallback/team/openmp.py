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

from cpu_fallback.lanes.jit import Kernel
from cpu_fallback.lanes.late import i64, void
from cpu_fallback.lanes.memory import read_i64, write_i64
from cpu_fallback.lanes.vector import op
from cpu_fallback.team import sync
from cpu_fallback.team.sync import now_ns
from cpu_fallback.team.tape import begin, walk

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_PARALLEL, _RANK, _SIZE, _BODY = range(sync.STOP + 1, sync.STOP + 5)


class OpenMP(NamedTuple):
    """Addresses of a runtime's functions.

    Attributes:
        parallel: `GOMP_parallel`.
        rank: `omp_get_thread_num`.
        size: `omp_get_num_threads`.
    """

    parallel: int
    rank: int
    size: int

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


@op(void, i64, i64, i64, i64)
def _open_region(b, address, body, ctl, size):
    kind = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I32, _I32])
    arguments = [body, ctl, b.trunc(size, _I32), ir.Constant(_I32, 0)]
    b.call(b.inttoptr(address, kind.as_pointer()), arguments)


@op(i64, i64)
def _number(b, address):
    kind = ir.FunctionType(_I32, [])
    return b.sext(b.call(b.inttoptr(address, kind.as_pointer()), []), _I64)


def _take_part(ctl):
    """Execute the step as one of the threads of a region."""
    walk(ctl, _number(read_i64(ctl + 8 * _RANK)), _number(read_i64(ctl + 8 * _SIZE)))


def _lead(ctl, tokens, rows, size):
    """Execute one step with up to `size` threads, the calling one included."""
    start = now_ns()
    begin(ctl, tokens, rows, size)
    if size == 1:
        walk(ctl, 0, 1)
    else:
        _open_region(read_i64(ctl + 8 * _PARALLEL), read_i64(ctl + 8 * _BODY), ctl, size)
    write_i64(ctl + 8 * sync.STEP_NS, now_ns() - start)


take_part = Kernel(_take_part)
lead = Kernel(_lead)
