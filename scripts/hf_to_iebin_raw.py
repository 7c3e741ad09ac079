"""Convert a checkpoint to IEBIN without quantising: hf_to_iebin.py without --q4-map."""

from pathlib import Path

import click

from clocher_runtime.script_run import EXIT_CODES, reporting, write_model
from clocher_runtime.weights.convert import plan_conversion

EPILOG = f"""\b
Example:
  python scripts/hf_to_iebin_raw.py --hf-dir models/llama/hf --out-dir models/llama

{EXIT_CODES}
Killed at any moment, it leaves either the model that was there before, or no model, or the
finished new one. Run it again to go on."""


@click.command(epilog=EPILOG, context_settings={"max_content_width": 100})
@click.option(
    "--hf-dir",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory with config.json and safetensors weights (or with them in hf/ or "
    "hf/original/), or a GGUF file. It is only read.",
)
@click.option(
    "--out-dir",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory for model.ie.json, model.ie.bin and vocab.json. It is made if need be.",
)
@click.option("--verify", is_flag=True, help="Read the result back and check every hash.")
def main(hf_dir: Path, out_dir: Path, verify: bool) -> None:
    """Convert a checkpoint to IEBIN bit for bit.

    This is hf_to_iebin.py without --q4-map, for those who want to be sure that no weight changes;
    the result is the same, byte for byte.
    """
    with reporting("hf_to_iebin_raw") as report:
        write_model(report, plan_conversion(hf_dir, out_dir), verify)


if __name__ == "__main__":
    main()
