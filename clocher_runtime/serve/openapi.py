"""The routes of the server, and its OpenAPI 3.1 document."""

import re
from functools import cache
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from clocher_runtime.serve.anthropic import CountTokensRequest, MessagesRequest
from clocher_runtime.serve.embeddings import EmbeddingsRequest
from clocher_runtime.serve.errors import MESSAGES_PATH, codes_by_status
from clocher_runtime.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from clocher_runtime.serve.responses import ResponsesRequest
from clocher_runtime.serve.schemas import Schema

_JSON = "application/json"
_BOTH = (_JSON, "text/event-stream")
_REF = "#/components/schemas/{model}"


class Described(NamedTuple):
    """A route: a method of `Server`, the body's schema, the media types of answers."""

    handler: str
    method: str
    path: str
    summary: str
    asks: type[Schema] | None = None
    answers: tuple[str, ...] = (_JSON,)


ROUTES = (
    Described("chat", "post", "/v1/chat/completions", "Answer a conversation", ChatRequest, _BOTH),
    Described("complete", "post", "/v1/completions", "Continue texts", CompletionRequest, _BOTH),
    Described("respond", "post", "/v1/responses", "Answer in items", ResponsesRequest, _BOTH),
    Described("stored_response", "get", "/v1/responses/{response}", "A stored response"),
    Described("drop_response", "delete", "/v1/responses/{response}", "Forget a response"),
    Described("message", "post", "/v1/messages", "Answer as Anthropic", MessagesRequest, _BOTH),
    Described("count", "post", "/v1/messages/count_tokens", "Only count", CountTokensRequest),
    Described("embed", "post", "/v1/embeddings", "Vectors of texts", EmbeddingsRequest),
    Described("models", "get", "/v1/models", "The model that is served, and its adapters"),
    Described("model", "get", "/v1/models/{model}", "One of them, by its name"),
    Described("tokenize", "post", "/tokenize", "The tokens of a prompt", TokenizeRequest),
    Described("detokenize", "post", "/detokenize", "The text of tokens", DetokenizeRequest),
    Described("tokenizer_info", "get", "/tokenizer_info", "The tokenizer's settings"),
    Described("health", "get", "/health", "Whether requests are served now"),
    Described("show_metrics", "get", "/metrics", "For Prometheus", answers=("text/plain",)),
    Described("describe", "get", "/openapi.json", "This document"),
    Described("root", "get", "/", "The chat page, or the name", None, ("text/html", _JSON)),
)


class Fault(BaseModel):
    """What is wrong; `param` is the field that is."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error response, or the last event of a failed stream."""

    error: Fault


class MessagesError(BaseModel):
    """An error response to /v1/messages, with a type and a message."""

    type: Literal["error"]
    error: dict[Literal["type", "message"], str]


@cache
def document(version: str) -> dict[str, Any]:
    """Return the OpenAPI document."""
    models: list[type[BaseModel]] = [route.asks for route in ROUTES if route.asks is not None]
    models += [Error, MessagesError]
    _, defined = models_json_schema([(each, "validation") for each in models], ref_template=_REF)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "clocher-serve", "version": version},
        "paths": paths,
        "components": {
            "schemas": defined["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(route: Described) -> dict[str, Any]:
    def body(model: type[BaseModel]) -> dict[str, Any]:
        return {_JSON: {"schema": {"$ref": _REF.format(model=model.__name__)}}}

    fault = MessagesError if route.path.startswith(MESSAGES_PATH) else Error
    kinds: dict[str, Any] = {_JSON: {"type": "object"}, "text/event-stream": {}}
    answer = {kind: {"schema": kinds.get(kind, {"type": "string"})} for kind in route.answers}
    responses: dict[str, Any] = {
        status: {"description": f"Error: {codes}", "content": body(fault)}
        for status, codes in codes_by_status().items()
    }
    responses["200"] = {"description": "The answer", "content": answer}
    if route.path == "/health":
        responses["503"] = {"description": "Not now", "content": answer}
    operation: dict[str, Any] = {"summary": route.summary, "responses": responses}
    for name in re.findall(r"{(\w+)}", route.path):
        place = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [place]
    if route.asks is not None:
        operation["requestBody"] = {"required": True, "content": body(route.asks)}
    return operation
