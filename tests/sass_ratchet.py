"""What machine code may cost: figures recorded for a version of Triton, and limits for all of them.

data/sass_budgets/AREA.json has {"3.6": {CONFIGURATION: {"sm_90": {FIGURE: VALUE}}}}, keyed by minor
versions of Triton. Figures may get better than recorded, never worse; other versions of Triton are
held to the limits alone. To record what the installed version gives:

    python tests/cuda_aot_linear.py --record
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from aot import Code

from clocher_kernels.cuda.launch import Launch

Report = Mapping[str, Mapping[str, Mapping[str, Any]]]

FOLDER = Path(__file__).parent / "data/sass_budgets"
VERSION = ".".join(triton.__version__.split(".")[:2])
HAS_PDL = tuple(map(int, VERSION.split("."))) >= (3, 5)

PER_WEIGHT = {"int4": 3.0, "mxfp4": 2.85, "ternary": 1.2, "int8": 3.8, "fp8": 3.8}
"""Format -> instructions for a weight; holds for configurations named "budget-FORMAT...-m1..."."""
# Tiles follow times on an H200, not these counts: lanes of 4 rows, which prepare activations twice
# as often as those of 8, take up to an eighth more (mxfp4 was 2.54); a row of ternary weights is
# read in one turn, so that all instructions of the kernel count (0.96 in a loop).
SHARED = {"sm_86": 99 << 10, "sm_89": 99 << 10}
MOST_SHARED = 160 << 10
_KEPT = ("per_weight", "registers", "shared", "wide_loads")
_AT_LEAST = ("wide_loads",)
LOCAL = {
    ("3.4", "gemv-bf16-bf16-m1-n5120-k2880"): 8,  # one pointer, read once, outside the loop
    ("3.9", "llama-bf16-m128_prefill"): 32,
    ("3.9", "llama4-i8-m1_decode"): 8,
    # Pointers, read a few times in a loop of 600 instructions.
    ("3.6", "int4_sym_g128_f16-m32-28672x14336-sm_90"): 40,
    ("3.9", "int4_sym_g128_f16-m32-28672x14336-sm_90"): 32,
    # Ternary weights times fp16 for eight tokens: half as many rows of a lane do not spill, but
    # with 3.6 (159 registers) they would convert each activation twice as often.
    ("3.9", "tanh"): 1240,
}
"""Version and configuration -> bytes of a thread that are known to spill; none elsewhere."""


def figures(code: Code, launch: Launch) -> dict[str, Any]:
    """Return the figures of a kernel that streams weights.

    Instructions per weight are those of the whole kernel if it has no loop.
    """
    per_weight = code.per_weight(launch) if launch.weights else 0
    if launch.weights and not per_weight:
        turns = -(-launch.constants["K"] // launch.constants.get("BLOCK", launch.constants["K"]))
        per_weight = sum(code.instructions.values()) / (launch.weights * turns)
    load, wait = code.ptx.find("evict_first"), code.ptx.find("griddepcontrol.wait")
    return {
        "per_weight": round(per_weight, 2),
        "registers": code.registers,
        "shared": code.shared_bytes,
        "local": code.local_bytes,
        "wide_streaming_loads": code.instructions["LDG.E.EF.128"],
        "waits_after_first_load": 0 <= load < wait,
    }


def hold(area: str, report: Report) -> None:
    """Fail if a figure is worse than recorded, or beyond its limit."""
    recorded = _read(area).get(VERSION)
    if recorded is not None:
        assert {n: set(archs) for n, archs in report.items()} == {
            n: set(archs) for n, archs in recorded.items()
        }
    for name, archs in report.items():
        for arch, got in archs.items():
            where = f"{name} on {arch} with Triton {VERSION}: {dict(got)}"
            assert got["local"] <= LOCAL.get((VERSION, name), 0), where
            assert got["shared"] <= SHARED.get(arch, MOST_SHARED), where
            if name.startswith("budget-"):
                fmt = name.split("-")[1].split("_")[0]
                limit = PER_WEIGHT[fmt]
                assert 0 < got["per_weight"] <= limit, f"above {limit}: {where}"
                assert got["wide_streaming_loads"] > 0, where
            for figure, value in recorded[name][arch].items() if recorded else ():
                kept = got[figure] >= value if figure in _AT_LEAST else got[figure] <= value
                assert kept, f"{figure} was {value}: {where}"


def print_or_record(area: str, report: Report, **more: object) -> None:
    """Print a report as JSON; with --record write it down for this version of Triton instead."""
    if "--record" not in sys.argv:
        print(json.dumps({"code": report, **more}))
        return
    kept = {
        name: {
            arch: {figure: got[figure] for figure in _KEPT if figure in got}
            for arch, got in archs.items()
        }
        for name, archs in report.items()
    }
    text = json.dumps(dict(sorted({**_read(area), VERSION: kept}.items())), indent=1)
    (FOLDER / f"{area}.json").write_text(f"{text}\n", encoding="utf-8")


def _read(area: str) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((FOLDER / f"{area}.json").read_text(encoding="utf-8"))
    return recorded
