"""Min-max INT8 calibration bench: cosine of every matrix, per tensor and per row, and a gate.

Every float matrix of a model is rounded with one scale for all of it and with one per row, and
compared with itself. The smallest cosine of the chosen granularity must reach the threshold.

    python -m bench.ptq_calib
    python -m bench.ptq_calib --model models/llama --granularity per-row --cosine-threshold 0.9999
    python -m bench.ptq_calib --model models/llama --bits 4 --group 64 --cosine-threshold 0.99

Exit codes: 0 accepted, 2 a flag cannot be used, 3 the model cannot be read, 8 rejected.
"""

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from clocher_kernels.formats import Float, Format, Int4, Int8
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.checkpoint import Checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.command.script_run import reporting
from clocher_runtime.convert.q4.map import reason_to_keep
from clocher_runtime.convert.rounding import parse_clip, round_tensor
from clocher_runtime.disk.output_file import write_file
from clocher_runtime.engine.topology import default_threads
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.quality.tensor_error import TensorError, measure

THRESHOLD = 0.999


@click.command(help=__doc__, context_settings={"max_content_width": 100})
@click.option("--model", type=click.Path(path_type=Path), help="default: the embedded model")
@click.option("--bits", type=click.Choice(["8", "4"]), default="8", show_default=True)
@click.option("--group", type=click.Choice(["32", "64", "128", "256"]), help="adds per-group")
@click.option(
    "--granularity",
    type=click.Choice(["per-tensor", "per-row", "per-group"]),
    help="the one that is judged; default: the finest that is measured",
)
@click.option("--clip", default="none", show_default=True, help="none, percentile:P, clamp:C, mse")
@click.option(
    "--cosine-threshold",
    type=click.FloatRange(-1, 1),
    default=THRESHOLD,
    show_default=True,
    help="accuracy budget: least cosine of a matrix",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="write all numbers")
def main(model: Path | None, json_path: Path | None, **options: Any) -> None:
    """Measure, print the table, judge."""
    with reporting("ptq_calib") as report:
        clip = parse_clip(options["clip"])
        formats = _formats(options["bits"], options["group"])
        judged = options["granularity"] or list(formats)[-1]
        if judged not in formats:
            raise click.UsageError(
                f"--granularity {judged} is not measured: per-tensor needs --bits 8, per-group "
                "needs --group"
            )
        checkpoint = open_checkpoint(model or embedded_model())
        names = [n for n, t in checkpoint.tensors.items() if reason_to_keep(n, t, False) is None]
        rows = []
        with report.progress(len(names)) as progress:
            for number, name in enumerate(names, start=1):
                rows.append((name, _errors(checkpoint, name, formats, clip)))
                progress(number, name)
        Console().print(_table(rows, list(formats)))
        worst = min(rows, key=lambda row: row[1][judged].cosine) if rows else None
        if worst is None:
            report.done("no float matrix to calibrate")
            sys.exit(ExitCode.MODEL)
        cosine = worst[1][judged].cosine
        accepted = cosine >= options["cosine_threshold"]
        if json_path:
            numbers = _numbers(rows, judged, accepted, options)
            write_file(json_path, json.dumps(numbers, indent=1).encode())
        report.done(
            f"{'accepted' if accepted else 'rejected'}: smallest cosine {judged} {cosine:.6f}, "
            f"budget {options['cosine_threshold']:g} ({worst[0]})"
        )
        sys.exit(ExitCode.OK if accepted else ExitCode.REJECTED)


def _formats(bits: str, group: str | None) -> dict[str, Format]:
    formats: dict[str, Format] = {}
    if bits == "8":
        formats = {"per-tensor": Int8("tensor", "f32"), "per-row": Int8("row", "f32")}
    else:
        formats = {"per-row": Int4(True, "row", "f16")}
    if group:
        formats["per-group"] = (
            Int8(int(group), "f16") if bits == "8" else Int4(True, int(group), "f16")
        )
    return formats


def _errors(
    checkpoint: Checkpoint, name: str, formats: dict[str, Format], clip: Any
) -> dict[str, TensorError]:
    source = checkpoint.tensor(name)
    assert isinstance(source.format, Float)
    threads = default_threads()
    found = {
        kind: measure(name, source, round_tensor(source, fmt, clip, threads))
        for kind, fmt in formats.items()
    }
    checkpoint.release()
    return found


def _table(rows: list[tuple[str, dict[str, TensorError]]], kinds: list[str]) -> Table:
    table = Table(
        Column("tensor", overflow="fold"),
        *(f"cosine {kind}" for kind in kinds),
        *(f"rms {k}" for k in kinds),
    )
    for name, errors in rows:
        cosines = [f"{errors[kind].cosine:.6f}" for kind in kinds]
        table.add_row(name, *cosines, *(f"{errors[kind].rms_rel:.5f}" for kind in kinds))
    return table


def _numbers(
    rows: list[tuple[str, dict[str, TensorError]]],
    judged: str,
    accepted: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    tensors = {
        name: {
            kind: {"cosine": e.cosine, "rms_rel": e.rms_rel, "max_abs": e.max_abs}
            for kind, e in errors.items()
        }
        for name, errors in rows
    }
    return {"options": options, "judged": judged, "accepted": accepted, "tensors": tensors}


if __name__ == "__main__":
    main()
