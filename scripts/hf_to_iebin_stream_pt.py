"""Convert pytorch_model*.bin weights to IEBIN. The work is in clocher_runtime.checkpoints."""

from pathlib import Path

import click

from clocher_runtime.checkpoints.hf.torch_bin import open_torch_bin
from clocher_runtime.command.script_run import (
    EXIT_CODES,
    RESUMES,
    conversion_options,
    reporting,
    write_model,
)
from clocher_runtime.convert.to_iebin import plan_conversion

EPILOG = f"""\b
Example:
  python scripts/hf_to_iebin_stream_pt.py --hf-dir models/llama/hf --out-dir models/llama

{EXIT_CODES}
{RESUMES}"""


@click.command(epilog=EPILOG, context_settings={"max_content_width": 100})
@conversion_options("pytorch_model*.bin weights (or with them in hf/ or hf/original/)")
def main(hf_dir: Path, out_dir: Path, verify: bool) -> None:
    """Convert a checkpoint with pickled weights to IEBIN, without running what is in the pickle.

    It needs torch 2.6 or newer, whose restricted unpickler only says where the tensors lie. Files
    that ask for more than that are refused.
    """
    with reporting("hf_to_iebin_stream_pt") as report:
        write_model(report, plan_conversion(hf_dir, out_dir, opener=open_torch_bin), verify)


if __name__ == "__main__":
    main()
