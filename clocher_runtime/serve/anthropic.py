"""POST /v1/messages and count_tokens: a chat in Anthropic's shapes (Anthropic API reference)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from clocher_kernels.errors import FormatError
from clocher_runtime.disk.strict_json import parse_object
from clocher_runtime.serve.answers import Answer
from clocher_runtime.serve.edge import Event
from clocher_runtime.serve.errors import MESSAGES_PATH, ApiError, invalid, to_json
from clocher_runtime.serve.requests import ChatRequest, SamplingFields
from clocher_runtime.serve.schemas import (
    MAX_MESSAGES,
    MAX_TOKENS,
    MAX_TOOLS,
    FlatSchemaFormat,
    FunctionName,
    JsonSchema,
    Schema,
    ShortText,
    Stops,
    TextPart,
    checked,
    function_of,
    joined,
    list_of,
)
from clocher_runtime.text.answers import Delta


class ThinkingBlock(Schema):
    """What the model thought in an earlier turn; its signature is not read."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Schema):
    """A call that the model made in an earlier turn."""

    type: Literal["tool_use"]
    id: ShortText
    name: FunctionName
    input: dict[str, Any]


class ToolResultBlock(Schema):
    """What a call gave; the text of an error begins with that word. Images are refused."""

    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: str | list[TextPart] | None = None
    is_error: bool | None = None


