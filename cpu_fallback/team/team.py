"""A team of threads that execute a tape together.

Rank 0 is the thread that calls `step`; the others are workers. Inside `running` the workers are in
compiled code without the interpreter lock, waiting for the next step by spinning, then yielding,
then short sleeps. Outside they are parked in a lock and cost nothing.

The protocol is level-triggered and has no state that an interruption could leave half-way. A worker
remembers the last step that it has seen, and a step cannot end without the workers that take part
in it (`Pace`), so a worker that wakes late, or twice, or never left, does the right thing.
`running` sets the stop word to 0 and wakes all; leaving it sets the stop word to 1. A worker looks
for a step before it looks at the stop word.

The child of a fork has the thread that forked and no workers. What they left half-way is cleared
there, and the next `running` starts new ones.

With an `OpenMP` the team has no workers: the runtime's threads take part, and wait as they do.

With a `Placement` each thread is pinned to its CPU: workers for life, the calling thread while it
is inside `running`.
"""

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from clocher_kernels.errors import DeviceError, UsageError
from cpu_fallback.team import tape
from cpu_fallback.team.placement import Hints, Pace, pin, unpin

_LINE = 64
_MOST_THREADS = (1 << 16) - 1
_teams: "weakref.WeakSet[Team]" = weakref.WeakSet()


def aligned(nbytes: int) -> np.ndarray:
    """Return zeroed bytes [nbytes] that start on a cache line."""
    raw = np.zeros(nbytes + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + nbytes]


