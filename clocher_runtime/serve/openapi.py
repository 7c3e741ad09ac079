"""The routes of the server, and its OpenAPI 3.1 document."""

from functools import cache
from typing import Any, NamedTuple

from pydantic.json_schema import models_json_schema

from clocher_runtime.serve.errors import codes_by_status
from clocher_runtime.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from clocher_runtime.serve.response_request import ResponsesRequest
from clocher_runtime.serve.schemas import Schema

_JSON, _EVENTS = "application/json", "text/event-stream"
_TEXT, _HTML = "text/plain", "text/html"
_REF = "#/components/schemas/{model}"


class Described(NamedTuple):
    """A route: a method of `Server`, the body's schema, the media types of answers."""

    handler: str
    method: str
    path: str
    summary: str
    asks: type[Schema] | None = None
    answers: tuple[str, ...] = (_JSON,)


_BOTH = (_JSON, _EVENTS)
ROUTES = (
    Described("chat", "post", "/v1/chat/completions", "Answer a conversation", ChatRequest, _BOTH),
    Described("complete", "post", "/v1/completions", "Continue texts", CompletionRequest, _BOTH),
    Described(
        "respond",
        "post",
        "/v1/responses",
        "Answer a conversation in items",
        ResponsesRequest,
        _BOTH,
    ),
    Described("models", "get", "/v1/models", "The model that is served"),
    Described("model", "get", "/v1/models/{model}", "The model that is served, by its name"),
    Described("tokenize", "post", "/tokenize", "The tokens of a prompt", TokenizeRequest),
    Described("detokenize", "post", "/detokenize", "The text of tokens", DetokenizeRequest),
    Described("health", "get", "/health", "Whether requests are served now"),
    Described("show_metrics", "get", "/metrics", "Counters for Prometheus", answers=(_TEXT,)),
    Described("describe", "get", "/openapi.json", "This document"),
    Described("root", "get", "/", "The chat page, or what this server is", answers=(_HTML, _JSON)),
)
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
    """Return the OpenAPI document."""
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
    responses: dict[str, Any] = {
        status: {"description": f"Error: {codes}", "content": model("Error")}
        for status, codes in codes_by_status().items()
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
