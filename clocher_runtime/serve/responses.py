"""POST /v1/responses: a chat, reported in items, one open at a time (OpenAI API reference)."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from clocher_runtime.serve.answers import Answer, ChatAnswer
from clocher_runtime.serve.errors import ApiError, to_json
from clocher_runtime.serve.response_request import ResponsesRequest
from clocher_runtime.text.answers import Delta

Event = dict[str, Any]
Kind = Literal["message", "reasoning", "function_call"]
_KINDS: Mapping[str, tuple[Kind, str, str]] = {
    "content": ("message", "msg", "response.output_text"),
    "reasoning": ("reasoning", "rs", "response.reasoning_text"),
    "tool_call": ("function_call", "fc", "response.function_call_arguments"),
    "arguments": ("function_call", "fc", "response.function_call_arguments"),
}
"""Kind of a delta -> type of its item, prefix of the item's id, prefix of its events."""


@dataclass(slots=True)
class OutputItem:
    """An output item; a call has an id and a name."""

    kind: Kind
    id: str
    grows: str
    index: int
    call_id: str = ""
    name: str = ""
    text: str = ""

    @property
    def place(self) -> dict[str, Any]:
        """The item's id and index, as events have them."""
        place = {"item_id": self.id, "output_index": self.index}
        return place if self.kind == "function_call" else place | {"content_index": 0}

    @property
    def part(self) -> dict[str, Any]:
        """The single content part of a message or of reasoning."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def plain(self, status: str, parts: bool = True) -> dict[str, Any]:
        """Return the item as JSON; `parts`: its content has begun."""
        plain: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        content = [self.part] if parts else []
        if self.kind == "message":
            return plain | {"role": "assistant", "content": content}
        if self.kind == "reasoning":
            return plain | {"summary": [], "content": content}
        return plain | {"call_id": self.call_id, "name": self.name, "arguments": self.text}


@dataclass(slots=True)
class ResponseStream:
    """The events of a response, and the object that they add up to."""

    request: ResponsesRequest
    answer: Answer
    output: list[dict[str, Any]] = field(default_factory=list)  # finished items
    open: OutputItem | None = None
    status: str = "in_progress"
    reason: str = ""  # why it is incomplete
    error: dict[str, Any] | None = None
    reasoning_tokens: int = 0
    sequence: int = 0  # sequence number of the next event

    def start(self) -> list[Event]:
        """Return the first events."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self.response()) for kind in kinds]

    def push(self, deltas: Iterable[Delta], calls: Mapping[int, str]) -> list[Event]:
        """Return the events of a token's deltas; `calls`: ids of the calls so far."""
        events: list[Event] = []
        for delta in deltas:
            kind = _KINDS[delta.kind][0]
            if self.open is None or self.open.kind != kind or delta.kind == "tool_call":
                events += self._close("completed") + self._begin(delta, calls)
            if delta.kind != "tool_call" and delta.text and (item := self.open):
                item.text += delta.text
                more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
                grown = {**item.place, "delta": delta.text, **more}
                events.append(self._event(f"{item.grows}.delta", **grown))
        self.reasoning_tokens += self.open is not None and self.open.kind == "reasoning"
        return events

    def finish(self, finish: str) -> list[Event]:
        """Return the last events; `finish` is "stop", "length" or "tool_calls"."""
        if finish == "length":
            events = self._close("incomplete")
            self.status, self.reason = "incomplete", "max_output_tokens"
        else:
            events = self._close("completed")
            if all(item["type"] == "reasoning" for item in self.output):
                # Clients that expect a message get an empty one.
                events += self._begin(Delta("content", ""), {}) + self._close("completed")
            self.status = "completed"
        return [*events, self._event(f"response.{self.status}", response=self.response())]

    def fail(self, error: ApiError) -> list[Event]:
        """Return the last events of a failed response."""
        events = self._close("incomplete")
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        self.status, self.error = "failed", {"code": code, "message": error.message}
        return [*events, self._event("response.failed", response=self.response())]

    def response(self) -> dict[str, Any]:
        """Return the response object so far."""
        asked, answer = self.request, self.answer
        choice, wanted = asked.tool_choice or "auto", asked.text and asked.text.format
        effort = asked.reasoning and asked.reasoning.effort
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
            "status": self.status,
            "error": self.error,
            "incomplete_details": {"reason": self.reason} if self.reason else None,
            "model": answer.model,
            "output": list(self.output),
            "usage": None if self.status == "in_progress" else usage,
            "background": False,
            "store": False,
            "previous_response_id": None,
            "truncation": "disabled",
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "reasoning": {"effort": effort, "summary": None},
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": wanted.model_dump(by_alias=True) if wanted else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in asked.tools or ()],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
        }

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self.answer.id.partition('-')[2]}"

    def _begin(self, delta: Delta, calls: Mapping[int, str]) -> list[Event]:
        kind, prefix, grows = _KINDS[delta.kind]
        index = len(self.output)
        item = self.open = OutputItem(kind, f"{self._id(prefix)}_{index}", grows, index)
        added = {"output_index": index}
        if kind == "function_call":
            item.call_id, item.name = calls[delta.index], delta.text
        plain = item.plain("in_progress", parts=False)
        events = [self._event("response.output_item.added", **added, item=plain)]
        if kind != "function_call":
            events.append(self._event("response.content_part.added", **item.place, part=item.part))
        return events

    def _close(self, status: str) -> list[Event]:
        item, self.open = self.open, None
        if item is None:
            return []
        done = item.plain(status)
        self.output.append(done)
        whole: dict[str, Any] = {"text": item.text}
        if item.kind == "message":
            whole |= {"logprobs": []}
        elif item.kind == "function_call":
            whole = {"arguments": item.text, "name": item.name}
        events = [self._event(f"{item.grows}.done", **item.place, **whole)]
        if item.kind != "function_call":
            events.append(self._event("response.content_part.done", **item.place, part=item.part))
        last = self._event("response.output_item.done", output_index=item.index, item=done)
        return [*events, last]

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self.sequence, **fields}
        self.sequence += 1
        return event


@dataclass(slots=True)
class ResponsesAnswer:
    """The response to one request: a chat with one choice, and its events."""

    chat: ChatAnswer
    stream: ResponseStream

    async def whole(self) -> dict[str, Any]:
        """Return the response of a request without `stream`; raises ApiError."""
        async for step in self.chat.steps():
            self._push(step)
        self.stream.finish(self.chat.choices[0].finish)
        return self.stream.response()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed response; the last one has the final status."""
        yield _sent(self.stream.start())
        try:
            async for step in self.chat.steps():
                if events := self._push(step):
                    yield _sent(events)
        except ApiError as error:
            yield _sent(self.stream.fail(error))
        else:
            yield _sent(self.stream.finish(self.chat.choices[0].finish))

    def _push(self, step: Iterable[tuple[int, list[Delta], str]]) -> list[Event]:
        calls = self.chat.choices[0].calls
        return [event for _, deltas, _ in step for event in self.stream.push(deltas, calls)]


def _sent(events: Sequence[Event]) -> bytes:
    return b"".join(
        b"event: %s\ndata: %s\n\n" % (event["type"].encode(), to_json(event)) for event in events
    )
