"""Append attention matrices in Q4_0. The work is in clocher_runtime.convert.q4.planes."""

from pathlib import Path

from clocher_runtime.command.script_run import Report, needed, script
from clocher_runtime.convert.q4.planes import plan_append

EXAMPLES = (
    (
        "An index of scripts/rebuild_dedup_and_quant.sh",
        "python scripts/append_q4_attn_from_hf.py --hf-dir models/llama/hf \\\n"
        "    --compat-json models/llama/model.ie.compat.json --q4-bin models/llama/model.q4.bin",
    ),
    ("Run it", "clocher-run --model-json models/llama/model.ie.compat.json"),
)


@script(
    "append_q4_attn_from_hf",
    needed("--hf-dir", "The checkpoint that the model was made of. It is only read."),
    needed(
        "--compat-json", "model.ie.compat.json, as scripts/rebuild_dedup_and_quant.sh makes it."
    ),
    needed(
        "--q4-bin",
        "model.q4.bin in the same directory; the scales go to model.q4.scales.fp16.bin beside it.",
    ),
    examples=EXAMPLES,
    epilog="Killed at any moment, it leaves an index of the matrices that are finished. Run it "
    "again to go on.",
)
def main(report: Report, hf_dir: Path, compat_json: Path, q4_bin: Path) -> None:
    """Append to an index the attention projections (self_attn q, k, v, o) that it lacks in Q4_0."""
    job = plan_append(hf_dir, compat_json, q4_bin)
    report.disk(job.source.path, compat_json.parent, job.nbytes, job.free_bytes)
    with report.progress(job.nbytes) as progress:
        job.run(progress)
    report.done(
        f"appended {len(job.names)} matrices to {q4_bin}; {len(job.present)} were there already"
    )


if __name__ == "__main__":
    main()
