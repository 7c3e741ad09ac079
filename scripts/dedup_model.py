"""Deduplicate the weights of an IEBIN model, or restore them. The work is in weights.dedup."""

import sys
from pathlib import Path

import click

from clocher_kernels.errors import ModelNotFound, UsageError
from clocher_runtime.checkpoints.dedup.reader import has_dedup, open_deduplicated
from clocher_runtime.checkpoints.iebin import BIN_NAME, JSON_NAME, read_index
from clocher_runtime.command.script_run import PATH, Report, needed, option, script, switch
from clocher_runtime.convert.dedup.writer import Deduplication, gains, plan_dedup, restore
from clocher_runtime.exit_codes import ExitCode

EPILOG = """\b
Examples:
  python scripts/dedup_model.py --model-dir models/llama --verify --remove-bin
  python scripts/dedup_model.py --model-dir models/llama --restore
  python scripts/dedup_model.py --model-dir models/llama-int4 --base models/llama
  IE_DEDUP=1 clocher-run --model-dir models/llama --prompt "def f"

\b
What to expect: bf16 weights shrink by about 30 %, ternary ones by 20 %, an MXFP4 model by 4 to 5 %
(its scales), int4 codes by nothing or little. A variant with --base stores what differs.

\b
Exit codes:
  0  done
  2  a flag cannot be used
  3  the model or its base is missing or damaged
  5  the output cannot be written (disk full, no permission)
  8  it would save less than 3 %: nothing was written (--keep-anyway writes it)

Killed at any moment, it leaves model.ie.bin alone, and either the old deduplicated files, or none
that a reader accepts, or the finished new ones. Run it again to start over."""


@script(
    "dedup_model",
    EPILOG,
    needed(
        "--model-dir",
        "Directory with model.ie.json and model.ie.bin. The output goes there, too: "
        "model.dedup.json, model.dedup.{defaults,masks,exceptions}.bin.",
    ),
    option(
        "--base",
        PATH,
        "Directory of a model that this one is a variant of: what both have in common is not "
        "stored again. The variant can then be read only where the base is, best beside it.",
    ),
    switch("--verify", "Read the result back and check every hash."),
    switch("--keep-anyway", "Write it even if it saves less than 3 %."),
    switch("--remove-bin", "Then delete model.ie.bin."),
    switch("--restore", "The other way: write model.ie.bin, byte for byte.", "back"),
    switch("--check", "Write nothing; check every hash of what is there."),
)
def main(
    report: Report,
    model_dir: Path,
    base: Path | None,
    verify: bool,
    keep_anyway: bool,
    remove_bin: bool,
    back: bool,
    check: bool,
) -> None:
    """Store the weights of an IEBIN model in less space, without losing a bit.

    One tensor at a time is in memory. Everything is decoded again and compared before it counts.
    """
    if (back or check) and (remove_bin or keep_anyway or back == check):
        raise UsageError("--restore and --check stand alone, with --base or --verify")
    if back:
        _restore(report, model_dir, base)
    elif check:
        open_deduplicated(model_dir, base, verify=True)
        report.done(f"{model_dir}: every hash is right")
    else:
        _deduplicate(report, model_dir, base, keep_anyway)
        if verify or remove_bin:
            open_deduplicated(model_dir, base, verify=True)
            report.done("verified")
        if remove_bin:
            (model_dir / BIN_NAME).unlink()
            report.done(f"removed {BIN_NAME}")


def _deduplicate(report: Report, model_dir: Path, base: Path | None, keep_anyway: bool) -> None:
    total = read_index(model_dir / JSON_NAME).bin.nbytes
    with report.progress(total) as progress:
        plan = plan_dedup(model_dir, base, progress)
    _table(plan)
    saved = f"{total} -> {plan.nbytes} bytes, {100 * (1 - plan.nbytes / total):.1f} % less"
    if not (plan.worth_it or keep_anyway):
        report.done(f"{saved}: not worth it, nothing was written; --keep-anyway writes it")
        sys.exit(ExitCode.REJECTED)
    with report.progress(total) as progress:
        plan.run(progress)
    report.done(f"wrote {len(plan.choices)} planes to {model_dir}: {saved}")


def _restore(report: Report, model_dir: Path, base: Path | None) -> None:
    if not has_dedup(model_dir):
        raise ModelNotFound(f"{model_dir}: no deduplicated weights there")
    with report.progress(read_index(model_dir / JSON_NAME).bin.nbytes) as progress:
        nbytes = restore(model_dir, base, progress)
    report.done(f"restored {BIN_NAME}, {nbytes} bytes, SHA-256 as in {JSON_NAME}")


def _table(plan: Deduplication) -> None:
    click.echo(f"{'bytes':>13} {'stored':>13} {'saved':>7}  plane")
    for gain in gains(choice.plane for choice in plan.choices):
        click.echo(
            f"{gain.nbytes:13} {gain.stored:13} {gain.percent:6.1f}%  {gain.name} ({gain.dtype}): "
            f"{gain.how}"
        )


if __name__ == "__main__":
    main()
