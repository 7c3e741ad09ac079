"""NVIDIA's tools on the kernels: compute-sanitizer for every op, hardware counters of a few.

The counters are of the kernels that a decode step of gpt-oss spends most of its time in.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from bench.gpu import moe, shapes, weights
from bench.gpu.parity import run_once
from bench.gpu.record import Record, Row
from bench.gpu.setting import Item, Setting
from clocher_kernels.cuda.launch import execute
from clocher_kernels.cuda.timer import Call
from clocher_kernels.formats import parse_format
from clocher_kernels.ops import OPS
from clocher_kernels.ops.contract import Case, OpSpec

TOOLS = ("memcheck", "racecheck", "initcheck")
_ERRORS_FOUND = 86
_SUMMARY = re.compile(r"(ERROR SUMMARY: (\d+)|RACECHECK SUMMARY: (\d+))")
_FORMATS = ("bf16", "int4_sym_g64_f16", "int4_asym_g64_f16", "int8_row_bf16", "mxfp4")
_FORMATS += ("fp8_e4m3_b128_f32", "ternary")
_SHORT_LOG, _SHORT_TAIL = 2000, 400
# The tools slow everything down; what they have seen by then counts.
_SANITIZE_SECONDS, _COUNT_SECONDS = 90, 35

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


def sanitize_items(dry: bool) -> list[Item]:
    """Return one item for each tool of compute-sanitizer."""
    return [Item(tool, partial(_sanitize, tool=tool)) for tool in TOOLS[: 1 if dry else None]]


def exercise_items(dry: bool) -> list[Item]:
    """Return what is run under the sanitizer: some cases of every op, each once."""
    found = [
        Item(f"{spec.name}-{case.id}", partial(run_once, spec=spec, case=case))
        for spec, case in _cases()
    ]
    return found[:2] if dry else found


def counter_items(dry: bool) -> list[Item]:
    """Return one item for each kernel whose counters are read."""
    return [Item(name, partial(_count, kernel=name)) for name in KERNELS]


def profiled_items(dry: bool) -> list[Item]:
    """Return what runs under `ncu`: each kernel twice, the second time watched."""
    return [Item(name, partial(_watched, kernel=name)) for name in KERNELS]


def _cases() -> list[tuple[OpSpec, Case]]:
    """Choose two cases of each op: for products one aligned and one odd case of some formats."""
    chosen = []
    for spec in OPS.values():
        cases = [case for case in spec.cases if "cuda" not in case.missing]
        if spec.name != "linear":
            chosen += [(spec, case) for case in cases[:2]]
            continue
        for case in cases:
            shape = case.id.removeprefix(f"{case.formats['w']}-")
            if case.formats["w"] in _FORMATS and shape.startswith(("aligned-m4", "odd", "wide")):
                chosen.append((spec, case))
    return chosen


def _path_of(tool: str) -> str | None:
    """Return where a tool is: on the path, or with CUDA."""
    roots = [root for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root]
    places = os.pathsep.join(str(Path(root) / "bin") for root in roots)
    return shutil.which(tool) or shutil.which(tool, path=places)


def _not_measured(reason: str, **facts: object) -> list[Row]:
    return [{**facts, "status": "not measured", "reason": reason}]


def _inner(part: str, record: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "bench.gpu", part, "--out", str(record), *flags]


def _sanitize(setting: Setting, tool: str) -> list[Row]:
    if setting.dry:
        rows = [row for item in exercise_items(dry=True) for row in item.run(setting)]
        return _not_measured(f"a dry run; {len(rows)} cases ran without the tool", tool=tool)
    path = _path_of("compute-sanitizer")
    if path is None:
        return _not_measured("compute-sanitizer is not on this machine", tool=tool)
    with tempfile.TemporaryDirectory() as folder:
        log, record = Path(folder, "log"), Path(folder, "record.json")
        command = [path, "--tool", tool, "--error-exitcode", str(_ERRORS_FOUND)]
        command += ["--print-limit", "20", "--log-file", str(log)]
        command += _inner("exercise", record, "--stop-after", str(_SANITIZE_SECONDS))
        # Without the cache every tensor is an allocation of its own, with edges that can be seen.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        text = log.read_text(errors="replace") if log.exists() else ""
        found = Record.load(record) if record.exists() else None
    return [{"tool": tool, **verdict(done, text, found)}]


def verdict(done: "subprocess.CompletedProcess[str]", log: str, record: Record | None) -> Row:
    """Return what the sanitizer found; a run that did not get to its end is no verdict."""
    found = [int(first or second) for _, first, second in _SUMMARY.findall(log)]
    ran = len(record.done) if record is not None else 0
    if not found or not ran or record is None or record.running is not None:
        tail = (log + done.stdout + done.stderr)[-_SHORT_LOG:]
        why = f"ended early with status {done.returncode} after {ran} cases: {tail}"
        return {"status": "not measured", "reason": why}
    bad = [r for r in record.rows if r["status"] == "failed"]
    row: Row = {"cases": ran, "of": len(exercise_items(record.dry)), "errors": sum(found)}
    if sum(found) or done.returncode == _ERRORS_FOUND:
        return {**row, "status": "failed", "reason": log[:_SHORT_LOG]}
    return {**row, "not_run": [r["reason"] for r in bad], "status": "ok"}


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
    w = weights.random_tensor(fmt, (matrix.n, matrix.k), setting)
    return partial(execute, weights.product(setting, fmt, w, 1, "f16").launches)


def _count(setting: Setting, kernel: str) -> list[Row]:
    if setting.dry:
        _watched(setting, kernel)
        return _not_measured("a dry run; it ran without the tool")
    path = _path_of("ncu")
    if path is None:
        return _not_measured("ncu is not on this machine")
    with tempfile.TemporaryDirectory() as folder:
        command = [path, "--clock-control", "none", "--profile-from-start", "off", "--csv"]
        command += ["--page", "raw", "--print-units", "base", "--metrics", ",".join(_METRICS)]
        command += _inner("profiled", Path(folder, "record.json"), "--only", kernel)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_SECONDS)
        except subprocess.TimeoutExpired:
            return _not_measured(f"ncu took more than {_COUNT_SECONDS} s")
    tail = (done.stdout + done.stderr)[-_SHORT_TAIL:]
    return read_counters(done.stdout) or _not_measured(f"ncu gave no counters: {tail}")


def read_counters(text: str) -> list[Row]:
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
