"""The drafters of a session: checked, and made for each sequence."""

from clocher_kernels.errors import UsageError
from clocher_runtime.config.values import shown
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.backends import suffix_automaton
from clocher_runtime.engine.draft_model import DraftModel
from clocher_runtime.engine.load import Model
from clocher_runtime.speculation.draft import Drafter, SuffixDrafter
from clocher_runtime.speculation.model_gate import DraftModelGate
from clocher_runtime.speculation.speculator import (
    WITH_DRAFT_MODEL,
    Speculator,
    Track,
    first_class,
)

_FROM_THE_TEXT = ("auto", "suffix")


class Drafting:
    """The drafters of a session.

    Args:
        mode: a value of --speculate, not "off".
        rows: output rows of a forward.
        model: drafts too, with "auto" or "draft".

    Attributes:
        speculator: decides which drafts are sent.
        model: see there.
    """

    def __init__(self, mode: str, rows: int, model: DraftModel | None = None) -> None:
        self._mode, self.model = mode, model
        gate = None if model is None else DraftModelGate(model)
        self.speculator = Speculator(self._drafters, rows, gate)

    def _drafters(self) -> list[Drafter]:
        if self._mode not in _FROM_THE_TEXT:
            return []
        return [SuffixDrafter(suffix_automaton()(), first_class("suffix"))]

    def track(
        self, speculator: Speculator, ids: list[int], sampling: Sampling, salt: bytes
    ) -> Track:
        """Return what is drafted for a sequence.

        Args:
            speculator: of the session now, if another took the place of the first.
            ids: its prompt.
            sampling: how its tokens are drawn.
            salt: of the sequences whose cached pages it may share.
        """
        track = speculator.track()
        if self.model is not None:
            track.reader = self.model.reader(ids, sampling, salt)
        return track

    def warm(self) -> None:
        """Compile what drafting needs, and learn what it costs."""
        if self.model is not None:
            self.model.warm()

    def close(self) -> None:
        """Release the buffers."""
        if self.model is not None:
            self.model.close()


def check_draft(draft: Model | None, mode: str) -> None:
    """Refuse a draft model that would not be asked, and its absence where it is asked for.

    Raises:
        UsageError: it is one of these.
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
