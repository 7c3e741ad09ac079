"""Interleaved runs of contestants, since a shared machine drifts from minute to minute."""

from collections.abc import Callable, Mapping
from typing import TypeVar

Key = TypeVar("Key")


def in_turns(
    runs: Mapping[Key, Callable[[], float]],
    rounds: int,
    before: Callable[[int, Key], object] | None = None,
) -> dict[Key, list[float]]:
    """Run contestants once a round, rotating, after a warm-up round; return their measurements."""
    names = list(runs)
    found: dict[Key, list[float]] = {name: [] for name in names}
    done = 0
    for number in range(-1, rounds):
        turn = number % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            if before:
                before(done, name)
            value = runs[name]()
            done += 1
            if number >= 0:
                found[name].append(value)
    return found
