"""Make a model of a published shape with random weights, or with a small model's in it.

The work is in convert.synthetic and convert.inflate.
"""

from pathlib import Path

import click

from clocher_kernels.errors import UsageError
from clocher_runtime.command.script_run import COUNT, PATH, Report, needed, option, script
from clocher_runtime.convert.gguf import SAME, TYPES
from clocher_runtime.convert.inflate import plan_inflation
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
    (
        "With the text of a small model",
        f"{SELF} llama-1b --inflate DIR --precision int4 --out-dir D",
    ),
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
    option(
        "--inflate",
        PATH,
        "Put this small trained model into the shape, instead of random weights: the cost of the "
        "shape, the text of the model.",
    ),
    option("--pre", str, "With --inflate and --gguf: what GGUF calls how text is split."),
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
    inflate: Path | None,
    pre: str | None,
) -> None:
    """Make a model with random weights, to measure speed at real shapes without a download.

    The same arguments give the same bytes.

    With --inflate the model computes what a small trained one does, at the cost of the shape: its
    text comes out, token for token. It takes llama, BitNet and gpt-oss models. Of gpt-oss the
    choice of experts is the small model's, too: each of its experts stands there more than once,
    and those that are left over are never chosen. The layers that it lacks choose at random.
    """
    stored = Precision(precision, group, head, attention)
    if inflate is not None:
        synthesis = plan_inflation(
            inflate, preset, stored, out_dir, seed=seed, layers=layers, gguf=gguf, pre=pre
        )
    elif pre is not None:
        raise UsageError("--pre has no place without --inflate: the tokens are bytes")
    else:
        synthesis = plan_synthesis(preset, stored, out_dir, seed=seed, layers=layers, gguf=gguf)
    report.disk(synthesis.preset, out_dir, synthesis.nbytes, synthesis.free_bytes)
    with report.progress(synthesis.nbytes) as progress:
        synthesis.run(progress)
    report.done(
        f"wrote {len(synthesis.formats)} tensors to {out_dir}{' and model.gguf' if gguf else ''}"
    )


if __name__ == "__main__":
    main()
