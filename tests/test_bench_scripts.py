"""The scripts that run a bench under an older name: at tiny sizes each measures what it says."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import run_script
from weight_files import BITNET, ROOT

from bench import fused
from bench.ops import products
from clocher_runtime.command.settings import resolve
from clocher_runtime.engine.act_sparsity import act_sparsity
from clocher_runtime.models.selection import parse_selection

SIZES = {
    "gemv_cached": ("fused", "--shapes 64x128 --formats ternary,int8_row_f32 --mib 1 --rounds 2"),
    "kv_cache_bench": ("attention", "--models llama-1b --kv f16,i8 --context 64 --rounds 2"),
    "sparsity_benchmark": (
        "act_sparsity",
        f"--model-dir {BITNET} --rules topk:0.7 --tokens 8 --mib 16 --rounds 2",
    ),
    "profile_bitnet_ops": ("roofline", "--shapes 64x128 --tokens 1 --rounds 2 --mib 1"),
    "direct_bitnet_inference": ("roofline", "--shapes 64x128 --tokens 1 --rounds 2 --mib 1"),
    "profile_forward_pass": ("profile", "--tokens 4 --mib 16"),
    "sglang_model_direct": ("profile", "--tokens 4 --mib 16"),
    "profile_sglang_overhead": ("step_overhead", "--steps 32 --limit 0.9"),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.one_in(2)
def test_a_script_measures_what_its_bench_does(name: str, tmp_path: Path) -> None:
    """It runs from any directory."""
    kind, flags = SIZES[name]
    words = [*flags.split(), "--threads", "2", "--json", tmp_path / "rows.json"]
    done = run_script(name, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert {row["kind"] for row in rows} == {kind}
    assert all(row.get("correct", True) for row in rows)
    if name in ("profile_bitnet_ops", "direct_bitnet_inference"):
        assert {row["format"] for row in rows} == {"ternary"}
    elif name == "kv_cache_bench":
        assert [row["kv"] for row in rows] == ["f16", "i8"]


@pytest.mark.parametrize("name", SIZES)
def test_help_says_what_is_measured(name: str) -> None:
    done = run_script(name, "--help")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0].startswith(f"Usage: python -m bench.{SIZES[name][0]}")
    assert len(lines[2]) > 40 and "--json " in done.stdout


@pytest.mark.parametrize("name", ["wf_server", "dlm_server"])
def test_a_server_of_the_seeds_is_clocher_serve(name: str, tmp_path: Path) -> None:
    done = run_script(name, "--model-path", "nowhere", "--port", "0", cwd=tmp_path)
    assert done.returncode == 3 and "clocher serve: error: --model-dir: 'nowhere'" in done.stderr


def test_direct_inference_is_a_run(tmp_path: Path) -> None:
    done = run_script("direct_inference_full", "--stub", "--max-new", "2", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["tokens_generated"] == 2


@pytest.mark.parametrize("path", sorted((ROOT / "bench/configs").glob("*/*.toml")), ids=str)
def test_the_files_of_settings_are_some(path: Path) -> None:
    config = resolve({"config": str(path)}, {})
    sparse = parse_selection(config.attn) or act_sparsity(config.act_sparsity)
    assert sparse is not None


def rows_of_fused(path: Path, *words: str) -> tuple[int, list[dict[str, object]]]:
    flags = ["--shapes", "64x96", "--mib", "1", "--rounds", "2", "--threads", "2", *words]
    done = CliRunner().invoke(fused.main, [*flags, "--json", str(path)])
    found: list[dict[str, object]] = json.loads(path.read_text(encoding="utf-8"))
    return done.exit_code, found


def test_fused_and_cached_multiply_the_same_numbers(tmp_path: Path) -> None:
    code, rows = rows_of_fused(tmp_path / "rows.json", "--formats", "mxfp4", "--tokens", "3")
    assert code == 0 and all(row["correct"] for row in rows)
    assert [row["weights"] for row in rows] == ["fused", "cached", "cached, torch"]
    assert rows[1]["speedup"] == 1
    assert [row["megabytes"] for row in rows[:2]] == [64 * 96 * 17 / 32 / 1e6, 64 * 96 * 4 / 1e6]


def test_a_wrong_product_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = products.exact_product
    monkeypatch.setattr(fused, "exact_product", lambda *args: 2 * exact(*args))
    code, rows = rows_of_fused(tmp_path / "rows.json", "--formats", "ternary")
    assert code == 1 and not any(row["correct"] for row in rows)


def test_without_torch_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: object) -> None:
        raise products.NotMeasured("torch cannot be imported")

    monkeypatch.setattr(fused, "torch_cpu", missing)
    code, rows = rows_of_fused(tmp_path / "rows.json", "--formats", "int8_row_f32")
    assert code == 0
    notes = {row["weights"]: row["note"] for row in rows}
    assert notes["cached, torch"] == "torch cannot be imported" and len(rows) == 3
