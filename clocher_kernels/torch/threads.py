"""The threads of CPU ops: those of torch's own ops, or a separate team."""

import os
from contextlib import AbstractContextManager
from functools import cache

import torch

from clocher_kernels.library.host import Host, host
from cpu_fallback.team.openmp import OpenMP

_PROCESS = os.getpid()


@cache
def _runtime(process: int) -> OpenMP | None:
    # After a fork it would wait for threads that the child does not have.
    return OpenMP.of(torch._C.__file__) if process == _PROCESS else None


def team(threads: int | None = None) -> Host:
    """Return the team of a size; None: as many threads as torch has."""
    return host(torch.get_num_threads() if threads is None else threads, _runtime(os.getpid()))


def awake(threads: int | None = None) -> AbstractContextManager[None]:
    """Return a context in which a team of our own does not sleep between two calls."""
    running: AbstractContextManager[None] = team(threads).executor.running()
    return running
