"""Commands, flags, positionals and help: one kind of click command for all programs."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import click
from click.shell_completion import CompletionItem

from clocher_kernels import __version__
from clocher_kernels.errors import UsageError
from clocher_runtime.config.engine import HINTS
from clocher_runtime.config.values import Setting
from clocher_runtime.exit_codes import ExitCode

HELP_WIDTH = 100
Examples = Sequence[tuple[str, str]]
"""(description, command line) pairs."""
Codes = Mapping[ExitCode, str] | Sequence[tuple[ExitCode, str]]
USUAL_CODES: Mapping[ExitCode, str] = {
    ExitCode.OK: "done",
    ExitCode.USAGE: "a flag, a variable or an input cannot be used",
    ExitCode.MODEL: "the model or input is missing, damaged or not supported",
    ExitCode.DEVICE: "device not available, or the output cannot be written",
    ExitCode.MEMORY: "out of memory",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
}
_HELP = ("-h, --help", "this text")
_MORE = (
    ("--help-all", "also variables for tuning, hints and exit codes"),
    ("--version", "the version"),
)


class Takes(click.ParamType[Any]):
    """The type of a setting: `reads` converts it, otherwise it stays text."""

    def __init__(self, setting: Setting, reads: bool) -> None:
        self._setting, self._reads, self.name = setting, reads, setting.takes.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the converted value, or its text."""
        setting = self._setting
        return setting.takes.read(setting.flag, value) if self._reads else value

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the placeholder in help."""
        return self.name

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return shell completions: words, or paths."""
        if self.name == "PATH":
            return [CompletionItem(incomplete, type="file")]
        words = self.name.split("|") if "|" in self.name else []
        return [CompletionItem(w) for w in words if not w.isupper() and w.startswith(incomplete)]


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


