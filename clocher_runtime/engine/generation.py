"""The tokens of a call, and the step lock.

A thread that waits for a token runs the next step, unless another does.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from clocher_kernels.errors import SessionBusy, UsageError
from clocher_runtime.engine.requests import OutputQueue, Snapshot, Token
from clocher_runtime.engine.scheduler import Scheduler

_all: "weakref.WeakSet[StepLock]" = weakref.WeakSet()


class StepLock:
    """Exclusive use of a scheduler and its executor."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._renew()
        self._is_closed = False
        _all.add(self)
        # Registered last runs first: before the executor's memory is released.
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)

    def _renew(self) -> None:
        # `with` on the lock itself: Ctrl-C cannot come between acquiring it and entering the block.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._leader: int | None = None  # the thread that has the right
        self._inside: int | None = None  # the same, between entering and leaving the context
        self._asking = 0  # threads that wait for the right, and come before the next step

    @contextmanager
    def taken(self, purpose: str) -> Iterator[None]:
        """Hold the lock. Raises SessionBusy if this thread has it, UsageError if closed."""
        me = threading.get_ident()
        if self._inside == me:
            raise SessionBusy(
                f"{purpose}: called from within a step of this session; return from there first"
            )
        with self._lock:
            self._asking += 1
            try:
                # Held by this thread without being inside: Ctrl-C prevented the release.
                while self._leader not in (None, me):
                    self._changed.wait()
            finally:
                self._asking -= 1
                self._changed.notify_all()
            self._lead(me, purpose)
        with self._led(me):
            yield

    def _lead(self, me: int, purpose: str) -> None:
        """Take the free step lock; the mutex is held."""
        self._leader = None
        if self._is_closed:
            raise _closed(purpose)
        self._leader = me

    @contextmanager
    def _led(self, me: int) -> Iterator[None]:
        try:
            self._inside = me
            yield
        finally:
            self._inside = None
            with self._lock:
                self._leader = None
                self._changed.notify_all()

    def serve(self, queue: OutputQueue) -> None:
        """Run steps, or wait for those of others, until a queue has news. Raises SessionBusy."""
        me = threading.get_ident()
        if self._inside == me:
            raise SessionBusy("generate: called from within a step of this session; return first")
        while not queue.has_news:
            with self._lock:
                # Threads that join, leave or close come first: this one would reacquire at once.
                while (self._asking or self._leader not in (None, me)) and not queue.has_news:
                    self._changed.wait()
                if queue.has_news:
                    return
                self._lead(me, "generate")
            with self._led(me):
                self._scheduler.step()

    def let_go(self, queue: OutputQueue) -> None:
        """Note that a queue is abandoned; its requests are freed now, or after the current step."""
        queue.left = True
        if not self._lock.acquire(blocking=False):
            return  # the thread that has it looks for queues that were left
        try:
            if self._leader is None and not self._is_closed:
                self._scheduler.sweep()
                self._scheduler.rest()
        finally:
            self._lock.release()

    def close(self) -> bool:
        """End all generations, keep the lock; return whether it was open. Raises SessionBusy."""
        if self._is_closed:
            return False
        try:
            with self.taken("close"):
                self._is_closed = True
                self._scheduler.end_all(_closed("this generation cannot go on"))
        except SessionBusy:
            raise
        except UsageError:  # another thread was faster
            return False
        return True

    def forked(self) -> None:
        """Reset in the child of a fork, where the other threads do not exist."""
        alone = self._leader in (None, threading.get_ident())
        self._renew()
        if not alone and not self._is_closed:
            self._scheduler.end_all(UsageError("this process was forked during a step; ask again"))


def _closed(purpose: str) -> UsageError:
    return UsageError(f"{purpose}: the session is closed; load the model again")


def _at_exit() -> None:
    # A daemon thread in a step would continue in memory that the interpreter releases.
    for lock in list(_all):
        with suppress(SessionBusy):
            lock.close()


def _after_fork() -> None:
    for lock in list(_all):
        lock.forked()


os.register_at_fork(after_in_child=_after_fork)


class Generation(Iterator[Token]):
    """The tokens of a call as they are requested; `close` or dropping it ends the call.

    `begin` checks and submits; `end` runs after the last token, raises if the result is invalid.
    """

    def __init__(
        self, begin: Callable[[], OutputQueue], lock: StepLock, end: Callable[[], None]
    ) -> None:
        self._begin, self._lock, self._end = begin, lock, end
        self._queue: OutputQueue | None = None
        self._is_over = False
        self._joining = threading.Lock()

    def __next__(self) -> Token:
        if self._is_over:
            raise StopIteration
        queue = self.begin()
        while True:
            self._lock.serve(queue)
            with suppress(IndexError):  # it ended, or another thread took the token
                return queue.tokens.popleft()
            if queue.is_over:
                self._finish(queue)
                raise StopIteration

    def poll(self) -> list[Token] | None:
        """Return available tokens without a step; None after the last.

        Raises ClocherError where one ended it, at every call from then on, as `next` does.
        """
        queue = self.begin()
        tokens = [queue.tokens.popleft() for _ in range(len(queue.tokens))]
        if tokens or not queue.is_over:
            return tokens
        self._finish(queue)
        return None

    def _finish(self, queue: OutputQueue) -> None:
        if queue.left or self._is_over:
            return
        if queue.error is not None:
            raise queue.error
        self._is_over = True
        self._end()

    def snapshot(self, sequence: int = 0) -> Snapshot | None:
        """Return the state of a sequence whose blocks are denoised; None for others."""
        return None if self._queue is None else self._queue.snapshots.get(sequence)

    def begin(self) -> OutputQueue:
        """Submit the requests now instead of at the first token. Raises UsageError."""
        with self._joining:
            if self._queue is None:
                try:
                    self._queue = self._begin()
                except BaseException:
                    self._is_over = True
                    raise
                if self._is_over:  # closed while it waited to join
                    self._lock.let_go(self._queue)
            return self._queue

    def close(self) -> None:
        """End the generation."""
        self._is_over = True
        if self._queue is not None:
            self._queue.tokens.clear()
            self._lock.let_go(self._queue)

    def __del__(self) -> None:
        if getattr(self, "_queue", None) is not None:
            self.close()
