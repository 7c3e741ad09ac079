"""The targets of the Makefile that measure: their variables, their paths, their commands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import VARIABLES

from bench import harness, targets
from bench.cells import OF_MAKE
from bench.record import read_rows
from clocher_kernels.errors import UsageError

ROOT = Path(__file__).parents[1]

# Every variable of the original documents that is about a benchmark, with a value that it refuses.
REFUSED = {
    "RUNS": "0",
    "ROUNDS": "x",
    "THREADS": "all",
    "BATCH": "0",
    "PRECISION": "int5",
    "IE_PRECISION": "double",
    "PREFETCH": "maybe",
    "PRETRANSPOSE": "yes",
    "AFFINITY": "tight",
    "MAX_NEW": "-1",
    "WARMUP_TOKENS": "1.5",
    "IE_REQUIRE_MODEL": "yes",
    "IE_BYTES_PER_TOKEN": "64M",
    "IE_STRIDE_BYTES": "0",
    "IE_VERIFY_TOUCH": "2",
    "IE_DEDUP": "on",
    "IE_DEDUP_STRICT": "on",
    "IE_DEDUP_POLICY": "x",
    "IE_DEDUP_CACHE_MB": "x",
    "IE_DEDUP_HOT_BYTES": "x",
    "IE_PREFETCH_DISTANCE": "x",
    "IE_NT_LOADS": "x",
    "IE_NT_RATIO": "101",
    "IE_L3_BYTES": "x",
    "IE_NT_THRESHOLD_RATIO": "x",
    "IE_STREAM_BLOCK_BYTES": "x",
    "IE_REUSE_GUARD_WINDOWS": "x",
    "IE_ACT_PREC": "e4m3",
    "NUMA_POLICY": "socket:x",
    "IE_HOT_REPLICATE": "2",
    "IE_HOT_REPL_LIMIT_MB": "x",
    "IE_TP_USE_AFFINITY": "2",
    "REPORT": "yes",
    "REPORT_TOKENS_MAX": "-1",
    "VERIFY": "2",
    "VERIFY_HF_IDS": "2",
    "HF_DEVICE": "tpu",
    "HF_DTYPE": "int8",
    "HF_TOPK": "0",
    "HF_LOGITS_TOL": "small",
}
ANY_TEXT = {
    "MODEL_DIR", "PROMPTS", "IE_DEDUP_HOT_LIST", "REPORT_ROOT", "REPORT_SCRIPT", "REPORT_ARGS",
    "REPORT_PATH", "STRICT_REPORT_PATH", "HF_PY", "HF_DIR",
}  # fmt: skip


class Commands:
    """Stand in for processes: note their commands, and write the files that they would."""

    def __init__(self, codes: dict[str, int] | None = None) -> None:
        self.codes = codes or {}
        self.seen: list[list[str]] = []
        self.environ: dict[str, str] = {}

    def __call__(self, command: list[str], **options: object) -> int:
        self.seen.append(command)
        self.environ = options["env"]
        if "--out" in command:
            Path(command[command.index("--out") + 1]).parent.mkdir(parents=True, exist_ok=True)
        return next((code for part, code in self.codes.items() if part in command), 0)

    def names(self) -> list[str]:
        """What was run: the module or script, and --verify."""
        return [
            ("verify" if "--verify" in c else c[2] if c[1] == "-m" else Path(c[1]).name)
            for c in self.seen
        ]


def call(commands: Commands, tmp_path: Path, **environ: str) -> targets.Call:
    made = targets.set_up({"REPORT_ROOT": str(tmp_path), **environ})
    made.run = commands
    return made


# Variables


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_value_is_refused_by_name_with_what_it_takes(name, monkeypatch, capsys) -> None:
    for variable in VARIABLES | set(targets.VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, REFUSED[name])
    assert targets.main(["bench"]) == 2
    error = capsys.readouterr().err
    assert f"{name}: got {REFUSED[name]!r}, expected " in error


def test_every_variable_is_tried() -> None:
    promised = {name for name in VARIABLES if not name.startswith("CLOCHER_")}
    assert set(REFUSED) | ANY_TEXT == promised | set(OF_MAKE) | set(targets.VARIABLES)


def test_the_page_lists_every_variable() -> None:
    page = (ROOT / "docs/benchmarking.md").read_text(encoding="utf-8")
    for name, (value, default, about) in targets.VARIABLES.items():
        shown = "the one that runs make" if name == "HF_PY" else default and f"`{default}`"
        assert f"| `{name}` | {value.takes} | {shown} | {about} |" in page
    for option in harness.OPTIONS:
        shown = f"{option.default:g}" if isinstance(option.default, int | float) else ""
        env = f"`{option.envvar}`" if option.envvar else ""
        assert f"| `{option.opts[0]}` | {env} | {shown} | {option.help} |" in page


# Paths


@pytest.mark.parametrize(
    ("raw", "called_from", "found"),
    [
        ("benchmarks/prompts_10..txt", ".", "bench/prompts_10..txt"),
        ("benchmarks/prompts_10.txt", ".", "bench/prompts_10.txt"),
        ("bench/prompts.jsonl", ".", "bench/prompts.jsonl"),
        ("../../benchmarks/prompts_10..txt", "tests/data", "bench/prompts_10..txt"),
        ("../../bench/prompts_10.txt", "tests/data", "bench/prompts_10.txt"),
        ("bench/prompts_10.txt", "tests/data", "bench/prompts_10.txt"),
        ("valid.txt", "tests/data", "tests/data/valid.txt"),
        ("missing.txt", "tests/data", "tests/data/missing.txt"),
    ],
)
def test_a_path_counts_from_where_make_was_called(raw, called_from, found) -> None:
    path = targets.find(raw, Path(os.path.normpath(ROOT / called_from)))
    assert path.resolve() == (ROOT / found).resolve()


def test_a_report_folder_under_benchmarks_lies_under_bench() -> None:
    root = f"{ROOT}/benchmarks/reports"
    assert targets.set_up({"REPORT_ROOT": root}).results.parent.resolve() == ROOT / "bench/reports"


def test_the_harness_has_the_path_of_the_original_document() -> None:
    command = [sys.executable, "benchmarks/harness.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--sweep" in done.stdout


def test_an_iebin_pair_where_make_was_called_is_the_model(tmp_path: Path) -> None:
    environ = {targets.CALLED_FROM: str(tmp_path)}
    assert "MODEL_DIR" not in targets.set_up(environ).environ
    (tmp_path / "model.ie.json").write_text("{}")
    assert targets.set_up(environ).environ["MODEL_DIR"] == str(tmp_path)
    assert targets.set_up({**environ, "MODEL_DIR": "x"}).environ["MODEL_DIR"] == str(tmp_path / "x")


# What is run


def test_bench_measures_verifies_and_reports(tmp_path: Path) -> None:
    commands = Commands()
    made = call(commands, tmp_path, RUNS="2", REPORT="0")
    assert targets.bench(made) == 0
    assert commands.names() == ["bench.harness", "verify"]
    assert commands.seen[0][3:] == ["--out", str(tmp_path / "bench.jsonl")]
    assert commands.environ["RUNS"] == "2"


def test_bench_cuda_names_the_device(tmp_path: Path) -> None:
    commands = Commands()
    made = call(commands, tmp_path, REPORT="0", VERIFY="0")
    made.flags = ["--label", "x"]
    assert targets.TARGETS["bench-cuda"](made) == 0
    assert commands.seen[0][-3:] == ["--device=cuda", "--label", "x"]


@pytest.mark.parametrize(("verified", "code"), [(0, 0), (7, 7), (9, 9)])
def test_a_contradiction_fails_and_a_disturbed_machine_is_undecided(
    verified, code, tmp_path
) -> None:
    commands = Commands({"--verify": verified})
    assert targets.bench(call(commands, tmp_path, REPORT="0")) == code
    assert targets.bench_verify(call(commands, tmp_path)) == code


def test_what_was_measured_goes_into_the_page_with_its_report(tmp_path: Path) -> None:
    commands = Commands()
    assert targets.bench(call(commands, tmp_path)) == 0
    assert commands.names()[2:] == ["run_harness_report.py", "update_performance_md.py"]
    assert commands.seen[-1][-2:] == ["--add", str(tmp_path / "bench.jsonl")]


def test_what_was_not_measured_is_reported_and_ends_with_9(tmp_path: Path) -> None:
    commands = Commands({"bench.harness": 9})
    made = call(commands, tmp_path)
    assert targets.bench(made, again=False) == 9
    assert commands.names() == ["bench.harness", "verify", "run_harness_report.py"]


def test_the_results_of_the_bench_before_are_kept(tmp_path: Path) -> None:
    (tmp_path / "bench.jsonl").write_text("old\n")
    targets.bench(call(Commands(), tmp_path, REPORT="0"))
    assert (tmp_path / "bench.previous.jsonl").read_text() == "old\n"
    (tmp_path / "bench.jsonl").write_text("new\n")
    targets.bench(call(Commands(), tmp_path, REPORT="0"), again=False)
    assert (tmp_path / "bench.jsonl").read_text() == "new\n"


def test_ids_are_compared_with_transformers(tmp_path: Path) -> None:
    commands = Commands()
    made = call(
        commands, tmp_path, VERIFY_HF_IDS="1", HF_TOPK="5", HF_PY="py", REPORT="0", VERIFY="0"
    )
    assert targets.bench(made) == 0
    _, traced, checked = commands.seen
    assert traced[-2:] == ["--trace-topk", "5"] and str(tmp_path / "trace.jsonl") in traced
    assert checked[:2] == ["py", "scripts/verify_hf_generation_ids.py"]
    assert checked[checked.index("--hf-dir") + 1].endswith("assets/clocher-tiny-gptoss")
    assert commands.environ["HF_TOPK"] == "5"


def test_the_report_gets_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "bench.jsonl").write_text("")
    commands = Commands()
    script = tmp_path / "own.py"
    script.write_text("")
    made = call(
        commands, tmp_path, REPORT_SCRIPT=str(script), REPORT_ARGS="--a b", REPORT_TOKENS_MAX="7"
    )
    assert targets.report(made) == 0
    expected = [str(script), str(tmp_path / "bench.jsonl"), "--out-dir", str(tmp_path)]
    assert commands.seen[0][1:] == [*expected, "--tokens-max", "7", "--a", "b"]


def test_a_report_of_the_strict_window_is_checked(tmp_path: Path) -> None:
    strict = tmp_path / "strict.json"
    check = {"name": "a", "status": "pass", "detail": "d"}
    strict.write_text(json.dumps([{"op": "strict", "checks": [check]}]))
    made = call(Commands(), tmp_path, STRICT_REPORT_PATH=str(strict))
    assert targets.bench_verify(made) == 0
    checks = [check, {**check, "status": "fail"}]
    strict.write_text(json.dumps([{"op": "strict", "checks": checks}]))
    assert targets.bench_verify(made) == 7
    strict.write_text(json.dumps([{"op": "decode"}]))
    with pytest.raises(UsageError, match="has no checks"):
        targets.bench_verify(made)


# The real thing


def make(*arguments: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run make with this interpreter in place of .venv."""
    drop = VARIABLES | set(targets.VARIABLES) | {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PWD"}
    kept = {name: value for name, value in os.environ.items() if name not in drop}
    own = [
        f"BIN={Path(sys.executable).parent}",
        "-o",
        ".venv/.installed",
        "-o",
        ".venv/.installed-bench",
    ]
    return subprocess.run(
        ["make", *own, *arguments],
        cwd=cwd,
        env={**kept, "PWD": str(cwd), **environ},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_make_bench_from_the_directory_of_a_model(tmp_path: Path) -> None:
    done = make(
        "-C", "../../..", "bench",
        cwd=ROOT / "tests/data/clocher-tiny-llama",
        MODEL_DIR=".", PROMPTS="../../../benchmarks/prompts_10..txt", RUNS="1", MAX_NEW="2",
        PRECISION="int4", IE_VERIFY_TOUCH="1", IE_BYTES_PER_TOKEN="64000", IE_STRIDE_BYTES="256",
        REPORT="0", REPORT_ROOT=str(tmp_path), ARGS="--retries 0",
    )  # fmt: skip
    (row,) = read_rows(tmp_path / "bench.jsonl")
    assert row["settings"]["model_dir"] == str(ROOT / "tests/data/clocher-tiny-llama")
    assert row["line"]["prompts"] == 10 and row["line"]["tokens_generated"] == 20
    assert row["line"]["work_touch"]["checksum"] is not None
    if done.returncode:  # the machine was disturbed in the only run
        assert "undecided" in done.stdout and "Error 9" in done.stderr, done.stderr
    else:
        assert "1 runs count" in done.stdout


def test_make_fails_with_the_message_of_the_variable() -> None:
    done = make("bench", RUNS="many")
    assert done.returncode == 2
    assert "RUNS: got 'many', expected an integer from 1 to 10000" in done.stderr


def test_make_build_gives_the_name_of_the_original_program(tmp_path: Path) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"build/inference-engine\S*", text)
    assert make("build").returncode == 0
    program = ROOT / "build/inference-engine"
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    assert shown.stdout.startswith("clocher-run ")


def test_every_target_is_described() -> None:
    shown = make("help").stdout
    names = "bench bench-cuda bench-report bench-verify microbench microbench-block-sparse profile"
    for name in f"{names} build build-cuda clean verify run test lint".split():
        assert f"make {name} " in shown


@pytest.mark.parametrize("name", ["run_benchmark.sh", "true_tps_strict.sh"])
def test_scripts_print_their_usage(name: str) -> None:
    script = ROOT / "scripts" / name
    shown = subprocess.run(["bash", script, "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0
    assert f"bash scripts/{name}" in shown.stdout


def test_run_benchmark_refuses_an_unknown_target() -> None:
    script = ROOT / "scripts/run_benchmark.sh"
    done = subprocess.run(
        ["bash", script, "nonsense"],
        env={**os.environ, "PYTHON": "false"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "got 'nonsense', expected bench, bench-cuda, bench-report or bench-ver" in done.stderr


def test_run_benchmark_reads_the_variables_of_make(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", ROOT / "scripts/run_benchmark.sh", "bench-verify"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable, "REPORT_PATH": "none.jsonl"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"REPORT_PATH: got '{tmp_path}/none.jsonl', expected a file" in done.stderr
