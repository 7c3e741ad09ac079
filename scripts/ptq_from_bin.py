"""Quantise a Hugging Face checkpoint of pickled weights (pytorch_model*.bin): write a q4 manifest.

The files are read by torch's restricted unpickler (torch 2.6 or newer); no code in them is run.
"""

import sys
from pathlib import Path
from typing import Any

import click

from clocher_runtime.checkpoints.hf.torch_bin import open_torch_bin
from clocher_runtime.command.ptq import EXIT_CODES, ptq_options, run_ptq

EPILOG = f"""\b
Examples:
  python scripts/ptq_from_bin.py --hf-dir models/gpt-oss-20b/hf --out quant/q4.json \\
      --bits 4 --weights-only 1
  python scripts/hf_to_iebin_stream_pt.py --help

{EXIT_CODES}"""


@click.command(help=__doc__, epilog=EPILOG, context_settings={"max_content_width": 100})
@click.option(
    "--hf-dir",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory with config.json and pytorch_model.bin, or its index and shards (or with them "
    "in hf/ or hf/original/).",
)
@ptq_options
def main(hf_dir: Path, **options: Any) -> None:
    """Quantise the checkpoint."""
    sys.exit(run_ptq("ptq_from_bin", lambda: open_torch_bin(hf_dir), options))


if __name__ == "__main__":
    main()
