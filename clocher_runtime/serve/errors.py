"""What a client is told when its request fails: a status, and OpenAI's error object.

Messages name what was wrong, what came and what is expected. They quote at most a few characters of
a request, never a path of this machine, and nothing that is unexpected inside the server.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

from clocher_kernels.errors import ClocherError, OutOfMemory, SessionBusy, UsageError
from clocher_runtime.config.values import shown

ErrorType = Literal[
    "invalid_request_error", "authentication_error", "rate_limit_error", "server_error"
]
_SHOWN_CHARS = 80
_RETRY_S = 1
# What only those who start a server can do: advice with a flag in it is not for its clients.
_FLAG = re.compile(r"(?<!\S)--\w")


class ApiError(ClocherError):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        message: what, got, expected, next step.
        type: OpenAI's class of errors.
        param: the field of the request that is wrong.
        code: a word for programs.
        retry_after: seconds after which the same request may do better.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: ErrorType,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type = status, message, type
        self.param, self.code, self.retry_after = param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer, and of the last event of a stream that fails."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """What the answer says besides its body."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error of a request that nobody could serve."""
    return ApiError(400, message, type="invalid_request_error", param=param, code=code)


def context_too_long(prompt: int, wanted: int | None, context: int, param: str) -> ApiError:
    """Return the error of a prompt that the model cannot read, or not go on with.

    Args:
        prompt: tokens of the prompt.
        wanted: tokens asked for in the answer; None: as many as there is room for.
        context: tokens that the server has room for.
        param: where the prompt came from.
    """
    asked = f"{prompt} tokens in the {param}"
    asked += f" and {wanted} in the answer" if wanted is not None else ""
    return invalid(
        f"This model's maximum context length is {context} tokens, but the request has {asked}; "
        "shorten one of them",
        param,
        "context_length_exceeded",
    )


def too_many(count: int, most: int) -> ApiError:
    """Return the error of a request for more sequences than are ever taken."""
    return invalid(
        f"{count} answers are asked for; this server takes at most {most} at a time: send fewer "
        "prompts, or lower n",
        "n",
    )


def foreign(what: str, got: str) -> ApiError:
    """Return the error of a request that a page of somebody else's may have sent.

    Args:
        what: the header that says so.
        got: its text.
    """
    return ApiError(
        403,
        f"The header {what} is {short(got)}, which may not call this server; who runs it can allow "
        "origins, and with a key any host",
        type="invalid_request_error",
        code="forbidden",
    )


def wrong_key() -> ApiError:
    """Return the error of a request without the key of the server."""
    return ApiError(
        401,
        "No valid API key; expected the header `Authorization: Bearer KEY` with the server's key",
        type="authentication_error",
        code="invalid_api_key",
    )


def unknown_model(name: str, served: Sequence[str]) -> ApiError:
    """Return the error of a request for a model that is not here."""
    return ApiError(
        404,
        f"The model {short(name)} does not exist; this server has {', '.join(served)}",
        type="invalid_request_error",
        param="model",
        code="model_not_found",
    )


def unknown_route(path: str) -> ApiError:
    """Return the error of a path that leads nowhere."""
    return ApiError(
        404,
        f"Unknown path {short(path)}; /openapi.json lists the known ones",
        type="invalid_request_error",
        code="unknown_url",
    )


def wrong_method(method: str, allowed: Sequence[str]) -> ApiError:
    """Return the error of a known path with another method."""
    return ApiError(
        405,
        f"Method {short(method)} is not allowed here; expected {' or '.join(allowed)}",
        type="invalid_request_error",
        code="method_not_allowed",
    )


def body_too_large(most: int) -> ApiError:
    """Return the error of a body that is not read to its end."""
    return ApiError(
        413,
        f"The body has more than {most} bytes; send less",
        type="invalid_request_error",
        code="request_too_large",
    )


def two_lengths() -> ApiError:
    """Return the error of a request whose body may end in two places."""
    return invalid("The headers Content-Length and Transfer-Encoding came together; send one")


def wrong_media_type(got: str) -> ApiError:
    """Return the error of a body that does not say that it is JSON."""
    return ApiError(
        415,
        f"The body is {short(got)}; expected the header `Content-Type: application/json`",
        type="invalid_request_error",
        code="unsupported_media_type",
    )


def queue_full(waiting: int, retry_after: int = _RETRY_S) -> ApiError:
    """Return the error of a request that comes when too many wait already."""
    return ApiError(
        429,
        f"{waiting} requests wait already; try again in {retry_after} s",
        type="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after=retry_after,
    )


def internal() -> ApiError:
    """Return the error of a request that the server failed at; it says nothing more."""
    return ApiError(
        500,
        "The server failed at this request; its log has the reason",
        type="server_error",
        code="internal_error",
    )


def unavailable(
    why: Literal["loading", "draining", "overloaded", "stuck"], retry_after: int | None = None
) -> ApiError:
    """Return the error of a request that comes at a time when none is served.

    Args:
        why: "loading": the model is not ready yet. "draining": the server ends. "overloaded": the
            memory for it is not there now. "stuck": the engine does not answer.
        retry_after: seconds.
    """
    text = {
        "loading": "The model is being loaded; try again when /health says 200",
        "draining": "The server is shutting down; send the request to another one",
        "overloaded": "The memory for this request is not there now; try again, or ask for less",
        "stuck": "The engine does not answer now; try again when /health says 200",
    }[why]
    return ApiError(503, text, type="server_error", code=why, retry_after=retry_after or _RETRY_S)


def from_exception(error: BaseException) -> ApiError:
    """Return what a client is told about an exception that reached the edge of the server."""
    match error:
        case ApiError():
            return error
        case SessionBusy():
            return unavailable("overloaded")
        case UsageError():
            return invalid(_for_clients(str(error)))
        case OutOfMemory() | MemoryError():
            return unavailable("overloaded")
        case _:
            return internal()


def from_failure(kind: str, message: str) -> ApiError:
    """Return what a client is told about an error of the engine, which has sent its class's name.

    Args:
        kind: name of a class of `clocher_kernels.errors`.
        message: of the error.
    """
    known = {known.__name__: known for known in (UsageError, SessionBusy, OutOfMemory)}
    return from_exception(known[kind](message)) if kind in known else internal()


def short(value: object) -> str:
    """Return a few characters of what came."""
    text = shown(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def _for_clients(message: str) -> str:
    """Return a message without the advice that is for those who start servers."""
    parts = [part for part in message.split("; ") if not _FLAG.search(part)]
    return "; ".join(parts) or "The request cannot be served with the settings of this server"
