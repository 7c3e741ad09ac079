"""Block diffusion: which masked tokens of a block a forward commits.

Here: the names of the rules, and their numbers after a colon.
"""

import re
from typing import NamedTuple

from clocher_kernels.errors import UsageError, counted


class _Takes(NamedTuple):
    """Default numbers of a rule and their range; `whole`: integers."""

    usual: tuple[float, ...]
    lowest: float
    highest: float
    whole: bool = False


_RULES = {
    "static": _Takes((4,), 1, 1024, whole=True),
    "dynamic": _Takes((0.9,), 0, 1),
    "threshold": _Takes((0.9,), 0, 1),
    "factor": _Takes((1.0,), 0, 1024),
    "entropy": _Takes((0.1,), 0, 1024),
    "joint": _Takes((0.7, 0.9), 0, 1),
}
WORDS = ("auto", "off", "lossless")
"""Values besides the rules."""

RULES = tuple(_RULES)
USUAL = {name: ",".join(f"{number:g}" for number in takes.usual) for name, takes in _RULES.items()}
"""Rule -> its default numbers."""


def parse(text: str) -> tuple[str, tuple[float, ...]]:
    """Return name and numbers of "threshold:0.9", or of a name alone. Raises UsageError."""
    name, colon, rest = text.partition(":")
    takes = _RULES.get(name)
    if takes is None:
        raise UsageError(
            f"got {text!r}, expected one of {', '.join(RULES)}, with a number after a "
            f"colon, such as threshold:0.9, or {', '.join(WORDS)}"
        )
    if not colon:
        return name, takes.usual
    given = rest.split(",")
    numbers = tuple(float(g) for g in given if re.fullmatch(r"\d{1,9}(\.\d{0,9})?|\.\d{1,9}", g))
    fits = all(takes.lowest <= number <= takes.highest for number in numbers)
    complete = len(numbers) == len(given) == len(takes.usual)
    if not (fits and complete) or (takes.whole and not numbers[0].is_integer()):
        count = len(takes.usual)
        raise UsageError(
            f"got {text!r}; {name} takes {counted(count, 'number')} from "
            f"{takes.lowest:g} to {takes.highest:g}, such as {name}:{USUAL[name]}"
        )
    return name, numbers
