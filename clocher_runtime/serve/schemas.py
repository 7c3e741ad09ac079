"""The parts of requests: strict and bounded; unknown fields are ignored, null counts as absent.

Unsupported values are refused, not dropped. Types are literal: "3", 3.0 and true are not integers.
Ranges are OpenAI's where it has the field. No template, path or URL is taken from a request.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from clocher_kernels.errors import FormatError
from clocher_runtime.diffusion import RULES, WORDS
from clocher_runtime.disk.strict_json import parse_json, parse_object
from clocher_runtime.serve.errors import Refused, described, from_validation, invalid, short

MAX_TOKENS = (1 << 31) - 1
MAX_SCHEMA_CHARS = 64 << 10
MAX_MESSAGES, MAX_TOOLS = 4096, 128
MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_PROMPTS, MAX_INPUTS, MAX_PROMPT_TOKENS = 64, 2048, 1 << 20
S = TypeVar("S", bound="Schema")
Unsupported = Mapping[str, tuple[tuple[object, ...], str]]
"""Field of other servers -> values without effect, and what to use instead."""


class Schema(BaseModel):
    """A JSON object in a request."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)
    unsupported: ClassVar[Unsupported] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: object) -> object:
        for name, (harmless, instead) in cls.unsupported.items():
            given = data.get(name) if isinstance(data, Mapping) else None
            if given is not None and given not in harmless:
                raise Refused(f"{name} is not supported; {instead}", name)
        if cls.model_config["extra"] == "forbid" and isinstance(data, Mapping):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for name in (name for name in data if name not in known):
                raise Refused(f"{short(name)} is not known; expected {', '.join(known)}", name)
        return data

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Return a validated body; raises ApiError: not JSON, too deep, too large, invalid."""
        try:
            body = parse_json(data, "the body")
        except FormatError as error:
            # The text after a semicolon is advice for Python programs.
            raise invalid(str(error).split("; use sys.")[0]) from None
        return checked(cls, body)


def checked(schema: type[S], body: object) -> S:
    """Validate parsed JSON; raises ApiError."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise from_validation(error, body) from None


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    if (size := len(json.dumps(value))) > MAX_SCHEMA_CHARS:
        raise Refused(
            f"a JSON schema has {size} characters; expected at most {MAX_SCHEMA_CHARS}: shorten it"
        )
    return value


