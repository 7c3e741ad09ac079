"""Downloading: a small hub on this machine that cuts, lies and goes away."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from weight_files import ROOT, rng

from clocher_kernels.errors import FormatError, ModelError, UsageError
from clocher_runtime.weights import hub_download as hub
from clocher_runtime.weights.hub_download import plan_download

SCRIPT = ROOT / "scripts" / "download_gpt_oss_20b.py"
COMMIT = "0123456789abcdef" * 2 + "01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "README.md": b"# tiny",
    "model.safetensors": rng("hub").bytes(8000),
    "pytorch.bin": b"a pickle",
    "original/config.json": b'{"another": 1}',
}


class Hub:
    """What the server holds and how it behaves."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = dict(FILES)
        self.listing: list[dict[str, Any]] | None = None
        self.cut_after: int | None = None
        self.cuts_left = 0
        self.ignores_ranges = False
        self.requests: list[tuple[str, str]] = []
        self.endpoint = ""

    def siblings(self) -> list[dict[str, Any]]:
        return self.listing or [entry(name, data) for name, data in self.files.items()]


def entry(name: str, data: bytes) -> dict[str, Any]:
    """Return what the hub's API says about a file."""
    found: dict[str, Any] = {"rfilename": name, "size": len(data)}
    found["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if name.endswith(".safetensors"):
        found["blobId"] = "0" * 40
        found["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    return found


@pytest.fixture
def server() -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.requests.append((self.path, self.headers.get("Range", "")))
            if self.path == "/api/models/own/tiny/revision/main?blobs=true":
                body = json.dumps({"sha": COMMIT, "siblings": state.siblings()}).encode()
                return self.answer(200, body)
            name = self.path.removeprefix(f"/own/tiny/resolve/{COMMIT}/")
            if name not in state.files:
                return self.answer(404, b"")
            data, status = state.files[name], 200
            start = re.fullmatch("bytes=([0-9]+)-", self.headers.get("Range", ""))
            if start and not state.ignores_ranges:
                data, status = data[int(start[1]) :], 206
            return self.answer(status, data)

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if state.cuts_left and status != 404 and "/resolve/" in self.path:
                state.cuts_left -= 1
                body = body[: state.cut_after]
                self.close_connection = True
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    service = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.endpoint = f"http://127.0.0.1:{service.server_port}"
    thread = threading.Thread(target=service.serve_forever, args=(0.01,))
    thread.start()
    yield state
    service.shutdown()
    thread.join()
    service.server_close()


def fetch(server: Hub, out: Path, **options: Any) -> hub.Download:
    download = plan_download("own/tiny", out, endpoint=server.endpoint, **options)
    download.run()
    return download


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def wanted() -> dict[str, bytes]:
    return {n: d for n, d in FILES.items() if "/" not in n and n != "pytorch.bin"}


def test_the_top_folder_without_pickles_is_fetched(server: Hub, tmp_path: Path) -> None:
    seen: list[int] = []
    download = plan_download("own/tiny", tmp_path / "new" / "hf", endpoint=server.endpoint)
    download.run(lambda nbytes, name: seen.append(nbytes))
    assert contents(tmp_path / "new" / "hf") == wanted()
    assert download.commit == COMMIT and download.nbytes == sum(map(len, wanted().values()))
    assert seen[-1] == download.nbytes
    assert all(COMMIT in path for path, _ in server.requests[1:]), "files of one commit"


def test_a_second_run_fetches_nothing(server: Hub, tmp_path: Path) -> None:
    fetch(server, tmp_path)
    server.requests.clear()
    again = fetch(server, tmp_path)
    assert again.missing == () and len(server.requests) == 1
    (tmp_path / "config.json").write_bytes(b"x" * len(FILES["config.json"]))
    with pytest.raises(FormatError, match=r"config\.json: damaged and removed"):
        fetch(server, tmp_path)
    fetch(server, tmp_path)
    assert contents(tmp_path) == wanted()


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_a_cut_connection_is_taken_up_again(
    server: Hub, tmp_path: Path, ignores_ranges: bool
) -> None:
    server.cut_after, server.cuts_left, server.ignores_ranges = 3000, 2, ignores_ranges
    fetch(server, tmp_path, patterns=["model.safetensors"])
    assert contents(tmp_path) == {"model.safetensors": FILES["model.safetensors"]}
    assert ("bytes=3000-" in [sent for _, sent in server.requests]) is True


def test_a_killed_run_is_taken_up_again(server: Hub, tmp_path: Path) -> None:
    data = FILES["model.safetensors"]
    (tmp_path / "model.safetensors.partial").write_bytes(data[:5000])
    download = plan_download("own/tiny", tmp_path, "main", ["model*"], server.endpoint)
    assert download.nbytes == len(data) - 5000
    download.run()
    assert server.requests[-1][1] == "bytes=5000-"
    assert contents(tmp_path) == {"model.safetensors": data}


def test_wrong_bytes_are_never_accepted(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.partial").write_bytes(b"y" * 5000)
    with pytest.raises(FormatError, match="not what the hub lists"):
        fetch(server, tmp_path, patterns=["model*"])
    assert contents(tmp_path) == {}
    fetch(server, tmp_path, patterns=["model*"])


def test_a_hub_that_goes_away_keeps_what_has_come(server: Hub, tmp_path: Path) -> None:
    server.cut_after, server.cuts_left = 100, 99
    with pytest.raises(ConnectionError, match="500 of 8000 bytes came"):
        fetch(server, tmp_path, patterns=["model*"])
    assert len(contents(tmp_path)["model.safetensors.partial"]) == 500
    server.cuts_left = 0
    fetch(server, tmp_path, patterns=["model*"])
    assert contents(tmp_path) == {"model.safetensors": FILES["model.safetensors"]}


@pytest.mark.parametrize(
    "change",
    [
        {"rfilename": "../config.json"},
        {"rfilename": "/etc/config.json"},
        {"rfilename": ".hidden/../x.json"},
        {"rfilename": "a\n.json"},
        {"size": -1},
        {"size": "9"},
        {"size": 1 << 60},
        {"blobId": None},
        {"lfs": {"sha256": "x"}},
        {"lfs": {"sha256": 5}},
    ],
    ids=str,
)
def test_a_hostile_listing_is_refused(server: Hub, tmp_path: Path, change: dict[str, Any]) -> None:
    server.listing = [entry("config.json", b"{}") | change]
    with pytest.raises(ModelError, match="in a way that is not known"):
        fetch(server, tmp_path / "out", patterns=["*", "*/*", "*/*/*"])
    assert not (tmp_path / "out").exists() and list(tmp_path.iterdir()) == []


def test_a_disk_too_small_is_noticed_first(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="the disk has 10 free"):
        fetch(server, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repo": "x"}, "expected owner/name"),
        ({"repo": "own/../x"}, "expected owner/name"),
        ({"revision": "a/../b"}, "expected a branch"),
        ({"repo": "own/absent"}, "HTTP 404: no such repository"),
        ({"patterns": ["x*"]}, "no file matches"),
        ({"endpoint": "file:///etc/"}, "expected an http"),
    ],
    ids=str,
)
def test_wrong_requests(server: Hub, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    request = {"repo": "own/tiny", "endpoint": server.endpoint, "out_dir": tmp_path} | options
    with pytest.raises(UsageError, match=message):
        plan_download(**request)


@pytest.mark.parametrize(
    ("variables", "code", "message"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, 5, "cannot be reached"),
        ({"HF_HUB_OFFLINE": "1"}, 2, "HF_HUB_OFFLINE=1 forbids the network"),
    ],
    ids=["no network", "offline"],
)
def test_the_script_without_a_network(
    variables: dict[str, str], code: int, message: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--out-dir", tmp_path / "hf"],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr and "copy the" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "hf").exists()


def test_the_script_fetches(server: Hub, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--repo", "own/tiny", "--out-dir", tmp_path / "hf"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": server.endpoint},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "needs" in done.stderr and "all match their hashes" in done.stderr
    assert contents(tmp_path / "hf") == wanted()
