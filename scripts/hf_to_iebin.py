"""Convert a checkpoint to IEBIN. The work is in clocher_runtime.convert.to_iebin."""

from pathlib import Path

import click

from clocher_runtime.command.script_run import (
    EXIT_CODES,
    RESUMES,
    SAFETENSORS,
    conversion_options,
    reporting,
    write_model,
)
from clocher_runtime.convert.to_iebin import plan_conversion

EPILOG = f"""\b
Examples:
  python scripts/hf_to_iebin.py --hf-dir models/llama/hf --out-dir models/llama
  python scripts/hf_to_iebin.py --hf-dir models/llama/hf --out-dir models/llama-int4 \\
      --q4-map quant/q4_manifest.json --verify

{EXIT_CODES}
{RESUMES}"""


@click.command(epilog=EPILOG, context_settings={"max_content_width": 100})
@conversion_options(SAFETENSORS)
@click.option(
    "--q4-map",
    type=click.Path(path_type=Path),
    help="Quantisation manifest (JSON): which matrices become int4 or int8, or where they lie "
    "already quantised. Without it every tensor is copied bit for bit.",
)
def main(hf_dir: Path, out_dir: Path, q4_map: Path | None, verify: bool) -> None:
    """Convert a checkpoint to IEBIN: one file of weights, ready to be mapped.

    Tensors that are already quantised (MXFP4, BitNet, fp8) keep their exact bytes. Two tensors at
    a time are in memory.
    """
    with reporting("hf_to_iebin") as report:
        write_model(report, plan_conversion(hf_dir, out_dir, q4_map), verify)


if __name__ == "__main__":
    main()
