"""`clocher sparsify`: a model with block-sparse matrices."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clocher_runtime.command.console import Console, size
from clocher_runtime.command.flags import option, place, script, switch
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.subcommands.convert import OUT_DIR, VERIFY, replacing_model

if TYPE_CHECKING:
    from rich.table import Table

    from clocher_runtime.convert.block_sparse import Outcome

INNERS = ("f32", "f16", "bf16", "int8", "int4")
LINEARS = r"model\.layers\.[0-9]+\..*_proj\.weight"


def _block(context: click.Context, option: click.Parameter, value: str) -> tuple[int, int]:
    sides = re.fullmatch("([1-9][0-9]{0,3})x([1-9][0-9]{0,3})", value)
    if not sides:
        raise click.BadParameter(f"{value!r}; expected ROWSxCOLUMNS, such as 32x32")
    return int(sides[1]), int(sides[2])


@script(
    "clocher sparsify",
    *place("MODEL", "--model-dir", "Directory of the model, Hugging Face or IEBIN. Only read."),
    *place("OUT_DIR", "--out-dir", OUT_DIR),
    option("--block", str, "Block shape.", default="32x32", callback=_block),
    option(
        "--sparsity",
        click.FloatRange(0, 1, max_open=True),
        "Make so large a share of each matrix's blocks zero, the weakest by magnitude. 0 leaves "
        "out only blocks that are zero already.",
        default=0.0,
    ),
    option("--inner", click.Choice(INNERS), "How blocks are stored; by default as the matrix was."),
    option("--pattern", str, "Regular expression of the names of the matrices.", default=LINEARS),
    switch("--force", "Convert matrices that become larger too."),
    VERIFY,
    examples=(
        ("A model that was pruned", "clocher sparsify models/pruned models/pruned-bsr"),
        (
            "Prune 90 % of the blocks, and round the rest",
            "clocher sparsify models/llama models/llama-s90 --sparsity 0.9 --inner int8",
        ),
    ),
    epilog="Killed at any moment, it leaves either the model that was there before, or no model, "
    "or the finished new one. Run it again to start over.",
    exit_codes={ExitCode.USAGE: "a flag cannot be used, or no matrix would become smaller"},
)
def sparsify(console: Console, model_dir: Path, out_dir: Path, verify: bool, **how: Any) -> None:
    """Convert a model to IEBIN with block-sparse matrices, and say how dense each one is.

    A matrix that would not become smaller stays as it is; if none would, nothing is written.
    """
    from rich.console import Console as RichConsole

    from clocher_runtime.checkpoints.checkpoint import JSON_NAME
    from clocher_runtime.checkpoints.iebin import open_iebin
    from clocher_runtime.checkpoints.locate import locate
    from clocher_runtime.convert import block_sparse

    how["inner"] = how["inner"] or ""
    with replacing_model(console, out_dir):
        outcomes = block_sparse.sparsify(
            locate(model_dir, "MODEL"), out_dir, block_sparse.Sparsifying(**how)
        )
    if verify:
        open_iebin(out_dir / JSON_NAME, verify=True)
    tables = RichConsole()
    (tables if tables.is_terminal else RichConsole(width=120)).print(_table(outcomes))
    done = [outcome for outcome in outcomes if not outcome.note]
    console.say(
        f"{len(done)} of {len(outcomes)} matrices are block-sparse in {out_dir}"
        f"{', verified' if verify else ''}"
    )


def _table(outcomes: "list[Outcome]") -> "Table":
    from rich.table import Table

    table = Table("matrix", "density", "before", "after", "format")
    for outcome in outcomes:
        stored = f"{outcome.format} ({outcome.note})" if outcome.note else outcome.format
        sizes = size(outcome.before), size(outcome.after)
        table.add_row(outcome.name, f"{outcome.density:.1%}", *sizes, stored)
    return table
