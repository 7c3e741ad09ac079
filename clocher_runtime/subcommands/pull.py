"""`clocher pull`: a model from the Hub, checked before and after the download."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clocher_kernels.errors import UsageError
from clocher_runtime.command.script_run import PATH, Report, option, script, switch
from clocher_runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from clocher_runtime.checkpoints.hf.hub import HubName

ENVIRONMENT = """\b
Environment:
  HF_HUB_CACHE    the cache; HF_HOME: where it is by default
  HF_ENDPOINT     address of the Hub or of a mirror
  HF_TOKEN        for models that are not public; or log in once with `hf auth login`
  HF_HUB_OFFLINE  1: do not use the network; so does CLOCHER_OFFLINE

Every file's size and hash are checked against what the Hub lists; a wrong file is removed. Killed
at any moment, run it again to go on: it keeps the files that are whole."""
_CODES = {
    ExitCode.USAGE: "a flag cannot be used, or HF_HUB_OFFLINE forbids the network",
    ExitCode.MODEL: "there is no such model, or it cannot run here (--anyway gets it)",
    ExitCode.DEVICE: "the network fails, or the disk is full or may not be written",
}
REVISION = option("--revision", str, "Branch, tag or commit.", default="main")
_SCRIPT = "python scripts/download_gpt_oss_20b.py"
ALLOW_HELP = "Shell pattern of wanted files, again for each. Without a slash: of the top folder."


@script(
    "clocher pull",
    click.Argument(["name"], metavar="OWNER/NAME", required=False),
    REVISION,
    option("--out-dir", PATH, "A directory for the files, in place of the Hub's cache."),
    option("--file", str, "One GGUF file of a repository that has several."),
    option("--allow", str, ALLOW_HELP, multiple=True),
    switch("--anyway", "Fetch it though this version cannot run it."),
    examples=(
        ("A model, then a chat with it", "clocher pull Qwen/Qwen3-0.6B"),
        ("", "clocher chat Qwen/Qwen3-0.6B"),
        ("One GGUF file of many", "clocher pull Qwen/Qwen3-0.6B-GGUF --file Qwen3-0.6B-Q8_0.gguf"),
        ("Into a directory", "clocher pull Qwen/Qwen3-0.6B --out-dir models/qwen3"),
    ),
    epilog=ENVIRONMENT,
    exit_codes=_CODES,
)
def pull(
    report: Report,
    name: str | None,
    revision: str,
    out_dir: Path | None,
    file: str | None,
    allow: tuple[str, ...],
    anyway: bool,
) -> None:
    """Get a model from the Hugging Face Hub into its local cache: config and safetensors.

    The config comes first: a model that cannot run here is refused before its weights are fetched.
    """
    if name is None:
        raise UsageError(
            "OWNER/NAME is missing; give the owner/name of a model on the Hub, such as "
            "Qwen/Qwen3-0.6B"
        )
    hub = _hub_name(name, revision, file)
    _fetch(report, hub, out_dir, allow, anyway)


COMMAND = pull
main = pull.run


@script(
    "download_gpt_oss_20b",
    option("--repo", str, "Which model.", default="openai/gpt-oss-20b"),
    REVISION,
    option("--out-dir", PATH, "Where the files go.", default=Path("models/gpt-oss-20b/hf")),
    option("--allow", str, ALLOW_HELP, multiple=True),
    examples=(
        ("All of it", f"{_SCRIPT}"),
        ("A part", f"{_SCRIPT} --allow '*.json' --allow 'model-00000*'"),
    ),
    epilog=ENVIRONMENT,
    exit_codes=_CODES,
)
def download(
    report: Report, repo: str, revision: str, out_dir: Path, allow: tuple[str, ...]
) -> None:
    """Download a model, checked file by file; `clocher pull` is the same for any."""
    from clocher_runtime.checkpoints.hf.hub import HubName

    _fetch(report, HubName(repo, revision), out_dir, allow, anyway=False)


def _fetch(
    report: Report, hub: "HubName", out_dir: Path | None, allow: tuple[str, ...], anyway: bool
) -> None:
    from clocher_runtime.command.fetching import fetch

    typed = fetch(report, hub, out_dir, allow, anyway)
    if not allow:
        report.note(f"next: clocher chat {typed}")


def _hub_name(text: str, revision: str, file: str | None) -> "HubName":
    from clocher_runtime.checkpoints.hf.hub import hub_name, repository_of_url

    hub = hub_name(repository_of_url(text) or text)
    if hub is None:
        raise UsageError(f"{text[:200]!r}: expected owner/name, as on the model's page on the Hub")
    if revision != "main":
        hub = replace(hub, revision=revision)
    if file is not None and not file.lower().endswith(".gguf"):
        raise UsageError(f"--file: got {file[:200]!r}, expected a GGUF file; see --allow")
    return replace(hub, file=file) if file is not None else hub
