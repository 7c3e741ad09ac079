"""What a setting takes, as text or as a Python value: strict, and able to say what it expects."""

import operator
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from clocher_kernels.errors import UsageError
from clocher_runtime.diffusion.asked import USUAL, WORDS
from clocher_runtime.diffusion.asked import parse as parse_rule
from clocher_runtime.models.selection import TAKES, parse_selection

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class Value:
    """A kind of value.

    Attributes:
        metavar: its place holder in help.
        takes: what is accepted, as a noun phrase.
        parse: text to value; raises ValueError, or UsageError with a reason of its own.
        accept: a Python value to the same kind of value; raises the same.
        unset: the value of a setting that was not given, unless it has a default.
    """

    metavar: str
    takes: str
    parse: Callable[[str], Any]
    accept: Callable[[Any], Any]
    unset: Any = None

    def read(self, source: str, raw: str) -> Any:
        """Return the value that a flag or variable named `source` was given.

        Raises:
            UsageError: the text is not what this kind takes.
        """
        try:
            return self.parse(raw)
        except ValueError:
            shown = raw if len(raw) <= 60 else f"{raw[:60]}..."
            raise UsageError(f"{source}: got {shown!r}, expected {self.takes}") from None
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from None

    def check(self, name: str, value: object) -> Any:
        """Return the value of a keyword of the Python API.

        Raises:
            UsageError: it is not what this kind takes.
        """
        try:
            return self.accept(value)
        except ValueError:
            takes = "True or False" if self.metavar == "0|1" else self.takes
            raise UsageError(f"{name}: got {shown(value)}, expected {takes}") from None
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None


def shown(value: object) -> str:
    """Return a value as an error message shows it, in a few words whatever it is."""
    try:
        return reprlib.repr(value)
    except Exception:  # of any class, even a number: one of many thousand digits
        return f"a {type(value).__name__}"


def as_integer(value: object) -> int | None:
    """Return an integer of Python, NumPy or torch; None for anything else, booleans too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def as_number(value: object) -> float | None:
    """Return a real number; None for anything else, booleans too."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def integer(low: int, high: int, *words: str) -> Value:
    """Take a decimal integer of a closed range, or one of some words."""

    def parse(raw: str) -> int | str:
        return raw if raw in words else _bounded(raw, low, high)

    def accept(value: object) -> int | str:
        if isinstance(value, str) and value in words:
            return value
        number = as_integer(value)
        return number if number is not None and low <= number <= high else _refuse(value)

    takes = f"an integer from {low} to {high}"
    if words:
        takes = f"{', '.join(words)} or {takes}"
    return Value("|".join([*words, "N"]), takes, parse, accept)


def number(low: float, high: float) -> Value:
    """Take a decimal number of a closed range."""

    def parse(raw: str) -> float:
        return float(_such(raw, bool(_NUMBER.fullmatch(raw)) and low <= float(raw) <= high))

    def accept(value: object) -> float:
        number = as_number(value)
        return number if number is not None and low <= number <= high else _refuse(value)

    takes = f"a number, at least {low:g}" if high == inf else f"a number from {low:g} to {high:g}"
    return Value("X", takes, parse, accept)


def one_of(*names: str, also: Mapping[str, str] = MappingProxyType({})) -> Value:
    """Take one of some names, and what others call them.

    Args:
        *names: what is taken.
        also: another name -> the one that it stands for.
    """

    def accept(value: object) -> str:
        if not isinstance(value, str) or value not in {*names, *also}:
            _refuse(value)
        return also.get(value, value)

    return Value("|".join(names), f"one of {', '.join(names)}", accept, accept)


def switch() -> Value:
    """Take 1 (on) or 0 (off); off unless it is given."""

    def accept(value: object) -> bool:
        return value if isinstance(value, bool) else _refuse(value)

    def parse(raw: str) -> bool:
        return _such(raw, raw in ("0", "1")) == "1"

    return Value("0|1", "0 or 1", parse, accept, unset=False)


def text(metavar: str = "TEXT") -> Value:
    """Take any text in UTF-8."""

    def accept(value: object) -> str:
        return value.encode().decode() if isinstance(value, str) else _refuse(value)

    return Value(metavar, "text in UTF-8", accept, accept)


def path() -> Value:
    """Take a path."""

    def accept(value: object) -> Path:
        given = os.fspath(value) if isinstance(value, str | os.PathLike) else None
        usable = isinstance(given, str) and given and "\0" not in given
        return Path(str(given)) if usable else _refuse(value)

    return Value("PATH", "a path", accept, accept)


def id_list() -> Value:
    """Take token ids separated by commas."""

    def parse(raw: str) -> tuple[int, ...]:
        return tuple(_bounded(part.strip(), 0, (1 << 31) - 1) for part in raw.split(","))

    def accept(value: object) -> tuple[int, ...]:
        ids = tuple(map(as_integer, value)) if isinstance(value, list | tuple) else (None,)
        return tuple(_refuse(value) if each is None else each for each in ids)

    return Value("1,2,3", "token ids separated by commas, such as 1,2,3", parse, accept)


def socket_policy() -> Value:
    """Take a NUMA policy: a word, or the number of a socket."""

    def parse(raw: str) -> str:
        if raw not in ("auto", "compact", "scatter"):
            kind, _, number_text = raw.partition(":")
            _bounded(_such(number_text, kind == "socket"), 0, 1023)
        return raw

    return Value("POLICY", "one of auto, compact, scatter, socket:N", parse, _as_text(parse))


def attention() -> Value:
    """Take what attention reads: a word, or a word and numbers."""

    def parse(raw: str) -> str:
        try:
            parse_selection(raw)
        except UsageError:
            raise ValueError(raw) from None
        return raw

    return Value("dense|auto|KIND:N", TAKES, parse, _as_text(parse))


def diffusion() -> Value:
    """Take how blocks are denoised: a word, or a rule and its numbers."""

    def parse(raw: str) -> str:
        if raw not in WORDS:
            parse_rule(raw)
        return raw

    rules = ", ".join(f"{name}:{numbers}" for name, numbers in USUAL.items())
    return Value(
        "auto|off|lossless|RULE:N",
        f"auto, off, lossless or a rule, such as {rules}",
        parse,
        _as_text(parse),
    )


def _as_text(parse: Callable[[str], str]) -> Callable[[object], str]:
    """Return what takes a Python value where `parse` takes text."""

    def accept(value: object) -> str:
        return parse(value) if isinstance(value, str) else _refuse(value)

    return accept


def _refuse(value: object) -> NoReturn:
    raise ValueError(shown(value))


def _bounded(raw: str, low: int, high: int) -> int:
    return int(_such(raw, bool(_INTEGER.fullmatch(raw)) and low <= int(raw) <= high))


def _such(raw: str, good: bool) -> str:
    if not good:
        raise ValueError(raw)
    return raw
