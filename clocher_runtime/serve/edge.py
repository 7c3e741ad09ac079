"""Access, bodies, errors, server-sent events, files of the chat page.

Sources: RFC 9112, 6.1; HTML standard, 9.2; Content Security Policy Level 3 (W3C).
"""

import asyncio
import hashlib
import hmac
import logging
import os
import re
import secrets
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clocher_runtime.config.commands import is_local
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.serve.answers import Pipeline
from clocher_runtime.serve.errors import ApiError, failure, from_exception, invalid, to_json

PUBLIC = frozenset({"/health"})
SMALL_BODY_BYTES = 1 << 16
"""Larger bodies are validated in the text thread and count as held."""
HELD_BODIES = 8
"""Limit of held bytes, in bodies of the largest size."""
KEEP_ALIVE_S = 15.0
"""Seconds of silence before a comment is sent, so that proxies keep the stream."""
_NAME, _IS_NAME = b"x-request-id", re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_COMMENT = {"type": "http.response.body", "body": b": keepalive\n\n", "more_body": True}
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer them
]
FOLDER = Path(__file__).parents[1] / "assets" / "page"
_MAX_BYTES = 1 << 18
_MEDIA = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
_PAGE_HEADERS = {
    # Only files of this server run or are asked: model output can run nothing.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "font-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Browsers prefetch DNS of links, and model output may name any host.
    "x-dns-prefetch-control": "off",
}
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Disconnected(Exception):
    """The client has disconnected."""


@dataclass(slots=True)
class Named:
    """Middleware: gives each response a request id; refuses bodies with two lengths."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        given = headers.get(_NAME, b"")
        name = given if _IS_NAME.fullmatch(given) else secrets.token_hex(12).encode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_NAME, name)]
            await send(message)

        app = self.app
        if headers.keys() >= {b"content-length", b"transfer-encoding"}:
            wrong = "The headers Content-Length and Transfer-Encoding came together; send one"
            app = error_response(invalid(wrong), scope["path"])
            app.headers["connection"] = "close"
        await app(scope, receive, named)


@dataclass(slots=True)
class Gate:
    """Middleware: refuses requests from foreign web pages, and requests without the key.

    A page can send simple requests to a local server, or resolve its own name to it (DNS
    rebinding), so Origin and Host are checked. `key` None disables the key; `public` paths need
    none; `origins` may call; `only_local`: Host must name this machine.
    """

    app: ASGIApp
    key: str | None
    public: Collection[str]
    origins: Collection[str]
    only_local: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it."""
        app = self.app
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            app = error_response(refusal, scope["path"])
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin", "")
        if self.only_local and not is_local(re.sub(r":[0-9]*$", "", host).strip("[]")):
            return failure("forbidden", header="Host", got=host)
        # A page cannot send this header without a preflight; a proxy with TLS sends it.
        own = f"{headers.get(b'x-forwarded-proto', scope['scheme'])}://{host}"
        if origin and not {origin, "*"} & {own, *self.origins}:
            return failure("forbidden", header="Origin", got=origin)
        if self.key is None or scope["path"] in self.public:
            return None
        scheme, _, bearer = headers.get(b"authorization", "").partition(" ")
        for key in (bearer if scheme.lower() == "bearer" else "", headers.get(b"x-api-key", "")):
            if hmac.compare_digest(key.encode("latin-1"), self.key.encode()):
                return None
        return failure("invalid_api_key")


class Bodies:
    """The bodies being read or validated."""

    _held = 0

    @asynccontextmanager
    async def read(self, request: Request, most: int) -> AsyncIterator[bytes]:
        """Read a body of at most `most` bytes and hold it while the context is open.

        Raises ApiError 413 or 503.
        """
        length = request.headers.get("content-length", "0")
        too_large = failure("request_too_large", most=most)
        if not (length.isascii() and length.isdigit()) or int(length) > most:
            raise too_large
        data, held = bytearray(), 0
        try:
            async for piece in request.stream():
                data += piece
                if len(data) > most:
                    raise too_large
                if len(data) > SMALL_BODY_BYTES:
                    self._held += len(data) - held
                    held = len(data)
                if held and self._held > HELD_BODIES * most:
                    raise failure("overloaded")
            body = bytes(data)
            data.clear()
            yield body
        finally:
            self._held -= held


def error_response(error: BaseException, path: str) -> Response:
    """Return a route's response for an error; log an unexpected one, but nothing of the request."""
    found = from_exception(error)
    if found.status >= 500 and not isinstance(error, ApiError):
        _log_defect(error)
    return json_response(found.body_at(path), found.status, found.headers)


