"""Commands, flags, positionals and help: one kind of click command for all programs.

Cheap to import, so that help is fast.
"""

import copy
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Self

import click
from click.shell_completion import CompletionItem

from clocher_kernels import __version__
from clocher_kernels.errors import DeviceError, UsageError
from clocher_runtime.command.console import STDOUT, Console, Screen, in_words
from clocher_runtime.command.parameters import PATH, Place
from clocher_runtime.config.commands import settle, warnings
from clocher_runtime.config.engine import HINTS, EngineConfig
from clocher_runtime.config.values import Setting, declared
from clocher_runtime.exit_codes import ExitCode, Taken, as_refusal, cause_of, listen, restore

HELP_WIDTH = 100
Examples = Sequence[tuple[str, str]]
"""(description, command line) pairs."""
Codes = Mapping[ExitCode, str]
USUAL_CODES: Codes = {
    ExitCode.OK: "done",
    ExitCode.BUG: "unexpected: a defect of Clocher, or standard output cannot be written",
    ExitCode.USAGE: "a flag, a variable or an input cannot be used",
    ExitCode.MODEL: "the model or input is missing, damaged or not supported",
    ExitCode.DEVICE: "device not available, or a file cannot be written",
    ExitCode.MEMORY: "out of memory",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
    ExitCode.TERMINATED: "terminated (SIGTERM)",
}
RESUMES = (
    "Killed at any moment, it leaves either the model that was there before, or no model, or the "
    "finished new one. Run it again to go on."
)
_HELP = ("-h, --help", "this text")
_MORE = (
    ("--help-all", "also variables for tuning, hints and exit codes"),
    ("--version", "the version"),
)
_NONE: Mapping[Any, Any] = MappingProxyType({})
_ENGINE = declared(EngineConfig)


