"""`clocher pull`: what is said before, what is refused, what is fetched, checked and shown."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import PYTHON_PATH, python
from fake_hub import COMMIT_PATH, INFO, Hub, contents, server
from huggingface_hub import constants
from weight_files import LLAMA

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import locate
from clocher_runtime.subcommands import pull

__all__ = ["server"]
MODEL = {path.name: path.read_bytes() for path in LLAMA.iterdir() if path.is_file()}
PULL = "import sys; from clocher_runtime.subcommands.pull import pull; pull.main()"


@pytest.fixture
def model(server: Hub) -> Hub:
    """A hub with a small model that runs."""
    server.files = dict(MODEL)
    return server


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return exit code and messages; nothing is ever written to standard output."""
    code = pull.pull.run(words)
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return code, err


def test_a_model_is_looked_at_fetched_and_named(
    model: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = run(capsys, "own/tiny")
    assert code == 0, err
    assert "own/tiny: llama, " in err and "of weights; a run needs" in err and "fits" in err
    assert "of disk" in err and "all match their hashes" in err
    assert err.rstrip().endswith("next: clocher chat own/tiny")
    assert open_checkpoint(locate("own/tiny", "")).names == open_checkpoint(LLAMA).names
    assert model.fetched().index("config.json") < model.fetched().index("model.safetensors")
    model.requests.clear()
    code, err = run(capsys, "https://huggingface.co/own/tiny/tree/main")
    assert code == 0 and "0 of them new" in err and model.fetched() == []


def test_into_a_directory(model: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, err = run(capsys, "own/tiny", "--out-dir", str(tmp_path / "my model"))
    assert code == 0 and f"next: clocher chat '{tmp_path}/my model'" in err
    assert contents(tmp_path / "my model")["model.safetensors"] == MODEL["model.safetensors"]


def changed(name: str = "config.json", **fields: Any) -> bytes:
    return json.dumps(json.loads(MODEL[name]) | fields).encode()


def test_an_adapter_is_fetched_and_its_base_is_named(
    model: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    model.files = {
        "adapter_config.json": b'{"base_model_name_or_path": "a/b"}',
        "adapter_model.safetensors": b"12345678",
    }
    code, err = run(capsys, "own/tiny")
    assert code == 0 and "a LoRA adapter of a/b, which has to be fetched as well" in err, err
    assert "next: clocher chat a/b --lora own/tiny" in err
    assert "adapter_model.safetensors" in model.fetched()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": changed(architectures=["BertModel"])}, "'BertModel' is not known"),
        ({"config.json": changed(quantization_config={"quant_method": "hqq"})}, "HQQ weights"),
        ({"config.json": changed(quantization_config={"quant_method": "x"})}, "'x' is not known"),
        ({"config.json": changed(quantization={"bits": 4, "group_size": 64})}, "MLX's own"),
        ({"config.json": changed(num_attention_heads=7, num_key_value_heads=2)}, "do not divide"),
        ({"config.json": b"no json"}, "not valid JSON"),
        ({"config.json": None}, "no config.json"),
        ({"model.safetensors": None, "pytorch_model.bin": b"x"}, "pickled weights are not fetched"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_what_cannot_run_is_not_fetched(
    model: Hub, capsys: pytest.CaptureFixture[str], files: dict[str, bytes | None], message: str
) -> None:
    for name, data in files.items():
        model.files.pop(name, None)
        if data is not None:
            model.files[name] = data
    code, err = run(capsys, "own/tiny")
    assert code == 3 and message in err and "nothing was fetched, --anyway" in err, err
    assert not {"model.safetensors", "tokenizer.json"} & set(model.fetched())
    code, err = run(capsys, "own/tiny", "--anyway")
    assert code == 0 and "note: it cannot run here" in err and message in err


def test_memory_that_is_not_there_is_told_and_no_reason_to_stop(
    model: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clocher_kernels.guards.available", lambda: 1 << 20)
    code, err = run(capsys, "own/tiny")
    assert code == 0 and "1.0 MB available: does not fit" in err


def test_a_repository_of_gguf_files_asks_which(
    model: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from gguf_files import as_f32, write_gguf

    tiny = open_checkpoint(LLAMA)
    data = write_gguf(tmp_path / "x.gguf", tiny.config, as_f32(tiny)).read_bytes()
    model.files = {"README.md": b"", "a-Q4_0.gguf": data, "b-Q8_0.gguf": b"GGUF"}
    code, err = run(capsys, "own/tiny", "--allow", "*.safetensors")
    assert code == 2 and "no file matches *.safetensors" in err
    del model.files["README.md"]
    code, err = run(capsys, "own/tiny")
    assert code == 2 and "name one with --file: 'a-Q4_0.gguf' (" in err, err
    code, err = run(capsys, "own/tiny", "--file", "a-Q4_0.gguf")
    assert code == 0 and "next: clocher chat own/tiny/a-Q4_0.gguf" in err
    assert open_checkpoint(locate("own/tiny/a-Q4_0.gguf", "")).kind == "gguf"
    code, err = run(capsys, "own/tiny", "--file", "b-Q8_0.gguf")
    assert code == 3 and "b-Q8_0.gguf" in err
    code, err = run(capsys, "own/tiny", "--file", "c.gguf")
    assert code == 2 and "no file matches c.gguf" in err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "OWNER/NAME is missing; give the owner/name"),
        (["tiny"], 2, "'tiny': expected owner/name"),
        (["../x/y"], 2, "expected owner/name"),
        (["own/absent"], 3, "own/absent: HTTP 404: no such repository"),
        (["own/tiny", "--revision", "v9"], 3, "no such repository, revision or file"),
        (["own/tiny", "--file", "x.bin"], 2, "--file: got 'x.bin', expected a GGUF"),
        (["own/tiny", "--fiel", "x"], 2, "No such option"),
    ],
    ids=str,
)
def test_mistakes(
    model: Hub, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    got, err = run(capsys, *words)
    assert (got, err.count("\n")) == (code, 1) and message in err, err
    assert err.startswith("clocher pull: error: ")


@pytest.mark.parametrize("status", [401, 403, 500])
def test_what_the_hub_refuses(model: Hub, capsys: pytest.CaptureFixture[str], status: int) -> None:
    model.statuses[INFO] = (status, "")
    code, err = run(capsys, "own/tiny")
    assert code == (5 if status == 500 else 3) and f"HTTP {status}" in err
    assert ("HF_ENDPOINT" if status == 500 else "HF_TOKEN") in err


def test_without_a_network(
    model: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, err = run(capsys, "own/tiny")
    assert code == 2 and "HF_HUB_OFFLINE=1 forbids the network" in err and err.count("\n") == 1
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with monkeypatch.context() as patch:
        patch.setenv("CLOCHER_OFFLINE", "1")
        code, err = run(capsys, "own/tiny")
        assert code == 2 and "CLOCHER_OFFLINE=1 forbids the network" in err
    assert not model.requests
    assert run(capsys, "own/tiny")[0] == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, err = run(capsys, "own/tiny")
    assert code == 2 and "own/tiny is in the cache already: clocher chat own/tiny" in err


@pytest.mark.parametrize("token", ["hf_abcdefgh12345678\n", "hf_abcdefgh12345678"])
def test_no_address_answers_and_no_token_is_told(tmp_path: Path, token: str) -> None:
    env = {
        "HF_ENDPOINT": "http://user:secret@127.0.0.1:9",
        "HF_TOKEN": token,
        "HF_HOME": str(tmp_path),
    }
    done = python("-c", PULL, "own/tiny", env=env)
    assert done.returncode == 5 and "the hub cannot be reached" in done.stderr
    assert "HF_ENDPOINT" in done.stderr and "Traceback" not in done.stderr
    assert "hf_abc" not in done.stderr and "secret" not in done.stderr


def test_interrupted_it_says_how_to_go_on(model: Hub, tmp_path: Path) -> None:
    model.stalls = f"{COMMIT_PATH}model.safetensors"
    env = {"HF_ENDPOINT": model.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.Popen(
        [sys.executable, "-c", PULL, "own/tiny"],
        env=os.environ | PYTHON_PATH | env,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while ("GET", model.stalls) not in model.requests and time.monotonic() < deadline:
        time.sleep(0.05)
    started = time.monotonic()
    done.send_signal(signal.SIGINT)
    model.stalled.set()
    _, err = done.communicate(timeout=60)
    assert done.returncode == 130, err
    assert "clocher pull: interrupted; run it again to go on" in err and "Traceback" not in err
    assert time.monotonic() - started < 20


def test_the_help_shows_examples_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert pull.pull.run(["-h"]) == 0
    shown = capsys.readouterr().out
    assert 0 < shown.index("clocher pull Qwen/Qwen3-0.6B") < shown.index("--revision")
    assert "130" in shown and "HF_TOKEN" in shown


def test_importing_it_is_cheap() -> None:
    code = (
        "import sys; import clocher_runtime.subcommands.pull, clocher_runtime.subcommands.models\n"
        "print(*[m for m in ('numpy', 'numba', 'huggingface_hub', 'rich') if m in sys.modules])"
    )
    assert python("-c", code).stdout.split() == []
