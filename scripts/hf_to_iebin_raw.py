"""Convert a checkpoint to IEBIN without quantising: hf_to_iebin.py without --q4-map."""

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
Example:
  python scripts/hf_to_iebin_raw.py --hf-dir models/llama/hf --out-dir models/llama

{EXIT_CODES}
{RESUMES}"""


@click.command(epilog=EPILOG, context_settings={"max_content_width": 100})
@conversion_options(SAFETENSORS)
def main(hf_dir: Path, out_dir: Path, verify: bool) -> None:
    """Convert a checkpoint to IEBIN bit for bit.

    This is hf_to_iebin.py without --q4-map, for those who want to be sure that no weight changes;
    the result is the same, byte for byte.
    """
    with reporting("hf_to_iebin_raw") as report:
        write_model(report, plan_conversion(hf_dir, out_dir), verify)


if __name__ == "__main__":
    main()
