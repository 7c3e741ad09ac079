"""The events of /v1/responses, and the object that they add up to: no sockets, no engine.

An answer is a list of items: reasoning, messages, calls. One is open at a time. It is announced,
grows by deltas, and is told again as a whole when something else begins or the answer ends.

Source: OpenAI API reference, responses and their streaming events.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from clocher_runtime.serve.errors import ApiError
from clocher_runtime.serve.schemas_responses import ResponsesRequest
from clocher_runtime.serve.usage import Answer
from clocher_runtime.text.answers import Delta

Event = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
Kind = Literal["message", "reasoning", "function_call"]

_KINDS: Mapping[str, Kind] = {
    "content": "message",
    "reasoning": "reasoning",
    "tool_call": "function_call",
    "arguments": "function_call",
}
_PREFIX: Mapping[Kind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_GROWS: Mapping[Kind, str] = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
"""What the events are called by which an item grows."""


@dataclass(slots=True)
class Item:
    """A part of the output.

    Attributes:
        index: in the output.
        call_id: of a call, as its answer will name it; else "".
        name: of the function that is called; else "".
        pieces: its text so far, or the JSON of its arguments.
    """

    kind: Kind
    id: str
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far, or the JSON of the arguments."""
        return "".join(self.pieces)

    @property
    def place(self) -> dict[str, Any]:
        """How events name what they are about."""
        place = {"item_id": self.id, "output_index": self.index}
        return place if self.kind == "function_call" else place | {"content_index": 0}

    @property
    def part(self) -> dict[str, Any]:
        """The one part of the content of a message or of reasoning."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def plain(self, status: Status, parts: bool = True) -> dict[str, Any]:
        """Return the item as the output has it.

        Args:
            status: of it.
            parts: whether its content has begun.
        """
        plain: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        content = [self.part] if parts else []
        match self.kind:
            case "message":
                return plain | {"role": "assistant", "content": content}
            case "reasoning":
                return plain | {"summary": [], "content": content}
            case "function_call":
                call = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
                return plain | call


@dataclass(slots=True)
class ResponseStream:
    """An answer, as it is made.

    Attributes:
        request: what it answers.
        answer: its name, and the tokens that it took.
        output: its items that are finished.
        open: that which grows.
        status: of the whole.
        reason: why it is incomplete; "" if it is not.
        error: what ended it early.
        reasoning_tokens: tokens that were reasoning.
        sequence: number of the next event.
    """

    request: ResponsesRequest
    answer: Answer
    output: list[dict[str, Any]] = field(default_factory=list)
    open: Item | None = None
    status: Status | Literal["failed"] = "in_progress"
    reason: str = ""
    error: dict[str, Any] | None = None
    reasoning_tokens: int = 0
    sequence: int = 0

    @property
    def key(self) -> str:
        """What ids of the answer and of its items have in common."""
        return self.answer.id.partition("-")[2]

    def start(self) -> list[Event]:
        """Return the first events."""
        return [
            self._event(kind, response=self.response())
            for kind in ("response.created", "response.in_progress")
        ]

    def push(self, deltas: Iterable[Delta], calls: Mapping[int, str]) -> list[Event]:
        """Return the events of what a token said.

        Args:
            deltas: what it said.
            calls: ids of the calls so far, by index.
        """
        events: list[Event] = []
        for delta in deltas:
            kind = _KINDS[delta.kind]
            if self.open is None or self.open.kind != kind or delta.kind == "tool_call":
                events += self._close("completed")
                events += self._begin(kind, delta, calls)
            if delta.kind != "tool_call":
                events += self._grow(delta.text)
        if self.open is not None and self.open.kind == "reasoning":
            self.reasoning_tokens += 1
        return events

    def finish(self, finish: str) -> list[Event]:
        """Return the last events.

        Args:
            finish: why nothing follows, as chats tell it: "stop", "length" or "tool_calls".
        """
        if finish == "length":
            events = self._close("incomplete")
            self.status, self.reason = "incomplete", "max_output_tokens"
        else:
            events = self._close("completed")
            if not any(item["type"] != "reasoning" for item in self.output):
                # Those who wait for a message get one, though the model said nothing.
                events += self._begin("message", Delta("content", ""), {})
                events += self._close("completed")
            self.status = "completed"
        return [*events, self._event(f"response.{self.status}", response=self.response())]

    def fail(self, error: ApiError) -> list[Event]:
        """Return the last events of an answer that cannot be completed."""
        events = self._close("incomplete")
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        self.status, self.error = "failed", {"code": code, "message": error.message}
        return [*events, self._event("response.failed", response=self.response())]

    def response(self) -> dict[str, Any]:
        """Return the answer as it is now."""
        asked, over = self.request, self.status != "in_progress"
        return {
            "id": f"resp_{self.key}",
            "object": "response",
            "created_at": self.answer.created,
            "status": self.status,
            "error": self.error,
            "incomplete_details": {"reason": self.reason} if self.reason else None,
            "model": self.answer.model,
            "output": list(self.output),
            "usage": self._usage() if over else None,
            "background": False,
            "store": False,
            "previous_response_id": None,
            "truncation": "disabled",
            **_echo(asked),
        }

    def _begin(self, kind: Kind, delta: Delta, calls: Mapping[int, str]) -> list[Event]:
        index = len(self.output)
        item = Item(kind, f"{_PREFIX[kind]}_{self.key}_{index}", index)
        if kind == "function_call":
            item.call_id, item.name = calls[delta.index], delta.text
        self.open = item
        added = item.plain("in_progress", parts=False)
        events = [self._event("response.output_item.added", output_index=index, item=added)]
        if kind != "function_call":
            events.append(self._event("response.content_part.added", **item.place, part=item.part))
        return events

    def _grow(self, text: str) -> list[Event]:
        item = self.open
        assert item is not None
        if not text:  # the arguments of a function without any
            return []
        item.pieces.append(text)
        logprobs: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
        return [self._event(f"{_GROWS[item.kind]}.delta", **item.place, delta=text, **logprobs)]

    def _close(self, status: Status) -> list[Event]:
        """Return the events that end the open item, if there is one."""
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
        events = [self._event(f"{_GROWS[item.kind]}.done", **item.place, **whole)]
        if item.kind != "function_call":
            events.append(self._event("response.content_part.done", **item.place, part=item.part))
        last = self._event("response.output_item.done", output_index=item.index, item=done)
        return [*events, last]

    def _usage(self) -> dict[str, Any]:
        """Return the tokens it took."""
        asked, made, cached = self.answer.prompt_tokens, self.answer.made, self.answer.cached
        return {
            "input_tokens": asked,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": asked + made,
            **self.answer.denoised(),
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self.sequence, **fields}
        self.sequence += 1
        return event


def _echo(asked: ResponsesRequest) -> dict[str, Any]:
    """Return what an answer repeats of its request."""
    choice = asked.tool_choice or "auto"
    wanted = asked.text and asked.text.format
    effort = asked.reasoning and asked.reasoning.effort
    return {
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
