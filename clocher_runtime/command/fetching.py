"""Models that are not here yet: `clocher pull`, and what other commands offer to fetch."""

import glob
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from clocher_kernels.errors import ModelError, UnsupportedModel, UsageError, counted
from clocher_runtime.command.console import Console, is_terminal, size
from clocher_runtime.command.flags import option, place, script, switch
from clocher_runtime.command.parameters import PATH
from clocher_runtime.config.commands import Config
from clocher_runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from clocher_runtime.checkpoints.hf.hub import Download, HubName

_TRUE = ("1", "on", "yes", "true")


def is_set(*variables: str) -> str:
    """Return which of some 0/1 variables is set to 1; else ""."""
    return next((each for each in variables if os.environ.get(each, "").lower() in _TRUE), "")


def with_model(config: Config, console: Console) -> Config:
    """Return the configuration of a command with a model that is here, if it can be had.

    A repository of the Hub is fetched with --yes, or after a question on a terminal. Without a
    model it is the default one.
    """
    if config.model_dir is not None:
        _offer(config.model_dir, console, config.yes)
        return config
    from clocher_runtime.checkpoints.checkpoint import JSON_NAME

    named = config.model_json or config.model_bin or config.stub or config.require_model
    if named or os.path.isfile(JSON_NAME) or is_set("CLOCHER_EMBEDDED"):
        return config
    from clocher_runtime.checkpoints.locate import DEFAULT
    from clocher_runtime.command.default_model import NotFetched, fetch_default

    try:
        fetch_default(console)
    except NotFetched as reason:
        console.say(
            f"SmolLM2-135M-Instruct is not here and cannot be fetched ({reason}); the model that "
            "ships with Clocher serves, which only completes Python"
        )
        return config
    return replace(config, model_dir=Path(DEFAULT))


def _offer(model: Path, console: Console, yes: bool) -> None:
    if os.path.exists(model) or os.path.isdir(model.parent):
        return
    from clocher_runtime.checkpoints.hf.hub import hub_name, snapshot

    hub = hub_name(os.fspath(model))
    if hub is None:
        return
    folder = snapshot(hub)
    if folder is not None and (not hub.file or os.path.isfile(folder / hub.file)):
        return
    if not yes and is_terminal(sys.stdin) and is_terminal(sys.stderr):
        sys.stderr.write(
            f"{console.name}: {hub} is not on this machine; fetch it from the Hub? [y/N] "
        )
        sys.stderr.flush()
        yes = sys.stdin.readline().strip().lower() in ("y", "yes")
    if yes:
        fetch(console, hub)


def fetch(
    console: Console,
    hub: "HubName",
    out_dir: Path | None = None,
    allow: Sequence[str] = (),
    anyway: bool = False,
) -> str:
    """Download missing files of a model, with reports; return what `clocher chat` takes then.

    Raises ModelError, UsageError, OSError.
    """
    from clocher_runtime.checkpoints import open_checkpoint
    from clocher_runtime.checkpoints.hf import hub as cache
    from clocher_runtime.checkpoints.locate import ADAPTER_CONFIG, DEFAULT, base_of
    from clocher_runtime.command.default_model import fetch_default

    if DEFAULT.startswith(f"{hub.repo}/"):
        fetch_default(console)
        return DEFAULT

    patterns = allow or ((glob.escape(hub.file),) if hub.file else cache.PATTERNS)
    try:
        if variable := is_set("CLOCHER_OFFLINE"):
            raise cache.offline(hub.repo, variable)
        download = cache.Download(hub.repo, out_dir, patterns, hub.revision)
    except (UsageError, ConnectionError):
        if out_dir is None and cache.snapshot(hub) is not None:
            console.note(f"note: {hub} is in the cache already: clocher chat {hub}")
        raise
    if not (allow or hub.file) and (refusal := _refusal(console, download)):
        if not anyway:
            raise type(refusal)(f"{refusal}; nothing was fetched, --anyway fetches it all the same")
        console.note(f"note: it cannot run here: {refusal}")
    target = out_dir or cache.cache_directory()
    console.disk(str(hub), target, download.nbytes)
    folder = download.run(lambda name: console.note(f"checking {name}"))
    console.say(
        f"{counted(len(download.files), 'file')} of {hub.repo} at {download.commit} in {folder}, "
        f"{len(download.missing)} of them new; all match their hashes"
    )
    if hub.file:
        open_checkpoint(folder / hub.file)  # its header shows whether it can run
    typed = shlex.quote(str(hub) if out_dir is None else str(out_dir / hub.file))
    if any(file.name == ADAPTER_CONFIG for file in download.files):
        return f"{shlex.quote(base_of(folder) or 'BASE')} --lora {typed}"
    return typed


def _refusal(console: Console, download: "Download") -> ModelError | None:
    """Return why a model cannot run, by its config; else report what it is, and whether it fits."""
    from clocher_kernels.guards import available
    from clocher_runtime.checkpoints.hf.checkpoint import check_config
    from clocher_runtime.checkpoints.locate import ADAPTER_CONFIG, base_of
    from clocher_runtime.disk.files import read_bytes
    from clocher_runtime.disk.strict_json import parse_object
    from clocher_runtime.engine.footprint import expected_bytes
    from clocher_runtime.models.families import spec_from_config

    repo, sizes = download.repo, {file.name: file.nbytes for file in download.files}
    if not sizes.keys() & {"config.json", ADAPTER_CONFIG}:
        return UnsupportedModel(
            f"{repo}: no config.json; is it a model's repository? --allow PATTERN fetches files of "
            "any"
        )
    folder = download.run(only=("config.json", ADAPTER_CONFIG))
    if ADAPTER_CONFIG in sizes:
        base = base_of(folder) or "its base"
        console.note(f"{repo}: a LoRA adapter of {base}, which has to be fetched as well")
        return None
    weights = [nbytes for name, nbytes in sizes.items() if name.endswith(".safetensors")]
    if not weights:
        return UnsupportedModel(f"{repo}: no model*.safetensors; pickled weights are not fetched")
    try:
        data = read_bytes(folder / "config.json", 16_000_000)
        config = parse_object(data, f"{repo}: config.json")
        spec = spec_from_config(config)
        check_config(config, repo)
    except ModelError as error:
        return error
    needed, left = expected_bytes(spec, sum(weights)), available()
    fits = "fits"
    if left is not None and needed > left:
        fits = "does not fit, weights are read from disk again and again"
    fits = "" if left is None else f", {size(left)} available: {fits}"
    console.note(
        f"{repo}: {spec.family}, {spec.num_layers} layers, {size(sum(weights))} of weights; "
        f"a run needs {size(needed)} of memory{fits}"
    )
    return None


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
    from clocher_runtime.checkpoints.hf.hub import hub_name, repository_of_url

    hub = hub_name(repository_of_url(repo) or repo)
    if hub is None:
        raise UsageError(f"{repo[:200]!r}: expected owner/name, as on the model's page on the Hub")
    if file is not None and not file.lower().endswith(".gguf"):
        raise UsageError(f"--file: got {file[:200]!r}, expected a GGUF file; see --allow")
    given = {"revision": revision} if revision != "main" else {}
    given |= {"file": file} if file is not None else {}
    typed = fetch(console, replace(hub, **given), out_dir, allow, anyway)
    if not allow:
        console.note(f"next: clocher chat {typed}")
