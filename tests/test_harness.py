"""The harness: its statistics, its turns, what it voids and keeps; and real processes of it."""

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import harness, machine, runs
from bench.cells import (
    Cell,
    base_settings,
    command_of,
    content_key,
    make_cells,
    parse_sweep,
)
from bench.compared import apart, beside, cells_tables, good, group, pairs, problems, write_csv
from bench.machine import State
from bench.record import append_row, read_rows
from bench.runs import Child, Harness
from clocher_kernels.errors import ModelNotFound, UsageError
from clocher_runtime.config.commands import resolve
from clocher_runtime.config.values import Given
from clocher_runtime.quality.statistics import apart_ratio, median_of_runs, paired_ratio

ROOT = Path(__file__).parents[1]
SIXTY = ",".join(map(str, range(1, 61)))
QUIET = State(0.0, 0.5, None, None, 1, 0.1, 1.0)
BUSY = State(2.5, 40.0, None, None, 5, 3.0, 1.0)


def noisy(speed: float, runs: int, rng: np.random.Generator) -> list[float]:
    """Speeds of runs: one per cent of noise, and one run in eight that was held up."""
    held_up = (rng.random(runs) < 0.125) * rng.exponential(0.05, runs)
    return list(speed * np.exp(rng.normal(0, 0.01, runs) - held_up))


def generator(text: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(text.encode()))


class Machine:
    """Stand in for processes: a speed for each cell, and a state for each launch."""

    def __init__(self, speeds: dict[str, float], states: list[State] | None = None) -> None:
        self.speeds = speeds
        self.states = list(states or [])
        self.launched: list[str] = []
        self.rng = generator("machine")

    def __call__(self, cell: Cell) -> Child:
        self.launched.append(cell.label)
        line = {
            "status": "ok",
            "tps_true": noisy(self.speeds[cell.label], 1, self.rng)[0],
            "latency_p50_ms": 1.0,
            "ttft_ms": None,
            "hints_ignored": ["IE_NT_LOADS=1"] if cell.settings.get("nt_loads") == "1" else [],
            "outputs": [{"token_ids": [1, 2, 3], "text": "abc"}],
        }
        return Child(0, line, "", self.states.pop(0) if self.states else QUIET)


def cells_of(*labels: str) -> list[Cell]:
    return [Cell(label, {}, {"stub": "1"}, key=f"{label:0>64}") for label in labels]


def run(path: Path, machine: Machine, cells: list[Cell], runs: int, **how: Any) -> list[dict]:
    return Harness(path, cells, runs, launch=machine, rest_s=0, **how).run()


# Statistics


@pytest.mark.parametrize("runs", [2, 3, 5, 10, 30])
def test_the_interval_holds_the_true_median(runs: int) -> None:
    rng = generator(f"coverage-{runs}")
    true = float(np.median(noisy(100, 100_000, rng)))
    found = [median_of_runs(noisy(100, runs, rng)) for _ in range(300)]
    inside = sum(s.low <= true <= s.high for s in found)
    assert inside >= 0.87 * 300


@pytest.mark.parametrize("runs", [3, 5, 10])
def test_two_summaries_of_the_same_thing_agree(runs: int) -> None:
    rng = generator(f"agree-{runs}")
    pairs = [
        (median_of_runs(noisy(100, runs, rng)), median_of_runs(noisy(100, runs, rng)))
        for _ in range(200)
    ]
    assert sum(a.low <= b.high and b.low <= a.high for a, b in pairs) >= 0.95 * 200


@pytest.mark.parametrize("compare", [paired_ratio, apart_ratio], ids=["paired", "apart"])
@pytest.mark.parametrize(
    ("slowdown", "verdicts"),
    [
        (0.0, {"no difference shown"}),
        (0.01, {"no difference shown"}),
        (0.05, {"slower"}),
        (-0.05, {"faster"}),
    ],
    ids=["same", "1-percent", "5-percent-slower", "5-percent-faster"],
)
def test_a_claim_needs_parted_intervals_and_three_percent(compare, slowdown, verdicts) -> None:
    rng = generator(f"{compare.__name__}-{slowdown}")
    found = []
    for _ in range(40):
        base, other = noisy(100, 15, rng), noisy(100 / (1 + slowdown), 15, rng)
        found.append(compare(other, base).verdict)
    assert sum(verdict in verdicts for verdict in found) >= 38


