"""POST /v1/responses: a chat, reported in items, one open at a time (OpenAI API reference)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import Discriminator, Field, Tag

from clocher_runtime.serve.answers import DONE, Answer, now_s
from clocher_runtime.serve.edge import Event
from clocher_runtime.serve.errors import ApiError, failure, to_json
from clocher_runtime.serve.requests import MAX_LOGPROBS, ChatRequest, SamplingFields
from clocher_runtime.serve.schemas import (
    MAX_MESSAGES,
    MAX_TOKENS,
    MAX_TOOLS,
    AllowedFunctions,
    CalledFunction,
    FlatSchemaFormat,
    FunctionTool,
    NamedFunction,
    ReasoningSettings,
    Schema,
    ShortText,
    Stops,
    TextSettings,
    checked,
    function_of,
    joined,
    list_of,
    text_of,
)
from clocher_runtime.text.answers import Delta


class InputPart(Schema):
    """A piece of text in a message. Images, audio and files are refused."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class ReasoningPart(Schema):
    """A piece of the reasoning, or of a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputMessage(Schema):
    """A message; `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]


class ReasoningItem(Schema):
    """What the model thought in an earlier turn."""

    unsupported: ClassVar = {"encrypted_content": ((), "reasoning is not encrypted; send content")}

    type: Literal["reasoning"]
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None


class FunctionCallItem(CalledFunction):
    """A call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: ShortText


class FunctionCallOutput(Schema):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: ShortText
    output: str | list[InputPart]


def _kind(item: Any) -> str:
    return str(item.get("type", "message")) if isinstance(item, dict) else "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]
Metadata = Annotated[
    dict[Annotated[str, text_of(0, 64)], Annotated[str, text_of(0, 512)]], Field(max_length=16)
]


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    unsupported: ClassVar = {
        **SamplingFields.unsupported,
        "conversation": ((), "use previous_response_id"),
        "background": ((False,), "use stream"),
        "prompt": ((), "use input"),
        "context_management": (([],), "shorten the input"),
        "moderation": ((), "leave it out"),
        "response_format": ((), "use text.format"),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), ((), "use max_output_tokens")),
        "n": ((1,), "use /v1/chat/completions"),
        "chat_template": ((), "the model's own template is used"),
    }

    input: str | Annotated[list[Item], list_of(MAX_MESSAGES, 1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedFunction | AllowedFunctions, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: list[ShortText] | None = Field(None, max_length=16)
    metadata: Metadata | None = None
    previous_response_id: ShortText | None = None
    store: bool | None = None
    max_tool_calls: int | None = Field(None, ge=1, description="of the server's tools: it has none")
    truncation: Literal["auto", "disabled"] | None = None
    prompt_cache_key: ShortText | None = None
    safety_identifier: ShortText | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stop: Stops | None = None

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return self.input

    def after(self, before: Sequence[Any]) -> Self:
        """Return the request with stored items before its own; raises ApiError."""
        own = [item.model_dump(exclude_none=True) for item in self.items]
        fields = self.model_dump(by_alias=True, exclude_none=True) | {"input": [*before, *own]}
        return checked(type(self), fields)  # a stored call may have a name that is not valid

    def chat(self) -> ChatRequest:
        """Return the equivalent chat request; raises ApiError if there is none."""
        same = (*SamplingFields.model_fields, "parallel_tool_calls", "stop")
        choice, wanted = self.tool_choice, self.text and self.text.format
        form = wanted and wanted.model_dump(by_alias=True)
        if isinstance(wanted, FlatSchemaFormat):
            form = {"type": "json_schema", "json_schema": form}
        fields = {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [function_of(**tool.model_dump()) for tool in self.tools or ()],
            "tool_choice": choice if choice is None or isinstance(choice, str) else choice.plain(),
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "response_format": form,
            "logprobs": "message.output_text.logprobs" in (self.include or ())
            or bool(self.top_logprobs),
            "top_logprobs": self.top_logprobs or None,
        }
        return checked(ChatRequest, {name: getattr(self, name) for name in same} | fields)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})

        def assistant(*before: str) -> dict[str, Any]:
            last = messages[-1] if messages else {}
            if last.get("role") != "assistant" or any(name in last for name in before):
                messages.append({"role": "assistant"})
            return messages[-1]

        for item in self.items:
            match item:
                case InputMessage(role="assistant"):
                    assistant("content", "tool_calls")["content"] = joined(item.content)
                case InputMessage():
                    messages.append({"role": item.role, "content": joined(item.content)})
                case ReasoningItem():
                    turn = assistant("reasoning_content", "content", "tool_calls")
                    turn["reasoning_content"] = joined(item.content or item.summary or ())
                case FunctionCallItem():
                    call = {"id": item.call_id, **function_of(**item.model_dump())}
                    assistant().setdefault("tool_calls", []).append(call)
                case FunctionCallOutput():
                    message = {"role": "tool", "tool_call_id": item.call_id}
                    messages.append(message | {"content": joined(item.output)})
        return messages


_KINDS: Mapping[str, tuple[str, str, str]] = {
    "content": ("message", "msg", "response.output_text"),
    "reasoning": ("reasoning", "rs", "response.reasoning_text"),
    "tool_call": ("function_call", "fc", "response.function_call_arguments"),
    "arguments": ("function_call", "fc", "response.function_call_arguments"),
}
"""Kind of a delta -> type of its item, prefix of the item's id, prefix of its events."""
_REPEATED: Mapping[str, Any] = {
    **dict.fromkeys(("instructions", "previous_response_id", "max_output_tokens")),
    **dict.fromkeys(("max_tool_calls", "prompt_cache_key", "safety_identifier")),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), 0),
    **{"metadata": {}, "store": True, "temperature": 1.0, "top_p": 1.0},
    **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "truncation": "disabled"},
}
"""Fields of a request that its response repeats, and their defaults."""
MAX_STORED, MAX_STORED_BYTES = 1000, 64 << 20
"""Responses that later requests may refer to: in memory, the oldest go first."""


class ResponseStore:
    """The last responses by id, each as JSON with the items of its whole conversation."""

    def __init__(self) -> None:
        self._found: dict[str, bytes] = {}
        self._bytes = 0

    def keep(self, items: Sequence[dict[str, Any]], response: dict[str, Any]) -> None:
        """Keep a response and the items that led to it, its own included."""
        self._found[response["id"]] = data = to_json({"items": items, "response": response})
        self._bytes += len(data)
        while self._bytes > MAX_STORED_BYTES or len(self._found) > MAX_STORED:
            self.drop(next(iter(self._found)))

    def read(self, response: str, code: str = "response_not_found") -> dict[str, Any]:
        """Return the `items` and the `response` of an id; raises ApiError of the code."""
        if response not in self._found:
            param = None if code == "response_not_found" else "previous_response_id"
            raise failure(code, param=param, got=response)
        return msgspec.json.decode(self._found[response], type=dict[str, Any])

    def drop(self, response: str) -> None:
        """Forget a response; raises ApiError if it is not there."""
        if response not in self._found:
            raise failure("response_not_found", got=response)
        self._bytes -= len(self._found.pop(response))


@dataclass(slots=True)
class ResponseStream:
    """The events of a response, and the object that they add up to; see `edge.EventAnswer`."""

    request: ResponsesRequest
    store: ResponseStore
    answer: Answer
    output: list[dict[str, Any]] = field(default_factory=list)  # finished items
    open: dict[str, Any] | None = None  # the item that grows, as it was added
    grows: str = ""  # prefix of its events
    text: str = ""  # of it
    logprobs: list[Any] = field(default_factory=list)  # of it
    pending: list[Any] = field(default_factory=list)  # log probabilities before the next text
    status: str = "in_progress"
    completed: int | None = None  # in seconds since 1970
    error: dict[str, Any] | None = None
    reasoning_tokens: int = 0
    sequence: int = 0  # sequence number of the next event
    end: ClassVar = DONE  # Open Responses, 2026-04-24

    def start(self) -> Iterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self.response())

    def push(
        self, deltas: Iterable[Delta], calls: Mapping[int, str], logprobs: Sequence[Any] = ()
    ) -> Iterator[Event]:
        self.pending += logprobs
        for delta in deltas:
            kind, *_ = _KINDS[delta.kind]
            if self.open is None or self.open["type"] != kind or delta.kind == "tool_call":
                yield from self._close("completed")
                yield from self._begin(delta, calls)
            if delta.kind != "tool_call" and delta.text:
                self.text += delta.text
                self.logprobs += self.pending
                more = {"logprobs": self.pending} if kind == "message" else {}
                grown = {**self._place(), "delta": delta.text, **more}
                yield self._event(f"{self.grows}.delta", **grown)
            self.pending = []
        self.reasoning_tokens += self.open is not None and self.open["type"] == "reasoning"

    def finish(self, finish: str, stop: str | None = None) -> Iterator[Event]:
        is_cut = finish == "length"
        self.status, self.completed = ("incomplete", None) if is_cut else ("completed", now_s())
        yield from self._close(self.status)
        if not is_cut and all(item["type"] == "reasoning" for item in self.output):
            # Clients that expect a message get an empty one.
            yield from self._begin(Delta("content", ""), {})
            yield from self._close(self.status)
        if self.request.store is not False:
            given = [item.model_dump(exclude_none=True) for item in self.request.items]
            self.store.keep([*given, *self.output], self.response())
        yield self._event(f"response.{self.status}", response=self.response())

    def fail(self, error: ApiError) -> Iterator[Event]:
        yield from self._close("incomplete")
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        self.status, self.error = "failed", {"code": code, "message": error.message}
        yield self._event("response.failed", response=self.response())

    def response(self) -> dict[str, Any]:
        asked, answer, is_cut = self.request, self.answer, self.status == "incomplete"
        wanted = asked.text and asked.text.format
        given = asked.model_dump(include=set(_REPEATED))
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached, "cache_write_tokens": 0},
            "output_tokens": answer.made,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": answer.prompt_tokens + answer.made,
            **answer.denoised(),
        }
        return {
            "id": self._id("resp"),
            "object": "response",
            "created_at": answer.created,
            "completed_at": self.completed,
            "status": self.status,
            "error": self.error,
            "model": answer.model,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(self.output),
            "usage": None if self.status == "in_progress" else usage,
            "background": False,
            "service_tier": "default",
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
            "text": {"format": wanted.model_dump(by_alias=True) if wanted else {"type": "text"}},
            **{name: _REPEATED[name] if value is None else value for name, value in given.items()},
        }

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self.answer.id.partition('_')[2]}"

    def _place(self) -> dict[str, Any]:
        """Return the id and index of the open item, as events have them."""
        assert self.open is not None
        place = {"item_id": self.open["id"], "output_index": len(self.output)}
        return place if self.open["type"] == "function_call" else place | {"content_index": 0}

    def _begin(self, delta: Delta, calls: Mapping[int, str]) -> Iterator[Event]:
        kind, prefix, self.grows = _KINDS[delta.kind]
        index = len(self.output)
        own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        own |= {"content": []}
        if kind == "function_call":
            own = {"call_id": calls[delta.index], "name": delta.text, "arguments": ""}
        item = {"id": f"{self._id(prefix)}_{index}", "type": kind, "status": "in_progress", **own}
        self.open, self.text, self.logprobs = item, "", []
        yield self._event("response.output_item.added", output_index=index, item=item)
        yield from self._parts("added")

    def _content(self) -> list[dict[str, Any]]:
        """Return the content of the open item so far: one part, none of a call."""
        match self.open:
            case {"type": "message"}:
                more = {"annotations": [], "logprobs": list(self.logprobs)}
                return [{"type": "output_text", "text": self.text, **more}]
            case {"type": "reasoning"}:
                return [{"type": "reasoning_text", "text": self.text}]
        return []

    def _parts(self, what: str) -> Iterator[Event]:
        for part in self._content():
            yield self._event(f"response.content_part.{what}", **self._place(), part=part)

    def _close(self, status: str) -> Iterator[Event]:
        if self.open is None:
            return
        whole: dict[str, Any] = {"text": self.text}
        own: dict[str, Any] = {"content": self._content()}
        if self.open["type"] == "message":
            whole |= {"logprobs": self.logprobs}
        elif self.open["type"] == "function_call":
            own = {"arguments": self.text}
            whole = own | {"name": self.open["name"]}
        yield self._event(f"{self.grows}.done", **self._place(), **whole)
        yield from self._parts("done")
        done = {**self.open, "status": status, **own}
        yield self._event("response.output_item.done", output_index=len(self.output), item=done)
        self.output.append(done)
        self.open = None

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self.sequence, **fields}
        self.sequence += 1
        return event
