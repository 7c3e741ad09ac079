"""When a draft model is asked, and how deep: where the expected gain exceeds its cost.

Else it is probed for 1 % of the time at most; the first `_TRIES` drafts are always verified. An
unread prompt is read in pieces, if drafts repay it within `_HORIZON` forwards.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol

from clocher_runtime.speculation.draft import Draft
from clocher_runtime.speculation.gate import ForwardCosts, draft_depth, worth_asking
from clocher_runtime.speculation.track import MAX_DRAFT, Pending, first_class

_HORIZON = 32
_LOOKS = 0.01  # of the time; what is not used of it is kept for so many forwards' worth
_LEAST_PIECE = 16  # tokens
_TRIES, _TRIED = 8, 3
"""Drafts verified unconditionally, and the tokens of each."""


class DraftModel(Protocol):
    """Drafts for many sequences side by side; `costs`: time of a step by tokens."""

    costs: ForwardCosts

    def draft(self, readers: Sequence[Any], depth: int, most: int) -> list[list[int]]:
        """Read up to `most` tokens of some sequences; draft `depth` for those read to their end."""

    def reset(self) -> None:
        """Forget all sequences."""


class DraftModelGate:
    """Asks a draft model where that pays."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        first = first_class("draft")
        self._classes = range(first, first + MAX_DRAFT)
        self._spare = 0.0  # ns for looks
        self._tries = _TRIES

    @property
    def step_ns(self) -> float:
        """Time of a one-token step of the model in nanoseconds; 0 if unknown."""
        steps = self.model.costs.ns
        return steps[1] if len(steps) > 1 else 0.0

    def ask(
        self,
        pending: Sequence[Pending],
        taken: Sequence[Sequence[float]],
        base: int,
        ns: Sequence[float],
    ) -> bool:
        """Make better offers than the chances `taken`; return whether the model was asked."""
        if base >= len(ns):
            return False
        steps = self.model.costs.ns
        readers = [each.track.reader for each in pending]
        behind = [
            reader.behind(each.ids) if reader else 0
            for reader, each in zip(readers, pending, strict=True)
        ]
        mine = [
            each.track.rates.along(self._classes[: each.most]) if tokens else []
            for each, tokens in zip(pending, behind, strict=True)
        ]
        entries = [
            max(0.0, _time(steps, tokens) - steps[1]) / _forwards_left(each)
            for each, tokens in zip(pending, behind, strict=True)
        ]
        piece = max(_LEAST_PIECE, 2 * len(pending), bisect_right(steps, ns[base]) - 1)
        count = draft_depth(mine, taken, base, ns, entries, steps)
        asked = worth_asking(mine, taken, count)
        self._spare = min(self._spare + _LOOKS * ns[base], _HORIZON * ns[base])
        if asked:
            price = paid = steps[len(asked)]
        else:
            asked = sorted((i for i, tokens in enumerate(behind) if tokens), key=behind.__getitem__)
            del asked[1:]
            # Otherwise the read would serve a probe that cannot be afforded.
            price = sum(_time(steps, behind[i]) for i in asked)
            paid = sum(_time(steps, min(behind[i], piece)) for i in asked)
        tries = self._tries > 0 and all(pending[i].most == MAX_DRAFT for i in asked)
        if tries:
            count = max(count, _TRIED)
        elif count < MAX_DRAFT and self._spare >= price:
            self._spare -= paid
            count += 1
        if not asked or not count:
            return False
        drafted = self.model.draft([readers[i] for i in asked], count, piece)
        for i, tokens in zip(asked, drafted, strict=True):
            self._offer(pending[i], tokens, sum(taken[i]), tries)
            self._tries -= bool(tries and tokens)
        return True

    def _offer(self, pending: Pending, tokens: Sequence[int], taken: float, tries: bool) -> None:
        count, track = min(len(tokens), pending.most), pending.track
        draft = Draft(tokens[:count], self._classes[:count])
        if tries and tokens:
            track.tried = count
        if track.tried or sum(track.rates.along(draft.classes)) > taken:
            track.offer, draft = draft, track.offer
        track.asides.append(draft)


def _forwards_left(pending: Pending) -> int:
    return _HORIZON if pending.most == MAX_DRAFT else pending.most


def _time(steps: Sequence[float], tokens: int) -> float:
    most = len(steps) - 1
    return steps[tokens] if tokens <= most else steps[most] * tokens / most
