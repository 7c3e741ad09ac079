"""`clocher gate`: quantised models against their float model."""

from typing import Any

import click

from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import engine_options, needed, option, place, script
from clocher_runtime.command.parameters import COUNT, FILE, PATH
from clocher_runtime.config.engine import EXACT, NUMERICS
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.subcommands.quantize import LIMIT_FLAGS, LIMITS


@script(
    "clocher gate",
    *place("MODEL", "--model", "Again for each model.", multiple=True),
    needed("--reference", "float model"),
    option("--text", FILE, required=True),
    option("--chars", COUNT, "use the first CHARS characters of the text"),
    option("--window", click.IntRange(2), "tokens", default=256),
    option("--document-separator", str, "text between documents; default: blocks of windows"),
    option(
        "--document-windows",
        COUNT,
        "windows of a document, without a separator; default: those in 1024 tokens",
    ),
    option("--documents", COUNT, "score at most DOCUMENTS documents"),
    *engine_options(*NUMERICS, of=EXACT, envvar=None),
    option(
        "--manifest",
        FILE,
        "manifest that a model was converted with",
        multiple=True,
        name="manifests",
    ),
    option(
        "--act-prec",
        click.Choice(["fp32", "default"]),
        "activations of the models; default: what the runtime uses",
        default="fp32",
    ),
    option("--backend", click.Choice(["cpu", "cuda", "reference"]), default="cpu"),
    option("--threads", COUNT, "default: all usable cores"),
    option("--limits", click.Choice(list(LIMITS)), "default: by what differs"),
    *LIMIT_FLAGS,
    option("--min-cosine", float, "of each tensor; default: by its format"),
    option("--speed/--no-speed", None, "measure decoding", default=True),
    option("--json", PATH, "write all numbers", name="json_path"),
    option("--report", PATH, "directory for quality.json and quality.md", name="directory"),
    examples=(
        (
            "A quantised model against its origin",
            "clocher gate models/llama-int4 --reference models/llama --text held_out.txt",
        ),
        (
            "What would rounding at load cost?",
            "clocher gate models/llama --precision int8w --reference models/llama \\\n"
            "    --text held_out.txt",
        ),
        (
            "Several, with their table in a file",
            "clocher gate models/llama-int8 models/llama-int4 --reference models/llama \\\n"
            "    --text held_out.txt --report results/llama",
        ),
    ),
    exit_codes={
        ExitCode.OK: "every model passes",
        ExitCode.REJECTED: "a model fails",
        ExitCode.UNDECIDED: "none fails, but one needs more text for a decision",
    },
)
def gate(console: Console, **options: Any) -> int:
    """Judge quantised models against the float model they were made from, on held-out text.

    A MODEL is a directory, or a quantisation manifest, which is applied to the reference.
    """
    from clocher_runtime.command.ptq import judge

    return judge(console, options)
