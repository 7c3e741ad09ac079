"""The fields that all requests for text have: how tokens are drawn, when to stop, what to follow.

Ranges are OpenAI's where OpenAI has the field, else wide enough for every use that is known.
"""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, WithJsonSchema

from clocher_kernels.errors import FormatError, UsageError
from clocher_runtime.diffusion.asked import RULES, WORDS, parse
from clocher_runtime.disk.strict_json import parse_object
from clocher_runtime.engine.sampling_defaults import taken
from clocher_runtime.serve.refusals import Refused
from clocher_runtime.serve.schemas_base import (
    MAX_SCHEMA_CHARS,
    MAX_TOKENS,
    JsonSchema,
    RequestId,
    Schema,
    ShortText,
    Unsupported,
)
from clocher_runtime.serve.schemas_messages import JsonFormat, ResponseFormat, SchemaFormat

MAX_CHOICES = 16
MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_REGEX_CHARS = 8 << 10
MAX_RULE_CHARS = 64
MAX_BIASES = 1024
_SEEDS = 1 << 64
# Odd, so that no two choices of a request share a seed: Knuth's 2^64 divided by the golden ratio.
_SEED_STEP = 0x9E3779B97F4A7C15


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _biases(value: dict[str, float]) -> dict[str, float]:
    """Return biases whose keys are token ids."""
    if value and max(map(int, value)) > MAX_TOKENS:
        raise Refused(f"logit_bias has a key above {MAX_TOKENS}; expected token ids")
    return value


def _parsed(value: object) -> object:
    """Return a JSON schema; one that came as text is parsed."""
    if not isinstance(value, str):
        return value
    try:
        return parse_object(value.encode("utf-8"), "a JSON schema")
    except (FormatError, UnicodeEncodeError) as error:
        raise Refused(str(error)) from None


def _denoised(value: str) -> str:
    """Return how blocks are denoised, once it is one of the ways."""
    try:
        if value not in WORDS:
            parse(value)
    except UsageError as error:
        raise Refused(str(error)) from None
    return value


StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
Stops = Annotated[
    list[StopText],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_listed),
    WithJsonSchema(
        {"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOPS}]}
    ),
]
TokenText = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Biases = Annotated[
    dict[TokenText, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    AfterValidator(_biases),
]
Denoised = Annotated[
    str,
    StringConstraints(max_length=MAX_RULE_CHARS),
    AfterValidator(_denoised),
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": MAX_RULE_CHARS,
            "pattern": rf"^({'|'.join(WORDS)}|({'|'.join(RULES)})(:[0-9.]+(,[0-9.]+)?)?)$",
        }
    ),
]
GuidedSchema = Annotated[
    JsonSchema,
    BeforeValidator(_parsed),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]
GuidedRegex = Annotated[str, StringConstraints(min_length=1, max_length=MAX_REGEX_CHARS)]
GuidedGrammar = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SCHEMA_CHARS)]
GuidedChoice = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=1024)]],
    Field(min_length=1, max_length=256),
]


class StreamOptions(Schema):
    """What streams tell besides the answer.

    The usage in a last chunk, or with each chunk; and after each pass that denoises a block, what
    of it is not sure yet.
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


class SamplingFields(Schema):
    """How tokens are drawn, and what is known of the request that wants them."""

    unsupported: ClassVar = {
        "use_beam_search": Unsupported((False,), "use n"),
        "min_tokens": Unsupported((0,), "use ignore_eos with max_tokens"),
        "stop_token_ids": Unsupported(([],), "use stop"),
        "include_stop_str_in_output": Unsupported((False,), "add the stop text to the answer"),
        "bad_words": Unsupported(([],), "use logit_bias"),
        "allowed_token_ids": Unsupported(([],), "use guided_choice or guided_grammar"),
        "length_penalty": Unsupported((1,), "it belongs to beam search"),
        "prompt_logprobs": Unsupported((), "use /v1/completions with echo and logprobs"),
        "truncate_prompt_tokens": Unsupported((), "shorten the prompt"),
        "skip_special_tokens": Unsupported((True,), "answers never have special tokens"),
        "logits_processors": Unsupported(([],), "use logit_bias"),
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
    diffusion: Denoised | None = Field(
        None, description="how blocks are denoised: lossless, a rule"
    )
    stream: bool | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None
    request_id: RequestId | None = None

    def on_top_of(self, defaults: Mapping[str, float]) -> Self:
        """Return the request with a model's defaults where it says nothing."""
        said = {name: getattr(self, name) for name in defaults}
        return self.model_copy(update=taken(defaults, said | {"temperature": self.temperature}))

    def sampling(self, choice: int = 0) -> dict[str, Any]:
        """Return the arguments of the engine's `Sampling` for one of the answers to a prompt.

        Choice 0 has the seed of the request; further ones have seeds that follow from it. All
        prompts of a request have the same seeds: each is answered as if it had come alone. Without
        a seed each has a random one.

        Args:
            choice: index of the answer, from 0.
        """
        seed = secrets.randbits(64) if self.seed is None else self.seed + choice * _SEED_STEP
        # Top_p 0 keeps the likeliest token, as any that is less than its probability does.
        # A bias of nothing would only cost the host's way of drawing.
        biases = {int(token): bias for token, bias in (self.logit_bias or {}).items() if bias}
        given = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "top_p": None if self.top_p is None else max(self.top_p, 1e-9),
            "min_p": self.min_p,
            "seed": seed % _SEEDS,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": biases,
        }
        return {name: value for name, value in given.items() if value is not None}


class GenerationFields(SamplingFields):
    """What is common to requests for text."""

    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stops | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: GuidedSchema | None = None
    guided_regex: GuidedRegex | None = None
    guided_grammar: GuidedGrammar | None = None
    guided_choice: GuidedChoice | None = None

    def model_post_init(self, _: Any) -> None:
        """Check what fields say together."""
        if self.stream_options is not None and not self.stream:
            raise Refused("stream_options is given without stream; set stream", "stream_options")
        if len(asked := self._constraints()) > 1:
            raise Refused(
                f"{len(asked)} things are given that the answer has to follow; expected one of "
                "response_format, structured_outputs and guided_...",
                "response_format" if self.response_format else None,
            )

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk of a stream tells the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream tells the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def shows(self) -> bool:
        """Whether a stream tells what is not sure yet."""
        return bool(self.stream_options and self.stream_options.include_canvas)

    @property
    def constraint(self) -> dict[str, Any] | None:
        """What the answer has to follow: one of these keys with its value, or None.

        "json_schema": a schema. "json_object": true. "regex" and "grammar": text. "choice": a list
        of texts.
        """
        return next(iter(self._constraints()), None)

    def _constraints(self) -> list[dict[str, Any]]:
        """Return everything that the answer is to follow."""
        outputs = self.structured_outputs or StructuredOutputs()
        named = [
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
            case JsonFormat():
                named.append(("json_object", True))
            case SchemaFormat(json_schema=described):
                named.append(("json_schema", described.schema_ or {}))
        return [{kind: value} for kind, value in named if value is not None]
