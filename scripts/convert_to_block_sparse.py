"""Make a model's matrices block-sparse. The work is in clocher_runtime.convert.block_sparse."""

import re
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from clocher_kernels.formats.bsr import INNERS
from clocher_runtime.checkpoints.iebin import JSON_NAME, open_iebin
from clocher_runtime.command.script_run import Report, needed, option, script, switch
from clocher_runtime.convert.block_sparse import (
    LINEARS,
    Outcome,
    Sparsifying,
    plan_block_sparse,
)

EPILOG = """\b
Examples:
  python scripts/convert_to_block_sparse.py --model-dir models/pruned --out-dir models/pruned-bsr
  python scripts/convert_to_block_sparse.py --model-dir models/llama --out-dir models/llama-s90 \\
      --sparsity 0.9 --block 32x32 --inner int8

\b
Exit codes:
  0  done
  2  a flag cannot be used, or no matrix would become smaller
  3  the input is missing, damaged or of an unknown kind
  5  the output cannot be written (disk full, no permission)
  6  out of memory

Killed at any moment, the converter leaves either the model that was there before, or no model,
or the finished new one. Run it again to start over."""


def _block(context: click.Context, option: click.Parameter, value: str) -> tuple[int, int]:
    sides = re.fullmatch("([1-9][0-9]{0,3})x([1-9][0-9]{0,3})", value)
    if not sides:
        raise click.BadParameter(f"{value!r}; expected ROWSxCOLUMNS, such as 32x32")
    return int(sides[1]), int(sides[2])


@script(
    "convert_to_block_sparse",
    EPILOG,
    needed("--model-dir", "Directory of the model, Hugging Face or IEBIN. It is only read."),
    needed(
        "--out-dir",
        "Directory for model.ie.json, model.ie.bin and vocab.json. It is made if need be.",
    ),
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
    switch("--verify", "Read the result back and check every hash."),
)
def main(
    report: Report,
    model_dir: Path,
    out_dir: Path,
    block: tuple[int, int],
    sparsity: float,
    inner: str | None,
    pattern: str,
    force: bool,
    verify: bool,
) -> None:
    """Convert a model to IEBIN with block-sparse matrices, and say how dense each one is.

    A matrix that would not become smaller stays as it is; if none would, nothing is written.
    """
    how = Sparsifying(block, inner or "", sparsity, pattern, force)
    outcomes = plan_block_sparse(model_dir, out_dir, how).run()
    if verify:
        open_iebin(out_dir / JSON_NAME, verify=True)
    tables = Console()
    (tables if tables.is_terminal else Console(width=120)).print(_table(outcomes))
    done = [outcome for outcome in outcomes if not outcome.note]
    report.done(
        f"{len(done)} of {len(outcomes)} matrices are block-sparse in {out_dir}"
        f"{', verified' if verify else ''}"
    )


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("matrix", "density", "before", "after", "format")
    for outcome in outcomes:
        stored = f"{outcome.format} ({outcome.note})" if outcome.note else outcome.format
        sizes = decimal(outcome.before), decimal(outcome.after)
        table.add_row(outcome.name, f"{outcome.density:.1%}", *sizes, stored)
    return table


if __name__ == "__main__":
    main()
