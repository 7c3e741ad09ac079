"""Min-max INT8 calibration: cosine of every matrix, per tensor and per row, and a gate.

    python -m bench ptq_calib --model DIR --bits 4 --cosine-threshold 0.99

Every float matrix of a model is rounded with one scale for all of it and with one per row, and
compared with itself. The smallest cosine of the chosen granularity must reach the threshold, or the
exit code is 8.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # python bench/ptq_calib.py: import from the root
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click

from bench.experiment import NotMeasured, experiment
from bench.record import Row
from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Format, Int4, Int8
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.command.flags import option
from clocher_runtime.command.parameters import PATH
from clocher_runtime.convert.q4_map import reason_to_keep
from clocher_runtime.convert.rounding import parse_clip, round_tensor
from clocher_runtime.engine.topology import default_threads
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.quality.tensor_error import measure

_GRANULARITIES = ("per-tensor", "per-row", "per-group")


@experiment(
    "ptq_calib",
    __doc__,
    option("--model", PATH, "default: the embedded model"),
    option("--bits", click.Choice(["8", "4"]), default="8"),
    option("--group", click.Choice(["32", "64", "128", "256"]), "adds per-group"),
    option("--granularity", click.Choice(_GRANULARITIES), "judged; default: the finest measured"),
    option("--clip", str, "none, percentile:P, clamp:C, mse", default="none"),
    option("--cosine-threshold", click.FloatRange(-1, 1), "least of a matrix", default=0.999),
    title="{judged}",
    code=lambda rows: ExitCode.OK if all(r["accepted"] for r in rows) else ExitCode.REJECTED,
    exit_codes={ExitCode.REJECTED: "a cosine is below the threshold"},
)
def main(asked: Any) -> Iterator[Row]:
    """Yield a row for each matrix."""
    clip, formats = parse_clip(asked.clip), _formats(asked.bits, asked.group)
    judged = asked.granularity or list(formats)[-1]
    if judged not in formats:
        raise UsageError(
            f"--granularity {judged} is not measured: per-tensor needs --bits 8, per-group "
            "needs --group"
        )
    checkpoint = open_checkpoint(asked.model or embedded_model())
    found: list[tuple[float, str]] = []
    for name, stored in checkpoint.tensors.items():
        if reason_to_keep(name, stored, False) is not None:
            continue
        source = checkpoint.tensor(name)
        row: Row = {"tensor": name, "judged": judged}
        for kind, fmt in formats.items():
            error = measure(name, source, round_tensor(source, fmt, clip, default_threads()))
            row |= {f"cosine_{kind}": error.cosine, f"rms_{kind}": error.rms_rel}
        found.append((row[f"cosine_{judged}"], name))
        yield row | {"accepted": found[-1][0] >= asked.cosine_threshold}
        checkpoint.release()
    if not found:
        raise NotMeasured("no float matrix to calibrate")
    cosine, name = min(found)
    verdict = "accepted" if cosine >= asked.cosine_threshold else "rejected"
    budget = f"smallest cosine {judged} {cosine:.6f}, budget {asked.cosine_threshold:g} ({name})"
    click.echo(f"{verdict}: {budget}", err=True)


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
