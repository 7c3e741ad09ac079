"""`clocher pull`: a model from the Hub, checked before and after the download."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from clocher_kernels.errors import UsageError
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import option, place, script, switch
from clocher_runtime.command.parameters import PATH
from clocher_runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from clocher_runtime.checkpoints.hf.hub import HubName


@script(
    "clocher pull",
    *place("OWNER/NAME", "--repo", "Such as Qwen/Qwen3-0.6B.", str),
    option("--revision", str, "Branch, tag or commit.", default="main"),
    option("--out-dir", PATH, "A directory for the files, in place of the Hub's cache."),
    option("--file", str, "One GGUF file of a repository that has several."),
    option(
        "--allow",
        str,
        "Shell pattern of wanted files, again for each. Without a slash: of the top folder.",
        multiple=True,
    ),
    switch("--anyway", "Fetch it though this version cannot run it."),
    examples=(
        ("A model, then a chat with it", "clocher pull Qwen/Qwen3-0.6B"),
        ("", "clocher chat Qwen/Qwen3-0.6B"),
        ("One GGUF file of many", "clocher pull Qwen/Qwen3-0.6B-GGUF --file Qwen3-0.6B-Q8_0.gguf"),
        ("Into a directory", "clocher pull Qwen/Qwen3-0.6B --out-dir models/qwen3"),
    ),
    epilog="""\b
Environment:
  HF_HUB_CACHE    the cache; HF_HOME: where it is by default
  HF_ENDPOINT     address of the Hub or of a mirror
  HF_TOKEN        for models that are not public; or log in once with `hf auth login`
  HF_HUB_OFFLINE  1: do not use the network; so does CLOCHER_OFFLINE

Every file's size and hash are checked against what the Hub lists; a wrong file is removed. Killed
at any moment, run it again to go on: it keeps the files that are whole.""",
    exit_codes={
        ExitCode.USAGE: "a flag cannot be used, or HF_HUB_OFFLINE forbids the network",
        ExitCode.MODEL: "there is no such model, or it cannot run here (--anyway gets it)",
        ExitCode.DEVICE: "the network fails, or the disk is full or may not be written",
    },
)
def pull(
    console: Console,
    repo: str,
    revision: str,
    out_dir: Path | None,
    file: str | None,
    allow: tuple[str, ...],
    anyway: bool,
) -> None:
    """Get a model from the Hugging Face Hub into its local cache: config and safetensors.

    The config comes first: a model that cannot run here is refused before its weights are fetched.
    """
    from clocher_runtime.command.fetching import fetch

    typed = fetch(console, _hub_name(repo, revision, file), out_dir, allow, anyway)
    if not allow:
        console.note(f"next: clocher chat {typed}")


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
