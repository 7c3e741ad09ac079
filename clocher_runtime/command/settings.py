"""The settings of `clocher run`: the engine's, and what is generated, measured and written."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from clocher_runtime.config.engine import BYTES, COUNT, HINTS, TOKENS, EngineConfig
from clocher_runtime.config.setting import GivenInFile, Setting, declared, flag, variable
from clocher_runtime.config.sources import Sources, settle
from clocher_runtime.config.values import id_list, integer, number, path, switch, text

_PATH, _TEXT, _SWITCH = path(), text(), switch()
_AHEAD = integer(0, 4096, "on", "off", "auto")
MIN_P, MIN_P_HELP = number(0, 1), "drop tokens less likely than this share of the most likely one"
PENALTY, PENALTY_HELP = number(0.01, 100), "above 1: tokens in the text become less likely"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(EngineConfig):
    """A run, fully decided: every setting that it acts on. A None stands for what help says."""

    command: ClassVar[str] = "run"
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("prompt", "prompt_ids", "prompts_file"),
        *EngineConfig.exclusive,
    )

    prompt: str | None = flag(
        "Prompt", _TEXT, "text to complete; - reads standard input, as a pipe without this flag is"
    )
    prompt_ids: tuple[int, ...] | None = flag("Prompt", id_list(), "token ids to complete")
    prompts_file: Path | None = flag(
        "Prompt",
        _PATH,
        'one prompt per line; *.jsonl: {"prompt": "..."} or {"ids": [...]} per line',
    )
    max_new: int = flag("Generation", TOKENS, "tokens to generate per prompt", default=64)
    temperature: float = flag(
        "Generation", number(0, 100), "0 takes the most likely token", default=0.0
    )
    top_k: int = flag("Generation", COUNT, "sample from the k most likely; 0: all", default=0)
    top_p: float = flag(
        "Generation",
        number(1e-6, 1),
        "sample from the most likely that sum to this probability",
        default=1.0,
    )
    min_p: float = flag("Generation", MIN_P, MIN_P_HELP, default=0.0)
    repetition_penalty: float = flag("Generation", PENALTY, PENALTY_HELP, default=1.0)
    seed: int = flag("Generation", integer(0, (1 << 64) - 1), "same seed, same tokens", default=0)
    rounds: int = flag("Run", integer(1, 1_000_000), "times to run every prompt", default=1)
    warmup: int = flag(
        "Run", integer(0, 1 << 24), "tokens to generate before the timed window", default=0
    )
    prefetch: int | str = flag(
        "Run",
        _AHEAD,
        "tokenise ahead: auto only between batches, off never, on or N (batches) beside the model",
        default="auto",
    )
    json: bool = flag(
        "Run", _SWITCH, "the line of JSON on standard output, also where that is a terminal"
    )
    aggregate: bool = flag(
        "Run", _SWITCH, "report totals only: outputs stays empty in the JSON line"
    )
    outputs: Path | None = flag(
        "Run", _PATH, "write ids and text of every prompt to this file, JSONL"
    )
    trace_ids: Path | None = flag(
        "Run",
        _PATH,
        "write prompt and generated ids of each prompt to this file, JSONL, to be verified",
    )
    trace_topk: int = flag(
        "Run",
        integer(1, 1000),
        "with --trace-ids: also the N largest logits of each step",
        default=0,
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


SETTINGS: Mapping[str, Setting] = declared(RunConfig)
"""Field of `RunConfig` -> how it is given."""

ALL: Mapping[str, Setting] = {**SETTINGS, **HINTS}
"""Every flag and every environment variable of a run."""


def resolve(
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    in_file: Mapping[str, GivenInFile] | None = None,
) -> RunConfig:
    """Return the configuration of a run; see `config.sources`."""
    return settle(RunConfig, Sources(flags, environ, in_file), HINTS)
