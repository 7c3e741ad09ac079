"""The GPU suite without a GPU: its dry run, what it makes of wrong kernels, crashes and hangs."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from bench.gpu import (
    decode,
    generate,
    moe,
    parity,
    report,
    shapes,
    supervise,
    targets,
    tools,
    weights,
)
from bench.gpu.record import SCHEMA, STATUSES, Record, Row
from bench.gpu.setting import DryTimer, Setting, make_setting, run_item
from bench.gpu.supervise import NAMES, items_of
from bench.gpu_suite import main
from clocher_kernels.cuda import prepack, tiles, tune
from clocher_kernels.cuda.executor import CudaExecutor
from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.lowering import LOWER, LOWER_GREEDY
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.cuda.timer import Call, GpuTimer, Timing
from clocher_kernels.formats import Bsr, known_formats, parse_format
from clocher_kernels.formats.ggml import GGML_KINDS
from clocher_kernels.ops import OPS
from clocher_kernels.ops.contract import EXACT
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.engine.session import Session

SPEEDS = {"us", "us_low", "us_high", "gbs", "share", "tokens_per_s", "tflops"}


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
    monkeypatch.setattr(prepack, "REARRANGE", {})


def checked(row: Row) -> Row:
    assert row["status"] in STATUSES
    assert row["status"] == "ok" or row["reason"]
    assert not SPEEDS & set(row), "a dry run has no speeds"
    return row


def suite(out: Path, *flags: str) -> Result:
    return CliRunner().invoke(main, ["--out", str(out), "--jobs", "1", *flags])


def test_dry_run_of_the_command(tmp_path: Path) -> None:
    done = suite(
        tmp_path, "--dry-run", "--part", "parity", "--only", "rms_norm", "--only", "coverage"
    )
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "suite.json").read_text())
    assert result["schema"] == SCHEMA and result["dry"] is True
    assert set(result["parts"]) == {"parity"}
    part = result["parts"]["parity"]
    assert part["finished"] and part["items"] == 2
    for row in part["rows"]:
        assert row["dry"] is True and row["item"] in ("rms_norm-heads-m2-d20", "coverage")
        checked(row)
    assert {r["act"]: r["status"] for r in part["rows"] if r.get("case")} == {
        "f32": "ok",
        "f16": "ok",
        "bf16": "ok",
    }
    assert len(result["targets"]) == len(targets.TARGETS)
    assert all(target["measured"] is None for target in result["targets"])
    assert "dry run, nothing here is a speed" in done.output


@pytest.mark.parametrize("part", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("references")
def test_every_line_of_a_part(part: str, setting: Setting) -> None:
    rows = [row for item in items_of(part, dry=True) for row in run_item(setting, item)]
    assert rows
    assert {row["status"] for row in map(checked, rows)} <= {"ok", "not measured"}, rows


@pytest.mark.slow
def test_the_whole_dry_run_with_the_kernels(tmp_path: Path) -> None:
    done = suite(tmp_path, "--dry-run", "--budget", "1200")
    assert done.exit_code == 0, done.output


def test_every_part_has_items_for_a_gpu() -> None:
    for part in NAMES:
        ids = [item.id for item in items_of(part, dry=False)]
        assert ids and len(ids) == len(set(ids)), part


def compiled(launches: Iterable[Launch]) -> set[str]:
    """Return what kernels are compiled for: their constants, and the types of their arguments."""
    return {
        repr((k.kernel.fn.__name__, k.constants, k.num_warps, k.pdl))
        + repr([(n, getattr(value, "dtype", value)) for n, value in k.args.items()])
        for k in launches
    }


def test_what_a_session_launches_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decode.TINY[0]
    meta = Setting(Device("meta", 90, 132), DryTimer(), 1, None)  # type: ignore[arg-type]
    made = decode.Made.make(meta, model)
    launched: list[Launch] = []

    def keep(setting: Setting, session: Session, *rest: object) -> list[Row]:
        executor = session.executor
        assert isinstance(executor, CudaExecutor)
        for key in executor.buckets():
            launched.extend(executor.lower(key, greedy=True) + executor.lower(key, greedy=False))
        return []

    monkeypatch.setattr(decode.Made, "make", lambda *_: made)
    monkeypatch.setattr(generate, "_first_token", lambda *_: {})
    monkeypatch.setattr(generate, "_tokens", keep)
    items_of("generate", dry=True)[0].run(meta)
    ahead = generate.launches(meta, model, generate._DRY_CHUNKS[0])
    assert launched and compiled(launched) == compiled(ahead)


def one(setting: Setting, name: str) -> list[Row]:
    return run_item(setting, next(i for i in items_of("parity", dry=False) if i.id == name))


def test_a_right_kernel_passes(setting: Setting) -> None:
    rows = one(setting, "rms_norm-heads-m2-d20")
    assert [row["act"] for row in rows] == ["f32", "f16", "bf16"]
    assert all(row["status"] == "ok" and row["rms"] > 0 for row in rows)
    assert rows[0]["alone"] is True


def lower_wrongly(change: Callable[[dict[str, Any]], None]) -> Callable[..., list[Launch]]:
    right = LOWER["rms_norm"]

    def lower(*, device: Device, **arguments: Any) -> list[Launch]:
        change(arguments)
        return right(**arguments, device=device)

    return lower


@pytest.mark.parametrize("fault", ["eps", "operands", "nothing"])
def test_a_wrong_kernel_fails(
    fault: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_eps(arguments: dict[str, Any]) -> None:
        arguments["eps"] = 1.0

    def other_operands(arguments: dict[str, Any]) -> None:
        arguments["weight"] = arguments["weight"].flip(0)

    def writes_nothing(*, device: Device, **arguments: Any) -> list[Launch]:
        return []

    wrong = {
        "eps": lower_wrongly(other_eps),
        "operands": lower_wrongly(other_operands),
        "nothing": writes_nothing,
    }
    monkeypatch.setitem(LOWER, "rms_norm", wrong[fault])
    rows = one(setting, "rms_norm-heads-m2-d20")
    assert {row["status"] for row in rows} == {"failed"}


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
    row = one(setting, "gather_rows-r5-k37")[0]
    assert row["status"] == "failed" and "other bits" in row["reason"]


def test_a_missing_kernel_is_refused_not_passed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(LOWER, "rms_norm")
    assert {row["status"] for row in one(setting, "rms_norm-heads-m2-d20")} == {"refused"}
    gaps = [row for row in one(setting, "coverage") if row.get("op") == "rms_norm"]
    assert gaps[0]["status"] == "not measured"


CHILD = """
import os, sys, time
from pathlib import Path
from bench.gpu.record import Record
path, what = Path(sys.argv[1]), sys.argv[2]
record = Record.load(path) if path.exists() else Record("child", dry=True)
for item in ("first", "bad", "last"):
    if item in record.done:
        continue
    record.running = item
    record.save(path)
    if item == "bad":
        if what == "crash":
            os.abort()
        time.sleep(60)
    record.add(item, [{"value": 1}])
    record.save(path)
