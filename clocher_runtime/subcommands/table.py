"""The subcommands of `clocher`, and which one a line means."""

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import click

from clocher_runtime.command.flags import HELP_WIDTH, write_examples
from clocher_runtime.command.jsonline import clocher_version
from clocher_runtime.exit_codes import ExitCode

ABOUT = """Run language models with low-bit weights: in a terminal, as a server, from Python."""

EXAMPLES = (
    ("the model that ships with Clocher goes on with what you type", "clocher chat"),
    ("what models are on this machine, and which of them fit", "clocher models"),
    ("get one from the Hub, and talk with it", "clocher pull Qwen/Qwen3-0.6B"),
    ("", "clocher chat Qwen/Qwen3-0.6B"),
    ("a server with OpenAI's API and a page to chat at http://127.0.0.1:8000", "clocher serve"),
    ("how fast is it here, and how far from the memory's limit", "clocher bench MODEL"),
)


class Subcommand(NamedTuple):
    """A subcommand: what it does in a line, and what imports its module.

    The module has `main(argv)`, which returns an exit code, and `COMMAND`, its flags and help.
    """

    about: str
    load: Callable[[], ModuleType]
    is_common: bool = True


def _chat() -> ModuleType:
    from clocher_runtime.subcommands import chat

    return chat


def _serve() -> ModuleType:
    from clocher_runtime.serve import command

    return command


def _run() -> ModuleType:
    from clocher_runtime.command import clocher_run

    return clocher_run


def _models() -> ModuleType:
    from clocher_runtime.subcommands import models

    return models


def _pull() -> ModuleType:
    from clocher_runtime.subcommands import pull

    return pull


def _quantize() -> ModuleType:
    from clocher_runtime.subcommands import quantize

    return quantize


def _convert() -> ModuleType:
    from clocher_runtime.subcommands import convert

    return convert


def _bench() -> ModuleType:
    from clocher_runtime.subcommands import bench

    return bench


def _dedup() -> ModuleType:
    from clocher_runtime.subcommands import dedup

    return dedup


def _sparsify() -> ModuleType:
    from clocher_runtime.subcommands import sparsify

    return sparsify


def _perplexity() -> ModuleType:
    from clocher_runtime.subcommands import perplexity

    return perplexity


def _gate() -> ModuleType:
    from clocher_runtime.subcommands import gate

    return gate


def _ray() -> ModuleType:
    from clocher_runtime.subcommands import ray_jobs

    return ray_jobs


def _completion() -> ModuleType:
    from clocher_runtime.subcommands import completion

    return completion


SUBCOMMANDS: Mapping[str, Subcommand] = {
    "chat": Subcommand("talk with a model in the terminal", _chat),
    "run": Subcommand("complete text once, and report how fast it went", _run),
    "serve": Subcommand("serve a model: OpenAI's API and a page to chat", _serve),
    "models": Subcommand("list the models on this machine, and whether they fit", _models),
    "pull": Subcommand("get a model from the Hugging Face Hub", _pull),
    "quantize": Subcommand("make a model of 4 or 8 bits from one of floats", _quantize),
    "convert": Subcommand("write a model as one file that loads at once (IEBIN)", _convert),
    "bench": Subcommand("measure speed: pp512 and tg128, beside the memory's limit", _bench),
    "dedup": Subcommand("store an IEBIN model in less space, or restore it", _dedup, False),
    "sparsify": Subcommand("make the matrices of a model block-sparse", _sparsify, False),
    "perplexity": Subcommand("measure how well a model predicts a text", _perplexity, False),
    "gate": Subcommand("judge quantised models against the float one", _gate, False),
    "ray": Subcommand("send the rows of a file through many actors, with Ray", _ray, False),
    "completion": Subcommand("completions of a shell, for bash, zsh and fish", _completion, False),
}
"""Name -> subcommand, in the order of the help text."""


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
"""What other programs call a subcommand, and what there is instead."""


def dispatch(words: Sequence[str]) -> int:
    """Run the subcommand that a line names, and return its exit code.

    Args:
        words: the line after `clocher`.
    """
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name in ("help", "-h", "--help"):
        click.echo(help_text())
        return ExitCode.OK
    if name == "--version":
        click.echo(f"clocher {clocher_version()}")
        return ExitCode.OK
    if name not in SUBCOMMANDS:
        click.echo(f"clocher: error: {unknown(name)}", err=True)
        return ExitCode.USAGE
    module = SUBCOMMANDS[name].load()
    code: int = module.main(rest, "clocher serve") if name == "serve" else module.main(rest)
    return code


def unknown(name: str) -> str:
    """Return what is wrong with a first word that is no subcommand, and what to type."""
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
    rows = [(name, each.about) for name, each in SUBCOMMANDS.items() if each.is_common]
    more = [(name, each.about) for name, each in SUBCOMMANDS.items() if not each.is_common]
    for title, section in (("Commands", rows), ("More", more)):
        with formatter.section(title):
            formatter.write_dl(section)
    formatter.write("\nclocher COMMAND --help tells more of one; clocher --version the version.\n")
    return formatter.getvalue().rstrip("\n")
