"""What the programs have in common: their declaration, help, messages, progress, exit codes.

Importing it is cheap, so that a command's help and its shell completion are: what works is
imported by the function that needs it.
"""

import errno
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clocher_kernels.errors import ClocherError, UsageError
from clocher_runtime.command.flags import HELP_WIDTH, told_by_click, write_examples
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.setting import Setting, declared
from clocher_runtime.exit_codes import ExitCode, exit_code, told

if TYPE_CHECKING:
    from rich.console import Console

EXIT_CODES = (
    (ExitCode.OK, "done"),
    (ExitCode.USAGE, "a flag, a variable or a manifest cannot be used"),
    (ExitCode.MODEL, "the input is missing, damaged or of an unknown kind"),
    (ExitCode.DEVICE, "the output cannot be written (disk full, no permission)"),
    (ExitCode.MEMORY, "out of memory"),
)
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

Wrap = Callable[[Any], Any]
Examples = Sequence[tuple[str, str]]
"""What an example shows, and its lines."""
Tell = Callable[[str, int, int], None]
"""Takes what is done, and (done, total)."""

_ENGINE = declared(EngineConfig)
_EXPECTED = (ClocherError, MemoryError, OSError, KeyboardInterrupt)
_FIRST_WORD_S = 5.0
_LATER = 1.5


def _where(error: OSError) -> str:
    """Return what could not be written or read; "" for what tells it by itself."""
    nameless = error.errno in (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF)
    return str(error.filename or "") or ("standard output" if nameless else "")


def option(flag: str, kind: Any, help: str | None = None, **more: Any) -> Wrap:
    """Declare an option; `more` is what `click.option` takes. Defaults and variables are shown."""
    names = (flag, more.pop("name")) if "name" in more else (flag,)
    more.setdefault("show_default", more.get("default") is not None)
    more.setdefault("show_envvar", "envvar" in more)
    return click.option(*names, type=kind, help=help, **more)


class _OfEngine(click.ParamType[Any]):
    """What a setting of `EngineConfig` takes."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self.name = setting, setting.takes.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._setting.takes.read(self._setting.flag, value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return self._setting.takes.metavar


def engine_option(name: str, help: str | None = None, **more: Any) -> Wrap:
    """Declare the flag of a field of `EngineConfig`, with its variables.

    Args:
        name: of the field.
        help: instead of the field's own.
        **more: what `click.option` takes.
    """
    setting = _ENGINE[name]
    help = setting.help if help is None else help
    return option(setting.flag, _OfEngine(setting), help, **{"envvar": list(setting.env), **more})


def needed(flag: str, help: str, **more: Any) -> Wrap:
    """Declare a path that has to be given."""
    return option(flag, PATH, help, required=True, **more)


def switch(flag: str, help: str, *names: str) -> Wrap:
    """Declare an option without a value."""
    return click.option(flag, *names, is_flag=True, help=help)


def place(word: str, flag: str, help: str, *, needed: bool = True, many: bool = False) -> Wrap:
    """Declare a path that is given by its place, or by a flag.

    Args:
        word: what usage calls it, such as "OUT_DIR".
        flag: such as "--out-dir", which also names the parameter of the function.
        help: of the flag.
        needed: whether it must be given, one way or the other.
        many: whether several may be; the function gets a tuple.
    """
    name = flag.removeprefix("--").replace("-", "_")
    spot = f"{name}_by_place"

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def merged(*args: Any, **given: Any) -> Any:
            placed, flagged = given.pop(spot), given.pop(name)
            if placed and flagged and not many:
                raise UsageError(f"got {word} {placed} and {flag} {flagged}; expected one of them")
            if needed and not (placed or flagged):
                raise UsageError(f"{word} is missing; give it, or {flag}")
            found = (*placed, *flagged) if many else placed or flagged
            return function(*args, **given, **{name: found})

        merged = option(flag, PATH, help, name=name, multiple=many)(merged)
        metavar = f"{word}..." if many else word
        placing = click.argument(
            spot,
            type=PATH,
            metavar=metavar if needed else f"[{metavar}]",
            required=False,
            nargs=-1 if many else 1,
        )
        return placing(merged)

    return declare


class Script(click.Command):
    """A command with its examples on top of its help; `run` does everything, errors included."""

    examples: Examples = ()
    exit_codes: Sequence[tuple[ExitCode, str]] = ()

    def run(self, argv: Sequence[str] | None = None) -> int:
        """Run it, and return the exit code.

        Args:
            argv: arguments after the name of the command; None: those of the process.
        """
        name = self.name or ""
        report = Report(name)
        given = list(sys.argv[1:] if argv is None else argv)
        try:
            with self.make_context(name, given, obj=report) as context:
                from clocher_runtime.disk.files import ending_on_lost_pages

                with ending_on_lost_pages(report.lost):
                    return self.invoke(context) or ExitCode.OK
        except click.exceptions.Exit as ended:
            return ended.exit_code
        except click.UsageError as error:
            return report.failed(UsageError(f"{told_by_click(error)} See {name} --help."))
        except _EXPECTED as error:
            return report.failed(error)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run it as a program: end the process with the exit code, unless not `standalone_mode`."""
        code = self.run(args)
        return sys.exit(code) if standalone_mode else code

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what it does, and the examples."""
        super().format_help_text(ctx, formatter)
        if self.examples:
            lines = [(about, line.replace("\n", "\n  ")) for about, line in self.examples]
            write_examples(formatter, lines)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what there is besides, and the exit codes."""
        super().format_epilog(ctx, formatter)
        if self.exit_codes:
            with formatter.section("Exit codes"):
                formatter.write_dl([(str(int(code)), text) for code, text in self.exit_codes])


