"""Errors as clients get them; messages quote little of a request and no path or internal error."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError

from clocher_kernels.errors import ClocherError, OutOfMemory, PromptTooLong, SessionBusy, UsageError
from clocher_runtime.config.values import shown

_INVALID, _SERVER = "invalid_request_error", "server_error"
_GONE = "The response {got} is not stored, or no longer"
_TABLE: Mapping[str, tuple[int, str]] = {
    "invalid_api_key": (
        401,
        "No valid API key; expected the header `Authorization: Bearer KEY` (or `x-api-key: KEY`) "
        "with the server's key",
    ),
    "forbidden": (
        403,
        "The header {header} is {got}, which may not call this server; who runs it can allow "
        "origins, and with a key any host",
    ),
    "model_not_found": (404, "The model {got} does not exist; this server has {served}"),
    "previous_response_not_found": (400, _GONE + "; send the whole conversation"),
    "response_not_found": (404, _GONE),
    "unknown_url": (404, "Unknown path {got}; /openapi.json lists the known ones"),
    "method_not_allowed": (405, "Method {got} is not allowed here; expected {allowed}"),
    "slow_reader": (408, "The answer was not read as fast as it was made; read faster"),
    "request_too_large": (
        413,
        "The body has more than {most} bytes; send less, or have the server started with a higher "
        "--max-body-mb",
    ),
    "unsupported_media_type": (415, "The header Content-Type is {got}; expected application/json"),
    "rate_limit_exceeded": (
        429,
        "Answers that are being written or wait already: {waiting}; try again in {retry_after} s",
    ),
    "internal_error": (500, "The server failed at this request; its log has the reason"),
    "engine_failed": (
        500,
        "The engine ended before the answer was complete; send the request again",
    ),
    "loading": (503, "The model is being loaded; try again when /health says 200"),
    "draining": (503, "The server is shutting down; send the request to another one"),
    "overloaded": (503, "The memory for this request is not there now; try again, or ask for less"),
    "stuck": (503, "The engine does not answer now; try again when /health says 200"),
    "timeout": (504, "The answer was not complete after {seconds:g} s; ask for less"),
}
"""Code -> status, message."""
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
"""Status -> OpenAI's error type; of others the class of the status says it."""
MESSAGES_PATH = "/v1/messages"
"""Where errors have Anthropic's shape."""
_ANTHROPIC = {
    **{401: "authentication_error", 403: "permission_error", 404: "not_found_error"},
    **{413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"},
    **{500: "api_error", 504: "timeout_error"},
}
"""Status -> Anthropic's error type; others are invalid requests."""
_EXPECTED = {
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
    "string_too_short": "a string of {min_length} or more characters",
    "string_too_long": "a string of at most {max_length} characters",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
}
"""Type of pydantic's error -> what was expected; of others its message says it."""
PATTERNS = {
    r"^(0|[1-9][0-9]{0,9})$": 'a token id in digits, as "42"',
    r"^[A-Za-z0-9_.-]{1,64}$": "1 to 64 letters (A-Z, a-z), digits, _ . or -",
    r"^[A-Za-z0-9_.:-]{1,128}$": "1 to 128 letters (A-Z, a-z), digits, _ . : or -",
}
"""Patterns of strings -> what they take."""
_SHOWN_CHARS = 80
_RETRY_STATUS = (429, 503)
# Hints about flags are for the operator, not for clients.
_FLAG = re.compile(r"(?<!\S)--\w")


class ApiError(ClocherError):
    """An error response; `retry_after` is in seconds."""

    def __init__(
        self, code: str | None, message: str, param: str | None = None, retry_after: int = 1
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param
        self.status, _ = _TABLE.get(code or "", (400, ""))
        self.type = _TYPES.get(self.status, _SERVER if self.status >= 500 else _INVALID)
        self.headers = {"retry-after": str(retry_after)} if self.status in _RETRY_STATUS else {}
        if self.status == 401:
            self.headers["www-authenticate"] = "Bearer"

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body, also the last event of a failed stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def body_at(self, path: str) -> dict[str, Any]:
        """Return the JSON body for clients of a route."""
        if not path.startswith(MESSAGES_PATH):
            return self.body
        kind = _ANTHROPIC.get(self.status, _INVALID)
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def failure(code: str, *, param: str | None = None, retry_after: int = 1, **facts: Any) -> ApiError:
    """Return the error of a code; `facts` fill its message, `got` shortened."""
    if "got" in facts:
        facts["got"] = short(facts["got"])
    message = _TABLE[code][1].format(retry_after=retry_after, **facts)
    return ApiError(code, message, param, retry_after)


def codes_by_status() -> dict[str, str]:
    """Return status -> error codes, for the OpenAPI document."""
    found = {"400": "invalid request, context_length_exceeded"}
    for code, (status, _) in _TABLE.items():
        found[str(status)] = f"{found[str(status)]}, {code}" if str(status) in found else code
    return found


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400 error."""
    return ApiError(code, message, param)


def from_exception(error: BaseException) -> ApiError:
    """Return the client's error for an exception that reached the edge of the server."""
    match error:
        case ApiError():
            return error
        case UsageError() if not isinstance(error, SessionBusy):
            parts = [part for part in str(error).split("; ") if not _FLAG.search(part)]
            nothing = "The request cannot be served with the settings of this server"
            code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
            return invalid("; ".join(parts) or nothing, code=code)
        case SessionBusy() | OutOfMemory() | MemoryError():
            return failure("overloaded")
        case _:
            return failure("internal_error")


def from_failure(kind: str, message: str) -> ApiError:
    """Return the client's error for an engine error, by class name and message."""
    known = {known.__name__: known for known in (UsageError, SessionBusy, OutOfMemory)}
    return from_exception(known[kind](message)) if kind in known else failure("internal_error")


def short(value: object) -> str:
    """Return the first characters of a value."""
    text = shown(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def described(value: object) -> str:
    """Return a JSON value for messages: its first characters, or what it is."""
    match value:
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "an object"
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
    return short(value)


class Refused(ValueError):
    """Raised by validators; `param`: the wrong field, None: the one being validated."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def from_validation(error: ValidationError, body: object) -> ApiError:
    """Return the error of the first invalid field of a request, in one sentence."""
    found = error.errors(include_url=False)
    places = [_place(detail, body) for detail in found]
    first = [at for at, place in enumerate(places) if place[:1] == places[0][:1]]
    # The union member that validated deepest counts; a wrong `type` explains missing fields
    # of the others.
    deepest = places[max(first, key=lambda at: (len(places[at]), found[at]["type"] != "missing"))]
    details = [found[at] for at in first if places[at] == deepest]
    for detail in details:
        own = detail.get("ctx", {}).get("error")
        if isinstance(own, Refused):
            place = deepest if own.param is None else (*deepest, own.param)
            return invalid(str(own), _path(place) or None)
    if tagged := [detail for detail in details if detail["type"].startswith("union_tag")]:
        context = tagged[0]["ctx"]
        tag = context["discriminator"].strip("'")  # a function reads the field `type`
        param = _path((*deepest, "type" if tag.endswith("()") else tag))
        if "tag" not in context:
            return invalid(f"{param} is missing", param)
        expected = f"expected {context['expected_tags']}"
        return invalid(f"{param} is {short(context['tag'])}; {expected}", param)
    where = _path(deepest)
    return invalid(f"{where or 'the body'} {_complaint(details)}", where or None)


def _complaint(details: Sequence[Mapping[str, Any]]) -> str:
    if details[0]["type"] == "missing":
        return "is missing"
    expected = " or ".join(dict.fromkeys(_expected(detail) for detail in details))
    verb = "has the key" if details[0]["loc"][-1:] == ("[key]",) else "is"
    got = described(details[0]["input"])
    if details[0].get("ctx", {}).get("field_type") == "Dictionary":
        got += f" of {len(details[0]['input'])}"
    return f"{verb} {got}; expected {expected}"


def _expected(detail: Mapping[str, Any]) -> str:
    context = detail.get("ctx", {})
    if detail["type"] == "string_pattern_mismatch":
        return PATTERNS[context["pattern"]]
    if (text := _EXPECTED.get(detail["type"])) is None:
        return str(detail["msg"][:200].removeprefix("Input should be "))
    if context.get("field_type") == "Dictionary":
        text = text.replace("a list", "an object")
    return text.format(**context)


def _place(detail: Mapping[str, Any], body: Any) -> tuple[int | str, ...]:
    """Return the keys and indices of an invalid field, without pydantic's union member names."""
    place: list[int | str] = []
    loc = detail["loc"]
    for step in loc[:-2] if loc[-1:] == ("[key]",) else loc:
        if isinstance(body, list):
            inside = isinstance(step, int) and step < len(body)
        else:
            inside = isinstance(body, Mapping) and step in body
        if inside:
            body = body[step]
            place.append(step)
    return (*place, loc[-1]) if detail["type"] == "missing" else tuple(place)


def _path(place: Sequence[int | str]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step:.64}" for step in place)
    return "".join(steps).removeprefix(".")


_encoder = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    """Return a value as JSON; lone surrogates become U+FFFD."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        text = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
        return _encoder.encode(json.loads(text.decode("utf-16", "replace")))  # NaN becomes null
