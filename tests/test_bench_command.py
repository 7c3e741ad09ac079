"""`clocher bench`: its rows, what they say of memory and of tokens, and errors."""

import csv
import io
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from weight_files import LLAMA

from clocher_kernels import guards
from clocher_kernels.errors import WindowError
from clocher_kernels.guards import refuse_in_window
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.load import Model, load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.timing import Span, TimedWindow
from clocher_runtime.quality import speed
from clocher_runtime.quality.speed import Case, Runner, session_for
from clocher_runtime.subcommands import bench_measure
from clocher_runtime.subcommands.bench import bench
from clocher_runtime.subcommands.bench_measure import doubts
from clocher_runtime.subcommands.bench_measure import speed as row_of

FAST = ["-p", "16", "-n", "4", "-r", "2", "-t", "1"]

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(open_checkpoint(embedded_model()))


def rows_of(capsys: Capture, *words: str, code: int = 0) -> list[dict[str, Any]]:
    """Run `clocher bench -o json` and return its rows; standard output has nothing else."""
    assert bench.run([*words, "-o", "json"]) == code
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def column(text: str, name: str) -> list[str]:
    """Return the cells of a column of a table in Markdown."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return [line[cells[0].index(name)] for line in cells[2:]]


# What is measured.


def test_a_table_as_llama_bench_prints_it(capsys: Capture) -> None:
    assert bench.run(FAST) == 0
    out = capsys.readouterr().out
    assert column(out, "test") == ["pp16", "tg4"]
    assert column(out, "model") == ["clocher-tiny-gptoss"] * 2
    assert all(float(cell.split(" ± ")[0]) > 0 for cell in column(out, "t/s"))
    assert column(out, "same tokens") == ["✓", "✓"]
    assert column(out, "% of read")[0] == ""
    assert float(column(out, "% of read")[1].split()[0]) > 0
    assert "Not timed: loading" in out
    assert "memory read at " in out


def test_every_sample_is_kept(capsys: Capture) -> None:
    prompt, decode = rows_of(capsys, *FAST)
    assert prompt["correct"] is decode["correct"] is True
    assert (decode["n_prompt"], decode["n_gen"], decode["n_depth"]) == (0, 4, 0)
    assert len(decode["samples_ns"]) == len(decode["samples_read_gbps"]) == 2
    for row in (prompt, decode):
        tokens = row["n_prompt"] + row["n_gen"]
        assert row["samples_ts"] == pytest.approx([tokens * 1e9 / ns for ns in row["samples_ns"]])
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
    rates = [rate * decode["bytes_per_token"] / 1e9 for rate in decode["samples_ts"]]
    share = 100 * sum(rates) / sum(decode["samples_read_gbps"])
    assert decode["pct_of_read"] == pytest.approx(share)
    assert decode["versions"]["clocher"] == decode["build_commit"]


def test_tests_threads_and_batches(capsys: Capture) -> None:
    words = ["-p", "8", "-n", "3", "-d", "0,128", "-pg", "8,2", "-t", "1,2", "-b", "1,3"]
    rows = rows_of(capsys, *words, "-r", "1")
    one = [(row["test"], row["n_seqs"]) for row in rows if row["n_threads"] == 1]
    shallow = [("pp8", 1), ("tg3", 1), ("tg3", 3), ("pp8+tg2", 1)]
    assert one == shallow + [(f"{name} @ d128", batch) for name, batch in shallow]
    assert [(r["test"], r["n_seqs"]) for r in rows if r["n_threads"] == 2] == one
    for row in rows:
        assert row["correct"], row
        assert row["same_tokens"]["thread_counts"]
        # Which experts three sequences have in common is not known, nor what a prompt reads.
        assert (row["bytes_per_token"] is None) == (row["n_seqs"] > 1 or row["n_prompt"] > 0)
    by_depth = [r["bytes_per_token"] for r in rows if r["bytes_per_token"]]
    assert by_depth[1] > by_depth[0]


def test_formats(capsys: Capture) -> None:
    assert bench.run([*FAST, "-o", "jsonl"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["test"] for line in lines] == ["pp16", "tg4"]
    assert bench.run([*FAST, "-o", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["test"] for row in rows] == ["pp16", "tg4"]
    assert "samples_ns" not in rows[0]


def test_variables_act_and_are_named(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("IE_ACT_PREC", "fp32")
    monkeypatch.setenv("IE_STREAM_BLOCK_BYTES", "65536")
    monkeypatch.setenv("IE_SEED", "7")
    assert bench.run(FAST) == 0
    out = capsys.readouterr().out
    assert "activations fp32" in out
    named = next(line for line in out.splitlines() if line.startswith("set by variables: "))
    assert "IE_ACT_PREC=fp32" in named
    assert "SEED" not in out


def test_steps_before_the_test_do_not_count() -> None:
    spans = [Span("prefill", 128, 1), Span("prefill", 128, 10), Span("prefill", 16, 100)]
    spans += [Span("decode", 1, 1000), Span("decode", 1, 1000)]
    assert sum(speed._counted(spans, Case(144, 0, 128))) == 110
    assert sum(speed._counted(spans, Case(144, 2, 128))) == 2110
    assert sum(speed._counted(spans, Case(272, 0))) == 111


def test_only_steps_of_the_whole_batch_count() -> None:
    spans = [Span("prefill", 8, 1), Span("decode", 2, 10), Span("decode", 3, 100)]
    assert [span.ns for span in speed._full(spans, 3)] == [100]


def test_bytes_of_a_token_hold_weights_and_the_keys_it_sees(model: Model) -> None:
    case = Case(0, 2, 256)
    with closing(
        session_for(model, [case], EngineConfig(threads=1, kv_dtype="f16", speculate="off"))
    ) as session:
        found = Runner(session).bytes_per_token(case)
    spec = model.spec
    cell = 2 * spec.num_kv_heads * spec.head_dim * 2
    seen = [sum(min(cells, window or cells) for window in spec.windows) for cells in (257, 258)]
    assert found == round(model.bytes_per_token + cell * sum(seen) / 2)


# Verdicts.


def test_other_tokens_in_a_repetition_are_found(capsys: Capture, monkeypatch: Patch) -> None:
    ids, calls = Runner._ids, []

    def drift(self: Runner, case: Case, index: int) -> list[int]:
        calls.append(case)
        return [len(calls)] * len(ids(self, case, index))

    monkeypatch.setattr(Runner, "_ids", drift)
    assert bench.run([*FAST, "--no-check"]) == 7
    captured = capsys.readouterr()
    assert column(captured.out, "same tokens") == ["✗", "✗"]
    assert "tokens differ, which is a defect: do not trust pp16 -t 1, tg4 -t 1" in captured.err


def test_another_way_to_compute_the_tokens_is_compared(model: Model) -> None:
    cases = Case(70, 0), Case(0, 9), Case(0, 5, 64, 3)
    with closing(session_for(model, cases, EngineConfig(threads=1, speculate="off"))) as session:
        runner = Runner(session)
        for case in cases:
            runner.run(case)
            assert runner.agrees(case)
            runner._last[case][-1][-1] ^= 1
            assert not runner.agrees(case)


def test_without_the_check_nothing_is_claimed(capsys: Capture) -> None:
    prompt, decode = rows_of(capsys, *FAST, "--no-check")
    assert prompt["correct"] is decode["correct"] is None
    assert decode["same_tokens"]["repetitions"] is True


class _SlowMemory:
    def gbps(self, threads: int, at_least: float) -> float:
        return 1e-6


def test_more_than_memory_gives_is_no_result(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(bench_measure, "memory_reader", lambda nbytes, device: _SlowMemory())
    monkeypatch.setattr(bench_measure, "cache_bytes", lambda cpus: 0)
    assert bench.run(FAST) == 7
    assert "no valid result" in capsys.readouterr().err
    monkeypatch.setattr(bench_measure, "cache_bytes", lambda cpus: 1 << 40)
    assert bench.run(FAST) == 0
    captured = capsys.readouterr()
    assert column(captured.out, "% of read")[1].endswith("(cache)")
    assert "the weights lie in a cache" in captured.err


def test_where_memory_is_not_read_there_is_no_share(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(bench_measure, "memory_reader", lambda nbytes, device: None)
    _, decode = rows_of(capsys, *FAST)
    assert decode["gbps"] > 0
    assert decode["read_gbps"] is decode["pct_of_read"] is None


def test_guesses_are_measured_where_they_are_asked_for(capsys: Capture, tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("import os\nimport sys\n" * 40)
    words = ["-p", "0", "-n", "24", "-d", "60", "-r", "2", "-t", "1"]
    (bare,) = rows_of(capsys, *words, "--text", str(text))
    (guessed,) = rows_of(capsys, *words, "--text", str(text), "--speculate", "auto")
    assert (bare["speculate"], bare["tokens_per_pass"]) == ("off", 1.0)
    assert guessed["speculate"] == "auto" and 1 <= guessed["tokens_per_pass"] <= 8
    assert guessed["correct"] and guessed["tokens_sha256"] == bare["tokens_sha256"]
    (other,) = rows_of(capsys, *words)
    assert other["tokens_sha256"] != bare["tokens_sha256"], "the text is not read"
    assert bench.run(words) == 0 and "tokens/forward" not in capsys.readouterr().out
    assert bench.run([*words, "--speculate", "auto"]) == 0
    assert 1 <= float(column(capsys.readouterr().out, "tokens/forward")[0]) <= 8
    assert bench.run([*words, "--speculate", "auto", "-b", "2"]) == 2
    assert "give -b 1" in capsys.readouterr().err
    (tmp_path / "empty").touch()
    assert bench.run([*words, "--text", "empty"]) == 2
    assert bench.run([*words, "--text", "none"]) == 2
    text.write_bytes(b"import os\n" * 40 + b"\xff")
    assert bench.run([*words, "--text", str(text)]) == 2
    assert "not UTF-8" in capsys.readouterr().err
    text.write_text("import os\n" * 8)
    capsys.readouterr()
    assert bench.run([*words, "--text", str(text)]) == 2
    assert "give less with -p and -d" in capsys.readouterr().err


def test_a_draft_model_can_be_measured(capsys: Capture) -> None:
    words = ["-m", str(LLAMA), "-p", "0", "-n", "24", "-r", "2", "-t", "1"]
    (bare,) = rows_of(capsys, *words, "--draft-model", str(LLAMA))
    assert bare["hints_ignored"] == [f"--draft-model={LLAMA}"]
    words += ["--speculate", "draft"]
    (guessed,) = rows_of(capsys, *words, "--draft-model", str(LLAMA))
    assert guessed["correct"] and guessed["tokens_sha256"] == bare["tokens_sha256"]
    assert guessed["speculate"] == "draft" and not guessed["hints_ignored"]
    assert bench.run(words) == 2 and "--draft-model" in capsys.readouterr().err


def test_tokens_of_a_pass_share_its_time_and_its_bytes(model: Model, monkeypatch: Patch) -> None:
    case = Case(0, 10)
    spans = [Span("decode", tokens, 80, 1) for tokens in (1, 4, 3, 4)]

    def decoded(runner: Runner, case: Case, window: TimedWindow) -> list[list[int]]:
        window.spans.extend(spans)
        return [[1]]

    with closing(session_for(model, [case], EngineConfig(threads=1, speculate="off"))) as session:
        runner = Runner(session)
        assert runner.bytes_per_token(case) is not None
        monkeypatch.setattr(Runner, "_decode", decoded)
        assert runner.run(case) == 80 + 80 + 80 + 40  # half of the last step is beyond the test
        assert runner.tokens_per_pass(case) == 3.0
        assert runner.bytes_per_token(case) is None, "which experts they share is not known"
    dense = load_model(open_checkpoint(LLAMA))
    with closing(session_for(dense, [case], EngineConfig(threads=1, speculate="off"))) as session:
        runner = Runner(session)
        alone = runner.bytes_per_token(case)
        runner.run(case)
        assert alone is not None and runner.bytes_per_token(case) == pytest.approx(alone / 3, abs=1)


def test_a_busy_machine_and_wide_samples_are_named() -> None:
    row = row_of(Case(0, 8), [10**6, 10**6, 2 * 10**6])
    row |= {"busy": True, "load1": 7.0, "cpus": 2, "n_threads": 2, "correct": True}
    row |= {"pct_of_read": 90.0, "pct_of_read_95": [80.0, 99.0], "in_cache": False}
    busy, wide = doubts([row])
    assert "load average 7.0 on 2 CPUs" in busy
    assert wide.endswith("tg8 -t 2 25%")
    assert not doubts([{**row, "busy": False, "iqr_ts": 0.0}])


def test_every_step_of_a_case_is_in_a_strict_window(model: Model, monkeypatch: Patch) -> None:
    cases = Case(130, 0), Case(0, 3, 5)
    refused = []
    with closing(session_for(model, cases, EngineConfig(threads=1, speculate="off"))) as session:
        step = session.executor.step

        def watched(tokens: int, rows: int) -> None:
            with pytest.raises(WindowError):
                refuse_in_window("compile")
            refused.append(tokens)
            step(tokens, rows)

        monkeypatch.setattr(session.executor, "step", watched)
        for case in cases:
            Runner(session).run(case)
    assert refused == [128, 2, *[1] * 7, 5, 1, 1, 1]


# What cannot be measured.


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-p", "1,x"], 2, "'1,x'; expected at most 16 numbers from 0"),
        (["-p", "9" * 99], 2, "expected at most 16 numbers"),
        (["-n", ",".join(map(str, range(17)))], 2, "expected at most 16 numbers"),
        (["-pg", "5"], 2, "expected two numbers from 1"),
        (["-pg", "5,0"], 2, "expected two numbers from 1"),
        (["-t", "0"], 2, "numbers from 1"),
        (["-t", "999"], 2, "this process may use"),
        (["-b", "x"], 2, "numbers from 1"),
        (["-r", "0"], 2, "'-r'"),
        (["-p", "0", "-n", "0"], 2, "nothing to measure"),
        (["-n", "1,2,3,4,5,6,7,8,9", "-d", "0,1,2,3,4,5,6,7"], 2, "at most 64"),
        (["-n", "4096"], 2, "needs a context of 4098 tokens; this model's is 4096"),
        (["-d", "100"], 2, "give -d a multiple of 128"),
        (["-n", "8", "-p", "0", "-d", "4080", "-b", "2"], 2, "no room to decode all of them"),
        (["--nothing"], 2, "No such option"),
        (["a", "b"], 2, "unexpected extra argument"),
        (["a", "-m", "b"], 2, "expected one of them"),
        (["no/such/model"], 3, "no/such/model"),
        (["--device", "ze"], 5, "Level Zero"),
    ],
)
def test_one_line_says_what_is_wrong(
    capsys: Capture, words: list[str], code: int, said: str
) -> None:
    assert bench.run(["-r", "1", *words] if "-r" not in words else words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.startswith("clocher bench: error: ")
    assert len(captured.err.splitlines()) == 1


def test_too_little_memory(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(guards, "available", lambda *_: 1 << 20)
    assert bench.run(["-p", "0", "-n", "4", "-t", "1,2"]) == 6
    captured = capsys.readouterr()
    assert "1 MiB are available" in captured.err
    assert "give -t one number" in captured.err


def test_ctrl_c(capsys: Capture, monkeypatch: Patch) -> None:
    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "generate", interrupt)
    assert bench.run(FAST) == 130
    assert capsys.readouterr().err.startswith("clocher bench: interrupted")


@pytest.mark.parametrize("words", [["-h"], ["--help"], ["quality", "-h"]])
def test_help_begins_with_examples(capsys: Capture, words: list[str]) -> None:
    assert bench.run(words) == 0
    out = capsys.readouterr().out
    assert 0 < out.index("Examples:") < out.index("Options:") < out.index("Exit codes:")


def test_importing_the_command_is_cheap() -> None:
    code = "import sys, clocher_runtime.subcommands.bench as b\n"
    code += "print(*[m for m in ('numpy', 'numba', 'msgspec', 'rich') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
