"""The sequences of a generation: how prompts are cut into steps, and what each sequence makes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        sequence: index of its prompt in the call.
        last: nothing follows: the length is reached, or the id ends the sequence.
        row: row of the step's logits that it was drawn from.
    """

    sequence: int
    id: int
    last: bool
    row: int = 0


@dataclass(slots=True)
class Growing:
    """A sequence in its decode phase: the slot it lives in and the token to feed next."""

    slot: int
    position: int
    budget: int
    token: int = 0
    made: int = 0

    def take(self, token: int, stop: frozenset[int], row: int) -> Token:
        """Accept a generated token."""
        self.token = token
        self.made += 1
        return Token(self.slot, token, self.made >= self.budget or token in stop, row)


def take_all(
    sequences: Sequence[Growing], sampled: Sequence[int], stop: frozenset[int]
) -> list[Token]:
    """Give each sequence the token that was drawn from its row."""
    return [
        s.take(token, stop, row)
        for row, (s, token) in enumerate(zip(sequences, sampled, strict=True))
    ]


class Chunk(NamedTuple):
    """The tokens of one prefill step: slot, position and id of each, and which end a prompt."""

    slots: tuple[int, ...]
    positions: tuple[int, ...]
    ids: tuple[int, ...]
    ends: list[int]


def chunks(prompts: Sequence[Sequence[int]], size: int) -> Iterator[Chunk]:
    """Cut all prompts, one after another, into steps of at most `size` tokens."""
    flat = [
        (slot, position, token)
        for slot, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    for start in range(0, len(flat), size):
        slots, positions, ids = zip(*flat[start : start + size], strict=True)
        ends = [i for i, p in enumerate(positions) if p == len(prompts[slots[i]]) - 1]
        yield Chunk(slots, positions, ids, ends)
