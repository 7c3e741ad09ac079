"""`clocher completion SHELL`: a shell completes commands, flags and their values.

click answers the shell, from the same declarations that the flags are parsed by.
Source: https://click.palletsprojects.com/en/stable/shell-completion/.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import click
from click.shell_completion import get_completion_class, shell_complete

from clocher_kernels.errors import UsageError
from clocher_runtime.command.flags import Command
from clocher_runtime.config.setting import Setting
from clocher_runtime.config.values import one_of
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.subcommands.table import SUBCOMMANDS

VARIABLE = "_CLOCHER_COMPLETE"
"""By which a shell asks."""

SHELL = Setting(
    "Shell", one_of("bash", "zsh", "fish"), "whose (unset: that of the variable SHELL)", "--shell"
)

COMMAND = Command(
    name="clocher completion",
    about="Print the script that lets a shell complete commands, flags and their values.",
    table={"shell": SHELL},
    defaults={},
    notes=(),
    examples=(
        ("bash, for good", "clocher completion bash >> ~/.bashrc"),
        ("zsh, for good", "clocher completion zsh >> ~/.zshrc"),
        ("fish, for good", "clocher completion fish > ~/.config/fish/completions/clocher.fish"),
        ("here and now", 'eval "$(clocher completion bash)"'),
    ),
    exit_codes=((ExitCode.OK, "done"), (ExitCode.USAGE, "no such shell")),
    positional=("shell",),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script of a shell and return the exit code."""
    try:
        flags = COMMAND.parse(argv or ())
        if flags is None:
            return ExitCode.OK
        shell = flags.get("shell") or Path(os.environ.get("SHELL", "")).name
        shell = SHELL.takes.read("SHELL", shell)
        answer = get_completion_class(shell)
        assert answer is not None
        click.echo(answer(_Clocher("clocher"), {}, "clocher", VARIABLE).source())
    except UsageError as error:
        click.echo(f"clocher completion: error: {error}", err=True)
        return ExitCode.USAGE
    return ExitCode.OK


def answer_shell() -> int:
    """Answer what a shell asks by its variable: what a line may go on with."""
    return shell_complete(_Clocher("clocher"), {}, "clocher", VARIABLE, os.environ[VARIABLE])


class _Clocher(click.Group):
    """`clocher` as click has it; a subcommand is imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands."""
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand."""
        if cmd_name not in SUBCOMMANDS:
            return None
        subcommand = SUBCOMMANDS[cmd_name]
        command = subcommand.load().COMMAND
        found: click.Command = command.click() if isinstance(command, Command) else command
        found.short_help = subcommand.about
        return found
