"""Flags and help text of a command, made from a table of settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from clocher_kernels.errors import UsageError
from clocher_runtime.command.jsonline import clocher_version
from clocher_runtime.command.settings import HINTS, Setting
from clocher_runtime.exit_codes import ExitCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command as its help describes it.

    Attributes:
        about: what it does.
        table: name -> setting: its flags and variables.
        defaults: name -> value, of settings that have one.
        notes: paragraphs after the settings.
        examples: what it shows, and the line.
    """

    name: str
    about: str
    table: Mapping[str, Setting]
    defaults: Mapping[str, Any]
    notes: Sequence[str]
    examples: Sequence[tuple[str, str]]
    exit_codes: Sequence[tuple[ExitCode, str]]

    def parse(
        self, argv: Sequence[str], show: Callable[[str], object] = click.echo
    ) -> dict[str, str] | None:
        """Return name of a setting -> what its flag was given; None after --help or --version.

        Args:
            argv: arguments after the name of the command.
            show: takes the text of --help or --version.

        Raises:
            UsageError: a flag is unknown or lacks its value, or there is an argument that is no
                flag.
        """
        options: list[click.Parameter] = [
            click.Option([setting.flag, name], is_flag=stands_alone(setting), default=None)
            for name, setting in self.table.items()
            if setting.flag
        ]
        options += [
            _asked("--version", lambda context: show(f"{self.name} {clocher_version()}")),
            _asked("--help", lambda context: show(context.get_help())),
        ]
        command = _HelpfulCommand(self, options)
        try:
            with command.make_context(self.name, list(argv)) as context:
                values = context.params
        except click.exceptions.Exit:
            return None
        except click.UsageError as error:
            raise UsageError(f"{error.format_message()} See {self.name} --help.") from None
        given = {name: value for name, value in values.items() if value not in (None, False)}
        return {name: "1" if value is True else value for name, value in given.items()}

    def describe(self, name: str) -> str:
        """Return what a setting does, with its default and the variables beside its flag."""
        setting = self.table[name]
        notes = ["hint"] if name in HINTS else []
        default = self.defaults.get(name)
        if default is not None and default is not False:
            notes.append(
                f"default: {default:g}" if isinstance(default, float) else f"default: {default}"
            )
        if setting.flag and setting.env:
            notes.append(f"env: {', '.join(setting.env)}")
        return f"{setting.help} [{'; '.join(notes)}]" if notes else setting.help


def _asked(flag: str, answer: Callable[[click.Context], object]) -> click.Option:
    """Return a flag that answers a question and ends the command."""

    def callback(context: click.Context, option: click.Parameter, wanted: bool) -> None:
        if wanted:
            answer(context)
            context.exit()

    return click.Option([flag], is_flag=True, is_eager=True, expose_value=False, callback=callback)


class _HelpfulCommand(click.Command):
    """A click command whose help is made from the table of settings."""

    def __init__(self, command: Command, options: list[click.Parameter]) -> None:
        super().__init__(command.name, params=options, help=command.about, add_help_option=False)
        self._command = command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write flags by group, variables without a flag, notes, examples and exit codes."""
        command = self._command
        groups: dict[str, list[tuple[str, str]]] = {}
        variables: list[tuple[str, str]] = []
        for name, setting in command.table.items():
            if setting.flag:
                row = (usage(setting), command.describe(name))
                groups.setdefault(setting.group, []).append(row)
            else:
                row = (f"{setting.env[0]} {setting.takes.metavar}", command.describe(name))
                variables.append(row)
        for group, rows in groups.items():
            _section(formatter, group, rows)
        _section(formatter, "Other", [("--version", ""), ("--help", "")])
        _section(formatter, "Environment variables", variables)
        for note in command.notes:
            formatter.write(f"\n{note}\n")
        with formatter.section("Examples"):
            for about, line in command.examples:
                formatter.write(f"  # {about}\n  {line}\n")
        codes = [(str(int(code)), text) for code, text in command.exit_codes]
        _section(formatter, "Exit codes", codes)


def usage(setting: Setting) -> str:
    """Return a flag with what it takes."""
    return setting.flag if stands_alone(setting) else f"{setting.flag} {setting.takes.metavar}"


def stands_alone(setting: Setting) -> bool:
    """Whether the flag of a setting takes no value and means 1."""
    return setting.takes.metavar == "0|1"


def _section(formatter: click.HelpFormatter, title: str, rows: list[tuple[str, str]]) -> None:
    with formatter.section(title):
        formatter.write_dl(rows, col_max=34)
