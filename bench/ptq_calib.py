"""Min-max INT8 calibration: cosine of every matrix, per tensor and per row, and a gate.

Every float matrix of a model is rounded with one scale for all of it and with one per row, and
compared with itself. The smallest cosine of the chosen granularity must reach the threshold.
"""

import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # python bench/ptq_calib.py: import from the root
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click

from bench.record import Row, print_table, table, write_json
from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Format, Int4, Int8
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import option, script
from clocher_runtime.command.parameters import PATH
from clocher_runtime.convert.q4_map import reason_to_keep
from clocher_runtime.convert.rounding import parse_clip, round_tensor
from clocher_runtime.engine.topology import default_threads
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.quality.tensor_error import measure


@script(
    "ptq_calib",
    option("--model", PATH, "default: the embedded model"),
    option("--bits", click.Choice(["8", "4"]), default="8"),
    option("--group", click.Choice(["32", "64", "128", "256"]), "adds per-group"),
    option(
        "--granularity",
        click.Choice(["per-tensor", "per-row", "per-group"]),
        "the one that is judged; default: the finest that is measured",
    ),
    option("--clip", str, "none, percentile:P, clamp:C, mse", default="none"),
    option(
        "--cosine-threshold",
        click.FloatRange(-1, 1),
        "accuracy budget: least cosine of a matrix",
        default=0.999,
    ),
    option("--json", PATH, "write all numbers", name="out"),
    examples=(
        ("the embedded model", "python -m bench.ptq_calib"),
        ("4 bits in groups", "python -m bench.ptq_calib --model DIR --bits 4 --group 64"),
    ),
    exit_codes={ExitCode.OK: "accepted", ExitCode.REJECTED: "rejected"},
    help=__doc__,
)
def main(
    console: Console, model: Path | None, out: Path | None, cosine_threshold: float, **options: Any
) -> ExitCode:
    """Measure, print the table, judge."""
    clip, formats = parse_clip(options["clip"]), _formats(options["bits"], options["group"])
    judged = options["granularity"] or list(formats)[-1]
    if judged not in formats:
        raise UsageError(
            f"--granularity {judged} is not measured: per-tensor needs --bits 8, per-group "
            "needs --group"
        )
    checkpoint = open_checkpoint(model or embedded_model())
    names = [n for n, t in checkpoint.tensors.items() if reason_to_keep(n, t, False) is None]
    rows: list[Row] = []
    with console.progress(len(names)) as progress:
        for number, name in enumerate(names, start=1):
            source = checkpoint.tensor(name)
            row: Row = {"kind": "ptq_calib", "tensor": name}
            for kind, fmt in formats.items():
                rounded = round_tensor(source, fmt, clip, default_threads())
                found = measure(name, source, rounded)
                row |= {f"cosine_{kind}": found.cosine, f"rms_{kind}": found.rms_rel}
            rows.append(row)
            checkpoint.release()
            progress(number, name)
    if not rows:
        console.say("no float matrix to calibrate")
        return ExitCode.MODEL
    heads = ["tensor", *(f"{what} {kind}" for what in ("cosine", "rms") for kind in formats)]
    cells = [f"{{{head.replace(' ', '_')}:.6f}}" for head in heads[1:]]
    print_table(table(" | ".join(heads), " | ".join(["{tensor}", *cells]), rows).on_terminal())
    if out:
        write_json(out, rows)
    worst = min(rows, key=lambda row: float(row[f"cosine_{judged}"]))
    cosine = worst[f"cosine_{judged}"]
    accepted = cosine >= cosine_threshold
    console.say(
        f"{'accepted' if accepted else 'rejected'}: smallest cosine {judged} {cosine:.6f}, "
        f"budget {cosine_threshold:g} ({worst['tensor']})"
    )
    return ExitCode.OK if accepted else ExitCode.REJECTED


def _formats(bits: str, group: str | None) -> dict[str, Format]:
    formats: dict[str, Format] = {"per-row": Int4(True, "row", "f16")}
    if bits == "8":
        formats = {"per-tensor": Int8("tensor", "f32"), "per-row": Int8("row", "f32")}
    if group:
        size = int(group)
        formats["per-group"] = Int8(size, "f16") if bits == "8" else Int4(True, size, "f16")
    return formats


if __name__ == "__main__":
    main()
