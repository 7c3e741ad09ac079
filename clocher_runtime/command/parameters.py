"""What parameters of commands take: paths, lists, and positionals that also have a flag."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

MOST, _MOST_VALUES = 1 << 24, 16
"""Of a number in a list, and of numbers."""


class _Path(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":  # of a shell's variable that is not set; Path("") is the current directory
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Path(path_type=Path)


class Listed(click.ParamType[Any]):
    """Values with commas between them; `read` parses one, or raises ValueError.

    `fits`: whether a list is allowed; `once`: a value counts once.
    """

    name = "list"

    def __init__(
        self,
        read: Callable[[str], Any],
        expected: str,
        fits: Callable[[Sequence[Any]], bool] = lambda values: True,
        once: bool = True,
    ) -> None:
        self._read, self._expected, self._fits, self._once = read, expected, fits, once

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Parse a list; a default may be parsed already."""
        if not isinstance(value, str):
            return tuple(value)
        try:
            found = [self._read(part) for part in value.split(",")]
            found = [*dict.fromkeys(found)] if self._once else found
            if self._fits(found):
                return tuple(found)
        except ValueError:
            pass
        self.fail(f"{value!r:.80}; expected {self._expected}", param, ctx)

    @classmethod
    def of(cls, known: Iterable[str]) -> "Listed":
        """Return the type of a list of known names."""
        names = tuple(known)
        # `index` raises ValueError for an unknown name.
        return cls(lambda text: names[names.index(text)], f"some of {', '.join(names)}")


class _New(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)
        if not path.parent.is_dir():
            self.fail(f"{path.parent} is not a directory", param, ctx)
        return path


def whole(least: int, most: int, text: str) -> int:
    """Read a whole number without a sign. Raises ValueError."""
    if not (text.isascii() and text.isdigit() and len(text) < 9 and least <= int(text) <= most):
        raise ValueError
    return int(text)


def sides(text: str) -> tuple[int, int]:
    """Read the sides of a rectangle, as 32x64. Raises ValueError."""
    rows, _, columns = text.partition("x")
    return whole(1, MOST, rows), whole(1, MOST, columns)


def numbers(least: int, most: int, such: str) -> Listed:
    """Return the type of a short list of numbers in a range; `such`: an example of one."""
    expected = f"at most {_MOST_VALUES} numbers from {least} to {most}, such as {such}"
    return Listed(partial(whole, least, most), expected, lambda some: len(some) <= _MOST_VALUES)


FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
NEW = _New(dir_okay=False, path_type=Path)
COUNT = click.IntRange(1)


class Place(click.Argument):
    """A positional argument that may also be given by its flag; `word` is its name in usage."""

    def __init__(self, word: str, flag: str, name: str, needed: bool, **more: Any) -> None:
        metavar = f"{word}..." if more.get("nargs") == -1 else word
        metavar = metavar if needed else f"[{metavar}]"
        super().__init__([f"{name}_"], required=False, metavar=metavar, **more)
        self.word, self.flag, self.of, self.needed = word, flag, name, needed

    def merge(self, values: dict[str, Any]) -> None:
        """Move the value to that of its flag."""
        placed, flagged = values.pop(f"{self.of}_"), values[self.of]
        if self.nargs == -1:
            values[self.of] = (*placed, *flagged)
        elif placed is not None and flagged is not None:
            got = f"got {self.word} {placed} and {self.flag} {flagged}"
            raise click.UsageError(f"{got}; expected one of them.")
        elif placed is not None:
            values[self.of] = placed
        if self.needed and not values[self.of]:
            raise click.UsageError(f"{self.word} is missing; give it, or {self.flag}.")
