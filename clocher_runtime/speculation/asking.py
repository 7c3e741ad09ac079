"""When a draft model is asked, and how far: its guesses take time, which has to be won back.

What it would take and win is compared before it is asked, so a model that is too slow or guesses
badly costs nothing but the looks at it that go on now and then: a hundredth of the time at most.
With them it is asked for one guess more than would pay, and whether that came true is learnt. So
the gate opens again when the text becomes easier, and guesses go deeper when those before come
true. Before anything is known it is tried: the first `_TRIES` drafts of a session are made and
verified whatever they promise, and what came of them decides.

A text that the model has not read yet, such as a long prompt, is read in pieces, none of which
takes longer than a pass; that it pays is expected if later guesses win it back within
`_HORIZON` passes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol

from clocher_runtime.speculation.draft import Draft
from clocher_runtime.speculation.gate import PassCosts, asking, depth
from clocher_runtime.speculation.speculator import MOST_GUESSES, Text

_HORIZON = 32
_LOOKS = 0.01  # of the time; what is not used of it is kept for so many passes' worth
_LEAST_PIECE = 16  # tokens
_TRIES, _TRIED = 8, 3
"""Drafts that are verified to learn what they are worth, and the tokens of each."""


class DraftModel(Protocol):
    """A model that guesses many texts side by side.

    Attributes:
        costs: time of a step by its tokens.
    """

    costs: PassCosts

    def guess(self, readers: Sequence[Any], depth: int, most: int) -> list[list[int]]:
        """Read on in some texts, and guess how those that were read go on.

        Args:
            readers: of the texts, made by this model; `behind` was asked.
            depth: guesses.
            most: tokens to read at most.

        Returns:
            Of each text `depth` tokens, or less; none of one that has to be read on.
        """

    def reset(self) -> None:
        """Forget all texts."""


class Asking:
    """Asks a draft model where that pays.

    Args:
        model: guesses.
        kind: the first of its `MOST_GUESSES` classes: that of its first guess, of its second, ...
    """

    def __init__(self, model: DraftModel, kind: int) -> None:
        self.model = model
        self._classes = range(kind, kind + MOST_GUESSES)
        self._spare = 0.0  # ns for looks
        self._tries = _TRIES

    @property
    def step_ns(self) -> float:
        """Time of a step of one token of the model in nanoseconds; 0 if it is not known."""
        steps = self.model.costs.ns
        return steps[1] if len(steps) > 1 else 0.0

    def ask(
        self,
        texts: Sequence[Text],
        taken: Sequence[Sequence[float]],
        base: int,
        ns: Sequence[float],
    ) -> bool:
        """Give texts a better offer, if the model has one.

        Args:
            texts: that are to be guessed at; their tracks have what others offer.
            taken: the chances of what is sent of that.
            base: tokens of the pass without guesses.
            ns: time of a pass by its tokens.

        Returns:
            Whether it was asked.
        """
        if base >= len(ns):
            return False
        steps = self.model.costs.ns
        behind = [text.track.reader.behind(text.ids) if text.track.reader else 0 for text in texts]
        mine = [
            text.track.chances.along(range(-1, text.most - 1), self._classes[: text.most])
            if tokens
            else []
            for text, tokens in zip(texts, behind, strict=True)
        ]
        entries = [
            max(0.0, _time(steps, tokens) - steps[1]) / _passes_left(text)
            for text, tokens in zip(texts, behind, strict=True)
        ]
        piece = max(_LEAST_PIECE, 2 * len(texts), bisect_right(steps, ns[base]) - 1)
        count = depth(mine, taken, base, ns, entries, steps)
        asked = asking(mine, taken, count)
        self._spare = min(self._spare + _LOOKS * ns[base], _HORIZON * ns[base])
        if asked:
            price = paid = steps[len(asked)]
        else:
            asked = sorted((i for i, tokens in enumerate(behind) if tokens), key=behind.__getitem__)
            del asked[1:]
            # Reading for a look that can then not be paid would be for nothing.
            price = sum(_time(steps, behind[i]) for i in asked)
            paid = sum(_time(steps, min(behind[i], piece)) for i in asked)
        tries = self._tries > 0 and all(texts[i].most == MOST_GUESSES for i in asked)
        if tries:
            count = max(count, _TRIED)
        elif count < MOST_GUESSES and self._spare >= price:
            self._spare -= paid
            count += 1
        if not asked or not count:
            return False
        readers = [texts[i].track.reader for i in asked]
        for i, tokens in zip(asked, self.model.guess(readers, count, piece), strict=True):
            self._offer(texts[i], tokens, taken[i], tries)
            self._tries -= bool(tries and tokens)
        return True

    def reset(self) -> None:
        """Forget all texts."""
        self.model.reset()

    def _offer(
        self, text: Text, tokens: Sequence[int], taken: Sequence[float], tries: bool
    ) -> None:
        """Let a track offer guesses if they are tried, or better than what is sent otherwise."""
        count, track = min(len(tokens), text.most), text.track
        guessed = Draft(tokens[:count], range(-1, count - 1), self._classes[:count])
        if tries and tokens:
            track.tried = count
        if track.tried or sum(track.chances.along(guessed.parents, guessed.classes)) > sum(taken):
            track.offer, guessed = guessed, track.offer
        track.asides.append(guessed)


def _passes_left(text: Text) -> int:
    """Return how many passes the text has that may win back what it takes to read it."""
    return _HORIZON if text.most == MOST_GUESSES else text.most


def _time(steps: Sequence[float], tokens: int) -> float:
    """Return how long reading some tokens takes."""
    most = len(steps) - 1
    return steps[tokens] if tokens <= most else steps[most] * tokens / most
