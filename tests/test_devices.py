"""Every command that takes a device says in one line that there is none, and ends with 5."""

import sys
from pathlib import Path

import pytest

from clocher_kernels import cuda as probe
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.cli import clocher

TEXT = ["--text", "text.txt", "--window", "16"]
LINES = {
    "run": ["--device", "cuda", "--prompt-ids", "1"],
    "serve": ["--device", "cuda", "--port", "0"],
    "chat": ["--device", "cuda", "--max-new", "1"],
    "bench": ["--device", "cuda", "-p", "0", "-n", "1"],
    "perplexity": [*TEXT, "--backend", "cuda"],
    "gate": [
        str(embedded_model()),
        "--reference",
        str(embedded_model()),
        *TEXT,
        "--backend",
        "cuda",
    ],
    "bench quality": ["--task", "lambada", "--data", "task.jsonl", "--backend", "cuda"],
}


@pytest.mark.parametrize("torch", [True, False], ids=["torch", "no-torch"])
@pytest.mark.parametrize("command", LINES)
def test_a_device_that_is_not_there(
    command: str,
    torch: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("import os\n" * 99, encoding="utf-8")
    Path("task.jsonl").write_text('{"text": "import os"}\n', encoding="utf-8")
    with Path("text.txt").open() as message:
        monkeypatch.setattr("sys.stdin", message)
        if torch:
            monkeypatch.setattr(probe, "unusable", lambda: "this machine has no GPU")
        else:
            monkeypatch.setitem(sys.modules, "torch", None)
        code = clocher([*command.split(), *LINES[command]])
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if "error" in line]
    assert code == 5, err
    assert len(lines) == 1 and "cuda" in lines[0] and "Traceback" not in out + err


@pytest.mark.parametrize(("capability", "version"), [((10, 0), "3.6.0"), ((7, 5), "3.7.1")])
def test_a_gpu_that_would_miscompute_is_refused(
    capability: tuple[int, int], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import triton

    monkeypatch.setattr(probe, "no_driver", lambda: "")
    monkeypatch.setattr(triton, "__version__", version)
    found = {"is_available": True, "get_device_capability": capability, "get_device_name": "GPU"}
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert "needed" in probe.unusable() or "3.7 or newer" in probe.unusable()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert probe.unusable() == ""
