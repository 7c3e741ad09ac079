"""The requests of chats, completions and tokenisation: see `schemas`."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from clocher_runtime.serve.errors import Refused
from clocher_runtime.serve.schemas import (
    MAX_CHOICES,
    MAX_TOKENS,
    MAX_TOOLS,
    GuidedChoice,
    GuidedGrammar,
    GuidedRegex,
    GuidedSchema,
    Messages,
    NamedChoice,
    PlainFormat,
    ReasoningEffort,
    SamplingFields,
    Schema,
    SchemaFormat,
    ShortText,
    Stops,
    TemplateVariables,
    Tool,
    plain_messages,
)

MAX_PROMPTS, MAX_ANSWERS, MAX_PROMPT_TOKENS = 64, 128, 1 << 20
MAX_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` in /v1/completions."""


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


class GenerationFields(SamplingFields):
    """What is common to requests of chats and completions."""

    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stops | None = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    structured_outputs: StructuredOutputs | None = None
    guided_json: GuidedSchema | None = None
    guided_regex: GuidedRegex | None = None
    guided_grammar: GuidedGrammar | None = None
    guided_choice: GuidedChoice | None = None
    functions: ClassVar[Sequence[dict[str, Any]]] = ()
    must_call: ClassVar[bool] = False

    def model_post_init(self, _: Any) -> None:
        """Validate combinations of fields."""
        if self.stream_options is not None and not self.stream:
            raise Refused("stream_options is given without stream; set stream", "stream_options")
        if len(asked := self._constraints()) > 1:
            raise Refused(
                f"{len(asked)} output constraints are set; expected one of response_format, "
                "structured_outputs and guided_...",
                "response_format" if self.response_format else None,
            )

    @property
    def choices(self) -> int:
        """Completions per prompt."""
        return self.n or 1

    @property
    def options(self) -> StreamOptions:
        """The stream options, or their defaults."""
        return self.stream_options or StreamOptions()

    @property
    def constraint(self) -> dict[str, Any] | None:
        """The output constraint as one of `grammar_rules.KINDS` -> its value, or None."""
        return next(iter(self._constraints()), None)

    def _constraints(self) -> list[dict[str, Any]]:
        outputs = self.structured_outputs or StructuredOutputs()
        named: list[tuple[str, Any]] = [
            ("json_schema", self.guided_json),
            ("json_schema", outputs.json_),
            ("json_object", outputs.json_object),
            ("regex", self.guided_regex),
            ("regex", outputs.regex),
            ("grammar", self.guided_grammar),
            ("grammar", outputs.grammar),
            ("choice", self.guided_choice),
            ("choice", outputs.choice),
        ]
        match self.response_format:
            case PlainFormat(type="json_object"):
                named.append(("json_object", True))
            case SchemaFormat(json_schema=described):
                named.append(("json_schema", described.schema_ or {}))
        return [{kind: value} for kind, value in named if value is not None]


class ChatFields(Schema):
    """How a conversation becomes a prompt."""

    unsupported: ClassVar = {
        "chat_template": ((), "the model's own template is used"),
        "continue_final_message": ((False,), "use /v1/completions"),
        "documents": (([],), "put their text into a message"),
        "functions": (([],), "use tools"),
        "function_call": (("none",), "use tool_choice"),
    }

    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The available functions, as chat templates read them."""
        return [tool.plain() for tool in self.tools or ()]

    @property
    def template_variables(self) -> dict[str, Any]:
        """The chat template variables that the request sets."""
        given = self.chat_template_kwargs or TemplateVariables()
        variables = given.model_dump(exclude_none=True)
        if self.add_generation_prompt is not None:
            variables["add_generation_prompt"] = self.add_generation_prompt
        return variables


class ChatRequest(ChatFields, GenerationFields):
    """POST /v1/chat/completions."""

    unsupported: ClassVar = {
        **GenerationFields.unsupported,
        **ChatFields.unsupported,
        "modalities": ((["text"], []), "models here write text only"),
        "audio": ((), "models here write text only"),
        "web_search_options": ((), "give a tool that searches"),
        "echo": ((False,), "use /v1/completions"),
        "best_of": ((1,), "use n"),
        "suffix": (("",), "put it into a message"),
    }

    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None

    def model_post_init(self, context: Any) -> None:
        """Validate combinations of fields."""
        super().model_post_init(context)
        if self.top_logprobs and not self.logprobs:
            raise Refused("top_logprobs is given without logprobs; set logprobs", "top_logprobs")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise Refused("two tools have the same name; expected different ones", "tools")
        if self.must_call and not self.functions:
            raise Refused("tool_choice asks for a tool that is not among tools", "tool_choice")
        effort = self.chat_template_kwargs and self.chat_template_kwargs.reasoning_effort
        if effort and self.reasoning_effort not in (None, effort):
            raise Refused("reasoning_effort is given twice, with two values", "reasoning_effort")

    def dialogue(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates read them."""
        return plain_messages(self.messages)

    @property
    def budget(self) -> int | None:
        """Maximum tokens per completion; None: as many as fit in the context."""
        limits = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(limits, default=None)

    @property
    def top(self) -> int:
        """Number of top tokens to report per token; -1: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    @property
    def functions(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The available functions: none or one of them if `tool_choice` says so."""
        choice = self.tool_choice
        if choice == "none":
            return []
        tools = super().functions
        if isinstance(choice, NamedChoice):
            return [tool for tool in tools if tool["function"]["name"] == choice.function.name]
        return tools

    @property
    def must_call(self) -> bool:  # type: ignore[override]
        """Whether the answer has to be a tool call."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def template_variables(self) -> dict[str, Any]:
        """The chat template variables that the request sets."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        return super().template_variables | effort


