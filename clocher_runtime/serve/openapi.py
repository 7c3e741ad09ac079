"""The OpenAPI document of the server: its routes, and what their requests may hold.

Source: OpenAPI Specification 3.1.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic.json_schema import models_json_schema

from clocher_runtime.serve.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from clocher_runtime.serve.schemas_base import Schema
from clocher_runtime.serve.schemas_responses import ResponsesRequest

_JSON = "application/json"
_EVENTS = "text/event-stream"
_TEXT = "text/plain"
_HTML = "text/html"
_CONTENT: Mapping[str, Any] = {
    _JSON: {"schema": {"type": "object"}},
    _TEXT: {"schema": {"type": "string"}},
    _HTML: {"schema": {"type": "string"}},
    _EVENTS: {},
}
_REF = "#/components/schemas/{model}"


class Described(NamedTuple):
    """What a route is for.

    Attributes:
        asks: what its body holds; None: it has none.
        answers: media types of its answer.
    """

    method: str
    path: str
    summary: str
    asks: type[Schema] | None = None
    answers: tuple[str, ...] = (_JSON,)


ROUTES = (
    Described(
        "post", "/v1/chat/completions", "Answer a conversation", ChatRequest, (_JSON, _EVENTS)
    ),
    Described("post", "/v1/completions", "Go on with texts", CompletionRequest, (_JSON, _EVENTS)),
    Described(
        "post",
        "/v1/responses",
        "Answer a conversation in items",
        ResponsesRequest,
        (_JSON, _EVENTS),
    ),
    Described("get", "/v1/models", "The model that is served"),
    Described("get", "/v1/models/{model}", "The model that is served, by its name"),
    Described("post", "/tokenize", "The tokens of a prompt or a conversation", TokenizeRequest),
    Described("post", "/detokenize", "The text of tokens", DetokenizeRequest),
    Described("get", "/health", "Whether requests are served now"),
    Described("get", "/metrics", "Counters for Prometheus", answers=(_TEXT,)),
    Described("get", "/openapi.json", "This document"),
    Described("get", "/", "The chat page, or what this server is", answers=(_HTML, _JSON)),
)

_ERRORS = {
    "400": "The request is wrong, or longer than the context",
    "401": "The key of the server is missing",
    "404": "No such model or path",
    "405": "Another method is expected",
    "408": "The answer was not read, or the body not sent, in time",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "Too many requests wait; the header Retry-After says when to try again",
    "500": "The server failed",
    "503": "The model is being loaded, or the server ends",
    "504": "The answer took too long",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def document(version: str) -> dict[str, Any]:
    """Return the OpenAPI document.

    Args:
        version: of the server.
    """
    asked = [route.asks for route in ROUTES if route.asks is not None]
    _, defined = models_json_schema([(each, "validation") for each in asked], ref_template=_REF)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "clocher-serve", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**defined["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(route: Described) -> dict[str, Any]:
    """Return a route as the document has it."""
    content: dict[str, Any] = {kind: _CONTENT[kind] for kind in route.answers}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {
            "200": {"description": "The answer", "content": content},
            **{
                status: {"description": text, "content": {_JSON: {"schema": _reference("Error")}}}
                for status, text in _ERRORS.items()
            },
        },
    }
    if route.path == "/health":
        operation["responses"]["503"] = {"description": "Not now", "content": content}
    if "{model}" in route.path:
        operation["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if route.asks is not None:
        schema = _reference(route.asks.__name__)
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return operation


def _reference(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=name)}
