"""The sequences of one HTTP request, from engine messages to their reader."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from clocher_runtime.serve.errors import ApiError, failure
from clocher_runtime.serve.messages import Made, Scored, Unsure

MAX_UNREAD, UNREAD_S = 256, 5.0
"""A request with so many unread tokens in a sequence for so many seconds is cancelled."""
_FAR_BEHIND = 1 << 16  # unread tokens of a sequence, at any speed


class News(NamedTuple):
    """An event of a sequence."""

    sequence: int
    what: Made | Unsure | Scored


class Job:
    """The sequences of a request, by their engine ids `numbers`; `cancel` stops one there."""

    def __init__(self, numbers: Sequence[int], cancel: Callable[[int], None]) -> None:
        self._open = {number: index for index, number in enumerate(numbers)}
        self._numbers, self._cancel = list(numbers), cancel
        self._limit: asyncio.TimerHandle | None = None
        self._news: list[News] = []
        self._unread_since = 0.0
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether all sequences have ended and been read."""
        return not self._open and not self._news

    async def read(self) -> list[News]:
        """Wait for events and return them, [] at the end; raises ApiError."""
        if not self._news and self._error is None and self._open:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news, self._news = self._news, []
        if self.is_over and self._limit is not None:
            self._limit.cancel()
        if not news and self._error is not None:
            raise self._error
        return news

    def end(self, sequence: int) -> None:
        """Cancel a sequence."""
        number = self._numbers[sequence]
        if self._open.pop(number, None) is not None:
            self._cancel(number)
        self._wake()

    def close(self) -> None:
        """Cancel all sequences and drop unread events."""
        for number in list(self._open):
            self._open.pop(number)
            self._cancel(number)
        self._news.clear()
        if self._limit is not None:
            self._limit.cancel()

    def expire(self, seconds: float) -> None:
        """Fail after some time, unless finished by then."""
        late = failure("timeout", seconds=seconds)
        self._limit = asyncio.get_running_loop().call_later(seconds, self.fail, late)

    def put(self, number: int, what: Made | Unsure | Scored, last: bool) -> None:
        """Add an event to a sequence."""
        index = self._open.get(number)
        if index is None:
            return
        if last:
            del self._open[number]
        now = asyncio.get_running_loop().time()
        if not self._news:
            self._unread_since = now
        self._news.append(News(index, what))
        unread = len(self._news) / len(self._numbers)
        late = now - self._unread_since > UNREAD_S
        if unread > MAX_UNREAD and (late or unread > _FAR_BEHIND):
            self.fail(failure("slow_reader"))
        self._wake()

    def fail(self, error: ApiError) -> None:
        """End all sequences with an error."""
        self.close()
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
