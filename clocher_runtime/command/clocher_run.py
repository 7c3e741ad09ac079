"""The command `clocher-run`: arguments and environment in, a line and an exit code out.

Its flags and its help text are made from the table of settings.
"""

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

import click

from clocher_kernels.errors import ModelChanged, UsageError
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
from clocher_runtime.command.settings import ALL, HINTS, RunConfig, Setting
from clocher_runtime.exit_codes import ExitCode, exit_code, told
from clocher_runtime.signals import cause_of

NAME = "clocher-run"

ABOUT = """Complete text with a language model and report how fast it went.

Generated text goes to standard error as it is produced. Standard output gets exactly one line of
JSON, also when the run fails."""

EXAMPLES = (
    ("the model that ships with Clocher completes a Python function", "clocher-run"),
    ("another prompt, 100 tokens", 'clocher-run --prompt "class Stack:" --max-new 100'),
    ("your model: a Hugging Face directory or an IEBIN pair", "clocher-run --model-dir DIR"),
    ("float weights quantised to 4 bits at load", "clocher-run --precision int4w"),
    ("every line of a file, four at a time", "clocher-run --prompts-file FILE --batch 4"),
    ("only the numbers, one per line", "clocher-run 2>/dev/null | python3 -m json.tool"),
    ("walk over 64 MB of the weights per token", "IE_BYTES_PER_TOKEN=64000000 clocher-run"),
)

EXIT_CODES = (
    (ExitCode.OK, "done"),
    (ExitCode.BUG, "unexpected: a defect of Clocher, or standard output cannot be written"),
    (ExitCode.USAGE, "bad flag, environment variable or prompt"),
    (ExitCode.MODEL, "model missing, invalid or not supported"),
    (ExitCode.DEVICE, "device or engine not available"),
    (ExitCode.MEMORY, "out of memory"),
    (ExitCode.INTERRUPTED, "interrupted (Ctrl-C)"),
    (ExitCode.TERMINATED, "terminated (SIGTERM)"),
)

_DEFAULTS = {field.name: field.default for field in fields(RunConfig)}


def command(argv: Sequence[str], emit: Callable[[str], object]) -> tuple[str, int]:
    """Run the command.

    Args:
        argv: arguments after its name.
        emit: writes a line to standard output, for a run that cannot come back.

    Returns:
        What standard output gets, and the exit code.

    Raises:
        KeyboardInterrupt: a signal arrived before there was a console to tell it.
    """
    line: RunLine | TuneLine | ErrorLine
    with Console() as console:
        try:
            shown: list[str] = []
            flags = parse(argv, shown.append)
            if flags is None:
                return "\n".join(shown), ExitCode.OK
            config = resolve(flags, os.environ)
            # NumPy and all that needs it is imported after the flags have been checked.
            from clocher_runtime.disk.files import ending_on_lost_pages

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


def parse(argv: Sequence[str], show: Callable[[str], object] = click.echo) -> dict[str, str] | None:
    """Return name of a setting -> what its flag was given; None after --help or --version.

    Args:
        argv: arguments after the name of the command.
        show: takes the text of --help or --version.

    Raises:
        UsageError: a flag is unknown or lacks its value, or there is an argument that is no flag.
    """
    options: list[click.Parameter] = [
        click.Option([setting.flag, name], is_flag=stands_alone(setting), default=None)
        for name, setting in ALL.items()
        if setting.flag
    ]
    options += [
        _asked("--version", lambda context: show(f"{NAME} {clocher_version()}")),
        _asked("--help", lambda context: show(context.get_help())),
    ]
    command = HelpfulCommand(NAME, params=options, help=ABOUT, add_help_option=False)
    try:
        with command.make_context(NAME, list(argv)) as context:
            values = context.params
    except click.exceptions.Exit:
        return None
    except click.UsageError as error:
        raise UsageError(f"{error.format_message()} See {NAME} --help.") from None
    given = {name: value for name, value in values.items() if value not in (None, False)}
    return {name: "1" if value is True else value for name, value in given.items()}


def _asked(flag: str, answer: Callable[[click.Context], object]) -> click.Option:
    """Return a flag that answers a question and ends the command."""

    def callback(context: click.Context, option: click.Parameter, wanted: bool) -> None:
        if wanted:
            answer(context)
            context.exit()

    return click.Option([flag], is_flag=True, is_eager=True, expose_value=False, callback=callback)


class HelpfulCommand(click.Command):
    """A click command whose help is made from the table of settings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write flags by group, variables without a flag, examples and exit codes."""
        groups: dict[str, list[tuple[str, str]]] = {}
        variables: list[tuple[str, str]] = []
        for name, setting in ALL.items():
            if setting.flag:
                row = (usage(setting), describe(name))
                groups.setdefault(setting.group, []).append(row)
            else:
                variables.append((f"{setting.env[0]} {setting.takes.metavar}", describe(name)))
        for group, rows in groups.items():
            _section(formatter, group, rows)
        _section(formatter, "Other", [("--version", ""), ("--help", "")])
        _section(formatter, "Environment variables", variables)
        formatter.write(
            "\nA flag is stronger than a variable, a variable is stronger than the file of "
            "--config,\nand the file is stronger than the default.\n"
        )
        formatter.write(
            "\nA hint is checked and accepted; this version does not act on it. The JSON line "
            "lists\nit under hints_ignored unless it asks for what happens anyway.\n"
        )
        with formatter.section("Examples"):
            for about, command in EXAMPLES:
                formatter.write(f"  # {about}\n  {command}\n")
        _section(formatter, "Exit codes", [(str(int(code)), text) for code, text in EXIT_CODES])


def usage(setting: Setting) -> str:
    """Return a flag with what it takes."""
    return setting.flag if stands_alone(setting) else f"{setting.flag} {setting.takes.metavar}"


def stands_alone(setting: Setting) -> bool:
    """Whether the flag of a setting takes no value and means 1."""
    return setting.takes.metavar == "0|1"


def describe(name: str) -> str:
    """Return what a setting does, with its default and the variables beside its flag."""
    setting = ALL[name]
    notes = ["hint"] if name in HINTS else []
    default = _DEFAULTS.get(name)
    if default is not None and default is not False:
        notes.append(
            f"default: {default:g}" if isinstance(default, float) else f"default: {default}"
        )
    if setting.flag and setting.env:
        notes.append(f"env: {', '.join(setting.env)}")
    return f"{setting.help} [{'; '.join(notes)}]" if notes else setting.help


def _section(formatter: click.HelpFormatter, title: str, rows: list[tuple[str, str]]) -> None:
    with formatter.section(title):
        formatter.write_dl(rows, col_max=34)
