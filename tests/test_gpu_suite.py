"""The GPU suite without a GPU: its dry run, what it makes of wrong kernels, crashes and hangs."""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import interpreter  # noqa: F401  importing it is its effect
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from bench import gpu_suite
from bench.gpu import models, parity, predict
from bench.gpu.setting import Row, Setting, make_setting, run_item
from bench.gpu_suite import note, rows_of
from bench.ops import judge
from clocher_kernels.cuda import executor, prepack
from clocher_kernels.cuda.executor import LOWER, LOWER_GREEDY
from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.prepack import DeviceTensor
from clocher_kernels.ops import OPS
from clocher_kernels.ops.contract import EXACT
from clocher_kernels.quant_tensor import QuantTensor

ROOT = Path(__file__).parents[1]
ITEMS = [name for name, part in gpu_suite.PARTS.items() if part.items]
SPEEDS = {"us", "us_low", "us_high", "gbs", "share", "tokens_per_s", "first_token_ms"}


@pytest.fixture
def setting() -> Setting:
    made = make_setting(dry=True)
    made.random.manual_seed(7)
    return made


class ReferenceKernel:
    """Stands in for a Triton kernel: runs the reference of an op on CPU tensors of any width."""

    def __init__(self, op: str) -> None:
        self.op = op

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launched(**arguments: Any) -> None:
            named = {p.name for p in OPS[self.op].params}
            attrs = set(OPS[self.op].cases[0].attrs)
            given = {n: as_numpy(v) for n, v in arguments.items() if n in named | attrs}
            OPS[self.op].reference(**given)
            for param in OPS[self.op].params:
                tensor, array = arguments.get(param.name), given.get(param.name)
                # What is 16-bit was widened, so what was written has to go back.
                written = tensor is not None and param.kind in ("out", "inout")
                if written and param.dtype and tensor.element_size() == 2:
                    tensor.copy_(torch.from_numpy(array))

        return launched


