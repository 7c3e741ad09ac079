"""The command `clocher-run`: flags and environment in, one JSON line and an exit code out."""

import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial

import click

from clocher_kernels.errors import ModelChanged, UsageError
from clocher_runtime.cli_help import ABOUT, HelpfulCommand, stands_alone
from clocher_runtime.console import Console
from clocher_runtime.env import resolve
from clocher_runtime.exit_codes import ExitCode, exit_code
from clocher_runtime.jsonline import (
    ErrorLine,
    RunLine,
    TuneLine,
    clocher_version,
    error_line,
    to_json,
)
from clocher_runtime.settings import ALL

NAME = "clocher-run"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: arguments after the name of the command; those of the process by default.
    """
    line: RunLine | TuneLine | ErrorLine
    with Console() as console:
        try:
            flags = parse(sys.argv[1:] if argv is None else argv)
            if flags is None:
                return ExitCode.OK
            config = resolve(flags, os.environ)
            # NumPy and all that needs it is imported after the flags have been checked.
            from clocher_runtime.weights.lost_pages import ending_on_lost_pages

            with ending_on_lost_pages(partial(_lost, console)):
                if config.tune:
                    from clocher_runtime.tile_tuning import tune

                    line, code = tune(config, console), ExitCode.OK
                else:
                    from clocher_runtime.run import run, summary

                    line, code = run(config, console), ExitCode.OK
                    console.note(summary(line))
        except (Exception, KeyboardInterrupt) as error:
            line, code = error_line(error), exit_code(error)
            if code == ExitCode.BUG:
                console.note("".join(traceback.format_exception(error)).rstrip())
            else:
                console.note(f"error: {line.message}")
    return code if emit(to_json(line)) else ExitCode.BUG


def _lost(console: Console, message: str) -> None:
    """Write the line of a run that ends at once, because a model file is gone."""
    line = error_line(ModelChanged(message))
    with console:
        console.note(f"error: {message}")
    emit(to_json(line))


def parse(argv: Sequence[str]) -> dict[str, str] | None:
    """Return name of a setting -> what its flag was given; None after --help or --version.

    Raises:
        UsageError: a flag is unknown or lacks its value, or there is an argument that is no flag.
    """
    command = HelpfulCommand(NAME, params=_options(), help=ABOUT)
    try:
        with command.make_context(NAME, list(argv)) as context:
            values = context.params
    except click.exceptions.Exit:
        return None
    except click.UsageError as error:
        raise UsageError(f"{error.format_message()} See {NAME} --help.") from None
    given = {name: value for name, value in values.items() if value not in (None, False)}
    return {name: "1" if value is True else value for name, value in given.items()}


def emit(text: str) -> bool:
    """Write a line to standard output; say whether it could be written."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError:
        # Python flushes again when it exits, and must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _options() -> list[click.Parameter]:
    options: list[click.Parameter] = [
        click.Option([setting.flag, name], is_flag=stands_alone(setting), default=None)
        for name, setting in ALL.items()
        if setting.flag
    ]
    return [
        *options,
        click.Option(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version
        ),
    ]


def _version(context: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"{NAME} {clocher_version()}")
        context.exit()


if __name__ == "__main__":
    sys.exit(main())
