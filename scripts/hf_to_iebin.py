"""Convert a Hugging Face checkpoint to IEBIN. The work is in clocher_runtime.weights.convert."""

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from clocher_kernels.errors import ModelError, OutOfMemory, UsageError
from clocher_runtime.weights.convert import Conversion, plan_conversion
from clocher_runtime.weights.iebin import JSON_NAME, open_iebin

USAGE, MODEL, IO, MEMORY = 2, 3, 5, 6

EPILOG = """\b
Examples:
  python scripts/hf_to_iebin.py --hf-dir models/llama/hf --out-dir models/llama
  python scripts/hf_to_iebin.py --hf-dir models/llama/hf --out-dir models/llama-int4 \\
      --q4-map quant/q4_manifest.json --verify

\b
Exit codes:
  0  done
  2  a flag or the manifest cannot be used
  3  the input is missing, damaged or of an unknown kind
  5  the output cannot be written (disk full, no permission)
  6  out of memory

Killed at any moment, the converter leaves either the model that was there before, or no model,
or the finished new one. Run it again to start over."""


@click.command(epilog=EPILOG, context_settings={"max_content_width": 100})
@click.option(
    "--hf-dir",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory with config.json and safetensors weights (or with them in hf/ or "
    "hf/original/). It is only read.",
)
@click.option(
    "--out-dir",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory for model.ie.json, model.ie.bin and vocab.json. It is made if need be.",
)
@click.option(
    "--q4-map",
    type=click.Path(path_type=Path),
    help="Quantisation manifest (JSON): which matrices become int4 or int8. Without it every "
    "tensor is copied bit for bit.",
)
@click.option("--verify", is_flag=True, help="Read the result back and check every hash.")
def main(hf_dir: Path, out_dir: Path, q4_map: Path | None, verify: bool) -> None:
    """Convert a Hugging Face checkpoint to IEBIN: one file of weights, ready to be mapped.

    Tensors that are already quantised (MXFP4, BitNet, fp8) keep their exact bytes. One tensor at a
    time is in memory.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        conversion = plan_conversion(hf_dir, out_dir, q4_map)
        _say_plan(console, conversion)
        with _progress(console) as progress:
            task = progress.add_task("", total=conversion.nbytes)
            conversion.run(lambda n, name: progress.update(task, completed=n, description=name))
            progress.update(task, completed=conversion.nbytes, description="done")
        if verify:
            open_iebin(out_dir / JSON_NAME, verify=True)
    except (UsageError, ModelError, OutOfMemory, MemoryError, OSError) as error:
        console.print(f"hf_to_iebin: error: {error or type(error).__name__}", markup=False)
        sys.exit(_exit_code(error))
    console.print(
        f"hf_to_iebin: wrote {len(conversion.formats)} tensors "
        f"({len(conversion.quantised)} quantised) to {out_dir}{', verified' if verify else ''}",
        markup=False,
    )


def _say_plan(console: Console, conversion: Conversion) -> None:
    for note in conversion.notes:
        console.print(f"note: {note}", markup=False)
    console.print(
        f"{conversion.source.path} -> {conversion.out_dir}: needs "
        f"{decimal(conversion.nbytes)} of disk, {decimal(conversion.free_bytes)} free",
        markup=False,
    )


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _exit_code(error: Exception) -> int:
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, ModelError):
        return MODEL
    return IO if isinstance(error, OSError) else MEMORY


if __name__ == "__main__":
    main()