def as_numpy(value: Any, widen: bool = True) -> Any:
    if isinstance(value, DeviceTensor):
        planes = {n: as_numpy(p, widen=False) for n, p in value.planes.items()}
        return QuantTensor(value.shape, value.format, planes)
    if not isinstance(value, torch.Tensor):
        return value
    # Planes and caches are four-dimensional, or not widened.
    if value.element_size() == 2 and value.is_floating_point():
        if widen and value.dim() < 4:
            return value.float().numpy()
        stored = np.float16 if value.dtype == torch.float16 else np.uint16
        return value.view(torch.int16).numpy().view(stored)
    return value.numpy().view(np.uint64) if value.dtype == torch.int64 else value.numpy()


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the references in the place of the kernels: what is tested here is the suite."""

    def lower(op: str) -> Callable[..., list[Launch]]:
        def lowered(*, device: Device, **arguments: Any) -> list[Launch]:
            return [Launch(ReferenceKernel(op), (1,), arguments, {})]

        return lowered

    for op in OPS:
        for table in (LOWER, LOWER_GREEDY):
            monkeypatch.setitem(table, op, lower(op))
    monkeypatch.setattr(executor, "FUSED", {})
    monkeypatch.setattr(prepack, "REARRANGE", {})


def suite(out: Path, *flags: str) -> Result:
    return CliRunner().invoke(gpu_suite.main, ["--out", str(out), *flags])


def parts_in(out: Path) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = json.loads((out / "suite.json").read_text())["parts"]
    return found


def items_of(part: str, dry: bool = True) -> list[Any]:
    from pkgutil import resolve_name

    made: list[Any] = resolve_name(f"bench.gpu.{gpu_suite.PARTS[part].items}")(dry)
    return made


def test_dry_run_of_the_command(tmp_path: Path) -> None:
    done = suite(tmp_path, "--dry-run", "--part", "ops", "--only", "rms_norm")
    assert done.exit_code == 0, done.output
    (row,) = parts_in(tmp_path)["ops"]
    assert row["item"] == "rms_norm-m1-d256" and row["status"] == "ok" and not SPEEDS & set(row)
    assert "| rms_norm-m1-d256 |" in (tmp_path / "suite.md").read_text()
    assert len(list(tmp_path.iterdir())) <= 8


@pytest.mark.parametrize("part", ITEMS)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("references")
def test_every_line_of_a_part(part: str, setting: Setting) -> None:
    rows = [row for item in items_of(part) for row in run_item(setting, item)]
    assert {row["status"] for row in rows} <= {"ok", "not measured"}, rows
    assert not any(SPEEDS & set(row) for row in rows), "a dry run has no speeds"
    own = [row for row in rows if row.get("who", "").startswith("clocher")]
    assert own or part not in ("ops", "peers")


@pytest.mark.slow
def test_the_whole_dry_run_with_the_kernels(tmp_path: Path) -> None:
    done = suite(tmp_path, "--dry-run", "--budget", "1200")
    assert done.exit_code == 0, done.output


def test_every_part_has_items_for_a_gpu() -> None:
    for part in ITEMS:
        names = [name for name, _ in items_of(part, dry=False)]
        assert names and len(names) == len(set(names)), part


def check(setting: Setting, op: str, case_id: str, act: str = "f16") -> Row:
    case = next(case for case in OPS[op].cases if case.id == case_id)
    return parity.Trial(setting, OPS[op], case, act).check()


@pytest.mark.parametrize("act", parity.ACTIVATIONS)
def test_a_right_kernel_passes(act: str, setting: Setting) -> None:
    row = check(setting, "rms_norm", "heads-m2-d20", act)
    assert row["status"] == "ok" and row["rms"] > 0
    assert row.get("alone", False) is (act != "bf16")


@pytest.mark.parametrize("fault", ["eps", "operands", "nothing"])
def test_a_wrong_kernel_fails(
    fault: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LOWER["rms_norm"]

    def lower(**given: Any) -> list[Launch]:
        if fault == "nothing":
            return []
        wrong = {"eps": 1.0} if fault == "eps" else {"weight": given["weight"].flip(0)}
        launches: list[Launch] = right(**given | wrong)
        return launches

    monkeypatch.setitem(LOWER, "rms_norm", lower)
    assert check(setting, "rms_norm", "heads-m2-d20")["status"] == "failed"


def test_a_kernel_that_does_not_repeat_fails(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = iter(range(1000))

    class Drifting:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            def run(*, x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, **_: object) -> None:
                y.copy_(x[rows.long()])
                y[0, 0] += 1e-3 * next(turns)

            return run

    def lower(*, device: Device, **arguments: Any) -> list[Launch]:
        return [Launch(Drifting(), (1,), arguments, {})]

    monkeypatch.setitem(LOWER, "gather_rows", lower)
    row = check(setting, "gather_rows", "r5-k37", "f32")
    assert row["status"] == "failed" and "other bits" in row["reason"]


def test_nan_and_large_errors_never_pass() -> None:
    expected = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    limit = OPS["linear"].allowed(None, "cuda", "f16")
    assert judge(limit, {"y": (expected, expected)})["status"] == "ok"
    for index, value in ((3, np.nan), (999, np.inf), (0, 5.0)):
        got = expected.copy()
        got[index] = value
        with np.errstate(invalid="ignore"):
            assert judge(limit, {"y": (got, expected)})["status"] == "failed"
            assert judge(EXACT, {"y": (got, expected)})["status"] == "failed"


CHILD = """
import os, sys, time
from pathlib import Path
from bench.gpu_suite import note, rows_of
path, what = Path(sys.argv[1]), sys.argv[2]
for item in ("first", "bad", "last"):
    if item in {row["item"] for row in rows_of(path)}:
        continue
    note(path, {"item": item, "status": "begun"})
    if item == "bad":
        if what == "crash":
            os.abort()
        time.sleep(60)
    note(path, {"item": item, "status": "ok"})
