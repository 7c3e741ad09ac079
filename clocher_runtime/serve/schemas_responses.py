"""The request of /v1/responses, and the conversation that it stands for.

Nothing is stored here: a client sends its whole conversation each time. `store` and a wish for
summaries of the reasoning are ignored: the answer says that nothing is stored, and has the whole
reasoning.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from clocher_runtime.serve.refusals import Refused
from clocher_runtime.serve.schemas import MAX_MESSAGES, MAX_TOOLS, ChatRequest
from clocher_runtime.serve.schemas_base import (
    MAX_TOKENS,
    FunctionName,
    JsonSchema,
    Schema,
    ShortText,
    Unsupported,
    checked,
)
from clocher_runtime.serve.schemas_messages import (
    Function,
    JsonFormat,
    ReasoningEffort,
    TextFormat,
)
from clocher_runtime.serve.schemas_sampling import SamplingFields

_SAME = (*SamplingFields.model_fields, "parallel_tool_calls")
"""Fields that a chat request has under the same name."""


class InputPart(Schema):
    """A piece of text in a message, from whomever. Images, audio and files are refused."""

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
        "encrypted_content": Unsupported((), "reasoning is never encrypted here; send content")
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
    """Return the type of an item of the input: where none is given, it is a message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    return kind if isinstance(kind, str) else "of no type"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


class FunctionTool(Function):
    """A function that the model may call; other types of tools are refused."""

    type: Literal["function"]


class NamedFunction(Schema):
    """The wish that one function is called."""

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

    unsupported: ClassVar = {"verbosity": Unsupported(("medium",), "say it in the instructions")}

    format: (
        Annotated[TextFormat | JsonFormat | FlatSchemaFormat, Field(discriminator="type")] | None
    ) = None


class ReasoningSettings(Schema):
    """How much the model thinks."""

    effort: ReasoningEffort | None = None


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    unsupported: ClassVar = {
        **SamplingFields.unsupported,
        "previous_response_id": Unsupported((), "nothing is stored: send the whole conversation"),
        "conversation": Unsupported((), "nothing is stored: send the whole conversation"),
        "background": Unsupported((False,), "nothing is stored: use stream"),
        "prompt": Unsupported((), "nothing is stored: use input"),
        "context_management": Unsupported(([],), "shorten the input"),
        "truncation": Unsupported(("disabled",), "shorten the input"),
        "top_logprobs": Unsupported((0,), "use /v1/chat/completions"),
        "moderation": Unsupported((), "leave it out"),
        "stop": Unsupported(([],), "use /v1/chat/completions"),
        "n": Unsupported((1,), "use /v1/chat/completions"),
        "chat_template": Unsupported((), "the model's own template is used"),
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
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None

    def model_post_init(self, _: Any) -> None:
        """Check what only a list of words tells."""
        if "message.output_text.logprobs" in (self.include or ()):
            raise Refused("include asks for logprobs; use /v1/chat/completions for them", "include")

    def chat(self) -> ChatRequest:
        """Return the chat request that asks for the same answer.

        Raises:
            ApiError: what the request says together cannot be obeyed.
        """
        fields = {name: getattr(self, name) for name in _SAME}
        fields["messages"] = self._messages()
        fields["max_completion_tokens"] = self.max_output_tokens
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump()} for tool in self.tools or ()
        ]
        fields["tool_choice"] = self.tool_choice
        if isinstance(self.tool_choice, NamedFunction):
            wanted = {"name": self.tool_choice.name}
            fields["tool_choice"] = {"type": "function", "function": wanted}
        fields["reasoning_effort"] = self.reasoning and self.reasoning.effort
        if self.text and self.text.format:
            fields["response_format"] = _chat_format(self.text.format)
        return checked(ChatRequest, fields)

    def _messages(self) -> list[dict[str, Any]]:
        """Return the input as messages of a chat."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            match item:
                case InputMessage(role="assistant"):
                    turn = _assistant(messages, "content", "tool_calls")
                    turn["content"] = _text(item.content)
                case InputMessage():
                    messages.append({"role": item.role, "content": _text(item.content)})
                case ReasoningItem():
                    turn = _assistant(messages, "reasoning_content", "content", "tool_calls")
                    parts = item.content or item.summary or ()
                    turn["reasoning_content"] = "\n".join(part.text for part in parts)
                case FunctionCallItem():
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    _assistant(messages).setdefault("tool_calls", []).append(call)
                case FunctionCallOutput():
                    message = {"role": "tool", "tool_call_id": item.call_id}
                    messages.append(message | {"content": _text(item.output)})
        return messages


def _assistant(messages: list[dict[str, Any]], *before: str) -> dict[str, Any]:
    """Return the message of the model that something belongs to: the last one, or a new one.

    Args:
        messages: so far; a new one is added.
        before: what cannot stand before it in the same message.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in before):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: Content) -> str:
    """Return a content as one text; its parts stand on lines of their own."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _chat_format(wanted: TextFormat | JsonFormat | FlatSchemaFormat) -> dict[str, Any]:
    """Return a format as chat requests have it."""
    if not isinstance(wanted, FlatSchemaFormat):
        return wanted.model_dump()
    described = wanted.model_dump(by_alias=True, exclude={"type"})
    return {"type": "json_schema", "json_schema": described}