async def unrouted(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown path, or by a wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code != 405:
        return error_response(failure("unknown_url", got=request.url.path), request.url.path)
    allowed = (error.headers or {}).get("Allow", "GET").split(", ")
    wrong = failure("method_not_allowed", got=request.method, allowed=" or ".join(allowed))
    wrong.headers["allow"] = ", ".join(allowed)
    return error_response(wrong, request.url.path)


def _log_defect(error: BaseException) -> None:
    frames = reversed(traceback.extract_tb(error.__traceback__)[-4:])
    places = " < ".join(f"{os.path.basename(f.filename)}:{f.lineno}" for f in frames)
    _log.error("%s at %s", type(error).__name__, places)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(to_json(body), status, headers, "application/json")


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await work for a request; cancel it and raise Disconnected when the client goes."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(gone())
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


class EventStream:
    """A response of complete server-sent events; `failed` makes the last ones of an error."""

    def __init__(self, events: AsyncIterator[bytes], failed: Callable[[ApiError], bytes]) -> None:
        self._events, self._failed, self._sent = events, failed, 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        self._sent = asyncio.get_running_loop().time()
        keeper = asyncio.ensure_future(self._keep_alive(send))

        async def hear() -> Message:
            message = await receive()
            if message["type"] == "http.request":  # the body is read: is the client there?
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
        last = b""
        try:
            async for event in self._events:
                self._sent = asyncio.get_running_loop().time()
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            if not isinstance(error, ApiError | OSError):
                _log_defect(error)
            last = self._failed(from_exception(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(self._sent + KEEP_ALIVE_S - clock(), 1.0))
            if clock() - self._sent >= KEEP_ALIVE_S:
                await send(_COMMENT)
                self._sent = clock()


Event = dict[str, Any]
"""A server-sent event that names its `type`."""


class EventAnswer:
    """The response to one request: a chat with one choice, in the events of another API.

    `writer` makes events and their sum. `start()`: the first ones. `push(deltas, calls, logprobs)`:
    those of a token, with the ids of the calls so far. `finish(why, stop)`: the last ones; `why` is
    "stop", "length" or "tool_calls", `stop` the stop string that was found. `fail(error)`: instead
    of these. `response()`: the object so far. `end`: bytes after the last events.
    """

    def __init__(self, chat: Pipeline, writer: Any) -> None:
        self._chat, self._writer = chat, writer

    async def whole(self) -> dict[str, Any]:
        """Return the response of a request without `stream`; raises ApiError."""
        async for _ in self._steps():
            pass
        return dict(self._writer.response())

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed response; the last one has the final status."""
        yield _sent(self._writer.start())
        async for events in self._steps():
            if events:
                yield _sent(events)
        yield self._writer.end

    def failed(self, error: ApiError) -> bytes:
        """Return the last events of a failed stream."""
        return b"".join((_sent(self._writer.fail(error)), self._writer.end))

    async def _steps(self) -> AsyncIterator[list[Event]]:
        (choice,) = self._chat.choices
        async for step in self._chat.steps():
            events: list[Event] = []
            for _, deltas, _ in step:
                events += self._writer.push(deltas, choice.calls, choice.logprobs)
                choice.logprobs = []
            yield events
        yield list(self._writer.finish(choice.finish, choice.stops.found))


def _sent(events: Iterable[Event]) -> bytes:
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), to_json(event)) for event in events
    )


async def page_file(file: Response, request: Request) -> Response:
    """GET: a file of the page, or 304 if the browser has it."""
    known = request.headers.get("if-none-match", "").split(",")
    is_known = file.headers["etag"] in (each.strip().removeprefix("W/") for each in known)
    return Response(status_code=304, headers=file.headers) if is_known else file


def read_page(folder: Path = FOLDER) -> dict[str, Response]:
    """Read the page's files, by the paths that they are served under.

    The names in `vendor` have versions, so browsers keep those files without asking again.
    """
    files = {}
    for file in folder.rglob("*.*"):
        if file.suffix not in _MEDIA:  # licences
            continue
        body, name = read_bytes(file, _MAX_BYTES), file.relative_to(folder).as_posix()
        cache = "max-age=31536000, immutable" if name.startswith("vendor/") else "no-cache"
        tag = f'"{hashlib.sha256(body).hexdigest()}"'
        headers = _PAGE_HEADERS | {"cache-control": cache, "etag": tag}
        path = "/" if name == "index.html" else f"/page/{name}"
        files[path] = Response(body, headers=headers, media_type=_MEDIA[file.suffix])
    return files
