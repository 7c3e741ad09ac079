"""Models of the Hugging Face hub: names, the local cache, and downloads that are checked.

    CACHE/models--OWNER--NAME/refs/REVISION          holds a commit
    CACHE/models--OWNER--NAME/snapshots/COMMIT/FILE  a link to what was downloaded

huggingface_hub is imported late because it is slow to load. Its own variables apply (HF_HUB_CACHE,
HF_ENDPOINT, HF_TOKEN, ...). Source: https://huggingface.co/docs/huggingface_hub/guides.
"""

import fnmatch
import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from clocher_kernels.errors import ClocherError, FormatError, ModelError, ModelNotFound, UsageError
from clocher_runtime.disk.output_file import check_free

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

MAIN = "main"
PATTERNS = (
    *("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "README.md", "USAGE_POLICY"),
    *("model*.safetensors", "adapter_model.safetensors"),
)
"""Downloaded by default: safetensors only; pickled files are never needed."""

_REPO = r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(
    rf"(?P<repo>{_REPO})(?:@(?P<revision>[A-Za-z0-9][\w./-]{{0,127}}?))?"
    r"(?:/(?P<file>[A-Za-z0-9][\w./-]{0,240}\.gguf))?",
    re.ASCII,
)
_PLACE = re.compile(r"(?:.*/)?models/(gpt-oss-(?:20|120)b)(?:/hf(?:/original)?)?/?", re.ASCII)
_URL = re.compile(
    rf"(?:https?:/{{1,2}})?(?:huggingface\.co|hf\.co)/({_REPO})(?:[/?#].*)?", re.ASCII
)
_COMMIT = re.compile("[0-9a-f]{40}")
_FOLDER = "models--"
_MOST_FOLDERS = 10_000
_REF_BYTES = 64
_SECRET = re.compile(r"hf_[A-Za-z0-9]{8,}|(?<=Bearer )\S+|(?<=://)[^/@\s]+(?=@)")


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
    folders = sorted(islice(cache.glob(f"{_FOLDER}*"), _MOST_FOLDERS))
    return {repo: folder for folder in folders if (repo := _repository(folder.name))}


def repository_of(path: Path) -> str | None:
    """Return the "owner/name" of a path in a cache snapshot; None elsewhere."""
    for parent in (path, *path.parents):
        if parent.parent.name == "snapshots":
            return _repository(parent.parents[1].name)
    return None


def folder_of(repo: str) -> Path:
    """Return the folder of a repository in the cache; it may not exist."""
    return cache_directory() / (_FOLDER + repo.replace("/", "--"))


def snapshot(name: HubName) -> Path | None:
    """Return the directory of a revision in the cache, or None."""
    folder, commit = folder_of(name.repo), name.revision
    if not _COMMIT.fullmatch(commit):
        commit = revisions(folder).get(name.revision, "")
    found = folder / "snapshots" / commit
    return found if commit and os.path.isdir(found) else None


def revisions(folder: Path) -> dict[str, str]:
    """Return the branches and tags of a repository's folder, with their commits."""
    refs = folder / "refs"
    found = {}
    for path in (Path(directory, name) for directory, _, names in os.walk(refs) for name in names):
        with suppress(OSError), path.open("rb") as file:
            commit = file.read(_REF_BYTES).decode("ascii", "replace").strip()
            if _COMMIT.fullmatch(commit):
                found[path.relative_to(refs).as_posix()] = commit
    return found


def _repository(folder: str) -> str | None:
    repo = folder.removeprefix(_FOLDER).replace("--", "/", 1)
    return repo if folder.startswith(_FOLDER) and re.fullmatch(_REPO, repo, re.ASCII) else None


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a revision: its path, size, and SHA-256 or git's SHA-1."""

    name: str
    nbytes: int
    digest: str

    def has_size(self, path: Path) -> bool:
        """Return whether a file on disk has this size."""
        return os.path.isfile(path) and os.path.getsize(path) == self.nbytes

    def matches(self, path: Path) -> bool:
        """Return whether a file on disk has this size and hash."""
        if not self.has_size(path):
            return False
        hasher = hashlib.sha256()
        if len(self.digest) == 40:
            hasher = hashlib.sha1(f"blob {self.nbytes}\0".encode(), usedforsecurity=False)
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, lambda: hasher).hexdigest() == self.digest


class Download:
    """A revision whose files can be fetched.

    `commit` is what the revision stands for now; `missing` are the `files` not there in the right
    size, and `nbytes` are still to come.
    """

    def __init__(
        self,
        repo: str,
        directory: Path | None,
        patterns: Sequence[str] = PATTERNS,
        revision: str = "main",
        subject: str = "",
    ) -> None:
        """Ask the hub what a revision holds, and check that the disk has room.

        `directory` None is the hub's cache. `patterns` without "/" match in the top folder only;
        `subject` is how messages begin. Raises UsageError, ModelNotFound, OSError, ModelError.
        """
        import huggingface_hub

        with _explained(subject or repo):
            info = huggingface_hub.HfApi().model_info(repo, revision=revision, files_metadata=True)
            self.repo, self.commit = repo, str(info.sha)
            if not _COMMIT.fullmatch(self.commit) or info.siblings is None:
                raise ModelError(f"{repo}: the hub's answer lists no files; is HF_ENDPOINT a hub?")
            wanted = (each for each in info.siblings if _wanted(each.rfilename, patterns))
            self.files = [_hub_file(each, repo) for each in wanted]
            if not self.files:
                raise UsageError(_nothing_matches(repo, patterns, info.siblings))
        self._directory, self._revision = directory, revision
        there = directory or snapshot(HubName(repo, self.commit))
        self.missing = [f for f in self.files if not (there and f.has_size(there / f.name))]
        self.nbytes = sum(file.nbytes for file in self.missing)
        check_free((directory or cache_directory()) / "file", self.nbytes)

    def run(self, checking: Callable[[str], None] | None = None, only: Sequence[str] = ()) -> Path:
        """Fetch and check all files, or `only` these; return their directory.

        `checking` gets their names.
        """
        import huggingface_hub

        files = [file for file in self.files if not only or file.name in only]
        with _explained(self.repo):
            folder = huggingface_hub.snapshot_download(
                self.repo,
                revision=self._revision,
                local_dir=self._directory,
                allow_patterns=[glob.escape(file.name) for file in files],
            )
        wrong = []
        for file in files:
            path = Path(folder, file.name)
            if not path.is_file():
                raise _unreachable(f"{self.repo}: {file.name} did not come")
            if checking:
                checking(file.name)
            if not file.matches(path):
                wrong.append(file.name)
                if not self._directory:
                    # In the cache the name is a link, and what is wrong is behind it.
                    path.resolve().unlink()
                path.unlink(missing_ok=True)
        if wrong:
            raise FormatError(
                f"{folder}: not what the hub lists, and removed: {', '.join(wrong)}; run it again "
                "to fetch them again"
            )
        return Path(folder)