def _parsed(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_object(value.encode("utf-8"), "a JSON schema")
    except (FormatError, UnicodeEncodeError) as error:
        raise Refused(str(error)) from None


def text_of(least: int, most: int) -> StringConstraints:
    """Return the bounds of a text's length."""
    return StringConstraints(min_length=least, max_length=most)


def list_of(most: int, least: int = 0) -> Any:
    """Return the bounds of a list's length."""
    return Field(min_length=least, max_length=most, fail_fast=True)


JsonSchema = Annotated[dict[str, Any], AfterValidator(_bounded)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
ShortText = Annotated[str, text_of(0, 256)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
_TokenIds = Annotated[list[TokenId], list_of(MAX_PROMPT_TOKENS, 1)]


def _texts(most: int) -> tuple[PlainValidator, WithJsonSchema]:
    """Return how one text or list of ids, or up to `most` of them, is read as a list."""
    many = list_of(most, 1)
    kinds: Any = str | _TokenIds | Annotated[list[str], many] | Annotated[list[_TokenIds], many]
    adapter: TypeAdapter[Any] = TypeAdapter(kinds, config=ConfigDict(strict=True))

    def read(value: object, info: ValidationInfo) -> list[str | list[int]]:
        try:
            given = adapter.validate_python(value)
        except ValidationError:
            raise Refused(
                f"{info.field_name} is {described(value)}; expected text, up to {most} texts, a "
                f"list of token ids (1 to {MAX_PROMPT_TOKENS} of them, from 0 to {MAX_TOKENS}), or "
                f"up to {most} such lists"
            ) from None
        return given if isinstance(given, list) and type(given[0]) is not int else [given]

    return PlainValidator(read), WithJsonSchema(adapter.json_schema())


Prompts = Annotated[list[str | list[int]], *_texts(MAX_PROMPTS)]
Inputs = Annotated[list[str | list[int]], *_texts(MAX_INPUTS)]
_StopText = Annotated[str, text_of(1, MAX_STOP_CHARS)]
Stops = Annotated[
    _StopText | Annotated[list[_StopText], Field(max_length=MAX_STOPS)],
    AfterValidator(lambda value: [value] if isinstance(value, str) else value),
]
Biases = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    Field(max_length=1024),
]
_RULE = rf"^({'|'.join(WORDS)}|({'|'.join(RULES)})(:[0-9.]+(,[0-9.]+)?)?)$"
Diffusion = Annotated[
    str, text_of(0, 64), WithJsonSchema({"type": "string", "maxLength": 64, "pattern": _RULE})
]
GuidedSchema = Annotated[
    JsonSchema,
    BeforeValidator(_parsed),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]
GuidedRegex = Annotated[str, text_of(1, 8 << 10)]
GuidedGrammar = Annotated[str, text_of(1, MAX_SCHEMA_CHARS)]
GuidedChoice = Annotated[list[Annotated[str, text_of(1, 1024)]], list_of(256, 1)]


class TextPart(Schema):
    """A piece of a message. Images, audio and files are refused: models here read text."""

    type: Literal["text"]
    text: str


def function_of(**fields: Any) -> dict[str, Any]:
    """Return a tool, a choice or a call in the format of chats."""
    return {"type": "function", "function": fields}


class CalledFunction(Schema):
    """What a call calls; the arguments are JSON text, as the model wrote it."""

    name: FunctionName
    arguments: str


class ToolCall(Schema):
    """A call that the model made in an earlier turn."""

    id: ShortText
    type: Literal["function"] = "function"
    function: CalledFunction


def joined(content: Any) -> str:
    """Return the text of a content: a text, or parts that have one."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class _Message(Schema):
    content: str | list[TextPart] | None = None
    name: ShortText | None = None

    def plain(self) -> dict[str, Any]:
        message = self.model_dump(exclude_none=True) | {"content": joined(self.content or "")}
        if reasoning := message.pop("reasoning", ""):
            message.setdefault("reasoning_content", reasoning)
        return {key: value for key, value in message.items() if value or key == "content"}


class GivenMessage(_Message):
    """A system, developer or user message."""

    unsupported: ClassVar = {"tool_calls": (([],), "only assistants call")}

    role: Literal["system", "developer", "user"]
    content: str | list[TextPart]


class ToolMessage(_Message):
    """What a call gave; `tool_call_id` says which one."""

    unsupported: ClassVar = GivenMessage.unsupported

    role: Literal["tool"]
    content: str | list[TextPart]
    tool_call_id: ShortText | None = None


class AssistantMessage(_Message):
    """What the model said; `reasoning` is another name of `reasoning_content`."""

    role: Literal["assistant"]
    tool_calls: list[ToolCall] | None = Field(None, max_length=128, fail_fast=True)
    reasoning_content: str | None = None
    reasoning: str | None = None


Message = Annotated[GivenMessage | ToolMessage | AssistantMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], list_of(MAX_MESSAGES, 1)]


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them; a tool's message has its function's name."""
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


class Tool(Schema):
    """A tool; of the types of tools, functions are supported."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Return the tool as chat templates read it."""
        name, parameters = self.function.name, self.function.parameters
        if parameters is None:
            parameters = {"type": "object", "properties": {}}
        about = self.function.description or ""
        return function_of(name=name, description=about, parameters=parameters)


class FunctionNamed(Schema):
    """The name of a function."""

    name: FunctionName


class NamedChoice(Schema):
    """The function that has to be called."""

    type: Literal["function"]
    function: FunctionNamed


class AllowedTools(Schema):
    """The functions that may be called, of those that are there."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], list_of(MAX_TOOLS, 1)]


class AllowedChoice(Schema):
    """That some of the functions may be called, or have to be."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class PlainFormat(Schema):
    """Any text, or a JSON object."""

    type: Literal["text", "json_object"]


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


class TemplateVariables(Schema, extra="forbid"):
    """Variables of the chat template that a request may set."""

    enable_thinking: bool | None = None
    reasoning_effort: ReasoningEffort | None = None


class StreamOptions(Schema):
    """What streams report besides the answer.

    The usage in a last chunk, or with each chunk; uncommitted tokens after each forward that
    denoises a block.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_canvas: bool | None = None


class StructuredOutputs(Schema, extra="forbid"):
    """What the answer has to follow, as vLLM names it; one of them."""

    json_: GuidedSchema | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: GuidedRegex | None = None
    grammar: GuidedGrammar | None = None
    choice: GuidedChoice | None = None


class FunctionTool(Function):
    """A function that the model may call; other types of tools are refused."""

    type: Literal["function"]


class NamedFunction(FunctionNamed):
    """The function that has to be called."""

    type: Literal["function"]

    def plain(self) -> dict[str, Any]:
        """Return the choice in the format of chats."""
        return function_of(name=self.name)


class AllowedFunctions(Schema):
    """That some of the functions may be called, or have to be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], list_of(MAX_TOOLS, 1)]

    def plain(self) -> dict[str, Any]:
        """Return the choice in the format of chats."""
        allowed = {"mode": self.mode, "tools": [tool.plain() for tool in self.tools]}
        return {"type": self.type, "allowed_tools": allowed}


class FlatSchemaFormat(NamedSchema):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class TextSettings(Schema):
    """The format of the text of the answer."""

    unsupported: ClassVar = {"verbosity": (("medium",), "say it in the instructions")}

    format: Annotated[PlainFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None


class ReasoningSettings(Schema):
    """How much the model thinks."""

    effort: ReasoningEffort | None = None
