"""Make a model of a published shape with random weights; the work is in convert.synthetic."""

from pathlib import Path

import click

from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import needed, option, script, switch
from clocher_runtime.command.parameters import COUNT
from clocher_runtime.convert.synthetic import (
    PRECISIONS,
    PRESETS,
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
    option("--preset", click.Choice(list(PRESETS)), "model shape", required=True),
    option(
        "--precision",
        click.Choice(PRECISIONS),
        "storage of matrices, integers in groups of 32; native: as published",
        default="native",
    ),
    needed("--out-dir", "directory for model.ie.json, model.ie.bin and vocab.json"),
    option("--seed", click.IntRange(0), default=0),
    option("--layers", COUNT, "keep only the first LAYERS layers"),
    switch("--gguf", "also write model.gguf with the same numbers, for llama.cpp"),
    examples=EXAMPLES,
    epilog=f"\b\nPresets:\n{PRESET_LINES}",
)
def main(
    console: Console,
    preset: str,
    out_dir: Path,
    seed: int,
    layers: int | None,
    gguf: bool,
    precision: str,
) -> None:
    """Make a model with random weights, to measure speed at real shapes without a download.

    The same arguments give the same bytes.
    """
    synthesis = plan_synthesis(preset, precision, out_dir, seed=seed, layers=layers, gguf=gguf)
    console.disk(preset, out_dir, synthesis.nbytes, synthesis.free_bytes)
    with console.progress(synthesis.nbytes) as progress:
        synthesis.run(progress)
    console.say(
        f"wrote {len(synthesis.formats)} tensors to {out_dir}{' and model.gguf' if gguf else ''}"
    )


if __name__ == "__main__":
    main()
