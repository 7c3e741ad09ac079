"""The requests of chats, completions and tokenisation; their parts are in `schemas`."""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, Field, StringConstraints

from clocher_runtime.engine.arguments import taken
from clocher_runtime.serve.errors import Refused
from clocher_runtime.serve.schemas import (
    MAX_PROMPT_TOKENS,
    MAX_TOKENS,
    MAX_TOOLS,
    AllowedChoice,
    AssistantMessage,
    Biases,
    Diffusion,
    GuidedChoice,
    GuidedGrammar,
    GuidedRegex,
    GuidedSchema,
    Messages,
    NamedChoice,
    PlainFormat,
    Prompts,
    ReasoningEffort,
    Schema,
    SchemaFormat,
    ShortText,
    Stops,
    StreamOptions,
    StructuredOutputs,
    TemplateVariables,
    TokenId,
    Tool,
    joined,
    plain_messages,
    text_of,
)

MAX_CHOICES, MAX_ANSWERS = 16, 128
MAX_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` in /v1/completions."""
_SEEDS = 1 << 64
# Odd, so that no two choices of a request share a seed: Knuth's 2^64 divided by the golden ratio.
_SEED_STEP = 0x9E3779B97F4A7C15


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
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    logit_bias: Biases | None = Field(None, description="token id -> added to its logit")
    seed: int | None = Field(None, ge=-_SEEDS // 2, le=_SEEDS - 1)
    ignore_eos: bool | None = None
    diffusion: Diffusion | None = Field(
        None, description="how blocks are denoised: lossless, a rule"
    )
    stream: bool | None = None
    cache_salt: Annotated[str, text_of(1, 128)] | None = None
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
    scores: ClassVar[bool] = False

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
    def sequences(self) -> int:
        """Completions of all prompts."""
        return self.choices

    @property
    def options(self) -> StreamOptions:
        """The stream options, or their defaults."""
        return self.stream_options or StreamOptions()

    @property
    def constraint(self) -> dict[str, Any] | None:
        """The output constraint as one of `grammar.KINDS` -> its value, or None."""
        return next(iter(self._constraints()), None)

    def _constraints(self) -> list[dict[str, Any]]:
        outputs, wanted = self.structured_outputs or StructuredOutputs(), self.response_format
        is_object = isinstance(wanted, PlainFormat) and wanted.type == "json_object"
        schema = wanted.json_schema.schema_ or {} if isinstance(wanted, SchemaFormat) else None
        named: dict[str, tuple[Any, ...]] = {
            "json_schema": (self.guided_json, outputs.json_, schema),
            "json_object": (outputs.json_object, is_object or None),
            "regex": (self.guided_regex, outputs.regex),
            "grammar": (self.guided_grammar, outputs.grammar),
            "choice": (self.guided_choice, outputs.choice),
        }
        return [{kind: v} for kind, values in named.items() for v in values if v is not None]


class ChatFields(Schema):
    """How a conversation becomes a prompt."""

    unsupported: ClassVar = {
        "chat_template": ((), "the model's own template is used"),
        "documents": (([],), "put their text into a message"),
        "functions": (([],), "use tools"),
        "function_call": (("none",), "use tool_choice"),
    }

    messages: Messages | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="continue the last message, an assistant's"
    )
    chat_template_kwargs: TemplateVariables | None = None

    def model_post_init(self, context: Any) -> None:
        """Validate combinations of fields."""
        super().model_post_init(context)
        last = self.messages[-1] if self.messages else None
        has_text = last is not None and joined(last.content or "").strip()
        is_open = isinstance(last, AssistantMessage) and not last.tool_calls and has_text
        if self.continue_final_message and (not is_open or self.add_generation_prompt):
            raise Refused(
                "continue_final_message: expected a last message of the assistant, with text and "
                "without tool_calls, and no add_generation_prompt",
                "continue_final_message",
            )

    def dialogue(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates read them; [] if there is a prompt."""
        return plain_messages(self.messages or [])

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
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedChoice | AllowedChoice, Field(discriminator="type")]
        | None
    ) = None
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
        if unknown := [name for name in self._choice[1] or () if names and name not in names]:
            why = f"the tool {unknown[0]!r}; expected one of {', '.join(names):.200}"
            raise Refused(f"tool_choice asks for {why}", "tool_choice")
        if self.must_call and not names:
            why = "a tool, but there are no tools; give tools"
            raise Refused(f"tool_choice asks for {why}", "tool_choice")
        effort = self.chat_template_kwargs and self.chat_template_kwargs.reasoning_effort
        if effort and self.reasoning_effort not in (None, effort):
            raise Refused("reasoning_effort is given twice, with two values", "reasoning_effort")

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
    def functions(self) -> list[dict[str, Any]]:
        """The available functions: none or some of them if `tool_choice` says so."""
        how, names = self._choice
        tools = [] if how == "none" else super().functions
        return [tool for tool in tools if names is None or tool["function"]["name"] in names]

    @property
    def _choice(self) -> tuple[str, list[str] | None]:
        """How functions are called, and the names of those that may be; None: of all."""
        match self.tool_choice:
            case NamedChoice(function=named):
                return "one", [named.name]
            case AllowedChoice(allowed_tools=allowed):
                return allowed.mode, [tool.function.name for tool in allowed.tools]
            case how:
                return how or "auto", None

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a tool call."""
        return self._choice[0] in ("required", "one")

    @property
    def may_call_again(self) -> bool:
        """Whether the answer that has to be a tool call may be several."""
        return self._choice[0] == "required" and self.parallel_tool_calls is not False

    @property
    def template_variables(self) -> dict[str, Any]:
        """The chat template variables that the request sets."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        return super().template_variables | effort


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

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
        if (answers := self.sequences) > MAX_ANSWERS:
            raise Refused(f"{answers} answers; expected at most {MAX_ANSWERS}: lower n", "n")

    @property
    def sequences(self) -> int:
        """Completions of all prompts."""
        return len(self.prompt) * self.choices

    @property
    def scores(self) -> bool:  # type: ignore[override]
        """Whether prompts are scored before they are continued."""
        return bool(self.echo) and (self.top >= 0 or not self.budget)

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
    add_special_tokens: bool | None = None

    def model_post_init(self, context: Any) -> None:
        """Validate combinations of fields."""
        super().model_post_init(context)
        if (self.prompt is None) == (self.messages is None):
            found = "neither prompt nor" if self.prompt is None else "both prompt and"
            raise Refused(f"{found} messages; expected one", "prompt")


class DetokenizeRequest(Schema):
    """POST /detokenize."""

    model: ShortText | None = None
    tokens: list[TokenId] = Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)
