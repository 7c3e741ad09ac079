"""The strict contract: what a process measures, and that each check can fail."""

import copy
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench import strict
from bench.strict import measure
from bench.strict_checks import (
    checks,
    linear,
    one_step_for_each_token,
    row,
    same_ids,
    touched,
    touched_sum,
    verdict,
    within_bandwidth,
)
from clocher_kernels.errors import UsageError
from clocher_runtime.engine.probes import WorkTouch
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.quality.speed import Case

TEXT = Path(__file__).parent / "data" / "valid.txt"
LLAMA = str(Path(__file__).parent / "data" / "clocher-tiny-llama")
NAMES = ("IE_BYTES_PER_TOKEN", "IE_STRIDE_BYTES", "MODEL_DIR", "BATCH", "THREADS")


def task(**changes: Any) -> strict.Task:
    small = {"prompt_tokens": 9, "tokens": 4, "depth": 6, "rounds": 2, "mib": 2, "text": TEXT}
    given = {"flags": {"threads": "2"}, "launched_ns": time.monotonic_ns()}
    return {**small, **given, **changes}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            patch.delenv(name, raising=False)
        patch.setenv("IE_BYTES_PER_TOKEN", "4096")
        patch.setenv("IE_STRIDE_BYTES", "64")
        return json.loads(json.dumps(measure(task())))


def launches(**changes: Any) -> list[dict[str, Any]]:
    """Return two processes of a made-up machine: 1 ms a token, 10 MB a token, 12 GB/s."""
    ms = 1_000_000
    each = {
        "bytes_per_token": 10_000_000,
        "touch_bytes_read": 0,
        "cache_bytes": 1_000_000,
        "cold": {"kernels_ns": 8, "strict_ns": 9, "end_to_end_ns": 99},
        "warm": {"kernels_ns": 8, "strict_ns": 9, "end_to_end_ns": 10},
        "tests": {
            "pp": [[8 * ms, 7 * ms]] * 3,
            "tg": [[4 * ms, 3 * ms]] * 3,
            "after": [[4 * ms, 3 * ms]] * 3,
            "double": [[8 * ms, 7 * ms]] * 3,
        },
        "token_ns": [ms] * 12,
        "read_gbps": [12.0] * 3,
        "same_ids": {"tg": True, "after": True, "double": True},
        "tokens_sha256": "ab" * 32,
        "tokens": 48,
        "steps": 48,
        "checksum": {"tokens": 8, "bytes_per_token": 9, "stride": 1, "got": 5, "expected": 5},
    }
    return [copy.deepcopy({**each, **changes}) for _ in range(2)]


def statuses(found: list[dict[str, Any]]) -> dict[str, str]:
    return {check["name"].split(" ")[0]: check["status"] for check in checks(found)}


def code(found: list[dict[str, Any]], *why_void: str) -> ExitCode:
    return verdict(checks(found, why_void))


def test_a_process_measures_everything_in_its_order(measured: dict[str, Any]) -> None:
    assert measured["model"] == "clocher-tiny-gptoss"
    assert measured["threads"] == 2
    assert {name: len(pairs) for name, pairs in measured["tests"].items()} == {
        "pp": 2,
        "tg": 2,
        "after": 2,
        "double": 2,
    }
    assert len(measured["token_ns"]) == 2 * 4
    assert len(measured["read_gbps"]) == 2
    assert (measured["touch_bytes_per_token"], measured["checksum"]["stride"]) == (4096, 64)
    for window in (measured["cold"], measured["warm"]):
        assert 0 < window["kernels_ns"] <= window["strict_ns"] <= window["end_to_end_ns"]


def test_what_a_process_measures_passes_the_checks_that_know_no_noise(
    measured: dict[str, Any],
) -> None:
    for check in (same_ids, one_step_for_each_token, touched, within_bandwidth):
        assert check([measured])[0] == "pass", check.__name__
    assert measured["tokens"] == measured["steps"] == 3 * (4 + 4 + 8)
    assert measured["checksum"]["got"] == measured["checksum"]["expected"] > 0


