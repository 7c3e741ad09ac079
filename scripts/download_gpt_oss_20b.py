"""Download gpt-oss-20b from the Hugging Face hub. The work is in weights.hub_download."""

import os
from pathlib import Path

import click

from clocher_kernels.errors import UsageError
from clocher_runtime.script_run import EXIT_CODES, reporting
from clocher_runtime.weights.hub_download import ENDPOINT, PATTERNS, plan_download

EPILOG = f"""\b
Examples:
  python scripts/download_gpt_oss_20b.py
  python scripts/download_gpt_oss_20b.py --allow '*.json' --allow 'model-00000*'

\b
Environment:
  HF_ENDPOINT     address of the hub or of a mirror; default {ENDPOINT}
  HF_HUB_OFFLINE  1: do not use the network; the script then only says so

{EXIT_CODES}
A file has its name only when its size and hash are what the hub lists. Killed or cut off at any
moment, run it again: it goes on where it stopped."""


@click.command(epilog=EPILOG, context_settings={"max_content_width": 100})
@click.option("--repo", default="openai/gpt-oss-20b", show_default=True, help="Which model.")
@click.option("--revision", default="main", show_default=True, help="Branch, tag or commit.")
@click.option(
    "--out-dir",
    type=click.Path(path_type=Path),
    default=Path("models/gpt-oss-20b/hf"),
    show_default=True,
    help="Where the files go.",
)
@click.option(
    "--allow",
    multiple=True,
    default=PATTERNS,
    show_default=True,
    help="Shell pattern of wanted files, again for each. Without a slash it is for the top folder.",
)
def main(repo: str, revision: str, out_dir: Path, allow: tuple[str, ...]) -> None:
    """Download a model (public ones only), checked file by file."""
    with reporting("download_gpt_oss_20b") as report:
        if os.environ.get("HF_HUB_OFFLINE") == "1":
            raise UsageError(
                "HF_HUB_OFFLINE=1 forbids the network; unset it, or copy the model from another "
                f"machine to {out_dir}"
            )
        endpoint = os.environ.get("HF_ENDPOINT") or ENDPOINT
        download = plan_download(repo, out_dir, revision, allow, endpoint)
        report.disk(Path(repo), out_dir, download.nbytes, download.free_bytes)
        with report.progress(download.nbytes) as progress:
            download.run(progress)
        report.done(
            f"{len(download.files)} files of {repo} at {download.commit} are in {out_dir}, "
            f"{len(download.missing)} of them new; all match their hashes"
        )


if __name__ == "__main__":
    main()
