"""compute-sanitizer over a small run of every op."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from bench.gpu.parity import run_once
from bench.gpu.record import Record, Row
from bench.gpu.setting import Item, Setting
from clocher_kernels.cuda.lowering import LOWER
from clocher_kernels.ops import OPS
from clocher_kernels.ops.contract import Case, OpSpec

TOOLS = ("memcheck", "racecheck", "initcheck")
_ERRORS_FOUND = 86
_SUMMARY = re.compile(r"(ERROR SUMMARY: (\d+)|RACECHECK SUMMARY: (\d+))")
_FORMATS = ("bf16", "int4_sym_g64_bf16", "int4_asym_g64_f16", "int8_row_bf16", "mxfp4")
_FORMATS += ("fp8_e4m3_b128_f32", "ternary")
_SHORT_LOG = 2000
# The tools slow everything down; what they have seen by then counts.
_SECONDS = 90


def items(dry: bool) -> list[Item]:
    """Return one item for each tool."""
    return [Item(tool, partial(_watch, tool=tool)) for tool in TOOLS[: 1 if dry else None]]


def exercise(dry: bool) -> list[Item]:
    """Return what is run under the tools: some cases of every op, each once."""
    found = []
    for spec, case in _cases():
        run = partial(run_once, spec=spec, case=case)
        found.append(Item(f"{spec.name}-{case.id}", run))
    return found[:2] if dry else found


def _cases() -> list[tuple[OpSpec, Case]]:
    """Choose two cases of each op: for products one aligned and one odd case of some formats."""
    chosen = []
    for spec in OPS.values():
        if spec.name not in LOWER:
            continue
        if spec.name not in ("linear", "linear_i8"):
            chosen += [(spec, case) for case in spec.cases[:2]]
            continue
        for case in spec.cases:
            shape = case.id.removeprefix(f"{case.formats['w']}-")
            if case.formats["w"] in _FORMATS and shape.startswith(("aligned-m4", "odd", "wide")):
                chosen.append((spec, case))
    return chosen


def _tool() -> str | None:
    roots = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [str(Path(root) / "bin") for root in roots if root]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(places)
    )


def _watch(setting: Setting, tool: str) -> list[Row]:
    row: Row = {"tool": tool}
    if setting.dry:
        rows = [row for item in exercise(dry=True) for row in item.run(setting)]
        reason = f"a dry run; {len(rows)} cases ran without the tool"
        return [{**row, "status": "not measured", "reason": reason}]
    path = _tool()
    if path is None:
        reason = "compute-sanitizer is not on this machine"
        return [{**row, "status": "not measured", "reason": reason}]
    with tempfile.TemporaryDirectory() as folder:
        log, record = Path(folder, "log"), Path(folder, "record.json")
        command = [path, "--tool", tool, "--error-exitcode", str(_ERRORS_FOUND)]
        command += ["--print-limit", "20", "--log-file", str(log)]
        command += [sys.executable, "-m", "bench.gpu", "exercise", "--out", str(record)]
        command += ["--stop-after", str(_SECONDS)]
        # Without the cache every tensor is an allocation of its own, with edges that can be seen.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        text = log.read_text(errors="replace") if log.exists() else ""
        return [row | _verdict(done, text, Record.load(record) if record.exists() else None)]


def _verdict(done: "subprocess.CompletedProcess[str]", log: str, record: Record | None) -> Row:
    """Return what the tool found; a run that did not get to its end is no verdict."""
    found = [int(first or second) for _, first, second in _SUMMARY.findall(log)]
    ran = len(record.done) if record is not None else 0
    if not found or not ran or record is None or record.running is not None:
        tail = (log + done.stdout + done.stderr)[-_SHORT_LOG:]
        why = f"ended early with status {done.returncode} after {ran} cases: {tail}"
        return {"status": "not measured", "reason": why}
    bad = [r for r in record.rows if r["status"] == "failed"]
    row: Row = {"cases": ran, "of": len(exercise(record.dry)), "errors": sum(found)}
    if sum(found) or done.returncode == _ERRORS_FOUND:
        return {**row, "status": "failed", "reason": log[:_SHORT_LOG]}
    return {**row, "not_run": [r["reason"] for r in bad], "status": "ok"}