"""


@pytest.mark.parametrize(("what", "status"), [("crash", "crashed"), ("hang", "timeout")])
def test_what_dies_is_reported_and_the_rest_survives(
    what: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = gpu_suite.run

    def child(command: object, log: Path, path: Path, *limits: float) -> int | None:
        return run(["-c", CHILD, str(path), what], log, path, *limits)

    monkeypatch.setattr(gpu_suite, "run", child)
    monkeypatch.setitem(gpu_suite.PARTS, "ops", gpu_suite.Part(2, 30, 1.5))
    assert suite(tmp_path, "--part", "ops").exit_code == 1
    found = [(row["item"], row["status"]) for row in parts_in(tmp_path)["ops"]]
    assert found == [("first", "ok"), ("bad", status), ("last", "ok")]


def test_a_part_that_never_starts_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = gpu_suite.run
    broken = ["-c", "raise SystemExit('no such thing')"]
    monkeypatch.setattr(gpu_suite, "run", lambda command, *rest: run(broken, *rest))
    done = suite(tmp_path, "--part", "ops")
    assert done.exit_code == 1 and "exit status 1; see suite.log" in done.output
    assert "no such thing" in (tmp_path / "suite.log").read_text()


def test_without_a_gpu_the_suite_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = suite(tmp_path, "--part", "machine")
    assert done.exit_code == 1 and "not measured: start" in done.output


def test_half_a_line_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "ops.jsonl"
    note(path, {"item": "a", "status": "ok"})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole + whole[:size])
        assert rows_of(path) == [{"item": "a", "status": "ok"}]


def test_a_run_that_is_asked_to_end_leaves_what_it_has(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu_suite", "--out", str(tmp_path), "--dry-run"]
    given = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*command, "--part", "smoke"], **given) as run:  # type: ignore[call-overload]
        while not rows_of(tmp_path / "smoke.jsonl"):
            time.sleep(0.05)
            assert run.poll() is None
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        run.terminate()
    assert run.returncode == 128 + 15
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    done = suite(tmp_path / "all", "--merge", str(tmp_path))
    assert done.exit_code == 1 and "not run" in done.output


LOG = """
tests/test_gpu_parity.py::test_parity[rope-m1] PASSED [ 33%]
[gw1] [ 66%] FAILED tests/test_gpu_parity.py::test_parity[linear-int4 m1]
[gw0] [100%] PASSED tests/test_gpu_parity.py::test_parity[route-m1]
"""
END = """=== short test summary info ===
FAILED tests/test_gpu_parity.py::test_parity[linear-int4 m1] - AssertionError: rms 1
=== 1 failed, 2 passed in 3.10s ===
"""


@pytest.mark.parametrize("end", ["", END])
def test_parity_is_read_from_what_pytest_says(end: str, tmp_path: Path) -> None:
    (tmp_path / "parity.log").write_text(LOG + end)
    rows = gpu_suite.rows_in(tmp_path)["parity"]
    assert rows[0]["item"].startswith("test_parity[linear-int4") and rows[0]["status"] == "failed"
    assert rows[0]["reason"] == ("AssertionError: rms 1" if end else "see parity.log")
    assert rows[1] == {"item": "passed", "status": "ok", "count": 2}
    assert [row["status"] for row in rows[2:]] == ([] if end else ["ended"])


def call_of(folder: Path, parts: dict[str, list[Row]]) -> Path:
    folder.mkdir()
    for name, rows in parts.items():
        note(folder / f"{name}.jsonl", *({"item": "i", "status": "ok", **row} for row in rows))
    return folder


def merge(out: Path, *folders: Path) -> Result:
    return suite(out, *(flag for folder in folders for flag in ("--merge", str(folder))))


def test_merged_calls_are_one_result(tmp_path: Path) -> None:
    names = list(gpu_suite.PARTS)
    first: dict[str, list[Row]] = {name: [{"value": name}] for name in names[:4]}
    first["machine"] = [{"gpu": "G"}]
    a = call_of(tmp_path / "a", first)
    b = call_of(
        tmp_path / "b", {n: [{"value": n}] for n in names[4:]} | {"machine": [{"gpu": "G"}]}
    )
    assert merge(tmp_path / "ab", a, b).exit_code == 0
    merged = parts_in(tmp_path / "ab")
    assert set(merged) == set(names) and len(merged["machine"]) == 2
    assert merge(tmp_path / "only-a", a).output.count("not run") == len(names[4:])
    c = call_of(tmp_path / "c", {"parity": [{"status": "failed", "reason": "wrong"}]})
    done = merge(tmp_path / "abc", a, b, c)
    assert done.exit_code == 1 and "wrong" in done.output, "running again hides no failure"
    d = call_of(tmp_path / "d", {"machine": [{"gpu": "other"}]})
    for other, why in ((d, "calls on G and other"), (tmp_path / "none", "has no results")):
        done = merge(tmp_path / "ad", a, other)
        assert done.exit_code == 2 and why in " ".join(done.output.split())


def test_the_limits_of_a_call_fit_its_budget() -> None:
    parts = gpu_suite.PARTS.items()
    limits = {
        call: sum(part.seconds for name, part in parts if part.call == call or name == "machine")
        for call in gpu_suite.CALLS
    }
    assert max(limits.values()) <= gpu_suite.BUDGET < 9 * 60
    assert limits[0] <= 150 and sum(limits.values()) <= 27 * 60, "half an hour, less the start"


def test_the_commands_of_the_page_exist() -> None:
    page = (ROOT / "bench/gpu/README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^python3? -m bench\.gpu_suite (.+)$", page, re.M)
    words = [shlex.split(line) for line in lines]
    known = {flag for param in gpu_suite.main.params for flag in param.opts}
    assert {word for line in words for word in line if word.startswith("--")} <= known
    calls = [line[line.index("--call") + 1] for line in words if "--call" in line]
    assert calls == [str(call) for call in gpu_suite.CALLS]


@pytest.mark.parametrize(("copy", "read"), [(3000.0, 2000.0), (2500.0, 3000.0)])
def test_more_than_copies_and_reads_reach_is_a_failure(copy: float, read: float) -> None:
    setting = make_setting(dry=True)
    setting.dry, setting.bandwidths = False, (copy, read)
    good, bad = (setting.measured([10.0], nbytes) for nbytes in (31_400_000, 31_600_000))
    assert "status" not in good and good["share"] == pytest.approx(3140 / copy)
    assert bad["status"] == "failed" and "copies and reads reach 3000" in bad["reason"]


def test_who_cannot_race_says_why(setting: Setting) -> None:
    def missing() -> tuple[int, list[Any]]:
        raise ImportError("not installed here")

    ran: list[str] = []
    racing = {"clocher": lambda: (8, [lambda: ran.append("ran")]), "clocher x": missing}
    rows = {row["who"]: row for row in setting.race(racing | {"peer": missing}, m=1)}  # type: ignore[arg-type]
    assert ran == ["ran"] and "status" not in rows["clocher"]
    assert rows["clocher x"]["status"] == "failed", "our own kernels may not be missing"
    assert rows["peer"]["status"] == "not measured"
    assert rows["peer"]["reason"] == "ImportError: not installed here" and rows["peer"]["m"] == 1


def test_a_race_times_graphs_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for what is of torch.cuda; a call in a graph takes 2 us."""
    clock, replays, captured = [0.0], list[int](), list[int]()

    class Graph:
        calls = 0

        def replay(self) -> None:
            replays.append(self.calls)
            clock[0] += 2e-3 * self.calls

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    @contextmanager
    def capture(graph: Graph, stream: object) -> Iterator[None]:
        before = len(captured)
        yield
        graph.calls = len(captured) - before

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Stream": lambda: stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda: stream,
        "synchronize": lambda: None,
        "_sleep": lambda cycles: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def refuse() -> None:
        raise RuntimeError("needs a sync\nand more")

    call = lambda: captured.append(1)  # noqa: E731
    racing = {"three copies": [call] * 3, "one copy": [call], "refused": [refuse]}
    setting = replace(make_setting(dry=True), dry=False)
    rows = setting.race({who: lambda calls=calls: (8, calls) for who, calls in racing.items()})
    assert rows.pop()["reason"] == "RuntimeError: needs a sync"
    assert sorted(set(replays)) == [20, 21] and len(replays) == 2 * (1 + 15)
    assert [row[key] for row in rows for key in ("us_low", "us", "us_high")] == [
        pytest.approx(2.0)
    ] * 6