record.finished = True
record.save(path)
"""


@pytest.mark.parametrize(("what", "status"), [("crash", "crashed"), ("hang", "timeout")])
def test_what_dies_is_reported_and_the_rest_survives(
    what: str, status: str, tmp_path: Path
) -> None:
    def job(name: str, fault: str) -> supervise.Job:
        path = tmp_path / f"{name}.json"
        command = [sys.executable, "-c", CHILD, str(path), fault]
        return supervise.Job(name, command, path, seconds=20, item_seconds=1.5)

    jobs = [job("child", what), job("other", "crash")]
    said: list[str] = []
    supervise.run_jobs(jobs, 2, said.append)
    record = jobs[0].record()
    assert record is not None and record.finished and jobs[0].ended == "finished"
    assert [(r["item"], r["status"]) for r in record.rows] == [
        ("first", "ok"),
        ("bad", status),
        ("last", "ok"),
    ]
    assert jobs[0].starts == 2 and not said
    result = report.combine([record], {}, dry=True, seconds=1)
    assert not report.is_good(result)


def test_a_part_that_never_starts_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "gone.json"
    command = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    job = supervise.Job("gone", command, path, seconds=20, item_seconds=5)
    said: list[str] = []
    supervise.run_jobs([job], 1, said.append)
    assert job.starts == 1 and "no such thing" in said[0]


def test_without_a_gpu_the_suite_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = suite(tmp_path, "--part", "environment")
    assert done.exit_code == 1
    assert "no device" in done.output and "Traceback" not in done.output


NO_KERNELS = ("bsr", *GGML_KINDS)
"""Formats that the back end has no dense kernels for."""


@pytest.mark.parametrize("name", [n for n in known_formats() if not n.startswith(NO_KERNELS)])
def test_the_reference_decodes_as_the_format_does(name: str, setting: Setting) -> None:
    fmt, shape = parse_format(name), (132, 288)
    planes = weights.random_planes(fmt, shape, setting)
    stored = {}
    for plane, expected in fmt.planes(shape).items():
        tensor = planes[plane]
        assert tensor.shape == expected.shape, plane
        wide = tensor.view(torch.int16) if tensor.element_size() == 2 else tensor
        stored[plane] = wide.numpy().view(expected.storage)
    fmt.check(stored, shape)
    np.testing.assert_array_equal(
        weights.decode(fmt, shape, planes).numpy(), fmt.decode(stored, shape)
    )


def test_random_blocks_are_a_valid_matrix(setting: Setting) -> None:
    fmt, planes = weights.random_blocks(Bsr((16, 32), "bf16"), (64, 128), 0.5, setting)
    stored = dict(planes)
    stored["values"] = stored["values"].view(torch.int16)
    arrays = {n: t.numpy().view(fmt.planes((64, 128))[n].storage) for n, t in stored.items()}
    fmt.check(arrays, (64, 128))
    assert 0 < fmt.nnzb < 16
    assert prepack.rearrange(fmt, (64, 128), planes).shape == (64, 128)


def test_sanitizer_verdicts() -> None:
    def verdict(log: str, code: int, running: str | None = None) -> Row:
        record = Record("exercise", dry=True, running=running, done=["a"], rows=[])
        done: subprocess.CompletedProcess[str] = subprocess.CompletedProcess([], code, "", "")
        return tools.verdict(done, log, record)

    assert verdict("========= ERROR SUMMARY: 0 errors", 0)["status"] == "ok"
    hazards = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
    assert verdict(hazards, 0)["status"] == "ok"
    assert verdict("========= ERROR SUMMARY: 3 errors", 86)["status"] == "failed"
    assert verdict("========= RACECHECK SUMMARY: 2 hazards", 86)["status"] == "failed"
    assert verdict("Device not supported", 1)["status"] == "not measured"
    assert verdict("========= ERROR SUMMARY: 0 errors", 0, "b")["status"] == "not measured"


def test_nan_and_large_errors_never_pass() -> None:
    expected = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    limit = OPS["linear"].allowed(None, "cuda", "f16")
    assert parity.judge(limit, expected, expected)["status"] == "ok"
    for index, value in ((3, np.nan), (999, np.inf), (0, 5.0)):
        got = expected.copy()
        got[index] = value
        with np.errstate(invalid="ignore"):
            assert parity.judge(limit, got, expected)["status"] == "failed"
            assert parity.judge(EXACT, got, expected)["status"] == "failed"


def test_overlapping_kernels_count_once() -> None:
    assert decode.covered([(0, 4, "a"), (2, 5, "b"), (7, 8, "c"), (7, 7.5, "d")]) == 6


def test_targets_from_rows_of_a_gpu() -> None:
    row = {"dry": False, "item": "race", "kind": "linear", "model": "llama-8b"}
    row |= {"n": 4096, "k": 4096, "m": 1}
    ours = {**row, "who": "clocher int4_sym_g128_f16", "format": "int4_sym_g128_f16", "us": 4.0}
    ours |= {"nbytes": 8_800_000, "share": 0.8}
    peer = {**row, "who": "torch tinygemm int4", "format": "", "us": 6.0, "nbytes": 9e6}
    found = {t["target"]: t for t in targets.verdicts([ours, peer])}
    assert found["int4 vs tinygemm, llama-8b"]["measured"] == pytest.approx(1.5)
    assert found["int4 vs tinygemm, llama-8b"]["met"] is True
    assert found["worst share of copy, 8-30 MB, M = 1"]["measured"] == 0.8
    assert found["gpt-oss-20b, batch 1, 1k"]["measured"] is None
    assert all(t["measured"] is None for t in targets.verdicts([{**ours, "dry": True}]))


def test_the_report_of_a_gpu_prints_speeds() -> None:
    record = Record("linear", finished=True)
    facts: Row = {"who": "clocher bf16", "model": "x", "n": 1, "k": 2, "m": 1}
    speeds: Row = {"us": 5.0, "us_low": 4.9, "us_high": 5.2, "gbs": 2500.0, "share": 0.83}
    record.add("item", [{**facts, **speeds}, {**facts, "status": "refused", "reason": "too odd"}])
    decode = Record("decode", finished=True)
    step: Row = {"model": "m", "batch": 1, "context": 1024, "us": 2000.0, "outside_us": 100.0}
    step |= {"tokens_per_s": 500.0, "limit_tokens_per_s": 803.0, "share": 0.62}
    decode.add("m-b1", [{**step, "top_kernels": [{"name": "_gemv", "count": 3, "us": 9.0}]}])
    result = report.combine([record, decode], {}, dry=False, seconds=2)
    assert report.is_good(result)
    text = StringIO()
    report.show(result, Console(file=text, width=150))
    for part in ("2500", "83", "refused: clocher bf16: too odd", "803", "_gemv x3", "not measured"):
        assert part in text.getvalue()


def test_gaps_in_the_op_table_are_named(setting: Setting) -> None:
    rows = one(setting, "coverage")
    named = {(row["op"], row["reason"]) for row in rows if "op" in row}
    stated = {(s.name, c.missing.get("cuda")) for s in OPS.values() for c in s.cases}
    assert named == {(op, why) for op, why in stated if why}
    assert rows[-1]["without_contract"] == sorted(set(LOWER) - set(OPS))


class FakeCuda:
    """Stands in for torch.cuda: records captures, and gives every call of a graph 2 us."""

    def __init__(self) -> None:
        self.captures: list[FakeCuda.Graph] = []
        self.replays: list[int] = []
        self.clock = 0.0
        self.capturing = False

    class Graph:
        def __init__(self, owner: "FakeCuda") -> None:
            self.owner, self.calls = owner, 0

        def replay(self) -> None:
            self.owner.replays.append(self.calls)
            self.owner.clock += 2e-3 * self.calls

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Stream:
            def wait_stream(self, other: object) -> None:
                pass

        owner = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = owner.clock

            def elapsed_time(self, end: "Event") -> float:
                return end.at - self.at

        @contextmanager
        def graph(made: FakeCuda.Graph, stream: object) -> Iterator[None]:
            owner.captures.append(made)
            yield

        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": lambda: FakeCuda.Graph(owner),
            "graph": graph,
            "stream": lambda stream: nullcontext(),
            "current_stream": Stream,
            "synchronize": lambda: None,
            "_sleep": lambda cycles: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_a_race_times_graphs_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)

    def call() -> None:
        if cuda.captures:
            cuda.captures[-1].calls += 1

    def refuse() -> None:
        raise RuntimeError("needs a sync\nand more")

    timer = GpuTimer(rounds=4)
    results = timer.race({"three copies": [call] * 3, "one copy": [call], "refused": [refuse]})
    assert results["refused"] == "RuntimeError: needs a sync"
    counts = [graph.calls for graph in cuda.captures]
    # The warm-up of the second contender also counts for the first fake graph.
    assert counts[1] == 20 and counts[0] == 21 + 20
    assert len(cuda.replays) == 2 * (2 + 4)
    timing = results["one copy"]
    assert isinstance(timing, Timing)
    assert timing.rounds == 4 and timing.us == pytest.approx(2.0)
    assert timing.low <= timing.us <= timing.high


class FixedTimer(DryTimer):
    """Runs each contender once and says that it took 8 us."""

    dry = False

    def race(self, contenders: Mapping[str, Sequence[Call]]) -> dict[str, Timing | str]:
        done = super().race({name: calls[:1] for name, calls in contenders.items()})
        return {n: t if isinstance(t, str) else Timing(8, 7, 9, 15) for n, t in done.items()}


@pytest.mark.parametrize(
    "part",
    ["linear", "moe", "attention", "sparse", "decode", "batches", "generate", "variants"],
)
@pytest.mark.usefixtures("references")
def test_rows_of_a_gpu(part: str, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    items = items_of(part, dry=True)
    setting.timer, setting.copy_gbs, setting.l2_bytes = FixedTimer(), 3000.0, 1
    monkeypatch.setattr(shapes, "KV_DTYPES", shapes.TINY_KV_DTYPES)
    for name, value in (("_STEPS", 1), ("_REPEATS", 1), ("_WARM_STEPS", 1)):
        monkeypatch.setattr(decode, name, value)
    monkeypatch.setattr(moe, "_CALLS", 2)
    for name, value in (("CHUNKS", (4, 8)), ("_PROMPTS", (3, 5)), ("_NEW", 2), ("_REPEATS", 1)):
        monkeypatch.setattr(generate, name, value)
    rows = [row for item in items for row in run_item(setting, item)]
    assert {row["status"] for row in rows} <= {"ok", "not measured"}, rows
    timed = [row for row in rows if "us" in row]
    assert all(row["share"] > 0 for row in timed if row["kind"] != "generate")
    record = Record(part, finished=True)
    record.add("all", rows)
    result = report.combine([record], {}, dry=False, seconds=1)
    report.show(result, Console(file=StringIO(), width=150))
    assert [row for row in timed if str(row.get("who", "clocher")).startswith("clocher")]


def test_who_cannot_race_says_why(setting: Setting) -> None:
    setting.timer, setting.copy_gbs = FixedTimer(), 3000.0

    def missing() -> tuple[int, list[Call]]:
        raise ImportError("not installed here")

    ran: list[str] = []
    racing = {
        "clocher fast": lambda: (8_000_000, [lambda: ran.append("fast")]),
        "clocher broken": missing,
        "peer": missing,
    }
    rows = {row["who"]: row for row in setting.race(racing, kind="made up", m=1)}
    assert set(ran) == {"fast"} and set(rows) == set(racing)
    assert rows["clocher fast"]["gbs"] == 1000 and rows["clocher fast"]["share"] == 1000 / 3000
    assert rows["clocher broken"]["status"] == "failed", "our own kernels may not be missing"
    assert rows["peer"]["status"] == "not measured"
    assert rows["peer"]["reason"] == "ImportError: not installed here"
    assert all(row["kind"] == "made up" and row["m"] == 1 for row in rows.values())


def test_rows_say_what_makes_them_again() -> None:
    record = Record("linear", dry=True)
    record.add("a b-m1", [{"kind": "race"}, {}])
    assert [row["kind"] for row in record.rows] == ["race", "linear"]
    command = "python -m bench.gpu_suite --part linear --only 'a b-m1'"
    assert {row["command"] for row in record.rows} == {command}


def test_tuning_tries_tiles_and_puts_the_functions_back(setting: Setting) -> None:
    kept = tiles.gemv_tile
    for matrix, name, field in (
        (shapes.TINY_MATRICES[0], "int4_sym_g64_f16", "vectors"),
        (shapes.TINY_MATRICES[0], "int8_row_f32", "warps"),
    ):
        kind = tune.kind_of(name)
        assert kind.order == field and len(kind.choices) <= 8
        found = tune.tune(setting, name, matrix.n, matrix.k)
        assert not found or tuple(found["tiles"]["1"].values()) in kind.choices
    assert tiles.gemv_tile is kept


def test_a_tile_enters_the_table_only_if_it_is_clearly_faster() -> None:
    assert tune.better({None: 10.0, (2, 1): 9.9, (4, 1): 10.5}) is None
    assert tune.better({None: 10.0, (2, 1): 9.0, (4, 1): 9.5}) == (2, 1)
    assert tune.better({None: 10.0}) is None
