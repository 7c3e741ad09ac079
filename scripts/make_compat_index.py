"""Write model.ie.compat.json. The work is in clocher_runtime.convert.q4.planes."""

from pathlib import Path

from clocher_runtime.checkpoints.q4 import COMPAT_NAME
from clocher_runtime.command.script_run import Report, needed, script
from clocher_runtime.convert.q4.planes import make_index


@script(
    "make_compat_index",
    needed(
        "--model-dir",
        "Directory with model.ie.json, model.ie.bin and the files of gen_q4_bytes_stream.py.",
    ),
    needed("--manifest", "The expanded manifest that gen_q4_bytes_stream.py wrote."),
    examples=(
        (
            "What gen_q4_bytes_stream.py has written",
            "python scripts/make_compat_index.py --model-dir models/llama \\\n"
            "    --manifest quant/q4_manifest.expanded.json",
        ),
        ("Run it", "clocher-run --model-json models/llama/model.ie.compat.json"),
    ),
)
def main(report: Report, model_dir: Path, manifest: Path) -> None:
    """Index a model that takes its Q4_0 matrices from model.q4.bin, all else from model.ie.bin."""
    names = make_index(model_dir, manifest)
    report.done(f"wrote {model_dir / COMPAT_NAME} with {len(names)} matrices in Q4_0")


if __name__ == "__main__":
    main()
