"""First checks: the machine, tiny models, memory bandwidth."""

import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from bench.gpu.setting import Item, Row, Setting

_PACKAGES = "torch triton numpy numba cupy-cuda12x cupy-cuda13x msgspec tokenizers safetensors"
_PACKAGES += " pytest pytest-xdist gemlite torchao"
_QUERY = "driver_version,pstate,clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.total"
_DATA = Path(__file__).parents[2] / "tests/data"
_MODELS = ("embedded", "clocher-tiny-llama", "clocher-tiny-bitnet")
_SIZES = tuple(mib << 20 for mib in (16, 64, 256, 1024, 4096))
_LOGIT_RMS = 0.02
"""fp16 activations against fp32 ones, relative to the RMS of the logits."""


def machine_items(dry: bool) -> list[Item]:
    """Return the item that describes the machine."""
    return [("machine", _machine)]


def ceiling_items(dry: bool) -> list[Item]:
    """Return the items that measure copy and read bandwidth."""
    sizes = (4096,) if dry else _SIZES
    return [(f"bandwidth-{size}", partial(Setting.bandwidth, size=size)) for size in sizes]


def items(dry: bool) -> list[Item]:
    """Return one item for each tiny model."""
    models = [m for m in _MODELS if m == "embedded" or (_DATA / m).exists()]
    return [(name, partial(_model, name=name)) for name in models[: 1 if dry else None]]


def _machine(setting: Setting) -> list[Row]:
    row: Row = {"python": sys.version.split()[0], "system": platform.platform()}
    for package in _PACKAGES.split():
        try:
            row[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            row[package] = "not installed"
    if not setting.dry:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        row |= {"gpu": properties.name, "cuda": torch.version.cuda}
    if tool := shutil.which("nvidia-smi"):
        command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        row["nvidia-smi"] = done.stdout.strip()
    return [row]


def _model(setting: Setting, name: str) -> list[Row]:
    """Compare greedy ids and fp32 logits with the CPU's, then logits with fp16 activations."""
    from clocher_runtime.checkpoints import open_checkpoint  # lazy: kernels need no runtime
    from clocher_runtime.checkpoints.locate import embedded_model
    from clocher_runtime.config.engine import EngineConfig
    from clocher_runtime.engine.load import load_model
    from clocher_runtime.engine.session import Session

    path = embedded_model() if name == "embedded" else _DATA / name
    model = load_model(open_checkpoint(path))
    # The interpreter would take minutes: a dry run compares the CPU with the reference.
    other, prompt, new = "cuda", list(range(40, 60)), 24
    if setting.dry:
        other, prompt, new = "reference", [40, 41, 42], 2

    def run(backend: str, act_prec: str) -> tuple[np.ndarray, list[int]]:
        shared = EngineConfig(chunk=len(prompt), all_logits=True, speculate="off", context=64)
        own = {"backend": backend, "act_prec": act_prec, "kv_dtype": "bf16"}
        session = Session(model, replace(shared, **own))  # type: ignore[arg-type]
        try:
            tokens = session.generate([prompt], new, stop_ids=frozenset())
            return session.logits(prompt), [token.id for token in tokens]
        finally:
            session.close()

    want, ids = run("cpu", "fp32")
    rows: list[Row] = []
    for act_prec in ("fp32",) if setting.dry else ("fp32", "fp16"):
        logits, got = run(other, act_prec)
        rms = float(np.sqrt(np.mean((logits - want) ** 2) / np.mean(want**2)))
        rows.append({"against": other, "act_prec": act_prec, "rms": rms})
        if not rms <= _LOGIT_RMS:
            rows[-1] |= {"status": "failed", "reason": f"logits are off by {rms:.3g} of their RMS"}
        elif got != ids and act_prec == "fp32":
            rows[-1] |= {"status": "failed", "reason": f"the tokens are {got}, on the CPU {ids}"}
    return rows
