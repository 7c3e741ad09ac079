"""Smaller forms of a model: `clocher dedup`, without losing a bit, and `clocher sparsify`."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from clocher_kernels.errors import ModelNotFound, UsageError
from clocher_runtime.command.console import Console, columns, size
from clocher_runtime.command.flags import option, place, script, switch
from clocher_runtime.command.parameters import Listed, sides
from clocher_runtime.convert import LINEARS
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.subcommands.convert import OUT_DIR, VERIFY, replacing_model

INNERS = ("f32", "f16", "bf16", "int8", "int4")
_BLOCK = Listed(
    sides, "ROWSxCOLUMNS, such as 32x32", lambda some: len(some) == 1 and max(some[0]) < 10_000
)
_NOTES = """\
What to expect: bf16 weights shrink by about 30 %, ternary ones by 20 %, an MXFP4 model by 4 to 5 %
(its scales), int4 codes by nothing or little.

Killed at any moment, it leaves model.ie.bin alone, and either the old deduplicated files, or none
that a reader accepts, or the finished new ones. Run it again to start over."""


@script(
    "clocher dedup",
    *place(
        "MODEL",
        "--model-dir",
        "Directory with model.ie.json and model.ie.bin. The output goes there, too: "
        "model.dedup.json, model.dedup.{defaults,masks,exceptions}.bin.",
    ),
    switch("--verify", "Read the result back and check every hash."),
    switch("--keep-anyway", "Write it even if it saves less than 3 %."),
    switch("--remove-bin", "Then delete model.ie.bin."),
    switch("--restore", "The other way: write model.ie.bin, byte for byte.", "back"),
    switch("--check", "Write nothing; check every hash of what is there."),
    examples=(
        ("Less space", "clocher dedup models/llama --verify --remove-bin"),
        ("And back", "clocher dedup models/llama --restore"),
        ("Run it", 'IE_DEDUP=1 clocher run --model-dir models/llama --prompt "def f"'),
    ),
    epilog=_NOTES,
    exit_codes={
        ExitCode.REJECTED: "it would save less than 3 %: nothing was written (see --keep-anyway)"
    },
)
def dedup(
    console: Console,
    model_dir: Path,
    verify: bool,
    keep_anyway: bool,
    remove_bin: bool,
    back: bool,
    check: bool,
) -> int:
    """Store the weights of an IEBIN model in less space, without losing a bit.

    One tensor at a time is in memory. Everything is decoded again and compared before it counts.
    """
    from clocher_runtime.checkpoints.checkpoint import BIN_NAME, JSON_NAME
    from clocher_runtime.checkpoints.dedup.reader import has_dedup, open_deduplicated
    from clocher_runtime.checkpoints.iebin import IebinIndex
    from clocher_runtime.convert.dedup_writer import restore

    if not (model_dir / JSON_NAME).exists():
        raise ModelNotFound(f"{model_dir}: no IEBIN model there; `clocher convert` makes one")
    if (back or check) and (remove_bin or keep_anyway or back == check):
        raise UsageError("--restore and --check stand alone, or with --verify")
    if back:
        if not has_dedup(model_dir):
            raise ModelNotFound(f"{model_dir}: no deduplicated weights there")
        total = IebinIndex(model_dir / JSON_NAME).bin.nbytes
        nbytes = console.progress(total, partial(restore, model_dir))
        console.say(f"restored {BIN_NAME}, {size(nbytes)}, SHA-256 as in {JSON_NAME}")
    elif check:
        open_deduplicated(model_dir, verify=True)
        console.say(f"{model_dir}: every hash is right")
    elif not _deduplicate(console, model_dir, keep_anyway):
        return ExitCode.REJECTED
    else:
        if verify or remove_bin:
            open_deduplicated(model_dir, verify=True)
            console.say("verified")
        if remove_bin:
            (model_dir / BIN_NAME).unlink()
            console.say(f"removed {BIN_NAME}")
    return ExitCode.OK


def _deduplicate(console: Console, model_dir: Path, keep_anyway: bool) -> bool:
    from clocher_runtime.checkpoints.checkpoint import JSON_NAME
    from clocher_runtime.checkpoints.iebin import IebinIndex
    from clocher_runtime.convert.dedup_writer import WORTH_IT, Deduplication, described

    total = IebinIndex(model_dir / JSON_NAME).bin.nbytes
    plan = console.progress(total, partial(Deduplication, model_dir))
    rows = [("bytes", "stored", "saved", "plane")]
    for each in plan.planes:
        nbytes, stored = each.plane.nbytes, sum(part for _, part in each.parts())
        saved = f"{1 - stored / nbytes:.1%}"
        name = f"{each.tensor} {each.key} ({each.plane.dtype}): {described(each)}"
        rows.append((str(nbytes), str(stored), saved, name))
    click.echo(columns(rows, right=(0, 1, 2)))
    less = 100 * (1 - plan.nbytes / total)
    saved = f"{size(total)} -> {size(plan.nbytes)}, {less:.1f} % less"
    if plan.nbytes > WORTH_IT * total and not keep_anyway:
        console.say(f"{saved}: not worth it, nothing was written; --keep-anyway writes it")
        return False
    console.progress(total, plan.run)
    console.say(f"wrote {len(plan.planes)} planes to {model_dir}: {saved}")
    return True


@script(
    "clocher sparsify",
    *place("MODEL", "--model-dir", "Directory of the model, Hugging Face or IEBIN. Only read."),
    *place("OUT_DIR", "--out-dir", OUT_DIR),
    option("--block", _BLOCK, "Block shape.", default="32x32", metavar="ROWSxCOLUMNS"),
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
    from clocher_runtime.checkpoints.checkpoint import JSON_NAME
    from clocher_runtime.checkpoints.iebin import open_iebin
    from clocher_runtime.checkpoints.locate import locate
    from clocher_runtime.convert import block_sparse

    how |= {"inner": how["inner"] or "", "block": how["block"][0]}
    with replacing_model(console, out_dir):
        outcomes = block_sparse.sparsify(
            locate(model_dir, "MODEL"), out_dir, block_sparse.Sparsifying(**how)
        )
    if verify:
        open_iebin(out_dir / JSON_NAME, verify=True)
    rows = [("matrix", "density", "before", "after", "format")]
    for each in outcomes:
        stored = f"{each.format} ({each.note})" if each.note else each.format
        rows.append((each.name, f"{each.density:.1%}", size(each.before), size(each.after), stored))
    click.echo(columns(rows, right=(1, 2, 3)))
    done = [outcome for outcome in outcomes if not outcome.note]
    console.say(
        f"{len(done)} of {len(outcomes)} matrices are block-sparse in {out_dir}"
        f"{', verified' if verify else ''}"
    )
