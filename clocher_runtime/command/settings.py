"""The settings of `clocher run` and `clocher chat`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from clocher_runtime.config.engine import BYTES, COUNT, HINTS, TOKENS, EngineConfig
from clocher_runtime.config.sources import Sources, settle
from clocher_runtime.config.values import (
    GivenInFile,
    Setting,
    declared,
    flag,
    id_list,
    integer,
    number,
    one_of,
    path,
    redefault,
    switch,
    text,
    variable,
)
from clocher_runtime.engine.sampling_defaults import CHAT_TEMPERATURE, taken

_PATH, _TEXT, _SWITCH = path(), text(), switch()
_generation = partial(flag, "Generation")
_prompt = partial(flag, "Prompt")
_run = partial(flag, "Run")
_chat = partial(flag, "Chat")
_AHEAD = integer(0, 4096, "on", "off", "auto")
RANDOM = "random"
CONTINUED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig(EngineConfig):
    """The settings of the engine and of sampling."""

    temperature: float = _generation(number(0, 100), "0 takes the most likely token", default=0.0)
    top_k: int = _generation(COUNT, "sample from the k most likely; 0: all", default=0)
    top_p: float = _generation(
        number(1e-6, 1), "sample from the most likely that sum to this probability", default=1.0
    )
    min_p: float = _generation(
        number(0, 1), "drop tokens less likely than this share of the most likely one", default=0.0
    )
    repetition_penalty: float = _generation(
        number(0.01, 100), "above 1: tokens in the text become less likely", default=1.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(SamplingConfig):
    """The settings of a run; for None see the help."""

    command: ClassVar[str] = "run"
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("prompt", "prompt_ids", "prompts_file"),
        *EngineConfig.exclusive,
    )

    prompt: str | None = _prompt(
        _TEXT, "text to complete; - reads standard input, as a pipe without this flag is"
    )
    prompt_ids: tuple[int, ...] | None = _prompt(id_list(), "token ids to complete")
    prompts_file: Path | None = _prompt(
        _PATH, 'one prompt per line; *.jsonl: {"prompt": "..."} or {"ids": [...]} per line'
    )
    max_new: int = _generation(TOKENS, "tokens to generate per prompt", default=64)
    seed: int = _generation(integer(0, (1 << 64) - 1), "same seed, same tokens", default=0)
    rounds: int = _run(integer(1, 1_000_000), "times to run every prompt", default=1)
    warmup: int = _run(integer(0, 1 << 24), "tokens to generate before the timed window", default=0)
    prefetch: int | str = _run(
        _AHEAD,
        "tokenise ahead: auto only between batches, off never, on or N (batches) beside the model",
        default="auto",
    )
    json: bool = _run(_SWITCH, "the line of JSON on standard output, also where that is a terminal")
    aggregate: bool = _run(_SWITCH, "report totals only: outputs stays empty in the JSON line")
    outputs: Path | None = _run(_PATH, "write ids and text of every prompt to this file, JSONL")
    trace_ids: Path | None = _run(
        _PATH, "write prompt and generated ids of each prompt to this file, JSONL, to be verified"
    )
    trace_topk: int = _run(
        integer(1, 1000), "with --trace-ids: also the N largest logits of each step", default=0
    )
    bytes_per_token: int = variable(
        BYTES,
        "bytes of the weight files to walk over per token; 0: none",
        "IE_BYTES_PER_TOKEN",
        default=0,
    )
    stride_bytes: int = variable(
        integer(1, 1 << 40),
        "distance of the bytes that the walk reads",
        "IE_STRIDE_BYTES",
        default=256,
    )
    verify_touch: bool = variable(_SWITCH, "1: report the checksum of the walk", "IE_VERIFY_TOUCH")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig(SamplingConfig):
    """The settings of a chat; for None see the help."""

    command: ClassVar[str] = "chat"

    prompt: str | None = _chat(_TEXT, "a question: answer it once, and end")
    system: str | None = _chat(_TEXT, "the system message of the conversation")
    reasoning_effort: str | None = _chat(
        one_of("low", "medium", "high"),
        "how much the model thinks, where its chat template reads that",
    )
    hide_thinking: bool = _chat(_SWITCH, "do not show what the model thinks")
    no_stats: bool = _chat(_SWITCH, "no line of numbers after an answer")
    temperature: float = redefault(SamplingConfig, "temperature", CHAT_TEMPERATURE)
    seed: int | str = _generation(
        integer(0, (1 << 64) - 1, RANDOM),
        "a number draws the same answer to the same conversation each time",
        default=RANDOM,
    )
    max_new: int | None = _generation(
        TOKENS,
        "tokens of an answer (unset: as many as the context has room for; "
        f"{CONTINUED} where text is continued)",
    )

    def on_top_of(self, defaults: Mapping[str, float]) -> tuple[Self, dict[str, float]]:
        """Return the settings with a model's defaults where unset, and those defaults."""
        said = {name: getattr(self, name) for name in defaults if name in self.given}
        if "temperature" in self.given:
            said["temperature"] = self.temperature
        found = taken(defaults, said)
        changes: dict[str, Any] = dict(found)
        return replace(self, **changes), found


SETTINGS: Mapping[str, Setting] = declared(RunConfig)

ALL: Mapping[str, Setting] = {**SETTINGS, **HINTS}


def resolve(
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    in_file: Mapping[str, GivenInFile] | None = None,
) -> RunConfig:
    """Return the configuration of a run; see `config.sources`."""
    return settle(RunConfig, Sources(flags, environ, in_file), HINTS)
