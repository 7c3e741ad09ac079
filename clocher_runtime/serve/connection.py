"""Client connections: number and timeouts. Sources: RFC 9110, 10.1.1 and 15.2.1; RFC 9112, 9.6."""

import asyncio
import socket
from math import inf

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_S = 20.0
"""Seconds for request headers, from the connection on; for later requests from the first byte."""

BODY_S = 60.0

OUTPUT_S = 20.0
"""Seconds in which a client has to read some of the pending output."""


class Connection(H11Protocol):
    """An HTTP connection with timeouts, of a limited number."""

    most = 1024
    """Open connections, kept below the descriptor limit so that the engine can still start."""

    _stage: tuple[object, ...] = ()

    _since = inf
    _half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the header timeout; above `most`, close an idle connection."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            ours = (each for each in self.connections if isinstance(each, Connection))
            gone = next((each for each in ours if each._has_idled), self)
            self.connections.discard(gone)  # before the loop has closed it
            gone.transport.abort()

    def look(self, now: float) -> None:
        """Close the connection if it has timed out."""
        stage, limit = self._waits_for()
        if stage != self._stage:
            self._stage, self._since = stage, now
        if now - self._since >= limit or (self._half_closed and self._is_reset()):
            self.transport.abort()

    def _waits_for(self) -> tuple[tuple[object, ...], float]:
        """Return the state that has to change, and within how many seconds."""
        if unsent := self.transport.get_write_buffer_size():
            return ("output", unsent), OUTPUT_S
        if self.conn.their_state is h11.SEND_BODY:
            return ("body", self.cycle), BODY_S
        if self._answers:
            return ("answer",), inf
        begun = self.cycle is None or self.conn.trailing_data[0]
        # uvicorn times out connections without a request.
        return ("headers" if begun else "idle", self.cycle), HEADER_S if begun else inf

    @property
    def _has_idled(self) -> bool:
        """Whether nothing has arrived since the last check and no answer is pending."""
        stage, _ = self._waits_for()
        return stage == self._stage and stage[0] != "output" and not self._answers

    @property
    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep answering a half-closed client; return whether to keep the connection.

        A closed socket looks the same until something is sent: a 100 before an answer, which
        clients skip, or a comment of `EventStream`.
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
        found: socket.socket = self.transport.get_extra_info("socket")
        return found.fileno() < 0 or found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0

    def on_response_complete(self) -> None:
        """Start the next request, if there is one."""
        super().on_response_complete()
        if self._half_closed and not self._answers:
            self.transport.close()