WITHOUT = """
import sys
missing = ("msgspec", "tokenizers", "re2", "safetensors", "huggingface_hub", "numba", "llvmlite")
sys.modules.update(dict.fromkeys(missing))
from pathlib import Path
from bench.gpu_suite import PARTS, rows_of, run_items
for part in [name for name in PARTS if PARTS[name].items]:
    path = Path(sys.argv[1], part)
    run_items(part, path, dry=True, only=["nothing"])
    print(part, *[row["reason"] for row in rows_of(path)])
"""


def test_parts_need_only_what_they_use(tmp_path: Path) -> None:
    """With torch, Triton and click alone parts run, but for those that step a model."""
    command = [sys.executable, "-c", WITHOUT, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    why = " import of msgspec halted; None in sys.modules"
    assert done.stdout.splitlines() == [p + why * (p in ("smoke", "steps")) for p in ITEMS]


@pytest.mark.parametrize("shape", models.SHAPES[:3], ids=lambda shape: shape.preset)
def test_predictions_are_near_what_an_h200_took(shape: models.Shape) -> None:
    """Launches may become fewer, and a change of the model of a step must still fit."""
    known = Path(gpu_suite.__file__).parent / "results/gpu/2026-11-27-h200-fourth.json"
    steps = json.loads(known.read_text())["parts"]["steps"]["rows"]
    (measured,) = (
        r["us"]
        for r in steps
        if (r["model"], r["batch"]) == (shape.label, 1) and r["context"] == 1024
    )
    launches, _, us = predict.step(shape, predict.GPUS["H200"], 1024)
    assert launches <= {"gpt-oss-20b": 198, "llama-8b": 230, "bitnet-2b": 276}[shape.preset]
    assert us == pytest.approx(measured, rel=0.15)
