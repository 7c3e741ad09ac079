"""Make a model of a published shape with random weights. The work is in weights.synthetic."""

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from clocher_kernels.errors import ModelError, OutOfMemory, UsageError
from clocher_runtime.convert.gguf.export import SAME, TYPES
from clocher_runtime.convert.presets import PRESETS
from clocher_runtime.convert.synthetic import (
    GROUPS,
    HEADS,
    PRECISIONS,
    Precision,
    Synthesis,
    plan_synthesis,
)

USAGE, MODEL, IO, MEMORY = 2, 3, 5, 6

EPILOG = """\b
Examples:
  python scripts/make_synthetic.py --preset llama-1b --precision int4 --out-dir models/l1b-int4
  python scripts/make_synthetic.py --preset llama-1b --precision int4 --out-dir models/l1b-int4 \\
      --gguf
  python scripts/make_synthetic.py --preset gpt-oss-20b --precision native --out-dir models/oss

\b
Presets:
"""
EPILOG += "\n".join(f"  {preset.name:13} {preset.summary}" for preset in PRESETS.values())


@click.command(epilog=EPILOG, context_settings={"max_content_width": 100})
@click.option("--preset", type=click.Choice(list(PRESETS)), required=True, help="The shape.")
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default="native",
    show_default=True,
    help="Storage of the blocks' linears; native is what the published model has.",
)
@click.option(
    "--out-dir",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory for model.ie.json, model.ie.bin and vocab.json. It is made if need be.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Keep only the first layers.")
@click.option(
    "--group",
    type=click.Choice(GROUPS),
    default="32",
    show_default=True,
    help="Columns that share a scale (int8w, int4). 32 is what Q4_0 and Q8_0 have.",
)
@click.option(
    "--head",
    type=click.Choice(HEADS),
    help="Storage of head and embedding. Default: bf16 as published; for a llama that of the "
    "linears, int4 beside ternary.",
)
@click.option(
    "--attention",
    type=click.Choice(HEADS),
    help="Storage of the attention's linears. Default: as the others; bf16 for gpt-oss in mxfp4.",
)
@click.option(
    "--gguf",
    type=click.Choice(TYPES),
    is_flag=False,
    flag_value=SAME,
    help="Also write model.gguf: the same numbers (the default), or decoded, for llama-quantize.",
)
def main(
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
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        stored = Precision(precision, group, head, attention)
        synthesis = plan_synthesis(preset, stored, out_dir, seed=seed, layers=layers, gguf=gguf)
        _run(console, synthesis)
    except (UsageError, ModelError, OutOfMemory, MemoryError, OSError) as error:
        console.print(f"make_synthetic: error: {error or type(error).__name__}", markup=False)
        sys.exit(_exit_code(error))
    console.print(
        f"make_synthetic: wrote {len(synthesis.formats)} tensors to {out_dir}"
        f"{' and model.gguf' if gguf else ''}",
        markup=False,
    )


def _run(console: Console, synthesis: Synthesis) -> None:
    console.print(
        f"{synthesis.preset} -> {synthesis.out_dir}: needs {decimal(synthesis.nbytes)} of disk, "
        f"{decimal(synthesis.free_bytes)} free",
        markup=False,
    )
    columns = (
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=synthesis.nbytes)
        synthesis.run(lambda n, name: progress.update(task, completed=n, description=name))


def _exit_code(error: Exception) -> int:
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, ModelError):
        return MODEL
    return IO if isinstance(error, OSError) else MEMORY


if __name__ == "__main__":
    main()
