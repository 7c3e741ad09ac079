"""Download gpt-oss-20b from the Hugging Face hub. The work is in weights.hub."""

from pathlib import Path

from clocher_runtime.checkpoints.hf.hub import PATTERNS, plan_download
from clocher_runtime.command.script_run import EXIT_CODES, PATH, Report, option, script

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


@script(
    "download_gpt_oss_20b",
    EPILOG,
    option("--repo", str, "Which model.", default="openai/gpt-oss-20b"),
    option("--revision", str, "Branch, tag or commit.", default="main"),
    option("--out-dir", PATH, "Where the files go.", default=Path("models/gpt-oss-20b/hf")),
    option(
        "--allow",
        str,
        "Shell pattern of wanted files, again for each. Without a slash it is for the top folder.",
        multiple=True,
        default=PATTERNS,
    ),
)
def main(report: Report, repo: str, revision: str, out_dir: Path, allow: tuple[str, ...]) -> None:
    """Download a model, checked file by file."""
    download = plan_download(repo, out_dir, allow, revision)
    report.disk(repo, out_dir, download.nbytes, download.free_bytes)
    download.run(lambda name: report.note(f"checking {name}"))
    report.done(
        f"{len(download.files)} files of {repo} at {download.commit} are in {out_dir}, "
        f"{len(download.missing)} of them new; all match their hashes"
    )


if __name__ == "__main__":
    main()
