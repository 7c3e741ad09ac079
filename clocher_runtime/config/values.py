"""Settings: a config field, all ways to give it, and the strict type of its value.

They are also the source of help and of docs/cli.md.
"""

import operator
import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from clocher_kernels.errors import UsageError
from clocher_runtime.diffusion import USUAL, WORDS
from clocher_runtime.diffusion import parse as parse_rule
from clocher_runtime.models.spec import TAKES, parse_selection

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NAME = re.compile(r"[\w.:-]+")
_NAMED = re.compile(rf"(?:(?P<name>{_NAME.pattern})=)?(?P<path>.*)", re.DOTALL)
_NEXT_NAMED = re.compile(rf",(?={_NAME.pattern}=)")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")  # as browsers send it
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class Value:
    """A type of value: converts Python values (`accept`) and text (`from_text`).

    Both raise ValueError, or UsageError with a reason of their own. `takes` is a noun phrase;
    `unset` the default, unless the setting has one. `repeats`: its flag may come several times.
    """

    metavar: str
    takes: str
    accept: Callable[[Any], Any]
    from_text: Callable[[str], Any] = str
    unset: Any = None
    repeats: bool = False

    def read(self, source: str, raw: str) -> Any:
        """Parse the text of the flag or variable `source`. Raises UsageError."""
        quoted = repr(raw if len(raw) <= 60 else f"{raw[:60]}...")
        return self._read(source, quoted, self.takes, lambda: self.accept(self.from_text(raw)))

    def check(self, name: str, value: object) -> Any:
        """Return the value of a Python keyword. Raises UsageError."""
        takes = "True or False" if self.metavar == "0|1" else self.takes
        return self._read(name, shown(value), takes, lambda: self.accept(value))

    @staticmethod
    def _read(where: str, got: str, takes: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except ValueError:
            raise UsageError(f"{where}: got {got}, expected {takes}") from None
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None


@dataclass(frozen=True, slots=True)
class Setting:
    """How one setting is given.

    `env`: variables, the strongest first; each flag also has one of its own name (`--max-new`:
    CLOCHER_MAX_NEW). `idle`: values that ask for what happens anyway; a field's default is one.
    `only`: commands that have it; empty: all. The flag of a 0/1 setting takes no value.
    """

    group: str
    takes: Value
    help: str
    flag: str = ""
    env: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


class Given(NamedTuple):
    """How a field was set: the flag, variable, or file and its key; and its text."""

    source: str
    raw: str

    def __str__(self) -> str:
        return f"{self.source}={self.raw}"

    @property
    def is_variable(self) -> bool:
        """Whether it is an environment variable."""
        return self.source.isidentifier()


def flag(group: str, takes: Value, help: str, *env: str, **more: Any) -> Any:
    """Declare a field whose flag has its name."""
    return _field(Setting(group, takes, help, "--", env), **more)


def variable(takes: Value, help: str, *env: str, **more: Any) -> Any:
    """Declare a field that has no flag."""
    return _field(Setting("", takes, help, "", env), **more)


internal = variable
"""Declares a field that only code sets, where no variable is named."""


def _field(
    setting: Setting, idle: tuple[str, ...] = (), only: tuple[str, ...] = (), **more: Any
) -> Any:
    default = more.get("default", setting.takes.unset)
    if default is not None:
        idle = (*idle, "0" if default is False else str(default))
    return field(default=default, metadata={"setting": replace(setting, idle=idle, only=only)})


def redefault(config: type[Any], name: str, default: Any) -> Any:
    """Declare a field of a subclass with a new default."""
    metadata = config.__dataclass_fields__[name].metadata
    return field(default=default, metadata=metadata)


def every(config: type[Any]) -> Iterator[tuple[str, Setting]]:
    """Yield the settings of a config record by field name."""
    for each in fields(config):
        setting = each.metadata.get("setting")
        if setting and setting.flag:
            env = dict.fromkeys((f"CLOCHER_{each.name.upper()}", *setting.env))
            flag = f"--{each.name.replace('_', '-')}"
            setting = replace(setting, flag=flag, env=tuple(env))
        if setting:
            yield each.name, setting


def declared(config: type[Any]) -> dict[str, Setting]:
    """Return the settings of a config record that its command line has."""
    return {
        name: setting
        for name, setting in every(config)
        if setting.flag or setting.env
        if not setting.only or config.command in setting.only
    }


def shown(value: object) -> str:
    """Return a short form of any value for error messages."""
    try:
        return reprlib.repr(value)
    except Exception:  # of any class, even a number: one of many thousand digits
        return f"a {type(value).__name__}"


def refuse_unknown(given: Mapping[str, object], known: Collection[str], where: str) -> None:
    """Raise UsageError for an unknown keyword option."""
    if unknown := sorted(set(given) - set(known)):
        raise UsageError(f"{where} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")


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


def _room(low: float, high: float, spec: str = "") -> str:
    return f", at least {low:g}" if high == inf else f" from {low:{spec}} to {high:{spec}}"


def integer(low: int, high: float, *words: str) -> Value:
    """Take a decimal integer of a closed range, or one of some words."""

    def accept(value: object) -> int | str:
        if isinstance(value, str) and value in words:
            return value
        number = as_integer(value)
        return int(_such(number, number is not None and low <= number <= high))

    takes = f"{', '.join(words)} or " * bool(words) + f"an integer{_room(low, high)}"
    return Value(
        "|".join([*words, "N"]), takes, accept, lambda raw: raw if raw in words else _int(raw)
    )


def number(low: float, high: float, above: bool = False) -> Value:
    """Take a decimal number of a closed range; `above`: without its lower bound."""

    def accept(value: object) -> float:
        number = as_number(value)
        fits = number is not None and low <= number <= high and not (above and number == low)
        return float(_such(number, fits))

    takes = "a number" + (f" above {low:g}, at most {high:g}" if above else _room(low, high, "g"))
    return Value("X", takes, accept, lambda raw: float(_such(raw, _NUMBER.fullmatch(raw))))


def one_of(*names: str, also: Mapping[str, str] = MappingProxyType({})) -> Value:
    """Take one of some names, or an alias (`also`: alias -> name)."""
    known = {**also, **{name: name for name in names}}

    def accept(value: object) -> str:
        return known[_such(value, isinstance(value, str) and value in known)]

    return Value("|".join(names), f"one of {', '.join(names)}", accept)


def text(metavar: str = "TEXT") -> Value:
    """Take any text in UTF-8."""
    return Value(metavar, "text in UTF-8", lambda value: _text(value).encode().decode())


def _path(value: object) -> Path:
    given = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    return Path(_such(given, isinstance(given, str) and given and "\0" not in given))


def _adapters(value: object) -> dict[str, str]:
    named: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"": value}
    for name, path in named.items():
        _such(name, isinstance(name, str) and (not name or _NAME.fullmatch(name)))
        _path(path)
    return {name: os.fspath(path) for name, path in named.items()}


