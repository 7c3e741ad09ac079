"""The settings of `clocher chat`: those of a run that say what is loaded, and its own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from clocher_runtime.command.settings import MIN_P, MIN_P_HELP, PENALTY, PENALTY_HELP
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.setting import Setting, declared, defaults, flag
from clocher_runtime.config.sources import Sources, settle
from clocher_runtime.config.values import integer, number, one_of, switch, text
from clocher_runtime.engine.sampling_defaults import CHAT_TEMPERATURE, taken

RANDOM = "random"
CONTINUED = 64
"""Tokens that a text is continued by, unless a setting says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig(EngineConfig):
    """How a conversation is held, and with what. A None stands for what help says."""

    command: ClassVar[str] = "chat"

    prompt: str | None = flag("Chat", text(), "a question: answer it once, and end")
    system: str | None = flag("Chat", text(), "what the model is told before the conversation")
    reasoning_effort: str | None = flag(
        "Chat",
        one_of("low", "medium", "high"),
        "how much the model thinks, where its chat template reads that",
    )
    hide_thinking: bool = flag("Chat", switch(), "do not show what the model thinks")
    no_stats: bool = flag("Chat", switch(), "no line of numbers after an answer")
    temperature: float = flag(
        "Generation",
        number(0, 100),
        "how freely tokens are drawn; 0 takes the most likely one",
        default=CHAT_TEMPERATURE,
    )
    top_p: float = flag(
        "Generation",
        number(1e-6, 1),
        "sample from the most likely that sum to this probability",
        default=1.0,
    )
    top_k: int = flag(
        "Generation", integer(0, 1 << 30), "sample from the k most likely; 0: all", default=0
    )
    min_p: float = flag("Generation", MIN_P, MIN_P_HELP, default=0.0)
    repetition_penalty: float = flag("Generation", PENALTY, PENALTY_HELP, default=1.0)
    seed: int | str = flag(
        "Generation",
        integer(0, (1 << 64) - 1, RANDOM),
        "a number draws the same answer to the same conversation each time",
        default=RANDOM,
    )
    max_new: int | None = flag(
        "Generation",
        integer(1, 1 << 24),
        "tokens of an answer (unset: as many as the context has room for; "
        f"{CONTINUED} where text is continued)",
    )

    def on_top_of(self, defaults: Mapping[str, float]) -> tuple[Self, dict[str, float]]:
        """Return the settings with a model's defaults where nothing was given, and those."""
        said = {name: getattr(self, name) for name in defaults if name in self.given}
        if "temperature" in self.given:
            said["temperature"] = self.temperature
        found = taken(defaults, said)
        changes: dict[str, Any] = dict(found)
        return replace(self, **changes), found


TABLE: Mapping[str, Setting] = declared(ChatConfig)
"""Every flag and every environment variable of a chat."""

DEFAULTS: Mapping[str, Any] = defaults(ChatConfig)

CHANGEABLE = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "max_new",
)
"""What can be set between two answers."""


def decide(flags: Mapping[str, str], environ: Mapping[str, str]) -> ChatConfig:
    """Return the settings of a chat: flag, variable, file, default.

    Args:
        flags: name of a setting -> what its flag was given.
        environ: environment variables.

    Raises:
        UsageError: a value is not what its setting takes.
    """
    return settle(ChatConfig, Sources(flags, environ))
