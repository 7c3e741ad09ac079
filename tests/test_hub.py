"""Downloading from a small hub on this machine that cuts, lies and goes away."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import SCRIPTS, python
from fake_hub import COMMIT, COMMIT_PATH, FILES, INFO, Hub, contents, entry, server
from huggingface_hub import constants

from clocher_kernels.errors import FormatError, ModelError, ModelNotFound, UsageError
from clocher_runtime.checkpoints.hf import hub
from clocher_runtime.checkpoints.hf.hub import (
    PATTERNS,
    Download,
    local_or_fetched,
    published_as,
)
from clocher_runtime.convert.to_iebin import open_source

__all__ = ["server"]
script = partial(python, SCRIPTS / "download_gpt_oss_20b.py")


def fetch(out: Path, *patterns: str) -> Download:
    """Download the wanted files and return the plan."""
    download = Download("own/tiny", out, patterns or PATTERNS)
    download.run()
    return download


def wanted() -> dict[str, bytes]:
    return {n: d for n, d in FILES.items() if "/" not in n and n != "pytorch.bin"}


def test_the_top_folder_without_pickles_is_fetched(server: Hub, tmp_path: Path) -> None:
    checked: list[str] = []
    download = Download("own/tiny", tmp_path / "new" / "hf")
    assert not (tmp_path / "new").exists() and server.fetched() == []
    assert download.run(checked.append) == tmp_path / "new" / "hf"
    assert contents(tmp_path / "new" / "hf") == wanted()
    assert download.commit == COMMIT and download.nbytes == sum(map(len, wanted().values()))
    assert sorted(checked) == sorted(wanted())


def test_a_second_run_fetches_nothing(server: Hub, tmp_path: Path) -> None:
    fetch(tmp_path)
    server.requests.clear()
    assert fetch(tmp_path).missing == [] and server.fetched() == []


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("cached", [False, True], ids=["directory", "cache"])
def test_a_damaged_file_is_removed(server: Hub, tmp_path: Path, name: str, cached: bool) -> None:
    folder = Download("own/tiny", None if cached else tmp_path).run()
    path = folder / name
    before = path.stat()
    path.write_bytes(b"x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(FormatError, match=f"not what the hub lists, and removed: {name}; run it"):
        Download("own/tiny", None if cached else tmp_path).run()
    assert not path.exists()
    Download("own/tiny", None if cached else tmp_path).run()
    assert contents(folder) == wanted()


def test_wrong_bytes_are_never_accepted(server: Hub, tmp_path: Path) -> None:
    server.sent = {"model.safetensors": b"y" * 8000, "config.json": b"z" * 23}
    with pytest.raises(FormatError, match=r"config\.json, model\.safetensors"):
        fetch(tmp_path, "config.json", "model*")
    assert contents(tmp_path) == {}
    server.sent.clear()
    fetch(tmp_path)
    assert contents(tmp_path) == wanted()


def test_a_cut_connection_is_taken_up_again(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.cuts = [3000]
    fetch(tmp_path, "model.safetensors")
    assert contents(tmp_path) == {"model.safetensors": FILES["model.safetensors"]}
    assert server.fetched() == ["model.safetensors"] * 2


def test_a_run_that_was_cut_off_keeps_whole_files(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    fetch(tmp_path, "*.json")
    server.cuts = [0] * 99
    with pytest.raises(ConnectionError, match=r"cannot be reached.*run it again"):
        fetch(tmp_path)
    assert "model.safetensors" not in contents(tmp_path)
    server.cuts.clear()
    server.requests.clear()
    download = fetch(tmp_path)
    assert "model.safetensors" in [file.name for file in download.missing]
    assert contents(tmp_path) == wanted()
    assert "config.json" not in server.fetched()


def test_patterns_with_a_slash_reach_into_folders(server: Hub, tmp_path: Path) -> None:
    server.files["odd[1].json"] = b"[]"
    server.files["odd1.json"] = b"{}"
    fetch(tmp_path, "original/*", "odd[[]1].json")
    assert sorted(contents(tmp_path)) == ["odd[1].json", "original/config.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"rfilename": "../config.json"},
        {"rfilename": "/etc/config.json"},
        {"rfilename": "x/../../x.json"},
        {"rfilename": "..\\x.json"},
        {"rfilename": "a\n.json"},
        {"rfilename": 5},
        {"size": -1},
        {"size": "9"},
        {"blobId": None},
        {"lfs": {"sha256": "x"}},
        {"lfs": {"sha256": "x", "size": 2, "pointerSize": 2}},
        {"lfs": {"sha256": 5, "size": 2, "pointerSize": 2}},
    ],
    ids=str,
)
def test_a_hostile_listing_is_refused(server: Hub, tmp_path: Path, change: dict[str, Any]) -> None:
    server.listing = [entry("config.json", b"{}") | change]
    with pytest.raises(ModelError, match=r"is not understood|makes no sense"):
        fetch(tmp_path / "out", "*", "*/*", "*/*/*")
    assert not (tmp_path / "out").exists() and list(tmp_path.iterdir()) == []


def test_a_disk_too_small_is_noticed_first(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="the disk has 10 bytes free"):
        fetch(tmp_path / "out")
    assert not (tmp_path / "out").exists() and server.fetched() == []


@pytest.mark.parametrize(
    "answer",
    [b"no json", b"{}", b"[]", b'{"id": "own/tiny", "sha": "../x", "siblings": []}'],
    ids=str,
)
def test_an_answer_that_is_none(server: Hub, tmp_path: Path, answer: bytes) -> None:
    server.info = answer
    with pytest.raises(ModelError, match=r"makes no sense|lists no files"):
        fetch(tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"repo": "own/../x"}, UsageError, "expected owner/name"),
        ({"repo": "own/absent"}, ModelNotFound, "HTTP 404: no such repository"),
        ({"revision": "absent"}, ModelNotFound, "HTTP 404: no such repository, revision"),
        ({"patterns": ["x*"]}, UsageError, r"no file matches x\*; it has 'config\.json', 'README"),
    ],
    ids=str,
)
def test_wrong_requests(
    server: Hub, tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Download(**{"repo": "own/tiny", "directory": tmp_path} | options)


@pytest.mark.parametrize(
    ("path", "status", "code", "error", "message"),
    [
        (INFO, 401, "", ModelNotFound, "log in with `hf auth login`, or set HF_TOKEN"),
        (INFO, 503, "", ConnectionError, "HTTP 503; run it again"),
        (f"{COMMIT_PATH}config.json", 403, "GatedRepo", ModelNotFound, "access must be asked for"),
        (f"{COMMIT_PATH}config.json", 404, "EntryNotFound", ModelNotFound, "HTTP 404"),
    ],
    ids=["private", "hub is down", "gated", "file is gone"],
)
def test_what_the_hub_refuses(
    server: Hub, tmp_path: Path, path: str, status: int, code: str, error: type[Exception],
    message: str,
) -> None:  # fmt: skip
    server.statuses[path] = (status, code)
    with pytest.raises(error, match=message):
        fetch(tmp_path)
    server.statuses.clear()
    fetch(tmp_path)
    assert contents(tmp_path) == wanted()


def test_a_name_that_is_no_directory_is_fetched_once(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "x").mkdir(parents=True)
    for path in (Path("one"), Path("a/b/c"), tmp_path / "x" / "y", Path("there/x")):
        assert local_or_fetched(path) == path
    assert server.requests == []
    folder = local_or_fetched(Path("own/tiny"))
    assert contents(folder) == wanted() and Path(constants.HF_HUB_CACHE) in folder.parents
    with pytest.raises(ModelNotFound, match=r"own/absent: no such directory; as a name on the hub"):
        local_or_fetched(Path("own/absent"))
    server.statuses[INFO] = (503, "")
    assert local_or_fetched(Path("own/tiny")) == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_or_fetched(Path("own/tiny")) == folder
    with pytest.raises(UsageError, match=r"own/absent: no such directory.*HF_HUB_OFFLINE=1"):
        local_or_fetched(Path("own/absent"))


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
    variables = {"HF_HOME": str(tmp_path / "home"), **variables}
    done = script("--out-dir", tmp_path / "hf", env=variables)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr and "copy the" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "hf").exists()


def test_the_script_fetches(server: Hub, tmp_path: Path) -> None:
    variables = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "home")}
    out = tmp_path / "hf"
    done = script("--repo", "own/tiny", "--out-dir", out, env=variables)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "needs" in done.stderr and "all match their hashes" in done.stderr
    assert "checking model.safetensors" in done.stderr and contents(out) == wanted()
    done = script("--repo", "own/absent", "--out-dir", out, env=variables)
    assert done.returncode == 3 and "no such repository" in done.stderr


def test_the_place_of_the_guide_is_filled(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert published_as("models/gpt-oss-120b") == "openai/gpt-oss-120b"
    assert published_as("/data/models/gpt-oss-20b/hf/original") == "openai/gpt-oss-20b"
    assert published_as("models/gpt-oss-20b/hf/x") is published_as("gpt-oss-20b") is None
    place = tmp_path / "models" / "gpt-oss-20b" / "hf"
    monkeypatch.setattr(hub, "published_as", lambda name: name == str(place) and "own/tiny")
    assert local_or_fetched(place) == place
    assert contents(place) == wanted()
    server.requests.clear()
    assert local_or_fetched(place) == place and server.requests == []


@pytest.mark.parametrize(
    "command",
    [
        "-m clocher_runtime run models/gpt-oss-20b/hf",
        f"{SCRIPTS}/hf_to_iebin.py --out-dir out --hf-dir models/gpt-oss-20b/hf/original",
        f"{SCRIPTS}/ptq_from_bin.py --out q.json --hf-dir models/gpt-oss-20b/hf",
    ],
)
def test_what_does_not_fetch_tells_the_command_that_does(command: str, tmp_path: Path) -> None:
    done = python(*command.split(), cwd=tmp_path, env={"HF_HUB_CACHE": str(tmp_path)})
    assert done.returncode == 3
    place = command.rpartition(" ")[2]
    assert f"`clocher pull openai/gpt-oss-20b --out-dir {place}`" in done.stderr


def test_a_place_beside_the_model_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=f"the model is in {tmp_path}"):
        open_source(tmp_path / "original")