def _split_adapters(raw: str) -> dict[str, str]:
    parts = [_NAMED.fullmatch(part) for part in _NEXT_NAMED.split(raw)]
    names = [part["name"] or "" for part in parts if part]
    if repeated := next((name for name in names if names.count(name) > 1), ""):
        raise UsageError(f"{repeated!r} names two adapters; give each a name of its own")
    found = {part["name"] or "": part["path"] for part in parts if part}
    return dict(_such(found, len(found) == len(parts)))


def _origins(value: object) -> str:
    for each in filter(str.strip, _text(value).split(",")):
        _such(each, _ORIGIN.fullmatch(each.strip(" /")))
    return _text(value)


def _ids(value: object) -> tuple[int, ...]:
    ids = tuple(map(as_integer, value)) if isinstance(value, list | tuple) else (None,)
    return tuple(_such(each, each is not None and 0 <= each < 1 << 31) for each in ids)


def _policy(value: object) -> str:
    policy = _text(value)
    kind, _, socket = policy.partition(":")
    if policy not in ("auto", "compact", "scatter"):
        _such(policy, kind == "socket" and 0 <= _int(socket) <= 1023)
    return policy


def _selection(value: object) -> str:
    parse_selection(_text(value))
    return _text(value)


def _rule(value: object) -> str:
    if (rule := _text(value)) not in WORDS:
        parse_rule(rule)
    return rule


def _text(value: object) -> str:
    return str(_such(value, isinstance(value, str)))


def _int(raw: str) -> int:
    return int(_such(raw, _INTEGER.fullmatch(raw)))


def _such(value: Any, good: object) -> Any:
    if not good:
        raise ValueError(shown(value))
    return value


PATH = Value("PATH", "a path", _path)
ADAPTERS = Value(
    "[NAME=]PATH", "a path, or NAME=PATH,NAME=PATH", _adapters, _split_adapters, repeats=True
)
"""LoRA adapters by name; "" is the one that has none."""
ORIGINS = Value(
    "ORIGINS", "origins such as https://chat.example:8443, commas between them, or *", _origins
)
SWITCH = Value(
    "0|1",
    "0 or 1",
    lambda value: _such(value, isinstance(value, bool)),
    lambda raw: _such(raw, raw in ("0", "1")) == "1",
    unset=False,
)
"""1 (on) or 0 (off); off unless it is given."""
IDS = Value(
    "1,2,3",
    "token ids separated by commas, such as 1,2,3",
    _ids,
    lambda raw: [_int(part.strip()) for part in raw.split(",")],
)
SOCKETS = Value("POLICY", "one of auto, compact, scatter, socket:N", _policy)
ATTENTION = Value("dense|KIND:N", TAKES, _selection)
_RULES = ", ".join(f"{name}:{numbers}" for name, numbers in USUAL.items())
DIFFUSION = Value(
    "auto|off|lossless|RULE:N", f"auto, off, lossless or a rule, such as {_RULES}", _rule
)
