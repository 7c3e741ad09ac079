"""Bodies of requests: how large one may be, and all together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from clocher_runtime.serve.errors import body_too_large, unavailable

SMALL_BODY_BYTES = 1 << 16
"""Larger bodies are checked in the thread for text, and count as held."""

HELD_BODIES = 8
"""So many of the largest bodies may be held at a time."""


class Bodies:
    """The bodies that are being read or checked.

    Args:
        most: bytes of the largest.
    """

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Read a body, and hold it while the context is open. The connection has a deadline for it.

        Raises:
            ApiError: 413: it is too large. 503: too much is held already.
        """
        length = request.headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length) > self._most:
            raise body_too_large(self._most)
        data, held = bytearray(), 0
        try:
            async for piece in request.stream():
                data += piece
                if len(data) > self._most:
                    raise body_too_large(self._most)
                if len(data) > SMALL_BODY_BYTES:
                    self._held += len(data) - held
                    held = len(data)
                if held and self._held > HELD_BODIES * self._most:
                    raise unavailable("overloaded")
            body = bytes(data)
            data.clear()
            yield body
        finally:
            self._held -= held
