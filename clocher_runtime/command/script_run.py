"""Programs that are a function with flags; cheap to import, so that help is fast."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from clocher_kernels.errors import ClocherError
from clocher_runtime.command.console import Report as Report
from clocher_runtime.command.console import Tell as Tell
from clocher_runtime.command.console import in_words as in_words
from clocher_runtime.command.console import size as size
from clocher_runtime.command.flags import Codes, Command, Examples, Place, setting_option
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.values import declared
from clocher_runtime.exit_codes import ExitCode

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

_ENGINE = declared(EngineConfig)
_EXPECTED = (ClocherError, MemoryError, OSError, KeyboardInterrupt)


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
