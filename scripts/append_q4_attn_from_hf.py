"""Append attention matrices in Q4_0. The work is in clocher_runtime.convert.q4.append."""

from pathlib import Path

import click

from clocher_runtime.command.script_run import EXIT_CODES, reporting
from clocher_runtime.convert.q4.append import plan_append

EPILOG = f"""\b
Example:
  python scripts/append_q4_attn_from_hf.py --hf-dir models/llama/hf \\
      --compat-json models/llama/model.ie.compat.json --q4-bin models/llama/model.q4.bin
  clocher-run --model-json models/llama/model.ie.compat.json

{EXIT_CODES}
Killed at any moment, it leaves an index of the matrices that are finished. Run it again to go
on."""


@click.command(epilog=EPILOG, context_settings={"max_content_width": 100})
@click.option(
    "--hf-dir",
    type=click.Path(path_type=Path),
    required=True,
    help="The checkpoint that the model was made of. It is only read.",
)
@click.option(
    "--compat-json",
    type=click.Path(path_type=Path),
    required=True,
    help="model.ie.compat.json, as scripts/rebuild_dedup_and_quant.sh makes it.",
)
@click.option(
    "--q4-bin",
    type=click.Path(path_type=Path),
    required=True,
    help="model.q4.bin in the same directory; the scales go to model.q4.scales.fp16.bin beside it.",
)
def main(hf_dir: Path, compat_json: Path, q4_bin: Path) -> None:
    """Append to an index the attention projections (self_attn q, k, v, o) that it lacks in Q4_0."""
    with reporting("append_q4_attn_from_hf") as report:
        job = plan_append(hf_dir, compat_json, q4_bin)
        report.disk(job.source.path, compat_json.parent, job.nbytes, job.free_bytes)
        with report.progress(job.nbytes) as progress:
            job.run(progress)
        report.done(
            f"appended {len(job.names)} matrices to {q4_bin}; {len(job.present)} were there already"
        )


if __name__ == "__main__":
    main()