def script(
    name: str,
    *options: Wrap,
    examples: Examples = (),
    epilog: str | None = None,
    exit_codes: Sequence[tuple[ExitCode, str]] = EXIT_CODES,
    help: str | None = None,
) -> Callable[[Callable[..., int | None]], Script]:
    """Return a decorator that makes a function a command: `function(report, **options)`.

    What it returns is the exit code, None for 0; an expected error ends it with its own.

    Args:
        name: of the command, for messages.
        options: what `option` and its kind return, in the order of the help text.
        examples: on top of the help text.
        epilog: of the help text, between options and exit codes.
        exit_codes: at the end of the help text.
        help: None takes the docstring of the function.
    """

    def decorate(function: Callable[..., int | None]) -> Script:
        run: Any = click.pass_obj(function)
        for each in reversed(options):
            run = each(run)
        settings = {"max_content_width": HELP_WIDTH, "help_option_names": ["-h", "--help"]}
        command: Script = click.command(
            name, Script, help=help, epilog=epilog, context_settings=settings
        )(run)
        command.examples, command.exit_codes = examples, exit_codes
        return command

    return decorate


class Report:
    """Writes to standard error for one program."""

    def __init__(self, name: str) -> None:
        self._name = name

    @functools.cached_property
    def _console(self) -> "Console":
        from rich.console import Console

        return Console(stderr=True, highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Write a line."""
        self._console.print(text, markup=False)

    def done(self, text: str) -> None:
        """Write a line that begins with the program's name."""
        self.note(f"{self._name}: {text}")

    def failed(self, raised: BaseException) -> ExitCode:
        """Write the line of an expected error, and return its exit code."""
        error = told(raised)
        if isinstance(error, KeyboardInterrupt):
            self.done("interrupted; run it again to go on")
        elif isinstance(error, OSError) and error.strerror and (where := _where(error)):
            self.done(f"error: {where}: {error.strerror}")
        else:
            self.done(f"error: {error or type(error).__name__}")
        return ExitCode.DEVICE if isinstance(error, OSError) else exit_code(error)

    def lost(self, message: str) -> None:
        """Write the error of a process that ends at once, because a model file is gone."""
        self._console.show_cursor()
        self.done(f"error: {message}")

    def disk(self, source: Path | str, target: Path, nbytes: int, free: int) -> None:
        """Say how much of the disk the work needs."""
        from rich.filesize import decimal

        self.note(f"{source} -> {target}: needs {decimal(nbytes)} of disk, {decimal(free)} free")

    @contextmanager
    def progress(self, total: int) -> Iterator[Callable[[int, str], None]]:
        """Show how far a work of `total` bytes is; yield what takes (bytes done, name)."""
        with self._telling(in_bytes=True) as tell:
            yield lambda nbytes, name: tell(name, nbytes, total)
            tell("done", total, total)

    @contextmanager
    def counting(self) -> Iterator[Tell]:
        """Show how far something is; yield what takes (what is counted, done, total)."""
        with self._telling(in_bytes=False) as tell:
            yield tell

    @contextmanager
    def _telling(self, in_bytes: bool) -> Iterator[Tell]:
        """Show a bar with the time left on a terminal, elsewhere a line now and then."""
        from rich.filesize import decimal
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
                    amount = f"{decimal(done)} of {decimal(total)}" if in_bytes else ""
                    amount = amount or f"{100 * done // max(total, 1)} %"
                    self.done(f"{what}: {amount}, {elapsed:.0f} s")
                    due = _LATER * elapsed

            yield tell


@contextmanager
def reporting(name: str) -> Iterator[Report]:
    """Yield a `Report`; an expected error becomes a line and ends the process with its code."""
    from clocher_runtime.disk.files import ending_on_lost_pages

    report = Report(name)
    try:
        with ending_on_lost_pages(report.lost):
            yield report
    except _EXPECTED as error:
        sys.exit(report.failed(error))
