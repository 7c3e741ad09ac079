"""Write Q4_0 matrices to files of their own. The work is in clocher_runtime.convert.q4.planes."""

import os
from pathlib import Path

from clocher_runtime.command.script_run import Report, needed, script
from clocher_runtime.config.values import integer, switch
from clocher_runtime.convert.q4.planes import CHUNK_ROWS, plan_q4

MAX_CHUNK_ROWS = 1_000_000

EXAMPLES = (
    (
        "All projections and the head",
        "CHUNK_ROWS=128 IE_Q4_INCLUDE_LM_HEAD=1 python scripts/gen_q4_bytes_stream.py \\\n"
        "    --hf-dir models/llama/hf --q4-bytes models/llama/model.q4.bin \\\n"
        "    --scales models/llama/model.q4.scales.fp16.bin \\\n"
        "    --manifest quant/q4_manifest.expanded.json",
    ),
)
EPILOG = f"""\b
Environment:
  IE_Q4_INCLUDE_LM_HEAD  1: the output head (lm_head.weight) too; default 0
  CHUNK_ROWS             rows that are encoded at a time, 1 to {MAX_CHUNK_ROWS} ({CHUNK_ROWS});
                         fewer take less memory, the bytes are the same

Killed at any moment, it leaves no manifest, and no files count without one. Run it again to go
on."""


@script(
    "gen_q4_bytes_stream",
    needed("--hf-dir", "The checkpoint, as hf_to_iebin.py takes it. It is only read."),
    needed("--q4-bytes", "File for the codes, usually model.q4.bin."),
    needed("--scales", "File for the scales, usually model.q4.scales.fp16.bin."),
    needed("--manifest", "File for the expanded manifest, which hf_to_iebin.py --q4-map takes."),
    examples=EXAMPLES,
    epilog=EPILOG,
)
def main(report: Report, hf_dir: Path, q4_bytes: Path, scales: Path, manifest: Path) -> None:
    """Encode the projections of a model (*_proj.weight, stored as floats) in Q4_0.

    Norms, biases, routers, embeddings and tensors that are already quantised are left out; the
    manifest says why, tensor by tensor.
    """
    head = switch().read(*_variable("IE_Q4_INCLUDE_LM_HEAD", "0"))
    rows = integer(1, MAX_CHUNK_ROWS).read(*_variable("CHUNK_ROWS", str(CHUNK_ROWS)))
    job = plan_q4(hf_dir, q4_bytes, scales, manifest, head, rows)
    if head and "lm_head.weight" not in job.names:
        kept = job.kept.get("lm_head.weight", "the embedding is the output head")
        report.note(f"note: IE_Q4_INCLUDE_LM_HEAD=1, but there is none to encode: {kept}")
    report.disk(job.source.path, q4_bytes.parent, job.nbytes, job.free_bytes)
    with report.progress(job.nbytes) as progress:
        resumed = job.run(progress)
    taken_over = f" ({resumed} taken over from a killed run)" if resumed else ""
    report.done(
        f"wrote {len(job.names)} matrices{taken_over} to {q4_bytes} and {scales}; "
        f"{len(job.kept)} tensors are left as they are; all in {manifest}"
    )


def _variable(name: str, default: str) -> tuple[str, str]:
    """Return the name and value of a variable; one that is set to nothing counts as not set."""
    return name, os.environ.get(name) or default


if __name__ == "__main__":
    main()
