"""`clocher completion SHELL`: shell completion, by click."""

import os
from collections.abc import Sequence
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from clocher_kernels.errors import UsageError
from clocher_runtime.command.flags import Command
from clocher_runtime.config.setting import Setting
from clocher_runtime.config.values import one_of
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.subcommands.table import VARIABLE, Clocher

SHELL = Setting(
    "Shell", one_of("bash", "zsh", "fish"), "which one (unset: the variable SHELL)", "--shell"
)

COMMAND = Command(
    "clocher completion",
    "Print the script that lets a shell complete commands, flags and their values.",
    table={"shell": SHELL},
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
    """Print the completion script of a shell; return the exit code."""
    try:
        flags = COMMAND.parse(argv or ())
        if flags is not None:
            shell = flags.get("shell") or Path(os.environ.get("SHELL", "")).name
            kind = get_completion_class(SHELL.takes.read("SHELL", shell))
            assert kind is not None
            click.echo(kind(Clocher("clocher"), {}, "clocher", VARIABLE).source())
        return ExitCode.OK
    except UsageError as error:
        click.echo(f"clocher completion: error: {error}", err=True)
        return ExitCode.USAGE
