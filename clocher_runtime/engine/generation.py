"""The tokens of a call, as an iterator."""

import threading
from collections.abc import Callable, Iterator

from clocher_runtime.engine.requests import OutputQueue, Snapshot, Token
from clocher_runtime.engine.step_lock import StepLock


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
        if self._is_over:
            raise StopIteration
        while True:
            self._lock.serve(queue)
            try:
                return queue.tokens.popleft()
            except IndexError:  # it ended, or another thread took the token
                if queue.is_over:
                    break
        if queue.error is not None and not queue.left:
            raise queue.error
        self._is_over = True
        if not queue.left:
            self._end()
        raise StopIteration

    def poll(self) -> list[Token] | None:
        """Return available tokens without a step; None after the last. Raises ClocherError."""
        queue = self.begin()
        tokens = [queue.tokens.popleft() for _ in range(len(queue.tokens))]
        if tokens or not queue.is_over:
            return tokens
        if self._is_over:
            return None
        self._is_over = True
        if queue.error is not None and not queue.left:
            raise queue.error
        self._end()
        return None

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