def test_the_made_up_machine_passes() -> None:
    assert set(statuses(launches()).values()) == {"pass"}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"same_ids": {"tg": True, "after": False}}, "same"),
        ({"steps": 47}, "one"),
        ({"warm": {"kernels_ns": 8, "strict_ns": 7, "end_to_end_ns": 10}}, "synchronised:"),
        ({"cold": {"kernels_ns": 8, "strict_ns": 9, "end_to_end_ns": 8}}, "synchronised:"),
        ({"read_gbps": [8.0] * 3}, "bytes"),
        (
            {"checksum": {"tokens": 8, "bytes_per_token": 9, "stride": 1, "got": 4, "expected": 5}},
            "work-touch",
        ),
    ],
    ids=["ids", "steps", "kernels-over-strict", "strict-over-all", "bandwidth", "checksum"],
)
def test_a_broken_contract_fails(changes: dict[str, Any], name: str) -> None:
    found = statuses(launches(**changes))
    assert [n for n, status in found.items() if status == "fail"] == [name]
    assert code(launches(**changes)) == ExitCode.MISMATCH


def test_processes_that_differ_fail() -> None:
    one, two = launches()
    two["tokens_sha256"] = "cd" * 32
    assert same_ids([one, two])[0] == "fail"


@pytest.mark.parametrize(
    ("double", "status"),
    [([8.0, 8.0, 8.0], "pass"), ([7.0, 7.0, 7.0], "fail"), ([5.0, 8.0, 13.0], "undecided")],
    ids=["linear", "too-short", "noisy"],
)
def test_time_is_linear_in_tokens(double: list[float], status: str) -> None:
    found = launches()
    for each in found:
        each["tests"]["double"] = [[int(ms * 1e6), 1] for ms in double]
    assert linear(found)[0] == status


def test_one_round_decides_nothing() -> None:
    found = launches()[:1]
    for pairs in found[0]["tests"].values():
        del pairs[1:]
    found[0]["read_gbps"] = [12.0]
    assert linear(found)[0] == within_bandwidth(found)[0] == "undecided"


def test_a_model_that_fits_the_cache_has_no_limit_of_memory() -> None:
    status, detail = within_bandwidth(launches(cache_bytes=20_000_000, read_gbps=[0.1] * 3))
    assert status == "pass"
    assert "10.0 MB a token fit the cache of 20.0 MB" in detail


def test_a_model_beyond_the_cache_is_held_to_what_the_cache_cannot_hold() -> None:
    # 10 MB in 1 ms are 10 GB/s, but 4 MB may lie in the cache: 6 GB/s must come from memory.
    assert within_bandwidth(launches(cache_bytes=4_000_000, read_gbps=[6.1] * 3))[0] == "pass"
    assert within_bandwidth(launches(cache_bytes=4_000_000, read_gbps=[5.0] * 3))[0] == "fail"


def test_a_limit_that_noise_hides_is_not_said_to_hold() -> None:
    # 9 GB/s must come from memory, beside reads of 6 to 15.
    assert within_bandwidth(launches(read_gbps=[6.0, 9.5, 15.0]))[0] == "undecided"
    assert within_bandwidth(launches(read_gbps=[9.0, 9.1, 9.2]))[0] == "pass"
    assert within_bandwidth(launches(read_gbps=[12.0, 20.0, 30.0]))[0] == "pass"


def test_a_disturbed_machine_is_said() -> None:
    found = checks(launches(), ["steal: 3 %"])
    assert (found[-1]["status"], found[-1]["detail"]) == ("undecided", "steal: 3 %")
    assert code(launches(), "steal: 3 %") == ExitCode.UNDECIDED


