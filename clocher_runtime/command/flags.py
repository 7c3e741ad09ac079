"""Flags and help text of a command, made from a table of settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
from click.shell_completion import CompletionItem

from clocher_kernels.errors import UsageError
from clocher_runtime.command.jsonline import clocher_version
from clocher_runtime.config.engine import HINTS
from clocher_runtime.config.setting import Setting
from clocher_runtime.exit_codes import ExitCode

HELP_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command as its help describes it.

    Attributes:
        about: what it does.
        table: name -> setting: its flags and variables.
        defaults: name -> value, of settings that have one.
        notes: paragraphs after the settings.
        examples: what it shows, and the line.
        positional: settings that may be given without their flag, in this order.
    """

    name: str
    about: str
    table: Mapping[str, Setting]
    defaults: Mapping[str, Any]
    notes: Sequence[str]
    examples: Sequence[tuple[str, str]]
    exit_codes: Sequence[tuple[ExitCode, str]]
    positional: Sequence[str] = ()

    def named(self, name: str) -> "Command":
        """Return the command under another name, in its examples too."""
        examples = tuple((about, line.replace(self.name, name)) for about, line in self.examples)
        return replace(self, name=name, examples=examples)

    def parse(
        self, argv: Sequence[str], show: Callable[[str], object] = click.echo
    ) -> dict[str, str] | None:
        """Return name of a setting -> what its flag was given; None after --help or --version.

        Args:
            argv: arguments after the name of the command.
            show: takes the text of --help or --version.

        Raises:
            UsageError: a flag is unknown or lacks its value, or there is an argument too many.
        """
        try:
            with self.click(show).make_context(self.name, list(argv)) as context:
                values = context.params
        except click.exceptions.Exit:
            return None
        except click.UsageError as error:
            raise UsageError(f"{told_by_click(error)} See {self.name} --help.") from None
        given = {name: value for name, value in values.items() if value not in (None, False)}
        for name in self.positional:
            if (value := given.pop(_place(name), None)) is not None:
                if name in given:
                    flag = self.table[name].flag
                    raise UsageError(f"{value!r} and {flag} {given[name]!r}: give one of them")
                given[name] = value
        return {name: "1" if value is True else value for name, value in given.items()}

    def click(self, show: Callable[[str], object] = click.echo) -> click.Command:
        """Return the same as click has it: for parsing, help and shell completion."""
        options: list[click.Parameter] = [
            click.Argument(
                [_place(name)],
                required=False,
                metavar=f"[{_metavar(name)}]",
                shell_complete=_completing(self.table[name]),
            )
            for name in self.positional
        ]
        options += [
            click.Option(
                [setting.flag, name],
                is_flag=stands_alone(setting),
                default=None,
                shell_complete=_completing(setting),
            )
            for name, setting in self.table.items()
            if setting.flag
        ]
        everything = _HelpfulCommand(self, options, whole=True)
        command = _HelpfulCommand(self, options, whole=False)
        options += [
            _asked("--version", lambda context: show(f"{self.name} {clocher_version()}")),
            _asked("--help-all", lambda context: show(everything.get_help(context))),
            _asked("--help", lambda context: show(command.get_help(context)), "-h"),
        ]
        return command

    def describe(self, name: str, whole: bool = True) -> str:
        """Return what a setting does and its default; the `whole` of it has its variables too."""
        setting = self.table[name]
        notes = ["hint"] if name in HINTS else []
        default = self.defaults.get(name)
        if default is not None and default is not False:
            notes.append(
                f"default: {default:g}" if isinstance(default, float) else f"default: {default}"
            )
        if whole and setting.flag and setting.env:
            notes.append(f"env: {', '.join(setting.env)}")
        return f"{setting.help} [{'; '.join(notes)}]" if notes else setting.help


def told_by_click(error: click.UsageError) -> str:
    """Return what click says of a wrong line, as a sentence."""
    message = error.format_message()
    return message if message.endswith((".", "?", "?)")) else f"{message}."


def _asked(flag: str, answer: Callable[[click.Context], object], *short: str) -> click.Option:
    """Return a flag that answers a question and ends the command."""

    def callback(context: click.Context, option: click.Parameter, wanted: bool) -> None:
        if wanted:
            answer(context)
            context.exit()

    return click.Option(
        [*short, flag], is_flag=True, is_eager=True, expose_value=False, callback=callback
    )


class _HelpfulCommand(click.Command):
    """A click command whose help is made from the table of settings.

    Args:
        command: what it is about.
        options: what it takes.
        whole: with what few people need: variables, hints, notes, exit codes.
    """

    def __init__(self, command: Command, options: list[click.Parameter], whole: bool) -> None:
        super().__init__(
            command.name,
            params=options,
            help=command.about,
            add_help_option=False,
            context_settings={"max_content_width": HELP_WIDTH},
        )
        self._command, self._whole = command, whole

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples, flags by group, and then what only the whole help has."""
        command = self._command
        write_examples(formatter, command.examples)
        groups: dict[str, list[tuple[str, str]]] = {}
        variables: list[tuple[str, str]] = []
        for name, setting in command.table.items():
            about = command.describe(name, self._whole)
            if not setting.flag:
                variables.append((f"{setting.env[0]} {setting.takes.metavar}", about))
            elif self._whole or setting.group != "Hints":
                groups.setdefault(setting.group, []).append((usage(setting), about))
        for group, rows in groups.items():
            _section(formatter, group, rows)
        _section(
            formatter,
            "Other",
            [
                ("-h, --help", "this text"),
                ("--help-all", "also variables for tuning, hints and exit codes"),
                ("--version", "the version"),
            ],
        )
        if not self._whole:
            return
        _section(formatter, "Environment variables", variables)
        for note in command.notes:
            formatter.write(f"\n{note}\n")
        codes = [(str(int(code)), text) for code, text in command.exit_codes]
        _section(formatter, "Exit codes", codes)


def write_examples(formatter: click.HelpFormatter, examples: Sequence[tuple[str, str]]) -> None:
    """Write examples as a section of a help text: what each shows, and its line."""
    with formatter.section("Examples"):
        for about, line in examples:
            formatter.write(f"  # {about}\n  {line}\n" if about else f"  {line}\n")


def usage(setting: Setting) -> str:
    """Return a flag with what it takes."""
    return setting.flag if stands_alone(setting) else f"{setting.flag} {setting.takes.metavar}"


def stands_alone(setting: Setting) -> bool:
    """Whether the flag of a setting takes no value and means 1."""
    return setting.takes.metavar == "0|1"


def _place(name: str) -> str:
    """Return the name of an argument that stands for a setting."""
    return f"{name}_"


def _metavar(name: str) -> str:
    return name.removesuffix("_dir").upper()


def _completing(setting: Setting) -> Callable[..., list[CompletionItem]]:
    """Return what a shell is offered as the value of a flag: words, or paths."""
    metavar = setting.takes.metavar

    def offer(context: click.Context, option: click.Parameter, begun: str) -> list[CompletionItem]:
        if metavar == "PATH":
            return [CompletionItem(begun, type="file")]
        words = [word for word in metavar.split("|") if not word.isupper()]
        return [CompletionItem(word) for word in words if "|" in metavar and word.startswith(begun)]

    return offer


def _section(formatter: click.HelpFormatter, title: str, rows: list[tuple[str, str]]) -> None:
    with formatter.section(title):
        formatter.write_dl(rows, col_max=34)
