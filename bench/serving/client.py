"""A client that takes little of the CPU it shares with the server: raw sockets, few objects.

A request has a connection of its own. The clock is read once for what a socket gave at once, and an
answer is parsed no further than its fields that count.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.measure import NotMeasured

LEFT = "left"
"""Error of a request that the client itself gave up."""
PATIENCE_S = 600.0
"""After this time an answer counts as one that never came."""
_SHOWN = 120


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server listens."""

    host: str
    port: int
    key: str = ""

    @classmethod
    def of(cls, url: str, key: str = "") -> "Target":
        """Return the target of http://HOST:PORT.

        Raises:
            NotMeasured: it is another kind of address.
        """
        scheme, _, rest = url.rstrip("/").partition("://")
        host, colon, port = rest.rpartition(":")
        if scheme != "http" or not colon or not host or not port.isdigit():
            raise NotMeasured(f"{url}: expected http://HOST:PORT")
        return cls(host.strip("[]"), int(port), key)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a request."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Chunks:
    """Takes the chunks of HTTP/1.1 apart."""

    def __init__(self) -> None:
        self._held = b""
        self.is_over = False

    def feed(self, data: bytes) -> bytes:
        """Return what is in the chunks that are complete now."""
        held, at, found = self._held + data, 0, []
        while not self.is_over and (line := held.find(b"\r\n", at)) >= 0:
            begin = line + 2
            end = begin + int(held[at:line].partition(b";")[0], 16)
            if len(held) < end + 2:
                break
            found.append(held[begin:end])
            self.is_over = begin == end
            at = end + 2
        self._held = held[at:]
        return b"".join(found)


class Events:
    """Takes server-sent events apart."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that are complete now; comments have none."""
        text = (self._held + data).replace(b"\r\n", b"\n")
        *events, self._held = text.split(b"\n\n")
        found = []
        for event in events:
            lines = [line[5:].lstrip() for line in event.split(b"\n") if line[:5] == b"data:"]
            if lines:
                found.append(b"\n".join(lines))
        return found


class Delta(msgspec.Struct):
    """What a chunk of a chat says."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    """What a chunk says of one of the answers."""

    text: str = ""
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def says(self) -> bool:
        """Whether it carries a token that can be seen."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.tool_calls)


class Usage(msgspec.Struct):
    """How many tokens there were."""

    completion_tokens: int


class Chunk(msgspec.Struct):
    """An event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


@dataclass(eq=False, slots=True)
class Exchange(asyncio.Protocol):
    """A request and its answer, as it comes.

    Attributes:
        request: bytes to send.
        started: when the connection was asked for.
        ended: when the answer was complete, or nothing came any more; 0: not yet.
        stamps: when each chunk with a token came.
        tokens: of the output, as the server counts them; None: it did not say.
        status: of HTTP; 0: none came.
        headers: of the answer, names in small letters.
        body: of an answer that is no stream.
        finish: why the output ended, as the server says.
        error: what went wrong; "" if nothing did.
    """

    request: bytes
    started: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    stamps: list[float] = field(default_factory=list)
    tokens: int | None = None
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    finish: str | None = None
    error: str = ""
    _done: asyncio.Event = field(default_factory=asyncio.Event)
    _token: asyncio.Event = field(default_factory=asyncio.Event)
    _transport: asyncio.Transport | None = None
    _head: bytes = b""
    _chunks: Chunks | None = None
    _events: Events | None = None
    _is_complete: bool = False  # [DONE] came

    @property
    def lasted(self) -> float:
        """Seconds from the first token to the last."""
        return self.stamps[-1] - self.stamps[0]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        now = time.perf_counter()
        if self.ended:
            return
        if not self.status:
            self._head += data
            head, blank, data = self._head.partition(b"\r\n\r\n")
            if not blank:
                return
            self._begin(head.decode("latin-1"))
        try:
            plain = self._chunks.feed(data) if self._chunks else data
            for event in self._events.feed(plain) if self._events else ():
                self._take(event, now)
        except (ValueError, msgspec.DecodeError) as error:
            self._end(f"answer that cannot be read: {error}"[:_SHOWN])
            return
        if not self._events:
            self.body += plain
        size = int(self.headers.get("content-length", "-1"))
        if self._chunks and self._chunks.is_over:
            self._end("" if self._is_complete or not self._events else "stream without [DONE]")
        elif 0 <= size <= len(self.body):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """End what has not ended; without a length the end of an answer is that of the line."""
        framed = self._events or self._chunks or "content-length" in self.headers
        cut = exc or not self.status or (framed and not self._is_complete)
        self._end(f"connection lost: {exc or 'closed'}" if cut else "")

    def leave(self) -> None:
        """Give up, as a client does that is killed: nothing more is read or sent."""
        self._end(LEFT)
        if self._transport is not None:
            self._transport.abort()

    async def answered(self, patience_s: float = PATIENCE_S) -> "Exchange":
        """Wait for the end of the answer."""
        try:
            await asyncio.wait_for(self._done.wait(), patience_s)
        except TimeoutError:
            self._end(f"no end within {patience_s:g} s")
        return self

    async def has_tokens(self, count: int) -> bool:
        """Wait for chunks with a token; False: it ended before there were so many."""
        while len(self.stamps) < count and not self.ended:
            self._token.clear()
            await self._token.wait()
        return len(self.stamps) >= count

    def _begin(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        self.status = int(first.split()[1])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            self._chunks = Chunks()
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            self._events = Events()

    def _take(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self._is_complete = True
            return
        chunk = _decode(event)
        if chunk.error is not None:
            said = chunk.error.get("message") if isinstance(chunk.error, dict) else chunk.error
            self._end(f"error event: {said}"[:_SHOWN])
            return
        if chunk.usage:
            self.tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            self.finish = choice.finish_reason or self.finish
            if choice.says:
                self.stamps.append(now)
                self._token.set()

    def _end(self, error: str = "") -> None:
        if not self.ended:
            self.ended = time.perf_counter()
            failed = f"HTTP {self.status}" if self.status >= 400 else ""
            self.error = error or failed
            self._done.set()
            self._token.set()
            if self._transport is not None:
                self._transport.close()


async def start(target: Target, request: bytes) -> Exchange:
    """Send a request; a server that refuses the connection makes it an exchange with an error."""
    exchange = Exchange(request)
    loop = asyncio.get_running_loop()
    try:
        await loop.create_connection(lambda: exchange, target.host, target.port)
    except OSError as error:
        exchange._end(f"no connection: {error.strerror or error}"[:_SHOWN])
    return exchange


async def get(target: Target, path: str) -> Exchange:
    """Return the answer of a page."""
    return await (await start(target, target.request("GET", path))).answered()
