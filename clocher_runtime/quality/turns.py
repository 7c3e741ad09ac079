"""Things that are compared run in turns.

A shared machine drifts from minute to minute, so what is compared runs in the same minute: in every
round each contestant runs once, and the order turns by one from round to round.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

Key = TypeVar("Key")


def in_turns(
    runs: Mapping[Key, Callable[[], float]],
    rounds: int,
    before: Callable[[int, Key], object] | None = None,
) -> dict[Key, list[float]]:
    """Run every contestant once a round.

    `rounds`: how often; one more round comes first and is thrown away. Returns the measurements of
    each contestant, by round.
    """
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
