"""The sequences of a calibration text, of which some are held out to judge the others' fit."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import UsageError

_HELD_OUT = 16


class Text(NamedTuple):
    """Concatenated token sequences."""

    ids: np.ndarray  # all tokens, [T] i32
    lengths: tuple[int, ...]  # tokens of each sequence
    held: np.ndarray  # whether a token's sequence is held out from fitting, [T] bool

    def judged(self) -> "Text":
        """Return the sequences that are held out."""
        starts = np.cumsum((0, *self.lengths[:-1]))
        lengths = tuple(n for n, at in zip(self.lengths, starts, strict=True) if self.held[at])
        return Text(self.ids[self.held], lengths, self.held[self.held])

    def some(self, tokens: int) -> tuple["Text", np.ndarray]:
        """Return about so many tokens, in sequences from all over, none held out; and which."""
        every = len(self.lengths)
        count = min(max(1, tokens // max(self.lengths)), every)
        chosen = np.zeros(every, bool)
        chosen[np.arange(count) * every // count] = True
        rows = np.flatnonzero(np.repeat(chosen, self.lengths))
        lengths = tuple(np.array(self.lengths)[chosen].tolist())
        return Text(self.ids[rows], lengths, np.zeros(len(rows), bool)), rows

    def chunks(self, limit: int) -> Iterator[tuple[slice, tuple[int, ...]]]:
        """Yield runs of whole sequences of at most `limit` tokens: (tokens, lengths)."""
        start = 0
        lengths: list[int] = []
        for length in self.lengths:
            if lengths and sum(lengths) + length > limit:
                yield slice(start, start + sum(lengths)), tuple(lengths)
                start, lengths = start + sum(lengths), []
            lengths.append(length)
        yield slice(start, start + sum(lengths)), tuple(lengths)


def make_text(
    sequences: Sequence[Sequence[int]], seed: int = 0, held_out: float = _HELD_OUT
) -> Text:
    """Lay sequences out; hold out one in `held_out` (at least one). Raises UsageError."""
    lengths = tuple(len(sequence) for sequence in sequences)
    if len(lengths) < 2 or min(lengths) < 1:
        raise UsageError(
            f"{len(lengths)} calibration sequences of {min(lengths, default=0)} or more tokens; "
            "expected at least 2, none empty: one is held out to judge the others' fit"
        )
    count = max(1, round(len(lengths) / held_out))
    chosen = np.zeros(len(lengths), bool)
    chosen[np.random.default_rng(seed).choice(len(lengths), count, replace=False)] = True
    return Text(
        np.concatenate([np.asarray(sequence, np.int32) for sequence in sequences]),
        lengths,
        np.repeat(chosen, lengths),
    )
