"""The subcommands of `clocher`: dispatch, help and shell completion."""

import difflib
import os
import pkgutil
from collections.abc import Mapping, Sequence

import click
from click.shell_completion import shell_complete

from clocher_kernels import __version__
from clocher_runtime.command.flags import HELP_WIDTH, Command, write_examples
from clocher_runtime.exit_codes import ExitCode

ABOUT = """Run language models with low-bit weights: in a terminal, as a server, from Python."""

EXAMPLES = (
    ("talk with SmolLM2-135M-Instruct, which is fetched once (93 MB)", "clocher chat"),
    ("what models are on this machine, and which of them fit", "clocher models"),
    ("get one from the Hub, and talk with it", "clocher pull Qwen/Qwen3-0.6B"),
    ("", "clocher chat Qwen/Qwen3-0.6B"),
    ("a server with OpenAI's API and a page to chat at http://127.0.0.1:8000", "clocher serve"),
    ("how fast is it here, and how far from the memory's limit", "clocher bench MODEL"),
)


COMMON: Mapping[str, str] = {
    "chat": "talk with a model in the terminal",
    "run": "complete text once, and report how fast it went",
    "serve": "serve a model: OpenAI's API and a page to chat",
    "models": "list the models on this machine, and whether they fit",
    "pull": "get a model from the Hugging Face Hub",
    "quantize": "make a model of 2 to 8 bits from one of floats",
    "convert": "write a model as one file that loads at once (IEBIN)",
    "bench": "measure speed: pp512 and tg128, beside the memory's limit",
}
MORE: Mapping[str, str] = {
    "dedup": "store an IEBIN model in less space, or restore it",
    "sparsify": "make the matrices of a model block-sparse",
    "perplexity": "measure how well a model predicts a text",
    "gate": "judge quantised models against the float one",
    "ray": "send the rows of a file through many actors, with Ray",
}
SUBCOMMANDS = {**COMMON, **MORE}
"""Name -> what it does."""
_MODULES: Mapping[str, str] = {
    "run": "command.clocher_run:clocher_run",
    "serve": "serve.command:clocher_serve",
    "pull": "command.fetching:pull",
    "dedup": "subcommands.compress:dedup",
    "sparsify": "subcommands.compress:sparsify",
    "bench quality": "subcommands.quality:quality",
    "perplexity": "subcommands.quality:perplexity",
    "gate": "subcommands.quality:gate",
    "ray": "subcommands.ray_jobs:ray",
}
"""Where a command is, unless at subcommands.NAME:NAME."""


def command_of(name: str) -> Command:
    """Return the command of a subcommand, whose module is imported."""
    where = _MODULES.get(name, f"subcommands.{name}:{name}")
    found: Command = pkgutil.resolve_name(f"clocher_runtime.{where}")
    return found


_ELSEWHERE = {
    "list": "did you mean models?",
    "ls": "did you mean models?",
    "rm": "did you mean models?",
    "show": "`clocher models MODEL` describes a model",
    "ps": "a model runs as long as its `clocher serve`, whose /health describes it",
    "create": "`clocher quantize` and `clocher convert` make models",
    "generate": "did you mean run?",
    "llama-cli": "did you mean chat?",
    "llama-server": "did you mean serve?",
    "llama-bench": "did you mean bench?",
}
"""Names from other programs -> the equivalent here."""


def dispatch(words: Sequence[str]) -> int:
    """Run the subcommand of a command line; return its exit code."""
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name in ("help", "-h", "--help"):
        click.echo(help_text())
        return ExitCode.OK
    if name == "--version":
        click.echo(f"clocher {__version__}")
        return ExitCode.OK
    if name not in SUBCOMMANDS:
        click.echo(f"clocher: error: {unknown(name)}", err=True)
        return ExitCode.USAGE
    if name == "bench" and rest[:1] == ["quality"]:
        name, rest = "bench quality", rest[1:]
    return command_of(name).named(f"clocher {name}").run(rest)


def unknown(name: str) -> str:
    """Return the error for an unknown subcommand, with a suggestion."""
    if name.startswith("-"):
        return f"{name}: no such flag; flags go after a command, see clocher --help"
    if os.path.exists(name) or "/" in name:
        return f"{name!r} is no command; to use it as a model: clocher chat {name}"
    near = difflib.get_close_matches(name, SUBCOMMANDS, 1)
    hint = f"did you mean {near[0]}?" if near else "see clocher --help"
    hint = _ELSEWHERE.get(name, hint)
    return f"{name!r} is no command; {hint} (commands: {', '.join(SUBCOMMANDS)})"


def help_text() -> str:
    """Return the help of `clocher` itself."""
    formatter = click.HelpFormatter(max_width=HELP_WIDTH)
    formatter.write_usage("clocher", "COMMAND ...")
    with formatter.indentation():
        formatter.write(f"\n  {ABOUT}\n")
    write_examples(formatter, EXAMPLES)
    for title, rows in (("Commands", COMMON), ("More", MORE)):
        with formatter.section(title):
            formatter.write_dl([*rows.items()])
    formatter.write("\nclocher COMMAND --help tells more of one; clocher --version the version.\n")
    return formatter.getvalue().rstrip("\n")


VARIABLE = "_CLOCHER_COMPLETE"


class Clocher(click.Group):
    """`clocher` as a click group that imports subcommands on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all subcommand names."""
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand."""
        if cmd_name not in SUBCOMMANDS:
            return None
        found: click.Command = command_of(cmd_name)
        found.short_help = SUBCOMMANDS[cmd_name]
        return found


def answer_shell() -> int:
    """Answer a shell completion request."""
    return shell_complete(Clocher("clocher"), {}, "clocher", VARIABLE, os.environ[VARIABLE])
