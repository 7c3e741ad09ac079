"""Download gpt-oss-20b from the Hugging Face hub. The work is in weights.hub."""

from pathlib import Path

import click

from clocher_runtime.checkpoints.hf.hub import PATTERNS, plan_download
from clocher_runtime.command.script_run import EXIT_CODES, reporting

EPILOG = f"""\b
Examples:
  python scripts/download_gpt_oss_20b.py
  python scripts/download_gpt_oss_20b.py --allow '*.json' --allow 'model-00000*'

\b
Environment:
  HF_ENDPOINT     address of the hub or of a mirror
  HF_TOKEN        for models that are not public; or log in once with `hf auth login`
  HF_HUB_OFFLINE  1: do not use the network; the script then only says so

{EXIT_CODES}
Every file's size and hash are checked against what the hub lists; a wrong file is removed. Killed
at any moment, run it again: it keeps the files that are whole and fetches the others anew."""


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
    """Download a model, checked file by file."""
    with reporting("download_gpt_oss_20b") as report:
        download = plan_download(repo, out_dir, allow, revision)
        report.disk(Path(repo), out_dir, download.nbytes, download.free_bytes)
        download.run(lambda name: report.note(f"checking {name}"))
        report.done(
            f"{len(download.files)} files of {repo} at {download.commit} are in {out_dir}, "
            f"{len(download.missing)} of them new; all match their hashes"
        )


if __name__ == "__main__":
    main()