class Command(click.Command):
    """A command whose help has examples first, then flags by group, notes and exit codes.

    It calls a function, see `script`. With a `kind` of configuration it has the settings of that;
    model and prompt may be given without their flags. `exit_codes`: those that mean something else
    than in `USUAL_CODES`, or are not there.
    """

    def __init__(
        self,
        name: str,
        about: str,
        *,
        kind: type[EngineConfig] | None = None,
        console: type[Console] = Console,
        examples: Examples = (),
        exit_codes: Codes = _NONE,
        **more: Any,
    ) -> None:
        self.table = {**declared(kind), **kind.hints} if kind else {}
        self._defaults = {each.name: each.default for each in fields(kind)} if kind else {}
        self._kind, self._console = kind, console
        self.examples = examples
        self.exit_codes = sorted({**USUAL_CODES, **exit_codes}.items())
        params = [*more.pop("params", ())]
        if kind:
            paths = _completion("PATH")
            params.append(Place("MODEL", "--model-dir", "model_dir", False, shell_complete=paths))
            if "prompt" in self.table:
                params.append(Place("PROMPT", "--prompt", "prompt", False))
            params += [setting_option(n, s, reads=False) for n, s in self.table.items() if s.flag]
            params.append(_asking("--version", lambda on: f"{on.info_name} {__version__}"))
            params.append(_asking("--help-all", _help_all))
        params.append(_asking("--help", click.Context.get_help, "-h"))
        settings = {"max_content_width": HELP_WIDTH}
        more |= {"add_help_option": False, "context_settings": settings}
        super().__init__(name, params=params, help=about, **more)

    def named(self, name: str) -> Self:
        """Return the command under another name, examples included."""
        other, old = copy.copy(self), self.name or ""
        other.name = name
        other.examples = [(about, line.replace(old, name)) for about, line in self.examples]
        return other

    def texts(self, argv: Sequence[str]) -> dict[str, str]:
        """Return setting -> text of its flag. Raises click.UsageError."""
        return _texts(self.make_context(self.name, list(argv)).params)

    def run(self, argv: Sequence[str] | None = None, taken: Taken | None = None) -> int:
        """Run it; write an error; return the exit code. `taken`: what a caller's `listen` gave."""
        given = list(sys.argv[1:] if argv is None else argv)
        notes = " ".join((self.epilog or "").lower().split())
        before = listen() if taken is None else []
        console = self._console(
            self.name or "",
            resumes="run it again to go on" in notes,
            words=tuple(given),  # which click takes apart
            taken=taken or before,
        )
        try:
            with console, self.make_context(self.name, given, obj=console) as context:
                self._settle(context)  # before imports, which take longer
                from clocher_runtime.disk.files import ending_on_lost_pages

                with ending_on_lost_pages(console.lost):
                    return self.invoke(context) or ExitCode.OK
        except click.exceptions.Exit as ended:
            return ended.exit_code
        except click.UsageError as error:
            return console.ended(self._usage_error(error))[1]
        except (Exception, KeyboardInterrupt) as raised:
            cause = as_refusal(cause_of(raised))
            words = in_words(cause, console.echoes) if isinstance(cause, OSError) else None
            if words is None or not words.startswith(STDOUT):
                return console.ended(cause if words is None else DeviceError(words))[1]
            if not isinstance(cause, BrokenPipeError):  # whose reader wants no more
                console.say(f"error: {words}")
            if sys.stdout is not None:  # Python flushes again at exit, which must not fail again
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitCode.BUG
        finally:
            restore(before)

    def _settle(self, ctx: click.Context) -> None:
        """Make the configuration, where the flags are settings of one."""
        if self._kind:
            config = settle(self._kind, _texts(ctx.params), os.environ)
            for message in warnings(config, os.environ):
                ctx.obj.say(message)
            ctx.params = {"config": config}

    def main(self, args: Sequence[str] | None = None, *_: Any, **more: Any) -> Any:
        """Run it as a program: exit with its code."""
        sys.exit(self.run(args))

    def _usage_error(self, error: click.UsageError) -> UsageError:
        message = " ".join(error.format_message().split())  # a missing choice has lines
        message += "" if message.endswith((".", "?", "?)")) else "."
        return UsageError(
            f"{message} See {error.ctx.info_name if error.ctx else self.name} --help."
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and move positional values to their flags."""
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            values = ctx.params
            if "prompt" in self.table and values["prompt_"] is None:
                # A text in the first place is the prompt: `clocher chat "Who are you?"`.
                text, is_stub = values["model_dir_"], values.get("stub")  # which has no model
                said = text and (is_stub or " " in text or "\n" in text)
                if said and not os.path.exists(text):
                    values["model_dir_"], values["prompt_"] = None, text
            for place in self.params:
                if isinstance(place, Place):
                    place.merge(values)
        return rest

    def describe(self, name: str, whole: bool = True) -> str:
        """Return a setting's help and default, with its variables if `whole`."""
        setting, default = self.table[name], self._defaults.get(name)
        notes = ["hint"] if name in HINTS else []
        if whole and setting.flag and setting.env:
            notes.append(f"env var: {', '.join(setting.env)}")
        if default is not None and default is not False:
            notes.append(f"default: {f'{default:g}' if isinstance(default, float) else default}")
        return f"{setting.help}  [{'; '.join(notes)}]" if notes else setting.help

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples and flags; with --help-all also variables."""
        whole = not self.table or __name__ in ctx.meta
        write_examples(formatter, self.examples)
        groups: dict[str, list[tuple[str, str]]] = {}
        variables = []
        for name, setting in self.table.items():
            about, metavar = self.describe(name, whole), setting.takes.metavar
            if not setting.flag:
                variables.append((f"{setting.env[0]} {metavar}", about))
            elif whole or setting.group != "Hints":
                usage = setting.flag if metavar == "0|1" else f"{setting.flag} {metavar}"
                groups.setdefault(setting.group, []).append((usage, about))
        if self.table:
            groups["Other"] = [_HELP, *_MORE]
        else:
            records = [p.get_help_record(ctx) for p in self.params if isinstance(p, click.Option)]
            groups["Options"] = [*filter(None, records[:-1]), _HELP]
        for title, rows in groups.items():
            _section(formatter, title, rows)
        if whole:
            _section(formatter, "Environment variables", variables)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write notes and exit codes; of settings with --help-all only."""
        if not self.table or __name__ in ctx.meta:
            if self.epilog:
                formatter.write_paragraph()
                formatter.write_text(self.epilog)
            _section(formatter, "Exit codes", [(str(int(c)), t) for c, t in self.exit_codes])


def _texts(params: Mapping[str, Any]) -> dict[str, str]:
    """Return setting -> text of its flag, of those that are given."""
    given = {name: value for name, value in params.items() if value not in (None, False)}
    return {name: "1" if value is True else value for name, value in given.items()}


def script(
    name: str, *params: click.Parameter, help: str | None = None, **more: Any
) -> Callable[[Callable[..., int | None]], Command]:
    """Return a decorator that makes a command of a function.

    The function takes a `Console`, and the values of `params` or, with a `kind`, the `config`; it
    returns an exit code or None.
    """

    def decorate(function: Callable[..., int | None]) -> Command:
        about = text_of(help or function.__doc__)
        return Command(name, about, params=params, callback=click.pass_obj(function), **more)

    return decorate


def text_of(docstring: str | None) -> str:
    r"""Return a docstring as the text of --help; \b keeps lines apart, in a raw one too."""
    return inspect.cleandoc(docstring or "").replace("\\b\n", "\b\n")


def option(flag: str, kind: Any, help: str | None = None, **more: Any) -> click.Option:
    """Return an option whose help has its default and variable; `more` as `click.Option`."""
    names = filter(None, (more.pop("short", ""), flag, more.pop("name", "")))
    more.setdefault("show_default", more.get("default") is not None)
    more.setdefault("show_envvar", "envvar" in more)
    text = (help or "").removesuffix(".")
    if text[1:2].islower() or text[1:2] == " ":
        text = text[0].lower() + text[1:]
    return click.Option([*names], type=kind, help=text or None, **more)


def needed(flag: str, help: str, **more: Any) -> click.Option:
    """Return a required path."""
    return option(flag, PATH, help, required=True, **more)


def switch(flag: str, help: str, name: str = "") -> click.Option:
    """Return a flag without a value."""
    return option(flag, None, help, name=name, is_flag=True, show_default=False)


def place(
    word: str, flag: str, help: str, kind: Any = PATH, *, needed: bool = True, **more: Any
) -> tuple[click.Parameter, ...]:
    """Return a path as a positional, and its flag, which names the parameter; `multiple`: paths."""
    name = flag.removeprefix("--").replace("-", "_")
    count = -1 if more.get("multiple") else 1
    spot = Place(word, flag, name, needed, type=kind, nargs=count)
    return spot, option(flag, kind, help, name=name, **more)


def engine_options(
    *names: str, of: EngineConfig | None = None, reads: bool = True, **more: Any
) -> list[click.Option]:
    """Return the flags of `EngineConfig` fields, with the defaults `of` one; unread: as text."""
    found = []
    for name in names:
        setting, default = _ENGINE[name], getattr(of, name, None)
        help = setting.help if default is None else setting.help.partition(" (unset")[0]
        how = {"envvar": list(setting.env), "show_envvar": True, "show_default": True, **more}
        found.append(setting_option(name, setting, reads=reads, help=help, default=default, **how))
    return found


def setting_option(name: str, setting: Setting, *, reads: bool, **more: Any) -> click.Option:
    """Return the click option of a setting; `reads`: it gives the value, else the text."""
    takes, flag = setting.takes, setting.flag
    if takes.metavar == "0|1":  # it takes no value, and means 1
        return click.Option([flag, name], is_flag=True, default=None, **more)
    more |= {"metavar": takes.metavar, "shell_complete": _completion(takes.metavar)}
    if takes.repeats and not reads:  # as one text
        more |= {"multiple": True, "callback": lambda *given: ",".join(given[2]) or None}
    kind = (lambda raw: takes.read(flag, raw)) if reads else str
    return click.Option([flag, name], type=kind, **more)


def _completion(metavar: str) -> Callable[..., list[CompletionItem]]:
    """Return what completes a setting in a shell: its words, or paths."""
    words = [word for word in metavar.split("|") if "|" in metavar and not word.isupper()]

    def complete(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
        if metavar.endswith("PATH"):
            return [CompletionItem(typed, type="file")]
        return [CompletionItem(word) for word in words if word.startswith(typed)]

    return complete


def _asking(flag: str, answer: Callable[[click.Context], str], *short: str) -> click.Option:
    def callback(context: click.Context, option: click.Parameter, wanted: bool) -> None:
        if wanted:
            Screen(sys.stdout).line(answer(context))
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


def _section(formatter: click.HelpFormatter, title: str, rows: Sequence[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows, col_max=34)
