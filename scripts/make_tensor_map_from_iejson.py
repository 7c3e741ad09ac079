"""Write tensor_map.json. The work is in clocher_runtime.convert.tensor_map."""

from pathlib import Path

import click

from clocher_runtime.command.script_run import EXIT_CODES, reporting
from clocher_runtime.convert.tensor_map import MAP_NAME, write_tensor_map

EPILOG = f"""\b
Example:
  python scripts/make_tensor_map_from_iejson.py --model-dir models/llama

{EXIT_CODES}"""


@click.command(epilog=EPILOG, context_settings={"max_content_width": 100})
@click.option(
    "--model-dir",
    type=click.Path(path_type=Path),
    required=True,
    help="Directory with model.ie.json; tensor_map.json is written beside it.",
)
def main(model_dir: Path) -> None:
    """Say in a plain JSON file where each tensor of model.ie.bin lies.

    The map is for other programs. Clocher itself does not need it and never reads it.
    """
    with reporting("make_tensor_map_from_iejson") as report:
        count = write_tensor_map(model_dir)
        report.done(f"wrote {count} tensors to {model_dir / MAP_NAME}")


if __name__ == "__main__":
    main()
