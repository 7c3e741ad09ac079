"""The help text of `clocher-run`, made from the table of settings."""

from dataclasses import fields

import click

from clocher_runtime.command.config import RunConfig
from clocher_runtime.command.settings import ALL, HINTS, Setting
from clocher_runtime.exit_codes import ExitCode

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
