"""The request schemas: strict and bounded; unknown fields are ignored, null counts as absent.

Unsupported values are refused, not dropped. Types are literal: "3", 3.0 and true are not integers.
Ranges are OpenAI's where it has the field. No template, path or URL is taken from a request.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from clocher_kernels.errors import FormatError, UsageError
from clocher_runtime.diffusion import RULES, WORDS, parse
from clocher_runtime.disk.strict_json import parse_object
from clocher_runtime.engine.sampling_defaults import taken
from clocher_runtime.serve.errors import Refused, from_validation, invalid

MAX_TOKENS = (1 << 31) - 1
MAX_SCHEMA_CHARS = 64 << 10
MAX_MESSAGES, MAX_TOOLS, MAX_CHOICES = 4096, 128, 16
MAX_STOPS, MAX_STOP_CHARS = 16, 256
_SEEDS = 1 << 64
# Odd, so that no two choices of a request share a seed: Knuth's 2^64 divided by the golden ratio.
_SEED_STEP = 0x9E3779B97F4A7C15
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
        return data

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Return a validated body; raises ApiError: not JSON, too deep, too large, invalid."""
        try:
            body = parse_object(data, "the body")
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


def _biases(value: dict[str, float]) -> dict[str, float]:
    if value and max(map(int, value)) > MAX_TOKENS:
        raise Refused(f"logit_bias has a key above {MAX_TOKENS}; expected token ids")
    return value


def _diffusion(value: str) -> str:
    try:
        if value not in WORDS:
            parse(value)
    except UsageError as error:
        raise Refused(str(error)) from None
    return value


def _text(least: int, most: int) -> StringConstraints:
    return StringConstraints(min_length=least, max_length=most)


JsonSchema = Annotated[dict[str, Any], AfterValidator(_bounded)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
ShortText = Annotated[str, _text(0, 256)]
ReasoningEffort = Literal["low", "medium", "high"]
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
Stops = Annotated[
    list[Annotated[str, _text(1, MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema(
        {"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOPS}]}
    ),
]
Biases = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    Field(max_length=1024),
    AfterValidator(_biases),
]
_RULE = rf"^({'|'.join(WORDS)}|({'|'.join(RULES)})(:[0-9.]+(,[0-9.]+)?)?)$"
Diffusion = Annotated[
    str,
    _text(0, 64),
    AfterValidator(_diffusion),
    WithJsonSchema({"type": "string", "maxLength": 64, "pattern": _RULE}),
]
GuidedSchema = Annotated[
    JsonSchema,
    BeforeValidator(_parsed),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]
GuidedRegex = Annotated[str, _text(1, 8 << 10)]
GuidedGrammar = Annotated[str, _text(1, MAX_SCHEMA_CHARS)]
GuidedChoice = Annotated[list[Annotated[str, _text(1, 1024)]], Field(min_length=1, max_length=256)]


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
    content: str | list[TextPart] | None = None
    name: ShortText | None = None

    def plain(self) -> dict[str, Any]:
        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message = self.model_dump(exclude_none=True) | {"content": content}
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
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


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
        parameters = self.function.parameters
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": {"type": "object", "properties": {}}
            if parameters is None
            else parameters,
        }
        return {"type": "function", "function": function}


class FunctionNamed(Schema):
    """The name of a function."""

    name: FunctionName


class NamedChoice(Schema):
    """The function that has to be called."""

    type: Literal["function"]
    function: FunctionNamed


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


class SamplingFields(Schema):
    """How tokens are sampled."""

    unsupported: ClassVar = {
        "use_beam_search": ((False,), "use n"),
        "min_tokens": ((0,), "use ignore_eos with max_tokens"),
        "stop_token_ids": (([],), "use stop"),
        "include_stop_str_in_output": ((False,), "add the stop text to the answer"),
        "bad_words": (([],), "use logit_bias"),
        "allowed_token_ids": (([],), "use guided_choice or guided_grammar"),
        "length_penalty": ((1,), "it belongs to beam search"),
        "prompt_logprobs": ((), "use /v1/completions with echo and logprobs"),
        "truncate_prompt_tokens": ((), "shorten the prompt"),
        "skip_special_tokens": ((True,), "answers never have special tokens"),
        "logits_processors": (([],), "use logit_bias"),
    }

    model: ShortText | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS, description="-1 and 0: all tokens")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: Biases | None = Field(None, description="token id -> added to its logit")
    seed: int | None = Field(None, ge=-_SEEDS // 2, le=_SEEDS - 1)
    ignore_eos: bool | None = None
    diffusion: Diffusion | None = Field(
        None, description="how blocks are denoised: lossless, a rule"
    )
    stream: bool | None = None
    cache_salt: Annotated[str, _text(1, 128)] | None = None
    request_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")] | None = None

    def on_top_of(self, defaults: Mapping[str, float]) -> Self:
        """Return the request with a model's defaults for absent fields."""
        said = {name: getattr(self, name) for name in defaults}
        return self.model_copy(update=taken(defaults, said | {"temperature": self.temperature}))

    def sampling(self, choice: int = 0) -> dict[str, Any]:
        """Return arguments of `Sampling`; choice n has a seed derived from the request's."""
        seed = secrets.randbits(64) if self.seed is None else self.seed + choice * _SEED_STEP
        given = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "top_p": None if self.top_p is None else max(self.top_p, 1e-9),  # 0: the top token
            "min_p": self.min_p,
            "seed": seed % _SEEDS,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            # A bias of 0 has only a cost: sampling with biases is slower.
            "logit_bias": {int(t): bias for t, bias in (self.logit_bias or {}).items() if bias},
        }
        return {name: value for name, value in given.items() if value is not None}
