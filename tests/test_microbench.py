"""The microbenches: generated for every op, at sizes that their ids spell, wrong kernels found."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

from bench import microbench as timing
from bench.gpu import setting
from bench.microbench import compare, parameters, timed
from bench.ops import OpRun, real_cases, resized
from clocher_kernels.ops import OPS, ReferenceExecutor
from clocher_kernels.ops.contract import Case, Real
from cpu_fallback.executor import CpuExecutor

ROOT = Path(__file__).parents[1]


def ids() -> list[str]:
    return [parameter.id for parameter in parameters(["cpu"])]


def test_every_op_has_one() -> None:
    assert {spec.name for spec, _ in real_cases()} == set(OPS)
    assert {i.split("-")[1] for i in ids()} == set(OPS)


def test_ids_are_distinct_and_spell_the_sizes() -> None:
    assert len(set(ids())) == len(ids())
    for spec, case in real_cases():
        if spec.real:
            spelled = dict(re.findall(r"(?<![a-z0-9.])([a-z])([0-9]+)(?![a-z0-9.x])", case.id))
            sizes = {k.upper(): int(v) for k, v in spelled.items()}
            assert sizes.items() >= {k: sizes[k] for k in sizes if k in case.sizes}.items()
            for letter in "MNKEVR":
                if letter in case.sizes:
                    assert sizes[letter] == case.sizes[letter], (case.id, letter)


def test_every_entry_fits_a_case() -> None:
    for op, spec in OPS.items():
        for entry in spec.real:
            one = [c for c in real_cases_of(op) if c.sizes.items() >= entry.sizes.items()]
            assert one, (op, entry)


def real_cases_of(op: str) -> list[Case]:
    return [case for spec, case in real_cases() if spec.name == op]


def test_every_format_of_linear_is_there() -> None:
    cases = [case for case in OPS["linear"].cases if not case.id.startswith("large")]
    formats = {case.formats["w"] for case in cases}
    assert {case.formats["w"] for case in real_cases_of("linear")} == formats


def test_an_op_without_an_entry_keeps_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {**OPS, "rope": replace(OPS["rope"], real=())}
    monkeypatch.setattr("bench.ops.OPS", without)
    assert real_cases_of("rope") == list(OPS["rope"].cases)


def test_what_follows_from_other_sizes() -> None:
    spec = OPS["linear"]
    case = next(c for c in spec.cases if c.id == "mxfp4-aligned-m1-n64-k256-i8-g32")
    made = resized(spec, case, Real("", {"M": 2, "N": 64, "K": 100}))
    assert (made.id, made.sizes["B"]) == ("mxfp4-i8-g32-m2-n64-k100", 4)
    spec = OPS["attention"]
    made = resized(spec, spec.cases[0], Real("", {"M": 1, "N": 4, "H": 2, "D": 16, "S": 2, "B": 3}))
    assert made.attrs["scale"] == 0.25
    assert (made.sizes["F"], made.sizes["P"]) == (64, 6)


def small(op: str) -> tuple[OpRun, dict[str, np.ndarray]]:
    run = OpRun(OPS[op], OPS[op].cases[0])
    return run, run.run(ReferenceExecutor)


@pytest.mark.parametrize("op", ["linear", "rms_norm", "quantize", "advance"])
def test_a_wrong_result_is_not_correct(op: str) -> None:
    run, right = small(op)
    assert compare(run, right)["correct"]
    for name in run.written:
        wrong = {n: a.copy() for n, a in right.items()}
        last = wrong[name].reshape(-1)[-1:]
        last += np.asarray(1, last.dtype)
        facts = compare(run, wrong)
        assert facts["correct"] is False, name
    json.dumps(facts, allow_nan=False)


def test_what_was_never_written_is_not_correct() -> None:
    run, right = small("linear")
    right["y"][0, 3] = np.nan
    facts = compare(run, right)
    assert facts["correct"] is False
    json.dumps(facts, allow_nan=False)


class _Off(CpuExecutor):
    """A back end whose matrix products are off by a part in a thousand."""

    def step(self, tokens: int, rows: int) -> None:
        super().step(tokens, rows)
        self.array("y")[...] *= np.float32(1.001)


def test_a_wrong_kernel_is_not_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = OPS["linear"]
    right = timed(spec, spec.cases[0], "cpu", 2)
    right.close()
    assert right.facts["correct"] is True
    monkeypatch.setattr(timing, "CpuExecutor", _Off)
    wrong = timed(spec, spec.cases[0], "cpu", 2)
    wrong.close()
    assert wrong.facts["correct"] is False
    assert wrong.facts["rms"] == pytest.approx(1e-3, rel=0.01)


def test_kernels_of_the_gpu_are_checked_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, where a dry run's setting is all that differs."""
    made_dry = setting.make_setting(dry=True)
    monkeypatch.setattr(setting, "make_setting", lambda dry: made_dry)
    op = OPS["rms_norm"]
    made = timed(op, op.cases[0], "cuda", 1)
    assert made.facts["correct"] is True
    made.run()


def test_rates() -> None:
    made = timed(OPS["linear"], OPS["linear"].cases[0], "cpu", 1)
    made.close()
    assert made.facts["bytes"] == 4 * (256 + 64 * 256 + 64)
    assert made.facts["flops"] == 2 * 64 * 256
    assert made.calls > 1
    rates = made.rates(made.calls * 1e-3)
    assert rates["us_per_call"] == pytest.approx(1000)
    assert rates["gbps"] == pytest.approx(made.facts["bytes"] / 1e6)
    assert rates["gflops"] == pytest.approx(made.facts["flops"] / 1e6)


def microbench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "bench/microbench.py"]
    # A worker of xdist would tell pytest-benchmark not to measure.
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_XDIST")}
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )


def test_as_a_user_runs_it(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = microbench("-k", "cpu-gather_rows or cpu-rms_norm-m1", f"--benchmark-json={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {b["name"]: b for b in json.loads(out.read_text())["benchmarks"]}
    name = "test_op[cpu-rms_norm-m1-f2880-d2880]"
    assert set(rows) == {name, "test_op[cpu-gather_rows-m16-r1-k2880]"}
    info = rows[name]["extra_info"]
    assert info["correct"] is True
    assert info["bytes"] == 3 * 4 * 2880
    seconds = rows[name]["stats"]["median"] / info["calls"]
    assert info["gbps"] == pytest.approx(info["bytes"] / seconds / 1e9)
    assert "cpu-rms_norm-m1-f2880-d2880" in done.stdout and "GB/s" in done.stdout


def test_make_test_leaves_them_out(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getini("testpaths") == ["tests"]
    files = pytestconfig.getini("python_files")
    assert fnmatch_any("test_microbench.py", files) and not fnmatch_any("microbench.py", files)


def fnmatch_any(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