def test_a_drift_that_is_shared_does_not_hide_a_slowdown_from_pairs() -> None:
    rng = generator("drift")
    drift = np.exp(np.linspace(0, 0.4, 12))
    base = list(np.array(noisy(100, 12, rng)) * drift)
    other = list(np.array(noisy(95, 12, rng)) * drift)
    assert paired_ratio(other, base).verdict == "slower"
    assert apart_ratio(other, base).verdict == "no difference shown"


def test_too_few_runs_make_no_claim() -> None:
    assert paired_ratio([50.0], [100.0]).verdict == "too few runs"
    assert apart_ratio([50.0], [100.0, 101.0]).verdict == "too few runs"
    assert not median_of_runs([3.0]).known
    with pytest.raises(ValueError, match="positive"):
        median_of_runs([])


# Cells


def test_a_sweep_is_the_product_of_its_values_under_the_names_of_the_seed() -> None:
    sweep = (
        "act_quant=int8,fp8|kv_quant=none|prefetch=off,auto,256|nt_loads=0,1"
        "|numa_policy=auto,compact,scatter"
    )
    cells = make_cells({"kv_dtype": "bf16", "max_new": "4"}, sweep, "")
    assert len(cells) == 36 == len({cell.label for cell in cells})
    assert cells[0].label == "act_quant=int8 kv_quant=none prefetch=off nt_loads=0 numa_policy=auto"
    assert cells[0].settings == {
        "max_new": "4",
        "act_prec": "int8",
        "numa_policy": "auto",
        "prefetch_distance": "0",
        "nt_loads": "0",
    }
    assert cells[0].environment({"PATH": "p", "CLOCHER_MAX_NEW": "9"}) == {
        "PATH": "p",
        "CLOCHER_MAX_NEW": "4",
        "CLOCHER_ACT_PREC": "int8",
        "NUMA_POLICY": "auto",
        "IE_PREFETCH_DISTANCE": "0",
        "IE_NT_LOADS": "0",
    }


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("x=1", "unknown setting 'x'; known are act_calibration, act_prec, act_quant"),
        ("nt_loads=0,7", "nt_loads: got '7', expected one of 0, 1, auto"),
        ("threads", "expected threads=VALUE"),
        ("threads=1,1", "without repetition"),
        ("act_quant=int8|act_prec=fp8", "swept already"),
        ("|".join(f"{name}={SIXTY}" for name in ("threads", "batch", "seed")), "216000 comb"),
        ("trace_ids=1", "unknown setting 'trace_ids'"),
    ],
    ids=["name", "value", "no-value", "twice", "alias-twice", "too-many", "not-swept"],
)
def test_a_bad_sweep_is_refused(sweep: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_sweep(sweep)


def test_flag_then_variable_then_file_then_default() -> None:
    in_file = {"threads": Given("f:", "3"), "batch": Given("f:", "2")}
    found = base_settings(
        {"max_new": "8"}, {"CLOCHER_MAX_NEW": "9", "CLOCHER_THREADS": "4"}, in_file
    )
    assert found == {"max_new": "8", "threads": "4", "batch": "2"}


def test_the_key_follows_the_content(tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("a\n")
    cell = Cell("a", {}, {"prompts_file": str(prompts), "max_new": "4"})
    key = content_key(cell, tmp_path, "m")
    assert key == content_key(Cell("other label", {}, dict(cell.settings)), tmp_path, "m")
    assert key != content_key(cell, tmp_path, "another machine")
    prompts.write_text("b\n")
    assert key != content_key(cell, tmp_path, "m")
    with pytest.raises(ModelNotFound, match=r"^'.*no' does not exist"):  # not "--model_dir: ..."
        content_key(Cell("a", {}, {"model_dir": str(tmp_path / "no")}), tmp_path, "m")


# Turns, voids, resuming


def test_cells_run_in_turns_after_a_process_that_warms(tmp_path: Path) -> None:
    machine = Machine({"a": 100, "b": 90, "c": 80})
    rows = run(tmp_path / "r.jsonl", machine, cells_of("a", "b", "c"), 3)
    assert "".join(machine.launched) == "abc" + "abc" + "bca" + "cab"
    assert [row["status"] for row in rows] == ["warmup"] * 3 + ["ok"] * 9
    assert [row["order"] for row in rows] == list(range(1, 13))
    assert read_rows(tmp_path / "r.jsonl") == rows
    assert [row["outputs"] is None for row in rows] == [False] * 3 + [True] * 9


def test_a_disturbed_run_is_void_and_repeated(tmp_path: Path) -> None:
    states = [QUIET, BUSY, BUSY, QUIET]
    rows = run(tmp_path / "r.jsonl", Machine({"a": 100}, states), cells_of("a"), 2)
    assert [(r["run"], r["attempt"], r["status"]) for r in rows] == [
        (0, 1, "warmup"),
        (1, 1, "void"),
        (1, 2, "void"),
        (1, 3, "ok"),
        (2, 1, "ok"),
    ]
    assert rows[1]["why"] == [
        "steal: 2.5 % of CPU time (limit 1 %)",
        "other processes: 40.0 % of CPU time (--others-limit 5)",
    ]
    (cell,) = group(rows).values()
    assert len(good(cell)) == 2


def test_voids_end_at_the_limit_and_are_tried_again_when_resumed(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    rows = run(path, Machine({"a": 100}, [BUSY, BUSY]), cells_of("a"), 1, retries=1)
    assert [row["status"] for row in rows] == ["void", "void"]
    rows = run(path, Machine({"a": 100}), cells_of("a"), 1, retries=1)
    assert [row["status"] for row in rows] == ["void", "void", "ok"]


def test_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run(path, Machine({"a": 100}), cells_of("a"), 2)
    with path.open("a") as file:
        file.write('{"half of a li')  # the harness was killed
    machine = Machine({"a": 100, "b": 90})
    rows = run(path, machine, cells_of("a", "b"), 2)
    assert machine.launched == ["b", "b", "b"]
    assert read_rows(path) == rows
    assert [len(good(cell)) for cell in group(rows).values()] == [2, 2]


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    machine = Machine({"a": 100})

    def launch(cell: Cell) -> Child:
        if cell.label == "a":
            return machine(cell)
        return Child(3, {"status": "error", "message": "no model"}, "", QUIET)

    rows = run(tmp_path / "r.jsonl", launch, cells_of("a", "b"), 2)  # type: ignore[arg-type]
    assert [(row["label"], row["status"]) for row in rows] == [
        ("a", "warmup"),
        ("b", "error"),
        ("a", "ok"),
        ("a", "ok"),
    ]
    assert problems(group(rows)) == ["b, run 0: exit code 3: no model"]


def test_different_tokens_are_a_problem(tmp_path: Path) -> None:
    rows = run(tmp_path / "r.jsonl", Machine({"a": 100}), cells_of("a"), 2)
    assert problems(group(rows)) == []
    rows[-1]["tokens_sha256"] = "other"
    assert problems(group(rows)) == ["a: its processes generated 2 different texts"]


def test_the_command_of_a_sweep_is_one_that_a_shell_takes() -> None:
    settings = {"max_new": "4", "ignore_eos": "1", "isa": "avx2"}
    assert command_of(settings, "threads=1,2|nt_loads=0,1", 3) == (
        "CLOCHER_MAX_NEW=4 CLOCHER_IGNORE_EOS=1 CLOCHER_ISA=avx2 python -m bench.harness "
        "--runs 3 --sweep 'threads=1,2|nt_loads=0,1'"
    )
    assert command_of({}, "", 1) == "python -m bench.harness --runs 1"


def test_a_setting_that_the_engine_ignores_is_marked(tmp_path: Path) -> None:
    cells = make_cells({"stub": "1"}, "nt_loads=0,1|threads=1,2", "")
    cells = [Cell(c.label, c.swept, c.settings, key=f"{n:064}") for n, c in enumerate(cells)]
    machine = Machine({cell.label: 100.0 for cell in cells})
    found = group(run(tmp_path / "r.jsonl", machine, cells, 5))
    speeds, _ = cells_tables(found)
    marks = {row[0]: "(ignored: IE_NT_LOADS=1)" in row[-1] for row in speeds.rows}
    assert marks == {cell.label: "nt_loads=1" in cell.label for cell in cells}


def test_the_table_is_flat_in_the_csv_file(tmp_path: Path) -> None:
    rows = run(tmp_path / "r.jsonl", Machine({"a": 100}), cells_of("a"), 2)
    write_csv(tmp_path / "r.csv", rows)
    head, *lines = (tmp_path / "r.csv").read_text().splitlines()
    assert {"label", "run", "status", "why", "line.tps_true", "state.load1"} <= {*head.split(",")}
    assert len(lines) == 3


@pytest.mark.parametrize(
    "text",
    ["[]\n", "{}\n", "no\n", '{"schema": "clocher.bench/1", "key": 1}\n'],
    ids=["list", "no-schema", "no-json", "bad-key"],
)
def test_a_file_that_is_no_result_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(text)
    with pytest.raises(UsageError, match="line 1"):
        read_rows(tmp_path / "r.jsonl")


# Two files


def result_file(path: Path, speed: float, runs: int = 12, label: str = "a") -> Path:
    machine = Machine({label: speed})
    machine.rng = generator(path.name)
    run(path, machine, cells_of(label), runs)
    return path


@pytest.mark.parametrize(
    ("speed", "code"), [(100, 0), (95, 8), (106, 0), (99, 0)], ids=["same", "slow", "fast", "near"]
)
def test_compare_exits_8_where_the_second_file_is_slower(speed, code, tmp_path, capsys) -> None:
    before = result_file(tmp_path / "before.jsonl", 100)
    after = result_file(tmp_path / "after.jsonl", speed)
    assert harness.main(["--compare", str(before), str(after)]) == code
    assert "second file / first file" in capsys.readouterr().out


def test_a_measurement_without_a_run_that_counts_ends_with_9(tmp_path: Path) -> None:
    cases: list[tuple[list[State], int]] = [([], 0), ([BUSY], 9)]
    for states, code in cases:
        fake, out = Machine({"a": 100.0}, states), tmp_path / f"{code}.jsonl"
        assert harness.measure(Harness(out, cells_of("a"), 1, retries=0, launch=fake)) == code


def test_compare_cannot_tell_without_runs_or_from_different_machines(tmp_path, capsys) -> None:
    before = result_file(tmp_path / "before.jsonl", 100)
    few = result_file(tmp_path / "few.jsonl", 50, runs=1)
    assert harness.main(["--compare", str(before), str(few)]) == 9
    text = result_file(tmp_path / "there.jsonl", 50).read_text()
    host = machine.describe()["host_sha256"]
    (tmp_path / "there.jsonl").write_text(text.replace(host, "0" * 12))
    assert harness.main(["--compare", str(before), str(tmp_path / "there.jsonl")]) == 9
    assert "different machines" in capsys.readouterr().err
    assert harness.main(["--compare", str(before), str(tmp_path / "no.jsonl")]) == 2


def test_files_are_compared_by_label(tmp_path: Path) -> None:
    one = group(read_rows(result_file(tmp_path / "1.jsonl", 100, label="a")))
    two = group(read_rows(result_file(tmp_path / "2.jsonl", 90, label="b")))
    assert {label: apart(*pair).verdict for label, pair in pairs(one, two).items()} == {
        "a": "slower"
    }
    assert pairs({**one, "c": []}, two) == {}


# The machine


def recorded(root: Path, user: int, steal: int, throttles: int, quota_us: int) -> Path:
    for name, text in {
        "proc/stat": f"cpu 9 9 9 9\ncpu0 {user} 0 0 50 5 0 0 {steal} 0 0\n"
        "cpu1 999 0 0 0 0 0 0 9 0 0\nprocs_running 4\n",
        "proc/self/cgroup": "0::/user/me\n",
        "sys/fs/cgroup/user/me/cpu.stat": f"nr_throttled 2\nthrottled_usec {quota_us}\n",
        "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": f"{throttles}\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_counters_of_the_machine(tmp_path: Path) -> None:
    cpus = frozenset({0})
    before = machine.read(recorded(tmp_path, 100, 0, 3, 0), cpus)
    after = machine.read(recorded(tmp_path, 200, 5, 4, 400_000), cpus)
    seconds = after._replace(seconds=before.seconds + 2, own_s=before.own_s + 0.5)
    state = machine.between(before, seconds, 1, tmp_path)
    assert state.steal_percent == pytest.approx(2.5)
    assert state.others_percent == pytest.approx(25)
    assert (state.throttled_events, state.quota_throttled_s, state.runnable) == (1, 0.4, 4)
    assert [why.split(":")[0] for why in state.disturbances()] == [
        "steal",
        "other processes",
        "thermal throttling",
        "CPU quota",
    ]


def test_a_machine_without_counters_disturbs_nothing(tmp_path: Path) -> None:
    reading = machine.read(tmp_path, frozenset({0}))
    state = machine.between(reading, reading, 1, tmp_path)
    assert state.disturbances() == []
    assert state.others_percent is None


# The real thing


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    from clocher_runtime.config.commands import ALL

    for setting in ALL.values():
        for variable in setting.env:
            monkeypatch.delenv(variable, raising=False)


def test_real_processes(tmp_path: Path, bare: None, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "bench.toml"
    config.write_text(
        "runs = 1\nretries = 0\nothers_limit = 100\n[engine]\nmax_new = 4\nbatch = 2\n"
    )
    out = tmp_path / "r.jsonl"
    arguments = ["--config", str(config), "--prompts", str(ROOT / "bench/prompts_10.txt")]
    code = harness.main([*arguments, "--out", str(out), "--batch", "5"])
    (row,) = read_rows(out)
    assert code == (0 if row["status"] == "ok" else 9), row["why"]  # 9: the host took CPU time
    assert row["line"]["tokens_generated"] == 40
    assert row["line"]["batch"] == 5
    assert row["line"]["outputs"] == [] and len(row["outputs"]) == 10
    assert row["settings"]["max_new"] == "4"
    assert "bench" in capsys.readouterr().out
    code = harness.main(["--verify", str(out)])
    assert code == (0 if row["status"] == "ok" else 9)


@pytest.mark.slow
def test_a_planted_slowdown_of_five_percent_is_found(bare: None, tmp_path: Path) -> None:
    """Of the same engine, once with each step made 5 % longer; nothing is found of the same."""
    slowed = [sys.executable, str(ROOT / "tests/slowed_engine.py"), "5"]
    settings = {"max_new": "32", "ignore_eos": "1", "rounds": "40", "threads": "1"}
    host = machine.describe()["host_sha256"]
    cells = [Cell(name, {}, settings, key=f"{name}{host}") for name in ("plain", "again", "slowed")]

    def launch(cell: Cell) -> Child:
        return runs.launch(cell, slowed if cell.label == "slowed" else runs.ENGINE)

    job = Harness(tmp_path / "r.jsonl", cells, 12, others_limit=100, tokens_max=0, launch=launch)
    cells = group(job.run())
    plain, again, slower = cells.values()
    assert problems(cells) == []
    assert beside(plain, again).verdict == "no difference shown"
    assert beside(plain, slower).verdict == "slower"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs", "0"], "--runs' (env var: 'RUNS'): 0 is not in the range 1<=x<=10000"),
        (["--nope"], "No such option"),
        (["--", "--max-new", "x"], "--max-new: got 'x'"),
        (["--prompts", "missing.txt"], "prompts file missing.txt: No such file"),
    ],
    ids=["runs", "flag", "engine-flag", "prompts"],
)
def test_a_usage_error_runs_nothing(
    arguments, message, bare, capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert harness.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_unknown_key_of_the_file_names_the_known_ones(tmp_path, bare, capsys) -> None:
    config = tmp_path / "bench.toml"
    config.write_text("[engine]\nthread = 2\n")
    assert harness.main(["--config", str(config)]) == 2
    said = capsys.readouterr().err
    assert "unknown setting 'thread'; known are act_calibration, act_prec" in said


@pytest.mark.parametrize("name", ["engine.toml", "bench.toml"])
def test_the_shipped_settings_are_valid(name: str, bare: None, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    path = ROOT / "bench/configs" / name
    if name == "bench.toml":
        given = harness.command.make_context("harness", ["--config", str(path)]).params
        assert given["runs"] == 10
        assert given["in_file"]["max_new"].raw == "64"
    else:
        assert resolve({"config": str(path)}, {}).max_new == 64


def test_the_double_dot_file_is_a_copy() -> None:
    texts = [(ROOT / "bench" / n).read_text() for n in ("prompts_10.txt", "prompts_10..txt")]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 10
    for line in (ROOT / "bench/prompts.jsonl").read_text().splitlines():
        assert isinstance(json.loads(line)["prompt"], str)


def test_append_keeps_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    row = {"schema": "clocher.bench/1", "key": "k", "label": "l", "run": 1, "status": "void"}
    append_row(path, row)
    append_row(path, {**row, "run": 2})
    assert [found["run"] for found in read_rows(path)] == [1, 2]
