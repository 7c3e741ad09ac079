"""A team of threads that execute a tape together.

Rank 0 is the thread that calls `step`; the others are workers. Inside `running` the workers are in
compiled code without the interpreter lock, waiting for the next step by spinning, then yielding, then
short sleeps. Outside they are parked in a Python `Event` and cost nothing.

The protocol is level-triggered and has no state that an interruption could leave half-way. A worker
counts the steps that it has executed itself, and every worker executes every step, so a worker that
wakes late, or twice, or never left, does the right thing. `running` sets the stop word to 0 and all
events; leaving it sets the stop word to 1. A worker looks for a step before it looks at the stop word.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from clocher_kernels.errors import UsageError
from cpu_fallback import sync, tape

_LINE = 64


def aligned(nbytes: int) -> np.ndarray:
    """Return zeroed bytes [nbytes] that start on a cache line."""
    raw = np.zeros(nbytes + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + nbytes]


class Team:
    """Threads, their control block and their scratch memory.

    Args:
        threads: size of the team, the calling thread included.
        words: the tape.
        scratch: bytes of scratch memory per thread.
    """

    def __init__(self, threads: int, words: np.ndarray, scratch: int) -> None:
        if threads < 1:
            raise UsageError(f"a team of {threads} threads; expected at least 1")
        self.threads = threads
        scratch = -(-max(scratch, 1) // _LINE) * _LINE
        self._tape = words
        self._scratch = aligned(threads * scratch)
        self._control = aligned(8 * sync.WORDS).view(np.int64)
        self._control[[sync.SIZE, sync.TAPE, sync.TAPE_END, sync.SCRATCH, sync.SCRATCH_BYTES]] = (
            threads,
            words.ctypes.data,
            words.ctypes.data + words.nbytes,
            self._scratch.ctypes.data,
            scratch,
        )
        self._control[sync.STOP] = 1
        self._address = self._control.ctypes.data
        self._lead = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(tape.lead.address)
        self._inside = 0
        self._workers = [_Worker(self, rank) for rank in range(1, threads)]

    def step(self, tokens: int, rows: int) -> None:
        """Execute the tape for this many tokens and output rows."""
        if self._inside:
            self._lead(self._address, tokens, rows)
        else:
            with self.running():
                self._lead(self._address, tokens, rows)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the workers awake between steps."""
        self._inside += 1
        try:
            self._control[sync.STOP] = 0
            for worker in self._workers:
                worker.wake.set()
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._control[sync.STOP] = 1

    def close(self) -> None:
        """End the workers and wait until they have ended."""
        self._inside = 0
        self._control[sync.STOP] = 1
        for worker in self._workers:
            worker.closing = True
            worker.wake.set()
        for worker in self._workers:
            worker.thread.join()
        self._workers = []


class _Worker:
    """One thread of a team other than the caller's."""

    def __init__(self, team: Team, rank: int) -> None:
        self.wake = threading.Event()
        self.closing = False
        # The thread keeps what it touches alive, but not the team, whose owner may forget to close it.
        self._keep = (team._control, team._scratch, team._tape)
        self._serve = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(tape.serve.address)
        self._address = team._address
        self._rank = rank
        self.thread = threading.Thread(target=self._loop, name=f"clocher-{rank}", daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        seen = 0
        while True:
            self.wake.wait()
            self.wake.clear()
            if self.closing:
                return
            seen = self._serve(self._address, self._rank, seen)
