"""What conversations in requests are made of: messages, functions, formats of the answer."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from clocher_runtime.serve.schemas_base import (
    FunctionName,
    JsonSchema,
    Schema,
    ShortText,
    Unsupported,
)

ReasoningEffort = Literal["low", "medium", "high"]


class TextPart(Schema):
    """A piece of a message. Images, audio and files are refused: models here read text."""

    type: Literal["text"]
    text: str


class CalledFunction(Schema):
    """What a call calls; the arguments are JSON text, as the model wrote it."""

    name: FunctionName
    arguments: str


class ToolCall(Schema):
    """A call that the model made in an earlier turn."""

    id: ShortText
    type: Literal["function"] = "function"
    function: CalledFunction


class _Message(Schema):
    """What the messages of all roles have; the parts of a content stand on lines of their own."""

    content: str | list[TextPart] | None = None
    name: ShortText | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates read it: content is text, nothing is None."""
        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message = self.model_dump(exclude_none=True) | {"content": content}
        return {key: value for key, value in message.items() if value or key == "content"}


class GivenMessage(_Message):
    """What the model is told."""

    unsupported: ClassVar = {"tool_calls": Unsupported(([],), "only assistants call")}

    role: Literal["system", "developer", "user"]
    content: str | list[TextPart]


class ToolMessage(_Message):
    """What a call gave; `tool_call_id` says which one."""

    unsupported: ClassVar = {"tool_calls": Unsupported(([],), "only assistants call")}

    role: Literal["tool"]
    content: str | list[TextPart]
    tool_call_id: ShortText | None = None


class AssistantMessage(_Message):
    """What the model said.

    `reasoning_content` is what it thought before; `reasoning` is another name of it.
    """

    role: Literal["assistant"]
    tool_calls: list[ToolCall] | None = Field(None, max_length=128, fail_fast=True)
    reasoning_content: str | None = None
    reasoning: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        message = super().plain()
        reasoning = message.pop("reasoning", "")
        return message if not reasoning else {"reasoning_content": reasoning} | message


Message = Annotated[GivenMessage | ToolMessage | AssistantMessage, Field(discriminator="role")]


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them; that of a tool has the name of its function."""
    called: dict[str, str] = {}
    plain = []
    for message in messages:
        turn = message.plain()
        if isinstance(message, AssistantMessage):
            called |= {call.id: call.function.name for call in message.tool_calls or ()}
        elif isinstance(message, ToolMessage) and message.tool_call_id in called:
            turn.setdefault("name", called[message.tool_call_id])
        plain.append(turn)
    return plain


class Function(Schema):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        nothing: dict[str, Any] = {"type": "object", "properties": {}}
        function = {
            "name": self.name,
            "description": self.description or "",
            "parameters": nothing if self.parameters is None else self.parameters,
        }
        return {"type": "function", "function": function}


class Tool(Schema):
    """A tool; of the types of tools, functions are the one that exists here."""

    type: Literal["function"]
    function: Function


class FunctionNamed(Schema):
    """The name of a function."""

    name: FunctionName


class NamedChoice(Schema):
    """The wish that one function is called."""

    type: Literal["function"]
    function: FunctionNamed


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class TextFormat(Schema):
    """Any text."""

    type: Literal["text"]


class JsonFormat(Schema):
    """A JSON object."""

    type: Literal["json_object"]


class NamedSchema(Schema):
    """A JSON schema; it is kept to whether `strict` or not."""

    name: FunctionName
    description: str | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class SchemaFormat(Schema):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class TemplateVariables(Schema, extra="forbid"):
    """Variables of the chat template that a request may set."""

    enable_thinking: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
