"""A team of threads that execute a tape together.

Rank 0 is the thread that calls `step`; the others are workers. Inside `running` the workers are in
compiled code without the interpreter lock, waiting for the next step by spinning, then yielding,
then short sleeps. Outside they are parked in a Python `Event` and cost nothing.

The protocol is level-triggered and has no state that an interruption could leave half-way. A worker
counts the steps that it has executed itself, and every worker executes every step, so a worker that
wakes late, or twice, or never left, does the right thing. `running` sets the stop word to 0 and all
events; leaving it sets the stop word to 1. A worker looks for a step before it looks at the stop
word.
"""

import ctypes
import threading
import weakref
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
        self._scratch = aligned(threads * scratch)
        self._words = words
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
        kept_alive = (self._control, self._scratch, words)
        self._workers = [_Worker(self._address, rank, kept_alive) for rank in range(1, threads)]
        # For an owner who forgets to close, and for the end of the interpreter.
        self._finalizer = weakref.finalize(self, _end, self._control, self._workers)

    def step(self, tokens: int, rows: int) -> None:
        """Execute the tape for this many tokens and output rows."""
        if self._inside:
            self._lead(self._address, tokens, rows)
        else:
            with self.running():
                self._lead(self._address, tokens, rows)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the workers awake between steps.

        Raises:
            UsageError: the team is closed.
        """
        if not self._finalizer.alive:
            raise UsageError("a closed team was asked to run; make another executor")
        self._inside += 1
        try:
            self._control[sync.STOP] = 0
            for worker in self._workers:
                worker.wake.set()
            yield
        finally:
            self._inside = max(0, self._inside - 1)
            if not self._inside:
                self._control[sync.STOP] = 1

    def close(self) -> None:
        """End the workers and wait until they have ended. The team cannot step again."""
        self._inside = 0
        self._finalizer()


class _Worker:
    """One thread of a team other than the caller's.

    Args:
        control: address of the control block.
        rank: its number, from 1.
        kept_alive: what it reads and writes. It holds these and not the team, so that a team can be
            collected.
    """

    def __init__(self, control: int, rank: int, kept_alive: tuple[np.ndarray, ...]) -> None:
        self.wake = threading.Event()
        self.closing = False
        self._kept_alive = kept_alive
        self._serve = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(tape.serve.address)
        self._control = control
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
            seen = self._serve(self._control, self._rank, seen)


def _end(control: np.ndarray, workers: list[_Worker]) -> None:
    control[sync.STOP] = 1
    for worker in workers:
        worker.closing = True
        worker.wake.set()
    for worker in workers:
        if worker.thread is not threading.current_thread():
            worker.thread.join()
