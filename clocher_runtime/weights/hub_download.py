"""Downloading a model from the Hugging Face hub: resumed, checked, nothing accepted by halves.

Only the standard library and two addresses are used: the list of a revision's files with their
hashes, and the files. A file has its name only when its size and hash are right.
Source: https://huggingface.co/docs/hub/api and https://huggingface.co/docs/hub/en/models-downloading.
"""

import errno
import fnmatch
import hashlib
import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_runtime.weights.output_file import check_free, open_locked, sync_directory, write_all
from clocher_runtime.weights.strict_json import MAX_JSON_BYTES, parse_object

ENDPOINT = "https://huggingface.co"
PATTERNS = (
    "*.json",
    "*.jinja",
    "*.txt",
    "LICENSE*",
    "README.md",
    "USAGE_POLICY",
    "model*.safetensors",
)

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,99}", re.ASCII)
_PART = re.compile(r"[A-Za-z0-9_][\w.+ -]{0,200}", re.ASCII)
_TIMEOUT_S = 30
_ATTEMPTS = 5
_STEP = 1 << 20
_MAX_FILE_BYTES = 1 << 44


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a revision.

    Attributes:
        name: its path in the repository.
        nbytes: its size.
        sha256: its SHA-256 if the hub knows it (large files), else "".
        blob: otherwise the SHA-1 that git knows it by.
    """

    name: str
    nbytes: int
    sha256: str
    blob: str

    def hasher(self) -> Any:
        """Return what hashes the file's bytes to `digest`."""
        if self.sha256:
            return hashlib.sha256()
        return hashlib.sha1(f"blob {self.nbytes}\0".encode(), usedforsecurity=False)

    @property
    def digest(self) -> str:
        """The hash that the file must have."""
        return self.sha256 or self.blob


@dataclass(frozen=True, slots=True)
class Download:
    """A revision whose files can be fetched.

    Attributes:
        base: address of its files.
        commit: the revision's full name.
        out_dir: where the files will be.
        files: what is wanted.
        missing: those of it that are not there in the right size.
        nbytes: bytes that are still to come.
        free_bytes: bytes that the disk has for them.
    """

    base: str
    commit: str
    out_dir: Path
    files: tuple[HubFile, ...]
    missing: tuple[HubFile, ...]
    nbytes: int
    free_bytes: int

    def run(self, progress: Callable[[int, str], None] | None = None) -> None:
        """Fetch what is missing and check all of it.

        Args:
            progress: called with the bytes fetched so far and the name of the file.

        Raises:
            OSError: the hub cannot be reached any more, or the disk is full. What has come stays
                for the next run.
            FormatError: a file does not have the hash that the hub says; it is removed.
            UsageError: another process is downloading the same file.
        """
        done = 0

        def step(nbytes: int, name: str) -> None:
            nonlocal done
            done += nbytes
            if progress:
                progress(done, name)

        for file in self.files:
            path = self.out_dir / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            if file in self.missing:
                _fetch(f"{self.base}/{urllib.parse.quote(file.name)}", file, path, step)
            elif _digest(path, file) != file.digest:
                path.unlink()
                raise FormatError(f"{path}: damaged and removed; run it again to fetch it anew")


def plan_download(
    repo: str,
    out_dir: Path,
    revision: str = "main",
    patterns: Sequence[str] = PATTERNS,
    endpoint: str = ENDPOINT,
) -> Download:
    """Ask the hub what a revision holds, and check that the disk has room.

    Args:
        repo: "owner/name".
        out_dir: where the files will be.
        revision: branch, tag or commit.
        patterns: shell patterns of the wanted files; one without "/" is for the top folder only.
        endpoint: address of the hub.

    Raises:
        UsageError: a name is not one, there is no such repository or file, or no access to it.
        OSError: the hub cannot be reached, or the disk is too small.
        ModelError: the hub's answer makes no sense.
    """
    if not _REPO.fullmatch(repo) or ".." in repo:
        raise UsageError(f"--repo: got {repo!r:.80}, expected owner/name")
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise UsageError(f"--revision: got {revision!r:.80}, expected a branch, tag or commit")
    if urllib.parse.urlsplit(endpoint).scheme not in ("https", "http"):
        raise UsageError(f"HF_ENDPOINT: got {endpoint!r:.80}, expected an http(s) address")
    endpoint = endpoint.rstrip("/")
    quoted = urllib.parse.quote(revision, safe="")
    url = f"{endpoint}/api/models/{repo}/revision/{quoted}?blobs=true"
    with _open(url) as response:
        answer = parse_object(response.read(MAX_JSON_BYTES + 1), url)
    commit, siblings = answer.get("sha"), answer.get("siblings")
    if not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{40}", commit):
        raise ModelError(f"{url}: the answer names no commit; is HF_ENDPOINT a hub?")
    if not isinstance(siblings, list):
        raise ModelError(f"{url}: the answer lists no files")
    items = [item for item in siblings if isinstance(item, dict)]
    files = [_hub_file(item, url) for item in items if _wanted(item.get("rfilename"), patterns)]
    if not files:
        names = ", ".join(str(item.get("rfilename")) for item in items[:9])
        raise UsageError(f"{repo}: no file matches {', '.join(patterns)}; it has {names}")
    missing = [file for file in files if _size(out_dir / file.name) != file.nbytes]
    have = sum(max(0, min(_size(_partial(out_dir / f.name)), f.nbytes)) for f in missing)
    left = sum(file.nbytes for file in missing) - have
    free = check_free(out_dir / "file", left)
    base = f"{endpoint}/{repo}/resolve/{commit}"
    return Download(base, commit, out_dir, tuple(files), tuple(missing), left, free)


