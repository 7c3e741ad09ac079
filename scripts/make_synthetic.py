"""Make a model of a published shape with random weights. The work is in weights.synthetic."""

from pathlib import Path

import click

from clocher_runtime.command.script_run import COUNT, Report, needed, option, script
from clocher_runtime.convert.gguf import SAME, TYPES
from clocher_runtime.convert.synthetic import (
    GROUPS,
    HEADS,
    PRECISIONS,
    PRESETS,
    Precision,
    plan_synthesis,
)

SELF = "python scripts/make_synthetic.py --preset"
EXAMPLES = (
    ("Int4", f"{SELF} llama-1b --precision int4 --out-dir models/l1b-int4"),
    ("For llama.cpp, too", f"{SELF} llama-1b --precision int4 --out-dir models/l1b-int4 --gguf"),
    ("As published", f"{SELF} gpt-oss-20b --precision native --out-dir models/oss"),
)
PRESET_LINES = "\n".join(f"  {preset.name:13} {preset.summary}" for preset in PRESETS.values())


@script(
    "make_synthetic",
    option("--preset", click.Choice(list(PRESETS)), "The shape.", required=True),
    option(
        "--precision",
        click.Choice(PRECISIONS),
        "Storage of the blocks' linears; native is what the published model has.",
        default="native",
    ),
    needed(
        "--out-dir",
        "Directory for model.ie.json, model.ie.bin and vocab.json. It is made if need be.",
    ),
    option("--seed", click.IntRange(0), default=0),
    option("--layers", COUNT, "Keep only the first layers."),
    option(
        "--group",
        click.Choice(GROUPS),
        "Columns that share a scale (int8w, int4). 32 is what Q4_0 and Q8_0 have.",
        default="32",
    ),
    option(
        "--head",
        click.Choice(HEADS),
        "Storage of head and embedding. Default: bf16 as published; for a llama that of the "
        "linears, int4 beside ternary.",
    ),
    option(
        "--attention",
        click.Choice(HEADS),
        "Storage of the attention's linears. Default: as the others; bf16 for gpt-oss in mxfp4.",
    ),
    option(
        "--gguf",
        click.Choice(TYPES),
        "Also write model.gguf: the same numbers (the default), or decoded, for llama-quantize.",
        is_flag=False,
        flag_value=SAME,
    ),
    examples=EXAMPLES,
    epilog=f"\b\nPresets:\n{PRESET_LINES}",
)
def main(
    report: Report,
    preset: str,
    precision: str,
    out_dir: Path,
    seed: int,
    layers: int | None,
    group: str,
    head: str | None,
    attention: str | None,
    gguf: str | None,
) -> None:
    """Make a model with random weights, to measure speed at real shapes without a download.

    The same arguments give the same bytes.
    """
    stored = Precision(precision, group, head, attention)
    synthesis = plan_synthesis(preset, stored, out_dir, seed=seed, layers=layers, gguf=gguf)
    report.disk(synthesis.preset, out_dir, synthesis.nbytes, synthesis.free_bytes)
    with report.progress(synthesis.nbytes) as progress:
        synthesis.run(progress)
    report.done(
        f"wrote {len(synthesis.formats)} tensors to {out_dir}{' and model.gguf' if gguf else ''}"
    )


if __name__ == "__main__":
    main()
