"""Write model.ie.compat.json. The work is in clocher_runtime.convert.q4.planes."""

from pathlib import Path

import click

from clocher_runtime.checkpoints.q4 import COMPAT_NAME
from clocher_runtime.command.script_run import EXIT_CODES, reporting
from clocher_runtime.convert.q4.planes import make_index

EPILOG = f"""\b
Example:
  python scripts/make_compat_index.py --model-dir models/llama \\
      --manifest quant/q4_manifest.expanded.json
  clocher-run --model-json models/llama/model.ie.compat.json

{EXIT_CODES}"""


@click.command(epilog=EPILOG, context_settings={"max_content_width": 100})
@click.option(
    "--model-dir",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory with model.ie.json, model.ie.bin and the files of gen_q4_bytes_stream.py.",
)
@click.option(
    "--manifest",
    type=click.Path(path_type=Path),
    required=True,
    help="The expanded manifest that gen_q4_bytes_stream.py wrote.",
)
def main(model_dir: Path, manifest: Path) -> None:
    """Index a model that takes its Q4_0 matrices from model.q4.bin, all else from model.ie.bin."""
    with reporting("make_compat_index") as report:
        names = make_index(model_dir, manifest)
        report.done(f"wrote {model_dir / COMPAT_NAME} with {len(names)} matrices in Q4_0")


if __name__ == "__main__":
    main()