class Work:
    """A tape that a team executes, or one for each thread, and `scratch` bytes for each thread."""

    def __init__(
        self, threads: int, words: np.ndarray | Sequence[np.ndarray], scratch: int
    ) -> None:
        self.pace = Pace(threads)
        self.tapes = [words] * threads if isinstance(words, np.ndarray) else list(words)
        self.addresses = np.array([each.ctypes.data for each in self.tapes], np.int64)
        scratch = -(-max(scratch, 1) // _LINE) * _LINE
        self.scratch = aligned(threads * scratch)
        words = (self.addresses.ctypes.data, self.scratch.ctypes.data, scratch)
        self._words = np.array(words, np.int64)

    def lay_before(self, control: np.ndarray) -> None:
        """Write into a control block that this is what the next step executes."""
        control[tape.TAPES : tape.SCRATCH_BYTES + 1] = self._words


class Team:
    """Threads, the calling one among them, and what they execute; see `Work`. Raises DeviceError.

    `hints`: where the threads run, whether some sit out (`Pace`), and whose threads take part.
    """

    def __init__(
        self,
        threads: int,
        words: np.ndarray | Sequence[np.ndarray],
        scratch: int,
        hints: Hints | None = None,
    ) -> None:
        if not 1 <= threads <= _MOST_THREADS:
            raise UsageError(f"a team of {threads} threads; expected at least 1, at most 65535")
        self.threads = threads
        self.work = self._laid = Work(threads, words, scratch)
        self._others: weakref.WeakSet[Work] = weakref.WeakSet()
        hints = hints or Hints()
        self._adaptive = hints.adaptive and threads > 1
        self._placement, runtime = hints.placement, hints.runtime
        self._control = aligned(8 * (tape.LOST + tape.LINE * threads)).view(np.int64)
        self.work.lay_before(self._control)
        self._control[tape.STOP] = 1
        self._address = self._control.ctypes.data
        self._has_workers = runtime is None
        lead = tape.lead
        if runtime:
            from cpu_fallback.team.openmp import lead

            runtime.write(self._control)
        self._lead = lead.callable
        self._inside = 0
        self._led_by = 0
        self._before: frozenset[int] = frozenset()
        self._workers: list[_Worker] = []
        # For an owner that forgets to close, and for the end of the interpreter.
        self._finalizer = weakref.finalize(self, _end, self._control, self._workers)
        self._start_workers()
        _teams.add(self)

    def take_on(self, words: np.ndarray | Sequence[np.ndarray], scratch: int) -> Work:
        """Return something else that `step` can be given; see `Work`."""
        work = Work(self.threads, words, scratch)
        self._others.add(work)
        return work

    def step(self, tokens: int, rows: int, work: Work | None = None) -> None:
        """Execute a tape for this many tokens and output rows; None: the team's own."""
        if not self._inside and self._has_workers:
            with self.running():
                self.step(tokens, rows, work)
            return
        work = work or self.work
        self._lay(work)
        self._lead(self._address, tokens, rows, work.pace.of(tokens))
        if self._adaptive:
            work.pace.stepped((tokens, rows), self.step_ns, self._lost)

    @property
    def step_ns(self) -> int:
        """Nanoseconds of the last step."""
        return int(self._control[tape.STEP_NS])

    def execute(self, words: np.ndarray, tokens: int, rows: int, work: Work | None = None) -> None:
        """Execute a tape of some launches of `work` once. Only inside `running`."""
        work = work or self.work
        self._lay(work)
        own = work.addresses.copy()
        work.addresses[...] = words.ctypes.data
        try:
            self._lead(self._address, tokens, rows, work.pace.of(tokens))
        finally:
            work.addresses[...] = own

    def _lay(self, work: Work) -> None:
        """Let the next step execute something; no worker looks there between two steps."""
        if work is not self._laid:
            work.lay_before(self._control)
            self._laid = work

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the workers awake between steps. Raises UsageError once the team is closed."""
        if not self._finalizer.alive:
            raise UsageError("a closed team was asked to run; make another executor")
        self._inside += 1
        try:
            if self._inside == 1:
                self._start_workers()
                self._led_by = threading.get_native_id()
                self._before = pin(self._placement.cpu(0))
            self._control[tape.STOP] = 0
            for worker in self._workers:
                worker.wake()
            yield
        finally:
            self._inside = max(0, self._inside - 1)
            if not self._inside:
                self._control[tape.STOP] = 1
                unpin(self._before, self._led_by)

    def close(self) -> None:
        """End the workers and wait until they have ended. The team cannot step again."""
        self._inside = 0
        self._finalizer()

    def _start_workers(self) -> None:
        """Start the workers that are missing."""
        for rank in range(len(self._workers) + 1, self.threads if self._has_workers else 0):
            try:
                worker = _Worker(self._control, rank, self._placement.cpu(rank))
            except RuntimeError:
                self.close()
                raise DeviceError(
                    f"the system starts no more than {rank} of {self.threads} threads; lower "
                    "--threads, or raise the limit of processes (ulimit -u)"
                ) from None
            self._workers.append(worker)

    def forget_workers(self) -> None:
        """Make the child of a fork forget its parent's workers, and the step that was going on.

        They do not exist there, so there is nothing to end.
        """
        self._workers.clear()
        self._inside = 0
        unpin(self._before, 0)
        self._before = frozenset()
        self._control[tape.EPOCH :] = 0
        self._control[tape.STOP] = 1
        for work in (self.work, *self._others):
            for words in work.tapes:
                tape.clear_counts(words)

    def _lost(self) -> int:
        """Return what the thread that lost most has lost at barriers since the last call, in ns."""
        counts = self._control[tape.LOST :: tape.LINE]
        most = int(counts.max())
        counts[...] = 0
        return most


class _Worker:
    """One thread of a team other than the caller's.

    It holds the control block and not the team, so that a team can be collected; the thread that
    leads a step holds what is read and written there.
    """

    def __init__(self, control: np.ndarray, rank: int, cpu: int | None) -> None:
        # Not an Event: a signal that arrives in its `set` may leave it locked.
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self.closing = False
        self._serve = tape.serve.callable
        self._control = control
        self._rank = rank
        self._cpu = cpu
        self.thread = threading.Thread(target=self._loop, name=f"clocher-{rank}", daemon=True)
        self.thread.start()

    def wake(self) -> None:
        """Let the thread look for a step, now or when it next would sleep."""
        with suppress(RuntimeError):  # it is awake
            self._asleep.release()

    def _loop(self) -> None:
        pin(self._cpu)
        seen = 0
        while True:
            self._asleep.acquire()
            if self.closing:
                return
            seen = self._serve(self._control.ctypes.data, self._rank, seen)


def _forked() -> None:
    for team in list(_teams):
        team.forget_workers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _end(control: np.ndarray, workers: list[_Worker]) -> None:
    control[tape.STOP] = 1
    for worker in workers:
        worker.closing = True
        worker.wake()
    for worker in workers:
        if worker.thread is not threading.current_thread():
            worker.thread.join()
