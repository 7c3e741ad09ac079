"""Programs that are a function with flags; cheap to import, so that help is fast."""

import errno
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from clocher_kernels.errors import ClocherError
from clocher_runtime.command.flags import Codes, Command, Examples, Place, setting_option
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.values import declared
from clocher_runtime.exit_codes import ExitCode, exit_code, told

if TYPE_CHECKING:
    from rich.console import Console

RESUMES = (
    "Killed at any moment, it leaves either the model that was there before, or no model, or the "
    "finished new one. Run it again to go on."
)


class _Path(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":  # of a shell's variable that is not set; Path("") is the current directory
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Path(path_type=Path)
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
COUNT = click.IntRange(1)

Tell = Callable[[str, int, int], None]
"""Progress callback: label, done, total."""

_ENGINE = declared(EngineConfig)
_EXPECTED = (ClocherError, MemoryError, OSError, KeyboardInterrupt)
_FIRST_WORD_S = 5.0
_LATER = 1.5


def option(flag: str, kind: Any, help: str | None = None, **more: Any) -> click.Option:
    """Return an option whose help has its default and variable; `more` as `click.Option`."""
    names = filter(None, (more.pop("short", ""), flag, more.pop("name", "")))
    more.setdefault("show_default", more.get("default") is not None)
    more.setdefault("show_envvar", "envvar" in more)
    return click.Option([*names], type=kind, help=_phrase(help), **more)


def _phrase(help: str | None) -> str | None:
    text = (help or "").removesuffix(".")
    is_word = text[1:2].islower() or text[1:2] == " "
    return (text[0].lower() + text[1:] if is_word else text) or None


def engine_options(
    *names: str,
    defaults: Mapping[str, str] = MappingProxyType({}),
    reads: bool = True,
    **more: Any,
) -> list[click.Option]:
    """Return the flags of `EngineConfig` fields, with other `defaults`; not `reads`: as text."""
    found = []
    for name in names:
        setting, default = _ENGINE[name], defaults.get(name)
        help = setting.help if default is None else setting.help.partition(" (unset")[0]
        how = {"envvar": list(setting.env), "show_envvar": True, "show_default": True, **more}
        found.append(setting_option(name, setting, reads=reads, help=help, default=default, **how))
    return found


def needed(flag: str, help: str, **more: Any) -> click.Option:
    """Return a required path."""
    return option(flag, PATH, help, required=True, **more)


def switch(flag: str, help: str, *names: str) -> click.Option:
    """Return a flag without a value."""
    return click.Option([flag, *names], is_flag=True, help=_phrase(help))


def place(
    word: str, flag: str, help: str, *, needed: bool = True, many: bool = False
) -> tuple[click.Parameter, ...]:
    """Return a path as a positional, and its flag, which names the parameter."""
    name = flag.removeprefix("--").replace("-", "_")
    spot = Place(word, flag, name, needed, type=PATH, nargs=-1 if many else 1)
    return spot, option(flag, PATH, help, name=name, multiple=many)


class Script(Command):
    """A command that calls a function; `run` also handles its errors."""

    def run(self, argv: Sequence[str] | None = None) -> int:
        """Run it; return the exit code."""
        notes = " ".join(" ".join(self.notes).split())
        report = Report(self.name or "", resumes="run it again to go on" in notes.lower())
        given = list(sys.argv[1:] if argv is None else argv)
        try:
            with self.make_context(self.name, given, obj=report) as context:
                from clocher_runtime.disk.files import ending_on_lost_pages

                with ending_on_lost_pages(report.lost):
                    return self.invoke(context) or ExitCode.OK
        except click.exceptions.Exit as ended:
            return ended.exit_code
        except click.UsageError as error:
            return report.failed(self.told(error))
        except _EXPECTED as error:
            return report.failed(error)

    def main(self, args: Sequence[str] | None = None, *_: Any, **more: Any) -> Any:
        """Run it as a program: exit with its code, unless `standalone_mode=False`."""
        code = self.run(args)
        return sys.exit(code) if more.get("standalone_mode", True) else code


def script(
    name: str,
    *params: click.Parameter,
    examples: Examples = (),
    epilog: str | None = None,
    exit_codes: Codes = (),
    help: str | None = None,
) -> Callable[[Callable[..., int | None]], Script]:
    """Return a decorator that makes a command of a function that returns an exit code or None."""

    def decorate(function: Callable[..., int | None]) -> Script:
        return Script(
            name,
            inspect.cleandoc(help or function.__doc__ or ""),
            params=[*params],
            callback=click.pass_obj(function),
            notes=(epilog,) if epilog else (),
            examples=examples,
            exit_codes=exit_codes,
        )

    return decorate


def in_words(error: OSError) -> str:
    """Return the message of an error of the system: where, and what."""
    nameless = error.errno in (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF)
    where = str(error.filename or "") or ("standard output" if nameless else "")
    return f"{where}: {error.strerror}" if error.strerror and where else str(error)


def size(nbytes: int) -> str:
    """Return a size in bytes in a fitting unit."""
    from rich.filesize import decimal

    return decimal(nbytes)


class Report:
    """Messages of a program on standard error."""

    def __init__(self, name: str, resumes: bool = False) -> None:
        """Take the program's name and whether it resumes when it is run again."""
        self._name, self._resumes = name, resumes

    @functools.cached_property
    def _console(self) -> "Console":
        from rich.console import Console

        return Console(stderr=True, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Write a line."""
        self._console.print(text, markup=False)

    def done(self, text: str) -> None:
        """Write a line with the program's name."""
        self.note(f"{self._name}: {text}")

    def failed(self, raised: BaseException) -> ExitCode:
        """Write an expected error; return its exit code."""
        error = told(raised)
        if isinstance(error, KeyboardInterrupt):
            self.done("interrupted" + "; run it again to go on" * self._resumes)
        else:
            text = in_words(error) if isinstance(error, OSError) else str(error)
            self.done(f"error: {text or type(error).__name__}")
        return ExitCode.DEVICE if isinstance(error, OSError) else exit_code(error)

    def lost(self, message: str) -> None:
        """Write the error of a process that ends because a model file is gone."""
        self._console.show_cursor()
        self.done(f"error: {message}")

    def disk(self, source: Path | str, target: Path, nbytes: int, free: int) -> None:
        """Write how much disk space is needed."""
        self.note(f"{source} -> {target}: needs {size(nbytes)} of disk, {size(free)} free")

    @contextmanager
    def progress(self, total: int) -> Iterator[Callable[[int, str], None]]:
        """Show progress through `total` bytes; yield a callback for (bytes done, name)."""
        with self._telling(in_bytes=True) as tell:
            yield lambda nbytes, name: tell(name, nbytes, total)
            tell("done", total, total)

    @contextmanager
    def counting(self) -> Iterator[Tell]:
        """Show progress; yield a callback for (label, done, total)."""
        with self._telling(in_bytes=False) as tell:
            yield tell

    @contextmanager
    def _telling(self, in_bytes: bool) -> Iterator[Tell]:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            BarColumn(),
            DownloadColumn() if in_bytes else TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        plain = not self._console.is_terminal
        due = _FIRST_WORD_S
        with Progress(*columns, console=self._console, transient=True, disable=plain) as bar:
            task = bar.add_task("", total=None)

            def tell(what: str, done: int, total: int) -> None:
                nonlocal due
                bar.update(task, completed=done, total=total, description=what)
                elapsed = bar.tasks[0].elapsed or 0.0
                if plain and elapsed >= due:
                    amount = f"{size(done)} of {size(total)}" if in_bytes else ""
                    amount = amount or f"{100 * done // max(total, 1)} %"
                    self.done(f"{what}: {amount}, {elapsed:.0f} s")
                    due = _LATER * elapsed

            yield tell


@contextmanager
def reporting(name: str) -> Iterator[Report]:
    """Yield a `Report`; an expected error is written and ends the process."""
    from clocher_runtime.disk.files import ending_on_lost_pages

    report = Report(name)
    try:
        with ending_on_lost_pages(report.lost):
            yield report
    except _EXPECTED as error:
        sys.exit(report.failed(error))