_EXPECTED = "expected text, a list of texts, a list of token ids, or a list of such lists"


def _prompts(value: object) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise Refused(f"prompt is {_kind(value)}; {_EXPECTED}")
    if type(value[0]) is int:
        return [_token_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise Refused(f"{len(value)} prompts; expected at most {MAX_PROMPTS}: send fewer at a time")
    if all(isinstance(prompt, str) for prompt in value):
        return value
    return [_token_ids(prompt) for prompt in value]


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        raise Refused(f"a prompt is {_kind(value)}; {_EXPECTED}")
    if len(value) > MAX_PROMPT_TOKENS:
        raise Refused(f"a prompt of {len(value)} tokens; expected at most {MAX_PROMPT_TOKENS}")
    if min(value) < 0 or max(value) > MAX_TOKENS:
        raise Refused(f"a token id is out of range; expected 0 to {MAX_TOKENS}")
    return value


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "a list of various things" if value else "an empty list"
    kinds = {int: "a number", float: "a number", dict: "an object", bool: "true or false"}
    return "null" if value is None else kinds.get(type(value), "text")


_TOKEN_IDS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS},
    "minItems": 1,
    "maxItems": MAX_PROMPT_TOKENS,
}
_MANY = {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS}
_TEXTS = [{"type": "string"}, {**_MANY, "items": {"type": "string"}}]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema({"anyOf": [*_TEXTS, _TOKEN_IDS, {**_MANY, "items": _TOKEN_IDS}]}),
]


class CompletionRequest(GenerationFields):
    """POST /v1/completions. After validation `prompt` is a list of prompts."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def model_post_init(self, context: Any) -> None:
        """Validate combinations of fields."""
        super().model_post_init(context)
        if self.best_of not in (None, self.choices):
            raise Refused(f"best_of is not n, which is {self.choices}; leave it out", "best_of")
        if self.suffix:
            raise Refused("suffix is not supported; models here continue a prompt", "suffix")
        if self.max_tokens == 0 and not self.echo:
            raise Refused("max_tokens is 0 without echo; expected at least 1", "max_tokens")
        if (answers := len(self.prompt) * self.choices) > MAX_ANSWERS:
            raise Refused(f"{answers} answers; expected at most {MAX_ANSWERS}: lower n", "n")

    @property
    def budget(self) -> int:
        """Maximum tokens per completion; 0: only score the prompt."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int:
        """Number of top tokens to report per token; -1: no log probabilities."""
        return -1 if self.logprobs is None else self.logprobs


class TokenizeRequest(ChatFields):
    """POST /tokenize: a prompt, or messages; `add_special_tokens` is about prompts."""

    model: ShortText | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None

    def model_post_init(self, _: Any) -> None:
        """Validate combinations of fields."""
        if (self.prompt is None) == (self.messages is None):
            both = "neither" if self.prompt is None else "both"
            raise Refused(f"{both} of prompt and messages are given; expected one", "prompt")

    def dialogue(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates read them; [] if there is a prompt."""
        return plain_messages(self.messages or [])


class DetokenizeRequest(Schema):
    """POST /detokenize."""

    model: ShortText | None = None
    tokens: list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]] = Field(
        max_length=MAX_PROMPT_TOKENS, fail_fast=True
    )
