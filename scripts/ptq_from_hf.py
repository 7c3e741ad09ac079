"""Quantise a Hugging Face checkpoint (safetensors) after training: write a q4 manifest."""

import sys
from pathlib import Path
from typing import Any

import click

from clocher_runtime.checkpoints.hf.hub import local_or_fetched
from clocher_runtime.command.ptq import EXIT_CODES, ptq_options, run_ptq
from clocher_runtime.convert.to_iebin import open_source

EPILOG = f"""\b
Examples:
  python scripts/ptq_from_hf.py --hf-dir models/llama/hf --out quant/llama.json \\
      --bits 4 --weights-only 1
  python scripts/ptq_from_hf.py --hf-dir models/llama/hf --out quant/llama.json \\
      --calib-text calib.txt --gate held_out.txt
  python scripts/ptq_from_hf.py --hf-dir models/llama/hf --out quant/llama.json \\
      --rules quant/q4_manifest.json --method gptq --calib-text calib.txt
  python scripts/hf_to_iebin.py --hf-dir models/llama/hf --out-dir models/llama \\
      --q4-map quant/llama.json

{EXIT_CODES}"""


@click.command(help=__doc__, epilog=EPILOG, context_settings={"max_content_width": 100})
@click.option(
    "--hf-dir",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory of the model (or with it in hf/ or hf/original/), or the name of a repository "
    "on the Hugging Face hub, which is then downloaded.",
)
@ptq_options
def main(hf_dir: Path, **options: Any) -> None:
    """Quantise the checkpoint."""
    sys.exit(run_ptq("ptq_from_hf", lambda: open_source(local_or_fetched(hf_dir)), options))


if __name__ == "__main__":
    main()
