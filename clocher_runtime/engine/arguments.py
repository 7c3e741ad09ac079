"""What callers of the Python API hand over: numbers, token ids, settings. Nothing is guessed."""

import operator
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from clocher_kernels.errors import UsageError

_LARGEST_F32 = float(np.finfo(np.float32).max)


def shown(value: object) -> str:
    """Return a value as an error message shows it, in a few words whatever it is."""
    try:
        return reprlib.repr(value)
    except Exception:  # of any class, even a number: one of many thousand digits
        return f"a {type(value).__name__}"


def whole(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Return an integer argument; NumPy's integers are integers, True and 1.0 are not.

    Args:
        name: what the caller calls it.
        value: what came.
        least: the smallest that is accepted; None: any.
        most: the largest; None: any.

    Raises:
        UsageError: it is not one, or out of range.
    """
    number = _index(value)
    low = number is None or (least is not None and number < least)
    if number is None or low or (most is not None and number > most):
        room = f", at least {least}" if least is not None else ""
        room += f", at most {most}" if most is not None else ""
        raise UsageError(f"{name} is {shown(value)}; expected an integer{room}")
    return number


def one_of(name: str, value: object, known: Collection[str]) -> str:
    """Return an argument that is one of some words.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"{name} is {shown(value)}; known: {', '.join(known)}")
    return value


def refuse_unknown(given: Mapping[str, object], known: Collection[str], where: str) -> None:
    """Fail if an option by keyword is not known.

    Raises:
        UsageError: it is not.
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UsageError(f"{where} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")


def listed(value: object, expected: str) -> list[Any]:
    """Return the items of a sequence that is neither text nor bytes nor a mapping.

    Args:
        value: what came.
        expected: what should have, as a noun phrase.

    Raises:
        UsageError: it is something else.
    """
    sequence = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if not sequence or isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        raise UsageError(f"got {shown(value)}; expected {expected}")
    try:
        return list(value)  # type: ignore[call-overload, no-any-return]
    except TypeError:  # an array of no dimension
        raise UsageError(f"got {shown(value)}; expected {expected}") from None


def token_ids(prompt: object) -> list[int]:
    """Return the token ids of a prompt as Python integers.

    Args:
        prompt: a sequence of integers, or an array [T] of them.

    Raises:
        UsageError: it is something else.
    """
    items = listed(prompt, "a list of token ids")
    if set(map(type, items)) <= {int}:
        return items
    ids = []
    for at, item in enumerate(items):
        if isinstance(item, Mapping):
            raise UsageError(
                "got a list of messages; make a text of it with `tokenizer.apply_chat_template`"
            )
        number = _index(item)
        if number is None:
            raise UsageError(f"token {at} is {shown(item)}; expected an integer")
        ids.append(number)
    return ids


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; greedy by default.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the shortest run of most likely tokens with this probability.
        seed: the same seed draws the same tokens, whatever the batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        heat, p = _number(self.temperature), _number(self.top_p)
        k, seed = _index(self.top_k), _index(self.seed)
        for name, value, good in (
            ("temperature", self.temperature, heat is not None and 0 <= heat <= _LARGEST_F32),
            ("top_k", self.top_k, k is not None and 0 <= k < 1 << 31),
            ("top_p", self.top_p, p is not None and 0 < p <= 1),
            ("seed", self.seed, seed is not None and 0 <= seed < 1 << 64),
        ):
            if not good:
                raise UsageError(
                    f"{name} is {shown(value)}; expected temperature >= 0, integer top_k >= 0, "
                    "0 < top_p <= 1, integer 0 <= seed < 2^64"
                )
        for name, number in (("temperature", heat), ("top_k", k), ("top_p", p), ("seed", seed)):
            object.__setattr__(self, name, number)


def _index(value: object) -> int | None:
    """Return an integer, of Python or NumPy; None for anything else, booleans too."""
    if isinstance(value, bool | np.ndarray):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _number(value: object) -> float | None:
    """Return a real number; None for anything else, booleans too."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
