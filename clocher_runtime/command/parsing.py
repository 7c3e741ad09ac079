"""What a flag or an environment variable takes: strict parsers that can say what they expect."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        parse: text to value; raises ValueError.
        unset: the value of a setting that was not given, unless it has a default.
    """

    metavar: str
    takes: str
    parse: Callable[[str], Any]
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


def integer(low: int, high: int, *words: str) -> Value:
    """Take a decimal integer of a closed range, or one of some words."""

    def parse(raw: str) -> int | str:
        return raw if raw in words else _bounded(raw, low, high)

    takes = f"an integer from {low} to {high}"
    if words:
        takes = f"{', '.join(words)} or {takes}"
    return Value("|".join([*words, "N"]), takes, parse)


def number(low: float, high: float) -> Value:
    """Take a decimal number of a closed range."""

    def parse(raw: str) -> float:
        return float(_such(raw, bool(_NUMBER.fullmatch(raw)) and low <= float(raw) <= high))

    return Value("X", f"a number from {low:g} to {high:g}", parse)


def one_of(*names: str) -> Value:
    """Take one of some names."""
    return Value(
        "|".join(names), f"one of {', '.join(names)}", lambda raw: _such(raw, raw in names)
    )


def switch() -> Value:
    """Take 1 (on) or 0 (off); off unless it is given."""
    return Value("0|1", "0 or 1", lambda raw: _such(raw, raw in ("0", "1")) == "1", unset=False)


def text(metavar: str = "TEXT") -> Value:
    """Take any text in UTF-8."""
    return Value(metavar, "text in UTF-8", lambda raw: raw.encode("utf-8").decode("utf-8"))


def path() -> Value:
    """Take a path."""
    return Value("PATH", "a path", lambda raw: Path(_such(raw, raw != "")))


def id_list() -> Value:
    """Take token ids separated by commas."""

    def parse(raw: str) -> tuple[int, ...]:
        return tuple(_bounded(part.strip(), 0, (1 << 31) - 1) for part in raw.split(","))

    return Value("1,2,3", "token ids separated by commas, such as 1,2,3", parse)


def socket_policy() -> Value:
    """Take a NUMA policy: a word, or the number of a socket."""

    def parse(raw: str) -> str:
        if raw not in ("auto", "compact", "scatter"):
            kind, _, number_text = raw.partition(":")
            _bounded(_such(number_text, kind == "socket"), 0, 1023)
        return raw

    return Value("POLICY", "one of auto, compact, scatter, socket:N", parse)


def attention() -> Value:
    """Take what attention reads: a word, or a word and numbers."""

    def parse(raw: str) -> str:
        try:
            parse_selection(raw)
        except UsageError:
            raise ValueError(raw) from None
        return raw

    return Value("dense|auto|KIND:N", TAKES, parse)


def diffusion() -> Value:
    """Take how blocks are denoised: a word, or a rule and its numbers."""

    def parse(raw: str) -> str:
        try:
            if raw not in WORDS:
                parse_rule(raw)
        except UsageError:
            raise ValueError(raw) from None
        return raw

    rules = ", ".join(f"{name}:{numbers}" for name, numbers in USUAL.items())
    return Value(
        "auto|off|lossless|RULE:N", f"auto, off, lossless or a rule, such as {rules}", parse
    )


def _bounded(raw: str, low: int, high: int) -> int:
    return int(_such(raw, bool(_INTEGER.fullmatch(raw)) and low <= int(raw) <= high))


def _such(raw: str, good: bool) -> str:
    if not good:
        raise ValueError(raw)
    return raw