class Command(click.Command):
    """A command whose help has examples first, then flags by group, notes and exit codes.

    `exit_codes`: those that mean something else than in `USUAL_CODES`, or are not there.
    `table`: name -> setting, empty for a command that calls a function; `defaults`: their values;
    `positional`: settings that may be given without their flag, in order.
    """

    def __init__(
        self,
        name: str,
        about: str,
        *,
        table: Mapping[str, Setting] | None = None,
        defaults: Mapping[str, Any] | None = None,
        positional: Sequence[str] = (),
        notes: Sequence[str] = (),
        examples: Examples = (),
        exit_codes: Codes = (),
        **more: Any,
    ) -> None:
        self.table, self.defaults, self._positional = table or {}, defaults or {}, positional
        self.notes, self.examples = notes, examples
        self.exit_codes = sorted({**USUAL_CODES, **dict(exit_codes)}.items())
        params = more.pop("params", None) or [*self._setting_params()]
        params.append(_asking("--help", click.Context.get_help, "-h"))
        settings = {"max_content_width": HELP_WIDTH}
        super().__init__(
            name,
            params=params,
            help=about,
            add_help_option=False,
            context_settings=settings,
            **more,
        )

    def _setting_params(self) -> Sequence[click.Parameter]:
        table = self.table
        places = [
            Place(_word(n), table[n].flag, n, False, type=Takes(table[n], reads=False))
            for n in self._positional
        ]
        flags = [setting_option(n, s, reads=False) for n, s in table.items() if s.flag]
        version = _asking("--version", lambda context: f"{context.info_name} {__version__}")
        return [*places, *flags, version, _asking("--help-all", _help_all)]

    def named(self, name: str) -> Self:
        """Return the command under another name, examples included."""
        other, old = copy.copy(self), self.name or ""
        other.name = name
        other.examples = [(about, line.replace(old, name)) for about, line in self.examples]
        return other

    def parse(
        self, argv: Sequence[str], show: Callable[[str], object] = click.echo
    ) -> dict[str, str] | None:
        """Return setting -> text of its flag; None after --help or --version. Raises UsageError."""
        try:
            with self.make_context(self.name, list(argv), obj=show) as context:
                given = {n: v for n, v in context.params.items() if v not in (None, False)}
        except click.exceptions.Exit:
            return None
        except click.UsageError as error:
            raise self.told(error) from None
        return {name: "1" if value is True else value for name, value in given.items()}

    def told(self, error: click.UsageError) -> UsageError:
        """Return click's error as a sentence."""
        message = error.format_message()
        message += "" if message.endswith((".", "?", "?)")) else "."
        return UsageError(f"{message} See {self.name} --help.")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and move positional values to their flags."""
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            self._take_text(ctx.params)
            for place in self.params:
                if isinstance(place, Place):
                    place.merge(ctx.params)
        return rest

    def _take_text(self, values: dict[str, Any]) -> None:
        """Take a first positional for the prompt if it is a text: `clocher chat "Who are you?"`."""
        if self._positional != ("model_dir", "prompt") or values["prompt_"] is not None:
            return
        text = values["model_dir_"]
        if text and (" " in text or "\n" in text) and not os.path.exists(text):
            values["model_dir_"], values["prompt_"] = None, text

    def describe(self, name: str, whole: bool = True) -> str:
        """Return a setting's help and default, with its variables if `whole`."""
        setting, default = self.table[name], self.defaults.get(name)
        notes = ["hint"] if name in HINTS else []
        if whole and setting.flag and setting.env:
            notes.append(f"env var: {', '.join(setting.env)}")
        if default is not None and default is not False:
            notes.append(f"default: {f'{default:g}' if isinstance(default, float) else default}")
        return f"{setting.help}  [{'; '.join(notes)}]" if notes else setting.help

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples and flags; with --help-all also variables, notes and exit codes."""
        whole = not self.table or __name__ in ctx.meta
        write_examples(formatter, self.examples)
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, setting in self.table.items():
            about = self.describe(name, whole)
            if setting.flag and (whole or setting.group != "Hints"):
                groups.setdefault(setting.group, []).append((usage(setting), about))
            elif whole:
                row = (f"{setting.env[0]} {setting.takes.metavar}", about)
                groups.setdefault("Environment variables", []).append(row)
        variables = groups.pop("Environment variables", [])
        if self.table:
            groups["Other"] = [_HELP, *_MORE]
        else:
            records = [p.get_help_record(ctx) for p in self.params if isinstance(p, click.Option)]
            groups["Options"] = [*filter(None, records[:-1]), _HELP]
        for title, rows in groups.items():
            _section(formatter, title, rows)
        if whole:
            _section(formatter, "Environment variables", variables)
            for note in self.notes:
                formatter.write_paragraph()
                formatter.write_text(note)
            _section(formatter, "Exit codes", [(str(int(c)), t) for c, t in self.exit_codes])


def setting_option(name: str, setting: Setting, *, reads: bool, **more: Any) -> click.Option:
    """Return the click option of a setting."""
    if stands_alone(setting):
        return click.Option([setting.flag, name], is_flag=True, default=None, **more)
    return click.Option([setting.flag, name], type=Takes(setting, reads), **more)


def _asking(flag: str, answer: Callable[[click.Context], str], *short: str) -> click.Option:
    def callback(context: click.Context, option: click.Parameter, wanted: bool) -> None:
        if wanted:
            show = context.obj if callable(context.obj) else click.echo
            show(answer(context))
            context.exit()

    return click.Option(
        [*short, flag], is_flag=True, is_eager=True, expose_value=False, callback=callback
    )


def _help_all(context: click.Context) -> str:
    context.meta[__name__] = True
    return context.get_help()


def write_examples(formatter: click.HelpFormatter, examples: Examples) -> None:
    """Write the examples section of a help text."""
    if examples:
        with formatter.section("Examples"):
            for about, text in examples:
                line = text.replace("\n", "\n  ")
                formatter.write(f"  # {about}\n  {line}\n" if about else f"  {line}\n")


def usage(setting: Setting) -> str:
    """Return a flag with its value's placeholder."""
    return setting.flag if stands_alone(setting) else f"{setting.flag} {setting.takes.metavar}"


def stands_alone(setting: Setting) -> bool:
    """Whether a setting's flag takes no value and means 1."""
    return setting.takes.metavar == "0|1"


def _word(name: str) -> str:
    return name.removesuffix("_dir").upper()


def _section(formatter: click.HelpFormatter, title: str, rows: list[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows, col_max=34)
