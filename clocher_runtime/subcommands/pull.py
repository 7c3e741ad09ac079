"""`clocher pull`: a model from the Hub, checked before and after the download."""

import glob
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clocher_kernels.errors import UnsupportedModel, UsageError
from clocher_runtime.command.script_run import PATH, Report, option, script, size, switch
from clocher_runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from clocher_runtime.checkpoints.hf.cache import HubName
    from clocher_runtime.checkpoints.hf.hub import Download

ENVIRONMENT = """\b
Environment:
  HF_HUB_CACHE    the cache; HF_HOME: where it is by default
  HF_ENDPOINT     address of the Hub or of a mirror
  HF_TOKEN        for models that are not public; or log in once with `hf auth login`
  HF_HUB_OFFLINE  1: do not use the network

Every file's size and hash are checked against what the Hub lists; a wrong file is removed. Killed
at any moment, run it again: it keeps the files that are whole and fetches the others anew."""
PULL_EXIT_CODES = (
    (ExitCode.OK, "done"),
    (ExitCode.USAGE, "a flag cannot be used, or HF_HUB_OFFLINE forbids the network"),
    (ExitCode.MODEL, "there is no such model, or it cannot run here (--anyway gets it)"),
    (ExitCode.DEVICE, "the network fails, or the disk is full or may not be written"),
    (ExitCode.MISMATCH, "--check: a file is not what the Hub lists"),
    (ExitCode.INTERRUPTED, "interrupted; run it again to go on"),
)
REVISION = option("--revision", str, "Branch, tag or commit.", default="main")
_SCRIPT = "python scripts/download_gpt_oss_20b.py"
ALLOW_HELP = "Shell pattern of wanted files, again for each. Without a slash: of the top folder."


@script(
    "clocher pull",
    click.argument("name", metavar="OWNER/NAME", required=False),
    REVISION,
    option("--out-dir", PATH, "A directory for the files, in place of the Hub's cache."),
    option("--file", str, "One GGUF file of a repository that has several."),
    option("--allow", str, ALLOW_HELP, multiple=True),
    switch("--anyway", "Fetch it though this version cannot run it."),
    switch("--check", "Fetch nothing: check the hashes of what is in the cache, or --out-dir."),
    examples=(
        ("A model, then a chat with it", "clocher pull Qwen/Qwen3-0.6B"),
        ("", "clocher chat Qwen/Qwen3-0.6B"),
        ("One GGUF file of many", "clocher pull Qwen/Qwen3-0.6B-GGUF --file Qwen3-0.6B-Q8_0.gguf"),
        ("Into a directory", "clocher pull Qwen/Qwen3-0.6B --out-dir models/qwen3"),
        ("Are the files still what they were?", "clocher pull --check Qwen/Qwen3-0.6B"),
    ),
    epilog=ENVIRONMENT,
    exit_codes=PULL_EXIT_CODES,
)
def pull(
    report: Report,
    name: str | None,
    revision: str,
    out_dir: Path | None,
    file: str | None,
    allow: tuple[str, ...],
    anyway: bool,
    check: bool,
) -> int:
    """Get a model from the Hugging Face Hub into its local cache: config and safetensors.

    The config comes first: a model that cannot run here is refused before its weights are fetched.
    """
    if name is None:
        raise UsageError(
            "OWNER/NAME is missing; give the owner/name of a model on the Hub, such as "
            "Qwen/Qwen3-0.6B"
        )
    hub = _hub_name(name, revision, file)
    if check:
        return _check(report, hub, out_dir)
    fetch(report, hub, out_dir, allow, anyway)
    return ExitCode.OK


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
    exit_codes=PULL_EXIT_CODES,
)
def download(
    report: Report, repo: str, revision: str, out_dir: Path, allow: tuple[str, ...]
) -> None:
    """Download a model, checked file by file; `clocher pull` is the same for any."""
    from clocher_runtime.checkpoints.hf.cache import HubName

    fetch(report, HubName(repo, revision), out_dir, allow, anyway=False)


def fetch(
    report: Report, hub: "HubName", out_dir: Path | None, allow: Sequence[str], anyway: bool
) -> None:
    """Download missing files of a model, with reports; raises ModelError, UsageError, OSError."""
    from clocher_runtime.checkpoints import open_checkpoint
    from clocher_runtime.checkpoints.hf.cache import cache_directory, snapshot
    from clocher_runtime.checkpoints.hf.foreign import ADAPTER_CONFIG, base_of
    from clocher_runtime.checkpoints.hf.hub import PATTERNS, plan_download

    patterns = allow or ((glob.escape(hub.file),) if hub.file else PATTERNS)
    try:
        download = plan_download(hub.repo, out_dir, patterns, hub.revision)
    except (UsageError, ConnectionError):
        if out_dir is None and snapshot(hub) is not None:
            report.note(f"note: {hub} is in the cache already: clocher chat {hub}")
        raise
    if not (allow or hub.file):
        _look_ahead(report, download, anyway)
    target = out_dir or cache_directory()
    report.disk(str(hub), target, download.nbytes, download.free_bytes)
    folder = download.run(lambda name: report.note(f"checking {name}"))
    report.done(
        f"{len(download.files)} files of {hub.repo} at {download.commit} are in {folder}, "
        f"{len(download.missing)} of them new; all match their hashes"
    )
    if hub.file:
        open_checkpoint(folder / hub.file)  # its header shows whether it can run
    if not allow:
        typed = shlex.quote(str(hub) if out_dir is None else str(out_dir / hub.file))
        is_adapter = any(file.name == ADAPTER_CONFIG for file in download.files)
        if is_adapter:
            typed = f"{shlex.quote(base_of(folder) or 'BASE')} --lora {typed}"
        report.note(f"next: clocher chat {typed}")


