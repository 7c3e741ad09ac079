"""The sequences of one HTTP request, from the engine's answers to who reads them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clocher_runtime.serve.errors import ApiError
from clocher_runtime.serve.messages import Made, Scored, Unsure

MAX_UNREAD, UNREAD_S = 256, 5.0
"""Tokens of a sequence that nobody took for so many seconds; then the request is cancelled."""

_FAR_BEHIND = 1 << 16
"""Tokens that nobody took, however fast they were made."""


class News(NamedTuple):
    """Something that a request gets of one of its sequences: a token, or what is told of it."""

    sequence: int
    what: Made | Unsure | Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A sequence to be made; see `messages.Submit`."""

    ids: list[int]
    max_new: int
    sampling: Mapping[str, Any]
    stop_ids: tuple[int, ...] = ()
    logprobs: int = -1
    scores: bool = False
    salt: str = ""
    constraint: Mapping[str, Any] | None = None
    diffusion: str | None = None
    shows: bool = False


class Job:
    """The sequences of one HTTP request, and what the engine has made for them.

    Args:
        numbers: what the engine calls them, in order.
        cancel: tells the engine that nobody wants a sequence any more.
    """

    def __init__(self, numbers: Sequence[int], cancel: Callable[[int], None]) -> None:
        self._limit: asyncio.TimerHandle | None = None
        self._open = {number: index for index, number in enumerate(numbers)}
        self._numbers = list(numbers)
        self._cancel = cancel
        self._news: list[News] = []
        self._unread_since = 0.0
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether every sequence has ended and been taken."""
        return not self._open and not self._news

    async def read(self) -> list[News]:
        """Return what has come since, at least one piece; wait for it. [] at the end.

        Raises:
            ApiError: the request cannot be done, or the engine has died.
        """
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
        """Want no more of a sequence."""
        number = self._numbers[sequence]
        if self._open.pop(number, None) is not None:
            self._cancel(number)
        self._wake()

    def close(self) -> None:
        """Want no more of any."""
        for number in list(self._open):
            self._open.pop(number)
            self._cancel(number)
        self._news.clear()
        if self._limit is not None:
            self._limit.cancel()

    def expire(self, seconds: float) -> None:
        """Fail after some time, unless it is over by then."""
        loop = asyncio.get_running_loop()
        self._limit = loop.call_later(seconds, self.fail, _late(seconds))

    def put(self, number: int, what: Made | Unsure | Scored, last: bool) -> None:
        """Note something for a sequence."""
        index = self._open.get(number)
        if index is None:
            return
        if last:
            del self._open[number]
        if not self._news:
            self._unread_since = asyncio.get_running_loop().time()
        self._news.append(News(index, what))
        if len(self._news) > MAX_UNREAD * len(self._numbers):
            waited = asyncio.get_running_loop().time() - self._unread_since
            if waited > UNREAD_S or len(self._news) > _FAR_BEHIND * len(self._numbers):
                self.fail(_slow())
        self._wake()

    def fail(self, error: ApiError) -> None:
        """End all sequences."""
        self.close()
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _slow() -> ApiError:
    return ApiError(
        408,
        "The answer was not read as fast as it was made; read faster",
        type="invalid_request_error",
        code="slow_reader",
    )


def _late(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"The answer was not complete after {seconds:g} s; ask for less",
        type="server_error",
        code="timeout",
    )
