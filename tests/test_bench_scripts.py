"""The scripts that run a bench under an older name: at tiny sizes each measures what it says."""

import json
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import click
import pytest
from commands import SCRIPT_TARGETS, run_script
from weight_files import BITNET, ROOT

from bench.__main__ import CASES
from clocher_runtime.config.commands import resolve
from clocher_runtime.engine.act_sparsity import act_sparsity
from clocher_runtime.models.spec import parse_selection

LINEAR = "--shapes 64x128 --tokens 1 --rounds 2 --mib 1 --threads 2"
SIZES = {
    "profile_bitnet_ops": ("linear", LINEAR),
    "direct_bitnet_inference": ("linear", LINEAR),
    "profile_forward_pass": ("profile", "--tokens 4 --mib 16"),
    "sglang_model_direct": ("profile", "--tokens 4 --mib 16"),
    "profile_sglang_overhead": ("profile", "--tokens 32 --mib 16 --limit 0.9"),
}


def test_a_script_of_every_older_name_is_there() -> None:
    assert {*SCRIPT_TARGETS} <= {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert SCRIPT_TARGETS["sglang_direct_test"] == SCRIPT_TARGETS["verify_hf_generation_ids"]


@pytest.mark.parametrize("where", [where for where, _ in CASES.values()], ids=[*CASES])
def test_help_shows_a_command_in_the_lines_it_is_written_in(where: str) -> None:
    command = resolve_name(where)
    shown = command.get_help(click.Context(command))
    written = [line.strip() for line in command.help.splitlines() if line.startswith("    ")]
    assert [line for line in written if line not in shown] == []


# Of each case one more is run by test_page_commands, as the page has it.
@pytest.mark.parametrize(
    "name",
    [
        name if name == "profile_sglang_overhead" else pytest.param(name, marks=pytest.mark.slow)
        for name in SIZES
    ],
)
def test_a_script_measures_what_its_case_does(name: str, tmp_path: Path) -> None:
    """It runs from any directory."""
    kind, flags = SIZES[name]
    done = run_script(name, *flags.split(), "--json", tmp_path / "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert {row["kind"] for row in rows} == {kind}
    assert all(row.get("correct", True) for row in rows)
    if kind == "linear":
        assert {row["format"] for row in rows} == {"ternary"}


@pytest.mark.parametrize(
    ("name", "setting", "values"),
    [
        ("sparsity_benchmark", "act_sparsity", {None, "topk:0.6", "adaptive"}),
        pytest.param(
            *("kv_cache_bench", "kv_dtype", {None, "fp16", "e4m3", "i8"}), marks=pytest.mark.slow
        ),
    ],
)
def test_a_script_sweeps_the_harness(
    name: str, setting: str, values: set[str | None], tmp_path: Path
) -> None:
    flags = ["--runs", "1", "--retries", "0", "--others-limit", "100"]
    words = ["--out", tmp_path / "r.jsonl", "--model-dir", BITNET, "--", "--max-new", "4"]
    done = run_script(name, *flags, *words, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    counts = any(row["status"] == "ok" for row in rows)  # else the host took CPU time from all
    assert done.returncode == (0 if counts else 9), done.stderr
    assert len(rows) == len(values) and {row["swept"].get(setting) for row in rows} == values


@pytest.mark.parametrize("name", ["direct_bitnet_inference", "sglang_model_direct"])
def test_help_says_what_is_measured(name: str) -> None:
    done = run_script(name, "--help")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0].startswith(f"Usage: python -m bench {SIZES[name][0]}")
    assert len(lines[2]) > 40 and "--json " in done.stdout


@pytest.mark.parametrize(("threshold", "code"), [("0.99", 0), ("1", 8)])
def test_calibration_is_judged_by_its_smallest_cosine(threshold: str, code: int) -> None:
    command = [sys.executable, ROOT / "bench/ptq_calib.py", "--model", BITNET]
    command += ["--cosine-threshold", threshold]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert ("accepted" if code == 0 else "rejected") in done.stderr


@pytest.mark.parametrize("name", ["wf_server", "dlm_server"])
def test_a_server_of_the_seeds_is_clocher_serve(name: str, tmp_path: Path) -> None:
    done = run_script(name, "--model-path", "nowhere", "--port", "0", cwd=tmp_path)
    assert done.returncode == 3 and "clocher serve: error: no model 'nowhere' here" in done.stderr


def test_direct_inference_is_a_run(tmp_path: Path) -> None:
    done = run_script("direct_inference_full", "--stub", "--max-new", "2", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["tokens_generated"] == 2


@pytest.mark.parametrize("path", sorted((ROOT / "bench/configs").glob("*/*.toml")), ids=str)
def test_the_files_of_settings_are_some(path: Path) -> None:
    config = resolve({"config": str(path)}, {})
    sparse = parse_selection(config.attn) or act_sparsity(config.act_sparsity)
    assert sparse is not None