_Given = Annotated[TextPart | ToolResultBlock, Field(discriminator="type")]
_Made = Annotated[TextPart | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


def _of(kind: type[Any], content: str | Sequence[Schema]) -> list[Any]:
    blocks = [TextPart(type="text", text=content)] if isinstance(content, str) else content
    return [block for block in blocks if isinstance(block, kind)]


class UserTurn(Schema):
    """What a user says and tools gave, or instructions within the conversation."""

    role: Literal["user", "system"]
    content: str | Annotated[list[_Given], list_of(MAX_MESSAGES)]

    def plain(self) -> list[dict[str, Any]]:
        """Return the messages of a chat: the results of tools, then the text."""
        found: list[dict[str, Any]] = []
        for block in _of(ToolResultBlock, self.content):
            text = ("Error: " if block.is_error else "") + joined(block.content or "")
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        if (texts := _of(TextPart, self.content)) or not found:
            found.append({"role": self.role, "content": joined(texts)})
        return found


class AssistantTurn(Schema):
    """What the model said; the answer continues the last message if that is text."""

    role: Literal["assistant"]
    content: str | Annotated[list[_Made], list_of(MAX_MESSAGES)]

    def plain(self) -> list[dict[str, Any]]:
        """Return the message of a chat."""
        thoughts = "\n".join(block.thinking for block in _of(ThinkingBlock, self.content))
        turn = {"role": self.role, "content": joined(_of(TextPart, self.content))}
        calls = [
            {"id": b.id, **function_of(name=b.name, arguments=to_json(b.input).decode())}
            for b in _of(ToolUseBlock, self.content)
        ]
        return [turn | {"reasoning_content": thoughts or None, "tool_calls": calls or None}]


_Turn = Annotated[UserTurn | AssistantTurn, Field(discriminator="role")]


class ClientTool(Schema):
    """A tool that the client runs; those of Anthropic's servers are refused."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: JsonSchema


class ToolChoice(Schema):
    """Whether tools have to be called, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingSettings(Schema):
    """Whether the model thinks, where its template reads that; budgets are not kept to."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(FlatSchemaFormat):
    """JSON that a schema describes."""

    name: FunctionName = "answer"


class OutputConfig(Schema):
    """The format of the answer, and how much the model thinks where its template reads that."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Schema):
    """POST /v1/messages/count_tokens."""

    unsupported: ClassVar = {"mcp_servers": (([],), "call their tools in your program")}

    model: ShortText | None = None
    messages: Annotated[list[_Turn], list_of(MAX_MESSAGES, 1)]
    system: str | Annotated[list[TextPart], list_of(MAX_MESSAGES)] | None = None
    tools: list[ClientTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingSettings | None = None
    output_config: OutputConfig | None = None

    def chat(self, template: str) -> ChatRequest:
        """Return the equivalent chat request for a model's chat template; raises ApiError."""
        return checked(ChatRequest, self._fields() | {"chat_template_kwargs": self._kept(template)})

    def _fields(self) -> dict[str, Any]:
        messages = [{"role": "system", "content": joined(self.system)}] if self.system else []
        for message in (message for turn in self.messages for message in turn.plain()):
            before = messages[-1]["role"] if messages else "system"
            if message["role"] == "system" != before:  # few templates read it there
                message["role"] = "user"
            if messages and message["role"] == before and before in ("user", "system"):
                messages[-1]["content"] += f"\n{message['content']}"
            else:
                messages.append(message)
        last, choice = messages[-1], self.tool_choice or ToolChoice(type="auto")
        if choice.type == "tool" and choice.name is None:
            raise invalid("tool_choice.name is missing", "tool_choice.name")
        is_open = last["role"] == "assistant" and not last["tool_calls"]
        named = {"any": "required", "tool": function_of(name=choice.name)}
        wanted = self.output_config and self.output_config.format
        form = wanted and wanted.model_dump(by_alias=True)
        return {
            "messages": messages,
            "tools": [
                function_of(name=t.name, description=t.description, parameters=t.input_schema)
                for t in self.tools or ()
            ],
            "tool_choice": named.get(choice.type, choice.type),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "continue_final_message": is_open and bool(last["content"].strip()),
            "response_format": form and {"type": "json_schema", "json_schema": form},
        }

    def _kept(self, template: str) -> dict[str, Any]:
        """Return what is asked about thinking and the template reads."""
        thinks = self.thinking and {"enabled": True, "disabled": False}.get(self.thinking.type)
        effort = self.output_config and self.output_config.effort
        effort = "high" if effort in ("xhigh", "max") else effort
        found = {"enable_thinking": thinks, "reasoning_effort": effort}
        return {name: value for name, value in found.items() if name in template}


class MessagesRequest(CountTokensRequest, SamplingFields):
    """POST /v1/messages."""

    unsupported: ClassVar = {**SamplingFields.unsupported, **CountTokensRequest.unsupported}

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    stop_sequences: Stops | None = None

    def _fields(self) -> dict[str, Any]:
        more = {"max_completion_tokens": self.max_tokens, "stop": self.stop_sequences}
        same = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return {**same, **super()._fields(), **more}


_BLOCKS: Mapping[str, tuple[str, str, str]] = {
    "content": ("text", "text_delta", "text"),
    "reasoning": ("thinking", "thinking_delta", "thinking"),
    "tool_call": ("tool_use", "", ""),
    "arguments": ("tool_use", "input_json_delta", "partial_json"),
}
"""Kind of a delta -> type of its block, type of the block's delta, field of that."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(slots=True)
class MessageStream:
    """The events of a message, and the object that they add up to; see `edge.EventAnswer`."""

    answer: Answer
    blocks: list[dict[str, Any]] = field(default_factory=list)
    arguments: str = ""  # of the last block, if it is a call
    stopped: dict[str, str | None] = field(default_factory=dict)
    end: ClassVar = b""

    def start(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self.response()}

    def push(self, deltas: Iterable[Delta], calls: Mapping[int, str], *_: Any) -> Iterator[Event]:
        for delta in deltas:
            kind, grows, name = _BLOCKS[delta.kind]
            if delta.kind == "tool_call":
                call = {"id": calls[delta.index], "name": delta.text, "input": {}}
                yield from self._begin(kind, **call)
                continue
            if not self.blocks or self.blocks[-1]["type"] != kind:
                more = {"signature": ""} if kind == "thinking" else {}
                yield from self._begin(kind, **{kind: ""}, **more)
            if delta.kind == "arguments":
                self.arguments += delta.text
            else:
                self.blocks[-1][kind] += delta.text
            yield self._event("delta", delta={"type": grows, name: delta.text})

    def finish(self, finish: str, stop: str | None) -> Iterator[Event]:
        if not self.blocks:  # clients that expect a block get an empty one
            yield from self._begin("text", text="")
        yield from self._close()
        reason = _STOP_REASONS[finish] if stop is None else "stop_sequence"
        self.stopped = {"stop_reason": reason, "stop_sequence": stop}
        usage = self.response()["usage"]
        yield {"type": "message_delta", "delta": self.stopped, "usage": usage}
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Iterator[Event]:
        yield error.body_at(MESSAGES_PATH)

    def response(self) -> dict[str, Any]:
        answer = self.answer
        return {
            "id": answer.id,
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": self.blocks,
            **(self.stopped or dict.fromkeys(("stop_reason", "stop_sequence"))),
            "usage": {
                "input_tokens": answer.prompt_tokens - answer.cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": answer.cached,
                "output_tokens": answer.made,
                **answer.denoised(),
            },
        }

    def _begin(self, kind: str, **fields: Any) -> Iterator[Event]:
        if self.blocks:
            yield from self._close()
        self.blocks.append({"type": kind, **fields})
        yield self._event("start", content_block=dict(self.blocks[-1]))

    def _close(self) -> Iterator[Event]:
        said, self.arguments = self.arguments, ""
        if said:
            try:
                self.blocks[-1]["input"] = parse_object(said.encode(), "input")
            except FormatError:  # the call was cut off, or is no JSON object
                self.blocks[-1]["input"] = {"arguments": said}
        yield self._event("stop")

    def _event(self, what: str, **fields: Any) -> Event:
        return {"type": f"content_block_{what}", "index": len(self.blocks) - 1, **fields}
