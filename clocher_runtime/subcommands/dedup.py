"""`clocher dedup`: compress the weights of an IEBIN model losslessly, and restore them."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clocher_kernels.errors import ModelNotFound, UsageError
from clocher_runtime.command.console import Console, columns, size
from clocher_runtime.command.flags import place, script, switch
from clocher_runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from clocher_runtime.convert.dedup_writer import Deduplication

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
    from clocher_runtime.checkpoints.checkpoint import BIN_NAME
    from clocher_runtime.checkpoints.dedup.reader import open_deduplicated

    if (back or check) and (remove_bin or keep_anyway or back == check):
        raise UsageError("--restore and --check stand alone, or with --verify")
    if back:
        _restore(console, model_dir)
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
    from clocher_runtime.checkpoints.iebin import read_index
    from clocher_runtime.convert.dedup_writer import WORTH_IT, plan_dedup

    total = read_index(model_dir / JSON_NAME).bin.nbytes
    with console.progress(total) as progress:
        plan = plan_dedup(model_dir, progress)
    _table(plan)
    less = 100 * (1 - plan.nbytes / total)
    saved = f"{size(total)} -> {size(plan.nbytes)}, {less:.1f} % less"
    if plan.nbytes > WORTH_IT * total and not keep_anyway:
        console.say(f"{saved}: not worth it, nothing was written; --keep-anyway writes it")
        return False
    with console.progress(total) as progress:
        plan.run(progress)
    console.say(f"wrote {len(plan.choices)} planes to {model_dir}: {saved}")
    return True


def _restore(console: Console, model_dir: Path) -> None:
    from clocher_runtime.checkpoints.checkpoint import BIN_NAME, JSON_NAME
    from clocher_runtime.checkpoints.dedup.reader import has_dedup
    from clocher_runtime.checkpoints.iebin import read_index
    from clocher_runtime.convert.dedup_writer import restore

    if not has_dedup(model_dir):
        raise ModelNotFound(f"{model_dir}: no deduplicated weights there")
    with console.progress(read_index(model_dir / JSON_NAME).bin.nbytes) as progress:
        nbytes = restore(model_dir, progress)
    console.say(f"restored {BIN_NAME}, {size(nbytes)}, SHA-256 as in {JSON_NAME}")


def _table(plan: "Deduplication") -> None:
    from clocher_runtime.convert.dedup_writer import gain_of

    rows = [("bytes", "stored", "saved", "plane")]
    for gain in (gain_of(choice.plane) for choice in plan.choices):
        plane = f"{gain.name} ({gain.dtype}): {gain.how}"
        rows.append((str(gain.nbytes), str(gain.stored), f"{gain.percent:.1f}%", plane))
    click.echo(columns(rows, right=(0, 1, 2)))