def _hub_name(text: str, revision: str, file: str | None) -> "HubName":
    from clocher_runtime.checkpoints.hf.cache import hub_name, repository_of_url

    hub = hub_name(repository_of_url(text) or text)
    if hub is None:
        raise UsageError(f"{text[:200]!r}: expected owner/name, as on the model's page on the Hub")
    if revision != "main":
        hub = replace(hub, revision=revision)
    if file is not None and not file.lower().endswith(".gguf"):
        raise UsageError(f"--file: got {file[:200]!r}, expected a GGUF file; see --allow")
    return replace(hub, file=file) if file is not None else hub


def _look_ahead(report: Report, download: "Download", anyway: bool) -> None:
    from clocher_runtime.checkpoints.hf.foreign import ADAPTER_CONFIG, base_of

    names = {file.name for file in download.files}
    has_weights = any(name.endswith(".safetensors") for name in names)
    small = [file for file in download.files if file.name in ("config.json", ADAPTER_CONFIG)]
    folder = replace(download, files=tuple(small)).run() if small else None
    refusal: Exception | None = None
    if folder is not None and ADAPTER_CONFIG in names:
        base = base_of(folder) or "its base"
        report.note(f"{download.repo}: a LoRA adapter of {base}, which has to be fetched as well")
        return
    if "config.json" not in names:
        refusal = UnsupportedModel(
            f"{download.repo}: no config.json; is it a model's repository? --allow PATTERN fetches "
            "files of any"
        )
    elif not has_weights:
        refusal = UnsupportedModel(
            f"{download.repo}: no model*.safetensors; pickled weights are not fetched"
        )
    elif folder is not None:
        refusal = _refusal(report, folder / "config.json", download)
    if refusal is None:
        return
    if not anyway:
        raise type(refusal)(f"{refusal}; nothing was fetched, --anyway fetches it all the same")
    report.note(f"note: it cannot run here: {refusal}")


def _refusal(report: Report, path: Path, download: "Download") -> Exception | None:
    """Return why a model cannot run; else report what it is and whether it fits."""
    from clocher_kernels.errors import ModelError
    from clocher_kernels.guards import available
    from clocher_runtime.checkpoints.hf.checkpoint import check_config
    from clocher_runtime.disk.files import read_bytes
    from clocher_runtime.disk.strict_json import parse_object
    from clocher_runtime.engine.footprint import expected_bytes
    from clocher_runtime.models.families import spec_from_config

    try:
        config = parse_object(read_bytes(path, 16_000_000), f"{download.repo}: config.json")
        spec = spec_from_config(config)
        check_config(config, download.repo)
    except ModelError as error:
        return error
    weights = sum(f.nbytes for f in download.files if f.name.endswith(".safetensors"))
    needed, left = expected_bytes(spec, weights), available()
    fits = "fits"
    if left is not None and needed > left:
        fits = "does not fit, weights are read from disk again and again"
    fits = "" if left is None else f", {size(left)} available: {fits}"
    report.note(
        f"{download.repo}: {spec.family}, {spec.num_layers} layers, {size(weights)} of weights; "
        f"a run needs {size(needed)} of memory{fits}"
    )
    return None


def _check(report: Report, hub: "HubName", out_dir: Path | None) -> int:
    from clocher_runtime.checkpoints import open_checkpoint
    from clocher_runtime.checkpoints.hf.cache import snapshot
    from clocher_runtime.checkpoints.hf.hub import stored_hashes
    from clocher_runtime.checkpoints.locate import locate

    folder = out_dir or snapshot(hub)
    if folder is None:
        locate(str(hub), "")  # reports missing files and the next step
    assert folder is not None
    files = stored_hashes(folder)
    if hub.file:
        files = [each for each in files if each.name == hub.file]
    if not files:
        raise UsageError(f"{folder}: nothing there came from the Hub, so no hashes are known")
    wrong = []
    for each in files:
        report.note(f"checking {each.name}")
        if not each.matches(folder / each.name):
            wrong.append(each.name)
    if wrong:
        report.done(
            f"error: {len(wrong)} of {len(files)} files are not what was fetched: "
            f"{', '.join(wrong[:5])}; run `clocher pull {hub.repo}` to fetch them anew"
        )
        return ExitCode.MISMATCH
    open_checkpoint(folder / hub.file)  # whole, not only unharmed
    report.done(f"{len(files)} files of {hub} in {folder}: all match their hashes")
    return ExitCode.OK
