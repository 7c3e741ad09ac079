"""Server-sent events, and the end of work that nobody waits for.

Source: HTML standard, section 9.2 (event stream); OpenAI API reference, streaming.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import TypeVar

from starlette.types import Message, Receive, Scope, Send

from clocher_runtime.serve.edge import log_defect
from clocher_runtime.serve.errors import ApiError, from_exception
from clocher_runtime.serve.json_text import to_json

KEEP_ALIVE_S = 15.0
"""A comment is sent if there was nothing else for so long: proxies give up on silent streams."""

DONE = b"data: [DONE]\n\n"
_COMMENT = {"type": "http.response.body", "body": b": keepalive\n\n", "more_body": True}
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect them
]
T = TypeVar("T")


class Disconnected(Exception):
    """The client is gone."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await some work; end it when the client goes.

    Args:
        receive: of a request whose body has been read.
        work: to be awaited.

    Raises:
        Disconnected: the client went first.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise Disconnected
    finally:
        watcher.cancel()
        if not worker.done():
            worker.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await worker


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of events: an ASGI application.

    An error that ends the events becomes the last of them: the status has been sent already.

    Args:
        events: each complete, with its empty line. It is closed when the client goes.
    """

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self._events, self._sent = events, 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        self._sent = asyncio.get_running_loop().time()
        keeper = asyncio.ensure_future(self._keep_alive(send))

        async def hear() -> Message:
            message = await receive()
            if message["type"] == "http.request":  # nothing more comes: is the client there?
                await send(_COMMENT)
            return message

        try:
            await unless_gone(hear, self._send_all(send))
        except (Disconnected, OSError):
            pass
        finally:
            keeper.cancel()
            await self._events.aclose()  # type: ignore[attr-defined]

    async def _send_all(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        try:
            async for event in self._events:
                self._sent = now()
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            if not isinstance(error, ApiError | OSError):
                log_defect(error)
            await send(
                {"type": "http.response.body", "body": error_event(error), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b""})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(max(self._sent + KEEP_ALIVE_S - now, 1.0))
            if asyncio.get_running_loop().time() - self._sent >= KEEP_ALIVE_S:
                await send(_COMMENT)
                self._sent = asyncio.get_running_loop().time()


def error_event(error: BaseException) -> bytes:
    """Return the event of an error; clients know it by its key."""
    return b"data: " + to_json(from_exception(error).body) + b"\n\n" + DONE