def local_or_fetched(path: Path) -> Path:
    """Return a model's directory, downloaded if absent; offline, the cached copy is used."""
    name = path.as_posix()
    if not path.exists() and (repo := published_as(name)):
        return Download(repo, path, subject=f"{name}: no such directory; {repo}").run()
    if path.exists() or not re.fullmatch(_REPO, name, re.ASCII):
        return path
    try:
        subject = f"{name}: no such directory; as a name on the hub"
        return Download(name, None, subject=subject).run()
    except (UsageError, ConnectionError):
        if (folder := snapshot(HubName(name))) is None:
            raise
        return folder


def _nothing_matches(repo: str, patterns: Sequence[str], siblings: Sequence["RepoSibling"]) -> str:
    gguf = [item for item in siblings if item.rfilename.lower().endswith(".gguf")]
    if gguf and patterns == PATTERNS:
        sizes = [f"{item.rfilename!r} ({(item.size or 0) / 1e9:.1f} GB)" for item in gguf[:20]]
        return f"{repo}: GGUF files only; name one with --file: {', '.join(sizes)}"
    names = ", ".join(repr(item.rfilename) for item in siblings[:9])
    return f"{repo}: no file matches {', '.join(patterns)}; it has {names}"


def _wanted(name: str, patterns: Sequence[str]) -> bool:
    return any(
        fnmatch.fnmatchcase(name, pattern) and ("/" in pattern or "/" not in name)
        for pattern in patterns
    )


def _hub_file(item: "RepoSibling", repo: str) -> HubFile:
    name, nbytes = item.rfilename, item.size
    digest = str(item.lfs.sha256 if item.lfs else item.blob_id)
    plain = name.isprintable() and "\\" not in name and not {"", ".", ".."} & {*name.split("/")}
    hashed = re.fullmatch("[0-9a-f]{64}" if item.lfs else "[0-9a-f]{40}", digest)
    if not plain or not hashed or type(nbytes) is not int or nbytes < 0:
        raise ModelError(f"{repo}: the hub's description of {name!r:.80} is not understood")
    return HubFile(name, nbytes, digest)


@contextmanager
def _explained(subject: str) -> Iterator[None]:
    """Turn errors of the library and of the network below it into Clocher's."""
    try:
        yield
    except ClocherError:
        raise
    except Exception as error:
        raise _explanation(error, subject) from None


def _explanation(error: Exception, subject: str) -> Exception:
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        # After any failure the library looks for older files; the failure is what matters.
        error = error.__cause__
    first_line = _without_secrets(str(error).strip()).partition("\n")[0]
    reason = f"{type(error).__name__}: {first_line:.200}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return offline(subject, "HF_HUB_OFFLINE")
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        login = "log in with `hf auth login`, or set HF_TOKEN"
        text = f"{subject}: HTTP {status}"
        if isinstance(error, errors.GatedRepoError) or status == 403:
            return ModelNotFound(
                f"{text}: access must be asked for on the model's page; then {login}"
            )
        if status in (401, 404):
            return ModelNotFound(
                f"{text}: no such repository, revision or file; check the name, and for a private "
                f"model {login}"
            )
        return _unreachable(text)
    if isinstance(error, errors.HFValidationError):
        return UsageError(f"{subject}: {error}; expected owner/name")
    if isinstance(error, ValueError | KeyError | TypeError | AttributeError):
        return ModelError(f"{subject}: the hub's answer makes no sense ({reason})")
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return _unreachable(f"{subject}: the hub cannot be reached ({reason})")


def offline(subject: str, variable: str) -> UsageError:
    """Return the error for a download that a variable forbids."""
    return UsageError(
        f"{subject}: {variable}=1 forbids the network; unset it, or copy the files of the "
        "model from another machine (HF_HOME says where the cache is)"
    )


def _without_secrets(text: str) -> str:
    """Return a library's message with tokens and passwords removed."""
    import huggingface_hub

    for secret in (huggingface_hub.get_token(), os.environ.get("HF_TOKEN")):
        if secret:
            text = text.replace(secret, "***").replace(repr(secret)[1:-1], "***")
    return _SECRET.sub("***", text)


def _unreachable(message: str) -> ConnectionError:
    return ConnectionError(
        f"{message}; run it again, check the network and HF_ENDPOINT, or without a network copy "
        "the files of the model from another machine"
    )
