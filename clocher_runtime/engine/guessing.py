"""Who guesses the tokens of a session: checked, and made for each text."""

from collections import OrderedDict
from typing import Any

from clocher_kernels.errors import UsageError
from clocher_runtime.config.values import shown
from clocher_runtime.engine.arguments import Sampling
from clocher_runtime.engine.backends import shared_suffixes, suffix_automaton
from clocher_runtime.engine.draft_model import DraftModel
from clocher_runtime.engine.footprint import Sizes
from clocher_runtime.engine.load import Model
from clocher_runtime.speculation.asking import Asking
from clocher_runtime.speculation.draft import Drafter
from clocher_runtime.speculation.recycle import RecycleDrafter, RecycledTokens
from clocher_runtime.speculation.speculator import (
    WITH_DRAFT_MODEL,
    Speculator,
    Track,
    first_class,
)
from clocher_runtime.speculation.suffix import SuffixDrafter

_FROM_THE_TEXT = ("auto", "suffix")
_TABLES = 8  # of recycled tokens, one for each salt


class Guessing:
    """The guesses of a session.

    Args:
        mode: one of `MODES`, not "off".
        vocabulary: ids of the model.
        sizes: of its Plan.
        share: guess from finished texts of others, too.
        draft: guesses too, with "auto" or "draft".

    Attributes:
        speculator: decides which guesses are sent.
        draft: see there.
    """

    def __init__(
        self,
        mode: str,
        vocabulary: int,
        sizes: Sizes,
        share: bool = False,
        draft: DraftModel | None = None,
    ) -> None:
        self._mode, self._vocabulary, self._sizes, self.draft = mode, vocabulary, sizes, draft
        self._tables: OrderedDict[bytes, RecycledTokens] = OrderedDict()
        self._finished: Any = shared_suffixes()() if share else None
        asker = None if draft is None else Asking(draft, first_class("draft"))
        self.speculator = Speculator(self._drafters, sizes.rows, self._finished, asker)

    def _drafters(self) -> list[Drafter]:
        """Return who guesses a new text from nothing but itself."""
        if self._mode not in _FROM_THE_TEXT:
            return []
        return [SuffixDrafter(suffix_automaton()(), first_class("suffix"))]

    def track(
        self, speculator: Speculator, ids: list[int], sampling: Sampling, salt: bytes
    ) -> Track:
        """Return what is to be guessed about a text.

        Args:
            speculator: who guesses now, for those who put another in the place of the first.
            ids: its prompt.
            sampling: how its tokens are drawn.
            salt: of the texts that it may be guessed from.
        """
        others: list[Drafter] = []
        if self._finished is not None:
            others.append(SuffixDrafter(self._finished.reader(salt), first_class("shared")))
        table = self._table(salt) if self._sizes.candidates else None
        if table is not None:
            others.append(RecycleDrafter(table, first_class("recycle")))
        track = speculator.track(*others)
        track.recycled = table
        if self.draft is not None:
            track.reader = self.draft.reader(ids, sampling, salt)
        return track

    def _table(self, salt: bytes) -> RecycledTokens:
        """Return the table of a salt; that of the one unused longest makes place for a new one."""
        table = self._tables.pop(salt, None)
        if table is None:
            table = RecycledTokens(self._vocabulary, self._sizes.candidates)
            if len(self._tables) >= _TABLES:
                self._tables.popitem(last=False)
        self._tables[salt] = table
        return table

    def warm(self) -> None:
        """Compile what guessing needs, and learn what it costs."""
        if self.draft is not None:
            self.draft.warm()

    def close(self) -> None:
        """Release the buffers."""
        if self.draft is not None:
            self.draft.close()


def check_draft(draft: Model | None, mode: str) -> None:
    """Refuse a draft model that nobody would ask, and its absence where it is asked for.

    Raises:
        UsageError: it is one of these.
    """
    if draft is None:
        if mode == "draft":
            raise UsageError(
                "speculate is 'draft' without a draft model; give draft_model to load, or 'auto'"
            )
        return
    if not isinstance(draft, Model):
        raise UsageError(f"draft is {shown(draft)}; expected a Model of engine.load, or None")
    if mode not in WITH_DRAFT_MODEL:
        raise UsageError(f"a draft model with speculate {mode!r}; expected 'auto' or 'draft'")
