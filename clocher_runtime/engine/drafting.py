"""The drafters of a session: checked, and made for each sequence."""

from clocher_kernels.errors import UsageError
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.values import shown
from clocher_runtime.engine.backends import suffix_automaton
from clocher_runtime.engine.draft_model import DraftModel
from clocher_runtime.engine.load import Model
from clocher_runtime.speculation.draft import SuffixDrafter
from clocher_runtime.speculation.model_gate import DraftModelGate
from clocher_runtime.speculation.speculator import WITH_DRAFT_MODEL, Speculator, first_class


def speculator_of(mode: str, rows: int, model: DraftModel | None) -> Speculator:
    """Return what drafts the tokens of a session."""

    def drafters() -> list[SuffixDrafter]:
        automaton = suffix_automaton()()
        return [SuffixDrafter(automaton, first_class("suffix"))]

    make = drafters if mode in ("auto", "suffix") else list
    return Speculator(make, rows, None if model is None else DraftModelGate(model))


def speculates(config: EngineConfig) -> bool:
    """Return whether the tokens of a session are drafted, unless blocks are denoised instead.

    Raises UsageError.
    """
    mode = config.speculate
    if config.backend == "stub" and mode not in ("auto", "off"):
        raise UsageError(f"speculate={mode}: the stub has nothing to verify; give off")
    return mode != "off" and config.backend != "stub"


def check_draft(draft: Model | None, mode: str) -> None:
    """Refuse a draft model that would not be asked, and its absence where it is asked for.

    Raises UsageError.
    """
    if draft is None:
        if mode == "draft":
            raise UsageError(
                "speculate is 'draft' without a draft model; give draft_model to load, or "
                "--draft-model, or use 'auto'"
            )
        return
    if not isinstance(draft, Model):
        raise UsageError(f"draft is {shown(draft)}; expected a Model of engine.load, or None")
    if mode not in WITH_DRAFT_MODEL:
        raise UsageError(f"a draft model with speculate {mode!r}; expected 'auto' or 'draft'")
