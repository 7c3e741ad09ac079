"""Download gpt-oss-20b from the Hugging Face hub. The work is in subcommands.pull."""

from pathlib import Path

from clocher_runtime.checkpoints.hf.cache import HubName
from clocher_runtime.command.script_run import PATH, Report, option, script
from clocher_runtime.subcommands.pull import (
    ALLOW_HELP,
    ENVIRONMENT,
    PULL_EXIT_CODES,
    REVISION,
    fetch,
)

EXAMPLES = (
    ("All of it", "python scripts/download_gpt_oss_20b.py"),
    ("A part", "python scripts/download_gpt_oss_20b.py --allow '*.json' --allow 'model-00000*'"),
)


@script(
    "download_gpt_oss_20b",
    option("--repo", str, "Which model.", default="openai/gpt-oss-20b"),
    REVISION,
    option("--out-dir", PATH, "Where the files go.", default=Path("models/gpt-oss-20b/hf")),
    option("--allow", str, ALLOW_HELP, multiple=True),
    examples=EXAMPLES,
    epilog=ENVIRONMENT,
    exit_codes=PULL_EXIT_CODES,
)
def main(report: Report, repo: str, revision: str, out_dir: Path, allow: tuple[str, ...]) -> None:
    """Download a model, checked file by file; `clocher pull` is the same for any."""
    fetch(report, HubName(repo, revision), out_dir, allow, anyway=False)


if __name__ == "__main__":
    main()
