"""What the numbers were measured on."""

import platform
import shutil
import subprocess
import sys
from importlib import metadata

import torch

from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting

_PACKAGES = (
    "torch",
    "triton",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "numpy",
    "gemlite",
    "torchao",
    "bitsandbytes",
)
_QUERY = (
    "name,driver_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,"
    "power.draw,power.limit,temperature.gpu,memory.total,memory.used,ecc.mode.current,mig.mode.current"
)
# For drivers that do not know a field of the other.
_SHORT_QUERY = "name,driver_version,memory.total"


def items(dry: bool) -> list[Item]:
    """Return the items of the part."""
    return [Item("machine", _machine), Item("packages", _packages), Item("gpu", _gpu)]


def state_item(name: str = "state-after") -> Item:
    """Return an item that notes clocks, power and temperature."""
    return Item(name, lambda setting: [{**state()}])


def state() -> dict[str, str]:
    """Return clocks, power and temperature as nvidia-smi reports them; empty without it."""
    tool = shutil.which("nvidia-smi")
    for query in (_QUERY, _SHORT_QUERY) if tool else ():
        command = [str(tool), f"--query-gpu={query}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        if not done.returncode and done.stdout.strip():
            values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
            return dict(zip(query.split(","), values, strict=False))
    return {}


def _machine(setting: Setting) -> list[Row]:
    return [{"python": sys.version.split()[0], "system": platform.platform()}]


def _packages(setting: Setting) -> list[Row]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return [{**versions, "cuda": str(torch.version.cuda)}]


def _gpu(setting: Setting) -> list[Row]:
    if setting.dry:
        return [{"status": "not measured", "reason": "a dry run has no GPU", **state()}]
    p = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts = {
        "gpu": p.name,
        "capability": setting.device.capability,
        "sms": p.multi_processor_count,
        "memory_bytes": p.total_memory,
        "l2_bytes": p.L2_cache_size,
    }
    return [{**facts, **state()}]
