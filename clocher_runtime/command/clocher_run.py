"""The command `clocher-run`: arguments and environment in, a line and an exit code out."""

import os
import traceback
from collections.abc import Callable, Sequence
from functools import partial

import click

from clocher_kernels.errors import ModelChanged, UsageError
from clocher_runtime.command.cli_help import ABOUT, HelpfulCommand, stands_alone
from clocher_runtime.command.console import Console
from clocher_runtime.command.env import resolve
from clocher_runtime.command.jsonline import (
    ErrorLine,
    RunLine,
    TuneLine,
    clocher_version,
    error_line,
    to_json,
)
from clocher_runtime.command.settings import ALL
from clocher_runtime.exit_codes import ExitCode, exit_code, told
from clocher_runtime.signals import cause_of

NAME = "clocher-run"


def command(argv: Sequence[str], emit: Callable[[str], object]) -> tuple[str | None, int]:
    """Run the command.

    Args:
        argv: arguments after its name.
        emit: writes a line to standard output, for a run that cannot come back.

    Returns:
        The line for standard output, None where there is to be none, and the exit code.

    Raises:
        KeyboardInterrupt: a signal arrived before there was a console to tell it.
    """
    line: RunLine | TuneLine | ErrorLine
    with Console() as console:
        try:
            flags = parse(argv)
            if flags is None:
                return None, ExitCode.OK
            config = resolve(flags, os.environ)
            # NumPy and all that needs it is imported after the flags have been checked.
            from clocher_runtime.disk.lost_pages import ending_on_lost_pages

            with ending_on_lost_pages(partial(_lost, console, emit)):
                if config.tune:
                    from clocher_runtime.command.tile_tuning import tune

                    line, code = tune(config, console), ExitCode.OK
                else:
                    from clocher_runtime.command.run import run, summary

                    line, code = run(config, console), ExitCode.OK
                    console.note(summary(line))
        except (Exception, KeyboardInterrupt) as raised:
            error = told(cause_of(raised))
            line, code = error_line(error), exit_code(error)
            if code == ExitCode.BUG:
                console.note("".join(traceback.format_exception(error)).rstrip())
            else:
                console.note(f"error: {line.message}")
    return to_json(line), code


def _lost(console: Console, emit: Callable[[str], object], message: str) -> None:
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
