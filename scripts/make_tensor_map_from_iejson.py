"""Write tensor_map.json. The work is in clocher_runtime.convert.to_iebin."""

from pathlib import Path

from clocher_runtime.command.script_run import Report, needed, script
from clocher_runtime.convert.to_iebin import MAP_NAME, write_tensor_map


@script(
    "make_tensor_map_from_iejson",
    needed("--model-dir", "Directory with model.ie.json; tensor_map.json is written beside it."),
    examples=(("Map", "python scripts/make_tensor_map_from_iejson.py --model-dir models/llama"),),
)
def main(report: Report, model_dir: Path) -> None:
    """Say in a plain JSON file where each tensor of model.ie.bin lies.

    The map is for other programs. Clocher itself does not need it and never reads it.
    """
    count = write_tensor_map(model_dir)
    report.done(f"wrote {count} tensors to {model_dir / MAP_NAME}")


if __name__ == "__main__":
    main()
