"""Hardware counters of the kernels that a decode step of gpt-oss spends most of its time in."""

import csv
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from bench.gpu import moe, ours, shapes
from bench.gpu.record import Row
from bench.gpu.setting import Item, Setting
from bench.gpu.timer import Call
from bench.gpu.weights import random_tensor
from clocher_kernels.cuda.launch import execute
from clocher_kernels.formats import parse_format

KERNELS = ("gate_up", "down", "head")
_METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__bytes_read.sum": "bytes read",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of memory",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% of warps",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "% of issue slots",
    "smsp__inst_executed.sum": "instructions",
    "launch__registers_per_thread": "registers",
    "launch__occupancy_limit_registers": "programs by registers",
}
_SECONDS = 35
_SHORT_LOG = 400


def items(dry: bool) -> list[Item]:
    """Return one item for each kernel."""
    return [Item(name, partial(_count, kernel=name)) for name in KERNELS]


def profiled(dry: bool) -> list[Item]:
    """Return what runs under the tool: each kernel twice, the second time watched."""
    return [Item(name, partial(_watched, kernel=name)) for name in KERNELS]


def _watched(setting: Setting, kernel: str) -> list[Row]:
    run = _head(setting) if kernel == "head" else moe.piece(setting, kernel)
    run()
    setting.timer.synchronize()
    if not setting.dry:
        torch.cuda.profiler.start()
    run()
    setting.timer.synchronize()
    if not setting.dry:
        torch.cuda.profiler.stop()
    return [{"kernel": kernel}]


def _head(setting: Setting) -> Call:
    heads = [m for m in shapes.matrices(setting.dry) if m.layer == "head"]
    matrix = next((m for m in heads if m.model == "gpt-oss-20b"), shapes.TINY_MATRICES[0])
    fmt = parse_format("bf16")
    w = random_tensor(fmt, (matrix.n, matrix.k), setting)
    return partial(execute, ours.product(setting, fmt, w, 1, "f16").launches)


def _count(setting: Setting, kernel: str) -> list[Row]:
    if setting.dry:
        _watched(setting, kernel)
        return [{"status": "not measured", "reason": "a dry run; it ran without the tool"}]
    path = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if path is None:
        return [{"status": "not measured", "reason": "ncu is not on this machine"}]
    with tempfile.TemporaryDirectory() as folder:
        command = [path, "--clock-control", "none", "--profile-from-start", "off", "--csv"]
        command += ["--page", "raw", "--print-units", "base", "--metrics", ",".join(_METRICS)]
        command += [sys.executable, "-m", "bench.gpu", "profiled", "--only", kernel]
        command += ["--out", str(Path(folder, "record.json"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return [{"status": "not measured", "reason": f"ncu took more than {_SECONDS} s"}]
    rows = read(done.stdout)
    tail = (done.stdout + done.stderr)[-_SHORT_LOG:]
    return rows or [{"status": "not measured", "reason": f"ncu gave no counters: {tail}"}]


def read(text: str) -> list[Row]:
    """Return the counters of each kernel in what `ncu --csv --page raw` prints."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = []
    for entry in csv.DictReader(lines[start:]):
        if not entry["ID"].isdigit():
            continue  # the line of units
        metrics = {
            short: float(entry[name].replace(",", ""))
            for name, short in _METRICS.items()
            if entry.get(name)
        }
        rows.append({"kernel": entry["Kernel Name"][:60], "metrics": metrics})
    return rows
