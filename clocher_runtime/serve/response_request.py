"""The request of /v1/responses, and its chat request. Nothing is stored; `store` is ignored."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from clocher_runtime.serve.errors import Refused
from clocher_runtime.serve.requests import ChatRequest
from clocher_runtime.serve.schemas import (
    MAX_MESSAGES,
    MAX_TOKENS,
    MAX_TOOLS,
    Function,
    FunctionName,
    JsonSchema,
    PlainFormat,
    ReasoningEffort,
    SamplingFields,
    Schema,
    ShortText,
    checked,
)


class InputPart(Schema):
    """A piece of text in a message. Images, audio and files are refused."""

    type: Literal["input_text", "output_text", "text"]
    text: str


Content = str | list[InputPart]


class InputMessage(Schema):
    """A message; `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ReasoningPart(Schema):
    """A piece of the reasoning, or of a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Schema):
    """What the model thought in an earlier turn."""

    unsupported: ClassVar = {
        "encrypted_content": ((), "reasoning is never encrypted here; send content")
    }

    type: Literal["reasoning"]
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None


class FunctionCallItem(Schema):
    """A call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: ShortText
    name: FunctionName
    arguments: str


class FunctionCallOutput(Schema):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: ShortText
    output: Content


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return kind if isinstance(kind, str) else "of no type"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
]


class FunctionTool(Function):
    """A function that the model may call; other types of tools are refused."""

    type: Literal["function"]


class NamedFunction(Schema):
    """The function that has to be called."""

    type: Literal["function"]
    name: FunctionName


class FlatSchemaFormat(Schema):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    name: FunctionName
    description: str | None = None
    schema_: JsonSchema = Field(alias="schema")
    strict: bool | None = None


class TextSettings(Schema):
    """The format of the text of the answer."""

    unsupported: ClassVar = {"verbosity": (("medium",), "say it in the instructions")}

    format: Annotated[PlainFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None


class ReasoningSettings(Schema):
    """How much the model thinks."""

    effort: ReasoningEffort | None = None


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    unsupported: ClassVar = {
        **SamplingFields.unsupported,
        "previous_response_id": ((), "nothing is stored: send the whole conversation"),
        "conversation": ((), "nothing is stored: send the whole conversation"),
        "background": ((False,), "nothing is stored: use stream"),
        "prompt": ((), "nothing is stored: use input"),
        "context_management": (([],), "shorten the input"),
        "truncation": (("disabled",), "shorten the input"),
        "top_logprobs": ((0,), "use /v1/chat/completions"),
        "moderation": ((), "leave it out"),
        "stop": (([],), "use /v1/chat/completions"),
        "n": ((1,), "use /v1/chat/completions"),
        "chat_template": ((), "the model's own template is used"),
    }

    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: list[ShortText] | None = Field(None, max_length=16)
    metadata: Metadata | None = None

    def model_post_init(self, _: Any) -> None:
        """Validate lists of allowed words."""
        if "message.output_text.logprobs" in (self.include or ()):
            raise Refused("include asks for logprobs; use /v1/chat/completions for them", "include")

    def chat(self) -> ChatRequest:
        """Return the equivalent chat request; raises ApiError if there is none."""
        same = (*SamplingFields.model_fields, "parallel_tool_calls")
        fields = {name: getattr(self, name) for name in same}
        fields["messages"] = self._messages()
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump()} for tool in self.tools or ()
        ]
        choice = self.tool_choice
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}  # type: ignore[assignment]
        fields["tool_choice"] = choice
        fields["reasoning_effort"] = self.reasoning and self.reasoning.effort
        wanted = self.text and self.text.format
        if isinstance(wanted, FlatSchemaFormat):
            described = wanted.model_dump(by_alias=True, exclude={"type"})
            fields["response_format"] = {"type": "json_schema", "json_schema": described}
        elif wanted:
            fields["response_format"] = wanted.model_dump()
        return checked(ChatRequest, fields)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]

        def assistant(*before: str) -> dict[str, Any]:
            last = messages[-1] if messages else {}
            if last.get("role") != "assistant" or any(name in last for name in before):
                messages.append({"role": "assistant"})
            return messages[-1]

        for item in self.input:
            match item:
                case InputMessage(role="assistant"):
                    assistant("content", "tool_calls")["content"] = _text(item.content)
                case InputMessage():
                    messages.append({"role": item.role, "content": _text(item.content)})
                case ReasoningItem():
                    turn = assistant("reasoning_content", "content", "tool_calls")
                    turn["reasoning_content"] = _text(item.content or item.summary or ())
                case FunctionCallItem():
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    assistant().setdefault("tool_calls", []).append(call)
                case FunctionCallOutput():
                    message = {"role": "tool", "tool_call_id": item.call_id}
                    messages.append(message | {"content": _text(item.output)})
        return messages


def _text(content: str | Sequence[InputPart | ReasoningPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
