"""What the numbers were measured on, and what it reaches at all: copies, reads, products."""

import pkgutil
import platform
import shutil
import subprocess
import sys
from functools import partial
from importlib import metadata

import torch

from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting
from clocher_kernels.cuda.timer import Timing, reason

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
_MODULES = ("numba", "safetensors", "msgspec", "tokenizers")
"""What some parts import besides; a missing one is carried as a wheel."""
_QUERY = (
    "name,driver_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,"
    "power.draw,power.limit,temperature.gpu,memory.total,memory.used,ecc.mode.current,mig.mode.current"
)
# For drivers that do not know a field of the other.
_SHORT_QUERY = "name,driver_version,memory.total"
_SIZES, _TINY_SIZES = tuple(mib << 20 for mib in (16, 64, 256, 1024, 4096)), (4096,)


def items(dry: bool) -> list[Item]:
    """Return the items of the part."""
    return [
        Item("machine", _machine),
        Item("packages", _packages),
        Item("gpu", _gpu),
        Item("imports", _imports),
    ]


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


def _imports(setting: Setting) -> list[Row]:
    """Import what parts need; each module that is missing is a failure of its own."""
    rows: list[Row] = []
    for name in _MODULES:
        try:
            pkgutil.resolve_name(name)
        except ImportError as error:
            rows.append({"module": name, "status": "failed", "reason": reason(error)})
    return rows or [{"imported": ", ".join(_MODULES)}]


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


def ceiling_items(dry: bool) -> list[Item]:
    """Return the items that measure how fast this GPU copies, reads and multiplies."""
    sizes = _TINY_SIZES if dry else _SIZES
    return [
        *(Item(f"copy-{size}", partial(_copy, size=size)) for size in sizes),
        *(Item(f"read-{size}", partial(_read, size=size)) for size in sizes),
        *(Item(f"matmul-{d}", partial(_matmul, dtype=d)) for d in ("float16", "bfloat16")),
        state_item(),
    ]


def _copy(setting: Setting, size: int) -> list[Row]:
    return [setting.copy(size)]


def _read(setting: Setting, size: int) -> list[Row]:
    return [setting.read(size)]


def _matmul(setting: Setting, dtype: str) -> list[Row]:
    size = 64 if setting.dry else 8192
    kind = getattr(torch, dtype)
    a, b = setting.randn(size, size, dtype=kind), setting.randn(size, size, dtype=kind)
    out = torch.empty_like(a)
    timing = setting.timer.race({"matmul": [partial(torch.mm, a, b, out=out)]})["matmul"]
    row = setting.measured(timing, 3 * a.nbytes, kind="matmul", dtype=dtype, size=size)
    if isinstance(timing, Timing) and not setting.dry:
        row["tflops"] = 2 * size**3 / timing.us / 1e6
        del row["gbs"]
    return [row]
