"""The routes of the server, and its OpenAPI document.

Source: OpenAPI Specification 3.1.
"""

from functools import cache
from typing import Any, NamedTuple

from pydantic.json_schema import models_json_schema

from clocher_runtime.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from clocher_runtime.serve.responses import ResponsesRequest
from clocher_runtime.serve.schemas import Schema

_JSON, _EVENTS = "application/json", "text/event-stream"
_TEXT, _HTML = "text/plain", "text/html"
_REF = "#/components/schemas/{model}"


class Described(NamedTuple):
    """A route: what its body holds, if it has one, and the media types of its answer."""

    method: str
    path: str
    summary: str
    asks: type[Schema] | None = None
    answers: tuple[str, ...] = (_JSON,)


_STREAMED = (_JSON, _EVENTS)
ROUTES = (
    Described("post", "/v1/chat/completions", "Answer a conversation", ChatRequest, _STREAMED),
    Described("post", "/v1/completions", "Continue texts", CompletionRequest, _STREAMED),
    Described(
        "post", "/v1/responses", "Answer a conversation in items", ResponsesRequest, _STREAMED
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
_NULLABLE = {"type": ["string", "null"]}
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
                "param": _NULLABLE,
                "code": _NULLABLE,
            },
        }
    },
}


@cache
def document(version: str) -> dict[str, Any]:
    """Return the OpenAPI document of a server of some version."""
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
    def content(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
        return {kind: {"schema": schema}}

    def model(name: str) -> dict[str, Any]:
        return content(_JSON, {"$ref": _REF.format(model=name)})

    kinds: dict[str, Any] = {_JSON: {"type": "object"}, _EVENTS: {}}
    answer: dict[str, Any] = {}
    for kind in route.answers:
        answer |= content(kind, kinds.get(kind, {"type": "string"}))
    responses = {
        status: {"description": text, "content": model("Error")} for status, text in _ERRORS.items()
    }
    responses["200"] = {"description": "The answer", "content": answer}
    if route.path == "/health":
        responses["503"] = {"description": "Not now", "content": answer}
    operation: dict[str, Any] = {"summary": route.summary, "responses": responses}
    if "{model}" in route.path:
        place = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [place]
    if route.asks is not None:
        operation["requestBody"] = {"required": True, "content": model(route.asks.__name__)}
    return operation
