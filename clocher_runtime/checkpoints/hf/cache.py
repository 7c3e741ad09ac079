"""The local cache of the Hugging Face hub (HF_HUB_CACHE, HF_HOME). Nothing is downloaded.

    CACHE/models--OWNER--NAME/refs/REVISION          holds a commit
    CACHE/models--OWNER--NAME/snapshots/COMMIT/FILE  a link to what was downloaded

Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

REPO = r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}"
MAIN = "main"

_NAME = re.compile(
    rf"(?P<repo>{REPO})(?:@(?P<revision>[A-Za-z0-9][\w./-]{{0,127}}?))?"
    r"(?:/(?P<file>[A-Za-z0-9][\w./-]{0,240}\.gguf))?",
    re.ASCII,
)
_PLACE = re.compile(r"(?:.*/)?models/(gpt-oss-(?:20|120)b)(?:/hf(?:/original)?)?/?", re.ASCII)
_URL = re.compile(rf"(?:https?:/{{1,2}})?(?:huggingface\.co|hf\.co)/({REPO})(?:[/?#].*)?", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")
_FOLDER = "models--"
_MOST_FOLDERS = 10_000
_REF_BYTES = 64


@dataclass(frozen=True, slots=True)
class HubName:
    """A parsed `owner/name[@revision][/file.gguf]`; `file` is "" for the whole repository."""

    repo: str
    revision: str = MAIN
    file: str = ""

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repo}{revision}{'/' if self.file else ''}{self.file}"


def hub_name(text: str) -> HubName | None:
    """Parse a hub name; None if it is not one."""
    found = _NAME.fullmatch(text)
    if found is None or ".." in text:
        return None
    return HubName(found["repo"], found["revision"] or MAIN, found["file"] or "")


def repository_of_url(text: str) -> str | None:
    """Return the "owner/name" of a hub URL; None if it is not one."""
    found = _URL.fullmatch(text)
    return found[1] if found else None


def published_as(path: str) -> str | None:
    """Return "owner/name" of a path that the guide uses, such as `models/gpt-oss-20b`, or None."""
    found = _PLACE.fullmatch(path)
    return f"openai/{found[1]}" if found else None


def cache_directory() -> Path:
    """Return the cache's path; it may not exist."""
    from huggingface_hub import constants  # late: a path needs no library

    return Path(constants.HF_HUB_CACHE).expanduser()


def repositories(cache: Path | None = None) -> dict[str, Path]:
    """Return the models of the cache, "owner/name" -> folder, sorted; none if unreadable."""
    cache = cache_directory() if cache is None else cache
    try:
        with os.scandir(cache) as entries:
            names = [entry.name for entry, _ in zip(entries, range(_MOST_FOLDERS), strict=False)]
    except OSError:
        return {}
    found = {_repository(name): cache / name for name in sorted(names)}
    return {repo: folder for repo, folder in found.items() if repo is not None}


def repository_of(path: Path) -> str | None:
    """Return the "owner/name" of a path in a cache snapshot; None elsewhere."""
    for parent in (path, *path.parents):
        if parent.parent.name == "snapshots":
            return _repository(parent.parents[1].name)
    return None


def snapshot(name: HubName, folder: Path | None = None) -> Path | None:
    """Return the directory of a revision in the cache, or None."""
    if folder is None:
        folder = cache_directory() / (_FOLDER + name.repo.replace("/", "--"))
    commit = name.revision
    if not _COMMIT.fullmatch(commit):
        commit = revisions(folder).get(name.revision, "")
    found = folder / "snapshots" / commit
    return found if commit and os.path.isdir(found) else None


def revisions(folder: Path) -> dict[str, str]:
    """Return the branches and tags of a repository's folder, with their commits."""
    refs = folder / "refs"
    found = {}
    for directory, _, names in os.walk(refs):
        for name in names:
            path = Path(directory, name)
            commit = _read_ref(path)
            if _COMMIT.fullmatch(commit):
                found[path.relative_to(refs).as_posix()] = commit
    return found


def _read_ref(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_REF_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _repository(folder: str) -> str | None:
    repo = folder.removeprefix(_FOLDER).replace("--", "/", 1)
    return repo if folder.startswith(_FOLDER) and re.fullmatch(REPO, repo, re.ASCII) else None
