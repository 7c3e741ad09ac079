"""A connection of a client: how many there may be, and how long each may wait.

Sources: RFC 9110, sections 10.1.1 and 15.2.1 (100 Continue); RFC 9112, section 9.6 (half-closed).
"""

import asyncio
import socket
from math import inf

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_S = 20.0
"""Seconds for the headers of a request: the first from the connection on, others from a byte on."""

BODY_S = 60.0
"""Seconds for a body, from its headers on."""

OUTPUT_S = 20.0
"""Seconds in which a client has to take something of what waits for it."""


class Connection(H11Protocol):
    """A connection, one of not too many, on which something has to happen in time."""

    most = 1024
    """Connections at a time. Below the limit of descriptors, or the engine could not be started."""

    _stage: tuple[object, ...] = ()
    """What was waited for at the last look; empty before the first."""

    _since = inf
    _half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for its first request; one too many ends one that idles."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            ours = (each for each in self.connections if isinstance(each, Connection))
            gone = next((each for each in ours if each._has_idled), self)
            self.connections.discard(gone)  # before the loop has closed it
            gone.transport.abort()

    def look(self, now: float) -> None:
        """End the connection if what it waits for has not come in time."""
        stage, limit = self._waits_for()
        if stage != self._stage:
            self._stage, self._since = stage, now
        if now - self._since >= limit or (self._half_closed and self._is_reset()):
            self.transport.abort()

    def _waits_for(self) -> tuple[tuple[object, ...], float]:
        """Return what has to change, and within how many seconds."""
        if unsent := self.transport.get_write_buffer_size():
            return ("output", unsent), OUTPUT_S
        if self.conn.their_state is h11.SEND_BODY:
            return ("body", self.cycle), BODY_S
        if self._answers:
            return ("answer",), inf
        begun = self.cycle is None or self.conn.trailing_data[0]
        # uvicorn ends those on which nothing has begun.
        return ("headers" if begun else "idle", self.cycle), HEADER_S if begun else inf

    @property
    def _has_idled(self) -> bool:
        """Whether nothing has come since the last look, and nobody waits for the server."""
        stage, _ = self._waits_for()
        return stage == self._stage and stage[0] != "output" and not self._answers

    @property
    def _answers(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a client that has said all it wants to say; return whether it is there.

        One that closed its socket looks the same until something is sent to it. Before an answer
        that is a 100, which every client skips; `EventStream` sends a comment.
        """
        if not self._answers or self.cycle.more_body:
            return False
        self._half_closed = True
        if self.cycle.response_started:
            self.cycle.message_event.set()
        elif self.scope["http_version"] != "1.0":
            told = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(told))
        return not self._is_reset()

    def _is_reset(self) -> bool:
        """Return whether the client has refused what was sent to it."""
        found: socket.socket = self.transport.get_extra_info("socket")
        return found.fileno() < 0 or found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0

    def on_response_complete(self) -> None:
        """Go on with the next request, if there can be one."""
        super().on_response_complete()
        if self._half_closed and not self._answers:
            self.transport.close()