def test_times_of_a_disturbed_machine_accuse_nobody() -> None:
    found = launches(read_gbps=[1.0] * 3)
    assert code(found) == ExitCode.MISMATCH
    assert code(found, "steal: 3 %") == ExitCode.UNDECIDED
    found[0]["steps"] = 1
    assert code(found, "steal: 3 %") == ExitCode.MISMATCH


def test_rows_are_named_as_llama_bench_names_them() -> None:
    found = row(launches(), "tg", Case(0, 4))
    assert found["tok_s"] == pytest.approx(1000)
    assert found["kernels_tok_s"] == pytest.approx(4e3 / 3)
    assert (found["avg_ns"], found["stddev_ns"], len(found["samples_ns"])) == (4e6, 0, 6)


@pytest.mark.parametrize("per_token", [1, 63, 64, 1000, 5000])
@pytest.mark.parametrize("stride", [1, 7, 64, 6000])
def test_the_sum_by_numpy_is_that_of_the_work_touch(per_token: int, stride: int) -> None:
    rng = np.random.default_rng(per_token * 7919 + stride)
    files = [rng.integers(256, size=size, dtype=np.uint8) for size in (100, 1, 1733)]
    touch = WorkTouch(files, per_token, stride)
    touch(9)
    assert touched_sum(files, 9, per_token, stride) == touch.checksum
    files[0][0] ^= 1
    assert touched_sum(files, 9, per_token, stride) != touch.checksum


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"depth": 5000}, "context: got 5010"),
        ({"flags": {"batch": "2"}}, "one sequence"),
        ({"flags": {"stub": "1"}}, "one sequence"),
        ({"flags": {"precision": "int3"}}, "int3"),
    ],
    ids=["too-long", "batch", "stub", "precision"],
)
def test_what_cannot_be_measured_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        measure(task(**changes))


SMALL = ["--prompt-tokens", "9", "--tokens", "4", "--depth", "6", "--rounds", "2", "--mib", "2"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "strict.json"
    arguments = [*SMALL, "--model-dir", LLAMA, "--launches", "1", "--threads", "1"]
    done = CliRunner().invoke(strict.main, [*arguments, "--json", str(out)], catch_exceptions=False)
    contract, pp, tg = json.loads(out.read_text())
    # Two rounds of a millisecond each: what compares times may say anything.
    found = contract["checks"]
    assert done.exit_code == verdict(found), done.output
    assert (pp["test"], tg["test"]) == ("pp9", "tg4 @ d6")
    assert contract["model"] == "clocher-tiny-llama"
    assert [found[i]["status"] for i in (0, 1, 2, 5)] == ["pass"] * 4
    assert len(tg["latency_us"]) == 101
    assert re.search("✓ +│ same token ids as an untimed run", done.output)
    assert "end to end" in done.output and "tg4 @ d6" in done.output


def test_the_command_ends_with_the_code_of_the_model(tmp_path: Path) -> None:
    done = CliRunner().invoke(strict.main, [*SMALL, "--model-dir", str(tmp_path)])
    assert done.exit_code == ExitCode.MODEL
    assert "no model there" in done.output
    done = CliRunner().invoke(strict.main, [*SMALL, "--text", str(tmp_path / "none.txt")])
    assert done.exit_code == ExitCode.USAGE
    assert "none.txt' does not exist" in done.output


def test_a_contract_that_fails_ends_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"model": "m", "format": "f", "act_prec": "int8", "kv_dtype": "f32", "device": "cpu"}
    more |= {"isa": "avx2", "threads": 1, "file_bytes": 1, "touch_bytes_per_token": 0}
    more |= {"hints_ignored": [], "rss_peak_mb": 1.0}
    broken = launches(steps=1, **more)
    monkeypatch.setattr(strict, "launch", lambda task: broken.pop())
    done = CliRunner().invoke(strict.main, [*SMALL, "--launches", "2"], catch_exceptions=False)
    assert done.exit_code == ExitCode.MISMATCH
    assert re.search("✗ +│ one step of the window for each token", done.output)