def _wanted(name: object, patterns: Sequence[str]) -> bool:
    if not isinstance(name, str):
        return False
    return any(
        fnmatch.fnmatchcase(name, pattern) and ("/" in pattern or "/" not in name)
        for pattern in patterns
    )


def _hub_file(item: dict[str, Any], url: str) -> HubFile:
    name, nbytes, blob = item["rfilename"], item.get("size"), item.get("blobId")
    lfs = item.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else ""
    sound = (
        all(_PART.fullmatch(part) for part in name.split("/"))
        and not name.endswith(".partial")
        and type(nbytes) is int
        and 0 <= nbytes <= _MAX_FILE_BYTES
        and isinstance(sha256, str)
        and re.fullmatch("[0-9a-f]{64}|", sha256)
        and (sha256 or (isinstance(blob, str) and re.fullmatch("[0-9a-f]{40}", blob)))
    )
    if not sound:
        raise ModelError(f"{url}: the answer describes {name!r:.80} in a way that is not known")
    return HubFile(name, int(nbytes or 0), str(sha256), str(blob))


def _fetch(url: str, file: HubFile, path: Path, step: Callable[[int, str], None]) -> None:
    partial = _partial(path)
    descriptor = open_locked(partial)
    try:
        for attempt in range(_ATTEMPTS):
            try:
                _receive(url, file, descriptor, partial, step)
                break
            except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
                if attempt == _ATTEMPTS - 1:
                    reason = str(error) or type(error).__name__
                    raise ConnectionError(errno.ECONNRESET, reason) from None
        if _digest(partial, file) != file.digest:
            partial.unlink()
            raise FormatError(f"{path}: what came is not what the hub lists; run it again")
        os.fsync(descriptor)
        os.replace(partial, path)
        sync_directory(path.parent)
    finally:
        os.close(descriptor)


def _receive(
    url: str, file: HubFile, descriptor: int, path: Path, step: Callable[[int, str], None]
) -> None:
    """Append what is missing of a file."""
    have = os.fstat(descriptor).st_size
    if have > file.nbytes:
        have = 0
    if have < file.nbytes:
        with _open(url, have) as response:
            if response.status != http.HTTPStatus.PARTIAL_CONTENT:
                have = 0
            os.ftruncate(descriptor, have)
            os.lseek(descriptor, have, os.SEEK_SET)
            while have <= file.nbytes and (data := response.read(_STEP)):
                write_all(descriptor, memoryview(data), path)
                have += len(data)
                step(len(data), file.name)
        if have < file.nbytes:
            raise ConnectionError(f"{url}: {have} of {file.nbytes} bytes came; run it again")
    os.ftruncate(descriptor, file.nbytes)


def _open(url: str, start: int = 0) -> Any:
    """Open an address; say what a failure means."""
    headers = {"User-Agent": "clocher", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            raise UsageError(
                f"{url}: HTTP {error.code}: no such repository, revision or file, or access to it "
                "must be asked for on the hub; public models only"
            ) from None
        raise ConnectionError(errno.ECONNREFUSED, f"{url}: HTTP {error.code}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(
            errno.ENETUNREACH,
            f"{url}: cannot be reached: {reason}; without a network, copy the files of the model "
            "from another machine",
        ) from None


def _digest(path: Path, file: HubFile) -> str:
    digest = file.hasher()
    with path.open("rb") as stream:
        while data := stream.read(_STEP):
            digest.update(data)
    return str(digest.hexdigest())


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1
