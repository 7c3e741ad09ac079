"""Prompts cut into prefill steps."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple


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
