"""A small hub on this machine that cuts, lies and goes away."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from huggingface_hub import constants
from weight_files import rng

COMMIT = "0123456789abcdef" * 2 + "01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "README.md": b"# tiny",
    "model.safetensors": rng("hub").bytes(8000),
    "pytorch.bin": b"a pickle",
    "original/config.json": b'{"another": 1}',
}


COMMIT_PATH = f"/own/tiny/resolve/{COMMIT}/"
INFO = "/api/models/own/tiny/revision/main"


class Hub:
    """What the server holds and how it behaves.

    Attributes:
        files: what it lists.
        sent: what it sends instead.
        info: what it says of the revision, if not the truth.
        listing: what it says of the files, if not the truth.
        statuses: status and error code of a path, if not what is right.
        cuts: after how many bytes it closes the next connections.
        stalls: path that it sends a part of, and the rest once `stalled` is set.
        requests: method and path of what it was asked.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = dict(FILES)
        self.sent: dict[str, bytes] = {}
        self.info = b""
        self.listing: list[dict[str, Any]] | None = None
        self.statuses: dict[str, tuple[int, str]] = {}
        self.cuts: list[int] = []
        self.stalls, self.stalled = "", threading.Event()
        self.requests: list[tuple[str, str]] = []
        self.endpoint = ""

    def fetched(self) -> list[str]:
        """Return the names of the files that were asked for."""
        wanted = [path for method, path in self.requests if method == "GET"]
        return [p.removeprefix(COMMIT_PATH) for p in wanted if p.startswith(COMMIT_PATH)]


def entry(name: str, data: bytes) -> dict[str, Any]:
    """Return what the hub's API says about a file."""
    found: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_hash(data)}
    if name.endswith(".safetensors"):
        sha256 = hashlib.sha256(data).hexdigest()
        found["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 134}
    return found


def tree_entry(name: str, data: bytes) -> dict[str, Any]:
    """Return what the hub's other API says about a file."""
    found = entry(name, data)
    found |= {"type": "file", "path": found.pop("rfilename"), "oid": found.pop("blobId")}
    if "lfs" in found:
        found["lfs"]["oid"] = found["lfs"].pop("sha256")
    return found


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            state.requests.append((self.command, path))
            if path in state.statuses:
                return self.answer(*state.statuses[path])
            if path == INFO and state.info:
                return self.answer(200, "", state.info)
            if path == INFO:
                siblings = state.listing or [entry(n, d) for n, d in state.files.items()]
                info = {"id": "own/tiny", "sha": COMMIT, "siblings": siblings}
                return self.answer(200, "", json.dumps(info).encode())
            if path == f"/api/models/own/tiny/tree/{COMMIT}":
                tree = [tree_entry(name, data) for name, data in state.files.items()]
                return self.answer(200, "", json.dumps(tree).encode())
            name = path.removeprefix(COMMIT_PATH)
            if name not in state.files:
                return self.answer(404, "RepoNotFound")
            return self.answer(200, "", state.sent.get(name, state.files[name]))

        def answer(self, status: int, code: str, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            name = unquote(self.path).removeprefix(COMMIT_PATH)
            if name in state.files:
                data = state.files[name]
                large = name.endswith(".safetensors")
                etag = hashlib.sha256(data).hexdigest() if large else git_hash(data)
                self.send_header("ETag", f'"{etag}"')
                self.send_header("X-Repo-Commit", COMMIT)
            if code:
                self.send_header("X-Error-Code", code)
            self.end_headers()
            if self.command == "HEAD":
                return
            if state.cuts and name in state.files:
                body = body[: state.cuts.pop()]
                self.close_connection = True
            if unquote(self.path.partition("?")[0]) == state.stalls:
                self.wfile.write(body[:1000])
                state.stalled.wait(30)
                body = body[1000:]
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    service = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.endpoint = f"http://127.0.0.1:{service.server_port}"
    thread = threading.Thread(target=service.serve_forever, args=(0.01,))
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        # What the library makes of the environment when it is loaded.
        patch.setattr(constants, "ENDPOINT", state.endpoint)
        template = state.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield state
    state.stalled.set()
    service.shutdown()
    thread.join()
    service.server_close()


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder without what the library keeps about them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {path: path.relative_to(folder).as_posix() for path in files}
    return {n: path.read_bytes() for path, n in names.items() if not n.startswith(".cache/")}
