"""The edge of the server: who may come in, and what those are told who came in vain."""

import hmac
import logging
import os
import re
import secrets
import traceback
from collections.abc import Collection
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clocher_runtime.serve.errors import (
    ApiError,
    foreign,
    from_exception,
    two_lengths,
    unknown_route,
    wrong_key,
    wrong_method,
)
from clocher_runtime.serve.json_text import to_json
from clocher_runtime.serve.settings import is_local

PUBLIC = frozenset({"/health"})
"""Paths that never need a key."""

_NAME, _IS_NAME = b"x-request-id", re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_NAME_OF_HOST = re.compile(r":[0-9]*$")
_log = logging.getLogger(__name__)


class Named:
    """Gives each answer the name of its request: the client's, or a random one.

    A body of two lengths is refused: a proxy may have believed the other one (RFC 9112, 6.1).

    Args:
        app: what is behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(_NAME, b"")
        name = given if _IS_NAME.fullmatch(given) else secrets.token_hex(12).encode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_NAME, name)]
            await send(message)

        app = self._app
        if headers.keys() >= {b"content-length", b"transfer-encoding"}:
            app = error_response(two_lengths())
            app.headers["connection"] = "close"
        await app(scope, receive, named)


class KeyCheck:
    """Refuses requests without the key of the server, on every path that is not public.

    Args:
        app: what is behind it.
        key: None lets everybody in.
        public: paths that need none.
    """

    def __init__(self, app: ASGIApp, key: str | None, public: Collection[str] = PUBLIC) -> None:
        self._app, self._public = app, public
        self._expected = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] == "http" and not self._may(scope):
            await error_response(wrong_key())(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        if self._expected is None or scope["path"] in self._public:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._expected)


class OriginCheck:
    """Refuses what pages of others send: to a browser's user the server is a neighbour.

    A page may send simple requests to any address, and have its own name lead there. Browsers tell
    where a page is from, and which name they asked for.

    Args:
        app: what is behind it.
        origins: pages that may call.
        only_local: requests must be for a name of this machine.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str], only_local: bool) -> None:
        self._app, self._origins, self._only_local = app, frozenset(origins), only_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await error_response(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin", "")
        if self._only_local and not is_local(_NAME_OF_HOST.sub("", host).strip("[]")):
            return foreign("Host", host)
        # A page cannot send this header without being asked whether it may; a proxy with TLS does.
        own = f"{headers.get(b'x-forwarded-proto', scope['scheme'])}://{host}"
        if origin and not {origin, "*"} & {own, *self._origins}:
            return foreign("Origin", origin)
        return None


async def http_error(request: Request, error: Exception) -> Response:
    """Answer what is wrong before any route is reached."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "GET").split(", ")
        response = error_response(wrong_method(request.method, allowed))
        response.headers["allow"] = ", ".join(allowed)
        return response
    return error_response(unknown_route(request.url.path))


def error_response(error: BaseException) -> Response:
    """Return the answer that tells of an error; what is unexpected goes to the log as well."""
    told = from_exception(error)
    if told.status >= 500 and not isinstance(error, ApiError):
        log_defect(error)
    return json_response(told.body, told.status, told.headers)


def log_defect(error: BaseException) -> None:
    """Write where an unexpected error came from, and nothing of what a request said."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(
        f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in reversed(frames[-4:])
    )
    _log.error("%s at %s", type(error).__name__, places)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(to_json(body), status, headers, "application/json")
