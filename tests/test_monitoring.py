"""The exporter: what lines become, hostile lines, followed files, the server, a real Prometheus."""

import errno
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import run_script
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from test_jsonline import RUN_KEYS, SPECULATION_KEYS, TOUCH_KEYS

from clocher_kernels.errors import ModelNotFound
from clocher_runtime.command.console import error_line
from clocher_runtime.monitoring import command, exporter
from clocher_runtime.monitoring.command import PORT, Followed, Place, lines_of
from clocher_runtime.monitoring.exporter import (
    CONFIGURATION,
    COUNTERS,
    GAUGES,
    HARNESS_SCHEMA,
    REASONS,
    STATUSES,
    RunMetrics,
)

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "monitoring"
EXPORTER = [sys.executable, str(ROOT / "scripts" / "metrics_exporter.py")]
NAMES = re.compile(r"\b(?:ie|configuration:ie)_\w+(?::\w+)*")
DEADLINE_S = 120

RUN: dict[str, Any] = {
    "schema": "clocher.run/1",
    "status": "ok",
    "version": "0.1.0",
    "device": "cpu",
    "isa": "avx2",
    "gpu": None,
    "model": "tiny",
    "precision": "mxfp4",
    "act_prec": "int8",
    "kv_dtype": "f32",
    "threads": 2,
    "batch": 1,
    "tokens_generated": 8,
    "wall_time_s": 0.5,
    "tps_true": 16.0,
    "latency_p50_ms": 50.0,
    "latency_p95_ms": 80.0,
    "latency_p99_ms": 90.0,
    "prefill_tokens": 5,
    "prefill_s": 0.1,
    "ttft_ms": 100.0,
    "rss_peak_mb": 128.5,
    "kv_cache_mb": 2.5,
    "numa_nodes": 2,
    "kv_hits": 60,
    "kv_misses": 12,
    "bytes_per_token": 1000,
    "forward_passes": 8,
    "speculation": {"drafted": 6, "accepted": 3, "passes": 4, "tokens_per_pass": 1.75},
    "work_touch": {"bytes_per_token": 100, "bytes_touched": 800, "checksum": None},
    "bytes_touched": 8800,
    "coverage": 2.5,
    "effective_gbps": 1.5,
    "outputs": [{"token_ids": [1], "text": "x"}],
}
ERROR = error_line(ModelNotFound("not there"))


def line(**changes: object) -> bytes:
    return json.dumps(RUN | changes).encode()


def row(status: str, **changes: object) -> bytes:
    """A row of the harness."""
    base = {
        "schema": HARNESS_SCHEMA,
        "label": "act_quant=int8 prefetch=off",
        "status": status,
        "machine": {"cpu": "a processor"},
        "build": {"version": "0.1.0", "commit": "abc1234"},
        "line": RUN,
    }
    return json.dumps(base | changes).encode()


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def taken(*lines: bytes | None) -> dict[str, list[tuple[dict[str, str], float]]]:
    metrics = RunMetrics()
    for item in lines:
        metrics.take(item)
    return samples(metrics.text())


def by(found: dict[str, Any], name: str, label: str) -> dict[str, float]:
    return {labels[label]: value for labels, value in found[name]}


def test_every_number_of_a_run_in_base_units() -> None:
    found = taken(line(), line(tps_true=20.0, rss_peak_mb=100.0))
    labels = {
        "label": "",
        "model": "tiny",
        "device": "cpu",
        "precision": "mxfp4",
        "act_prec": "int8",
        "kv_dtype": "f32",
        "threads": "2",
        "batch": "1",
    }
    expected = {
        "ie_tokens_generated_total": 16,
        "ie_prefill_tokens_total": 10,
        "ie_forward_passes_total": 16,
        "ie_spec_drafted_tokens_total": 12,
        "ie_spec_accepted_tokens_total": 6,
        "ie_spec_passes_total": 8,
        "ie_window_seconds_total": 1.0,
        "ie_prefill_seconds_total": 0.2,
        "ie_touched_bytes_total": 17600,
        "ie_work_touch_bytes_total": 1600,
        "ie_kv_hits_total": 120,
        "ie_kv_misses_total": 24,
        "ie_tokens_per_second": 20.0,
        "ie_token_latency_p50_seconds": 0.05,
        "ie_token_latency_p95_seconds": 0.08,
        "ie_token_latency_p99_seconds": 0.09,
        "ie_time_to_first_token_seconds": 0.1,
        "ie_kv_cache_bytes": 2.5 * 2**20,
        "ie_numa_nodes": 2,
        "ie_rss_peak_bytes": 100 * 2**20,
        "ie_rss_peak_mb_last": 100.0,
        "ie_rss_peak_mb_max": 128.5,
        "ie_effective_bandwidth_bytes_per_second": 1.5e9,
        "ie_bytes_per_token": 1000,
        "ie_tokens_per_pass": 1.75,
        "ie_coverage_ratio": 2.5,
    }
    for name, value in expected.items():
        assert found[name] == [(labels, pytest.approx(value))], name
    names = {f"{f.metric}_total" for f in COUNTERS} | {f.metric for f in GAUGES}
    assert names | {"ie_rss_peak_mb_last", "ie_rss_peak_mb_max"} == set(expected)


def test_every_key_is_one_of_the_json_line() -> None:
    top = set(RUN_KEYS)
    touch = {f"work_touch.{key}" for key in TOUCH_KEYS}
    guesses = {f"speculation.{key}" for key in SPECULATION_KEYS}
    assert {f.key for f in (*COUNTERS, *GAUGES)} <= top | touch | guesses
    assert set(RUN) <= top


def test_build_info() -> None:
    (info,) = taken(line(), line(tps_true=3.0))["ie_build_info"]
    assert info[1] == 1
    assert info[0]["version"] == "0.1.0" and info[0]["isa"] == "avx2" and info[0]["gpu"] == ""
    both = taken(row("ok"), line(gpu={"name": "H100", "sms": 132}, device="cuda", isa="sm_90"))
    assert [labels["gpu"] for labels, _ in both["ie_build_info"]] == ["", "H100"]
    assert both["ie_build_info"][0][0]["commit"] == "abc1234"
    assert both["ie_build_info"][0][0]["cpu"] == "a processor"


def test_only_runs_that_are_ok_measure() -> None:
    failed = row("error", line=ERROR)
    silent = row("error", line=None)
    error = json.dumps(ERROR).encode()
    found = taken(line(), row("ok"), row("void"), row("warmup"), failed, silent, error)
    assert by(found, "ie_runs_total", "status") == {
        "ok": 2,
        "error": 3,
        "void": 1,
        "warmup": 1,
    }
    assert by(found, "ie_run_errors_total", "type") == {"ModelNotFound": 2, "unknown": 1}
    assert by(found, "ie_tokens_generated_total", "label") == {
        "": 8,
        "act_quant=int8 prefetch=off": 8,
    }
    assert found["ie_exporter_lines_total"] == [({}, 7)]


def test_the_harness_and_the_exporter_name_one_schema() -> None:
    from bench import record

    assert HARNESS_SCHEMA == record.SCHEMA


def test_configurations_are_apart() -> None:
    found = taken(line(), line(threads=4, tps_true=30.0), line(kv_dtype="i8", tps_true=40.0))
    values = sorted(value for _, value in found["ie_tokens_per_second"])
    assert values == [16.0, 30.0, 40.0]


def test_what_the_last_run_could_not_know_is_absent() -> None:
    found = taken(line(), line(latency_p50_ms=None, tps_true=17.0))
    assert "ie_token_latency_p50_seconds" not in found
    assert found["ie_tokens_per_second"][0][1] == 17.0
    assert found["ie_tokens_generated_total"][0][1] == 16


def test_zeros_are_there_from_the_start() -> None:
    found = taken()
    assert by(found, "ie_runs_total", "status") == dict.fromkeys(STATUSES, 0)
    assert by(found, "ie_exporter_lines_rejected_total", "reason") == dict.fromkeys(REASONS, 0)


HOSTILE: dict[str, tuple[bytes | None, str]] = {
    "empty-object": (b"{}", "unknown_schema"),
    "list": (b"[1]", "not_json"),
    "text": (b"hello", "not_json"),
    "not-utf8": (b"\xff\xfe{}", "not_json"),
    "nul": (b"\0" * 100, "not_json"),
    "deep": (b"[" * 100_000, "not_json"),
    "digits": (b'{"schema":' + b"9" * 10_000 + b"}", "not_json"),
    "half": (line()[:200], "not_json"),
    "two": (line() + line(), "not_json"),
    "twice-a-key": (b'{"schema": "clocher.run/1", "schema": "clocher.run/1"}', "not_json"),
    "nan": (line().replace(b"16.0", b"NaN"), "not_json"),
    "infinite": (line().replace(b"16.0", b"1e999"), "not_json"),
    "surrogate": (line(model="\ud800"), "not_json"),
    "too-long": (None, "too_long"),
    "other-schema": (line(schema="clocher.run/2"), "unknown_schema"),
    "schema-is-a-list": (line(schema=[1]), "unknown_schema"),
    "status": (line(status="fine"), "bad_field"),
    "status-is-an-object": (line(status={}), "bad_field"),
    "negative": (line(tps_true=-1), "bad_field"),
    "huge": (line(kv_hits=10**40), "bad_field"),
    "bool": (line(tps_true=True), "bad_field"),
    "text-for-a-number": (line(wall_time_s="1"), "bad_field"),
    "list-for-a-number": (line(wall_time_s=[1]), "bad_field"),
    "number-for-an-object": (line(work_touch=3), "bad_field"),
    "list-for-text": (line(model=["a"]), "bad_field"),
    "row-line-is-text": (row("ok", line="x"), "bad_field"),
    "row-without-line": (row("ok", line=None), "bad_field"),
    "row-with-a-failed-line": (row("ok", line=ERROR), "bad_field"),
    "row-build-is-a-list": (row("ok", build=[1]), "bad_field"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_line_is_counted_and_does_no_harm(name: str) -> None:
    data, reason = HOSTILE[name]
    metrics = RunMetrics()
    metrics.take(line())
    before = samples(metrics.text())
    why = metrics.take(data)
    assert why is not None and why.reason == reason, why
    assert len(str(why)) < 300
    after = samples(metrics.text())
    rejected = by(after, "ie_exporter_lines_rejected_total", "reason")
    assert rejected == dict.fromkeys(REASONS, 0) | {reason: 1}
    for name in before:
        if not name.startswith("ie_exporter"):
            assert before[name] == after[name], name


@settings(max_examples=80)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    ),
    st.sampled_from(RUN_KEYS),
)
def test_any_value_of_any_key(value: object, key: str) -> None:
    metrics = RunMetrics()
    metrics.take(line(**{key: value}))
    samples(metrics.text())


@settings(max_examples=80)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    metrics = RunMetrics()
    metrics.take(data)
    assert samples(metrics.text())["ie_exporter_lines_total"] == [({}, 1)]


def test_series_are_bounded() -> None:
    metrics = RunMetrics()
    for i in range(exporter.MAX_CONFIGURATIONS + 50):
        metrics.take(line(model=f"m{i}", version=f"v{i}"))
        metrics.take(json.dumps(ERROR | {"type": f"Error{i}"}).encode())
    found = samples(metrics.text())
    assert len(found["ie_tokens_per_second"]) == exporter.MAX_CONFIGURATIONS
    assert by(found, "ie_exporter_lines_rejected_total", "reason")["too_many"] == 50
    assert len(found["ie_build_info"]) == exporter.MAX_BUILDS
    errors = by(found, "ie_run_errors_total", "type")
    assert len(errors) == exporter.MAX_ERROR_TYPES + 1
    assert sum(errors.values()) == exporter.MAX_CONFIGURATIONS + 50
    metrics.take(line(model="m0", tps_true=99.0))
    assert max(v for _, v in samples(metrics.text())["ie_tokens_per_second"]) == 99.0


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("a" * 5000, "a" * 120),
        ('say "hi" \\ there', 'say "hi" \\ there'),
        ("one\ntwo\x1b[31m\u202e", "one\ufffdtwo\ufffd[31m\ufffd"),
        ("gr\u00fcn \u4e16", "gr\u00fcn \u4e16"),
        (None, ""),
    ],
    ids=["long", "quotes", "control", "letters", "null"],
)
def test_labels_are_harmless(model: str | None, shown: str) -> None:
    found = taken(line(model=model))
    assert by(found, "ie_tokens_per_second", "model") == {shown: 16.0}


def test_blank_lines_and_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_LINE_BYTES", 20)
    data = b"one\n\n  \ntwo\r\n" + b"x" * 30 + b"\nthree"
    assert list(lines_of(io.BytesIO(data), Place())) == [b"one", b"two\r", None, b"three"]
    assert list(lines_of(io.BytesIO(b"x" * 40), Place())) == [None]


@pytest.mark.parametrize("size", [1, 2, 7, 19, 1000])
def test_lines_do_not_depend_on_pieces(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MAX_LINE_BYTES", 20)
    data = b"one\n\n  \ntwo\r\n" + b"x" * 70 + b"\nthree"
    path = tmp_path / "runs.jsonl"
    file = Followed(path)
    found: list[bytes | None] = []
    for start in range(0, len(data), size):
        with path.open("ab") as more:
            more.write(data[start : start + size])
        found += file.lines()
    assert [*found, *file.lines(last=True)] == [b"one", b"two\r", None, b"three"]


def test_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    file = Followed(path)
    assert list(file.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(file.lines()) == [b"one"]
    assert list(file.lines()) == []
    with path.open("ab") as more:
        more.write(b"o\nthree")
    assert list(file.lines()) == [b"two"]
    assert list(file.lines(last=True)) == [b"three"]


def test_a_file_that_is_cut_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b"one\ntwo\npart")
    file = Followed(path)
    assert list(file.lines()) == [b"one", b"two"]
    path.write_bytes(b"new\n")
    assert list(file.lines()) == [b"new"]
    other = tmp_path / "other"
    other.write_bytes(b"A\nB\nC\nD\n")
    os.replace(other, path)
    assert list(file.lines()) == [b"A", b"B", b"C", b"D"]
    path.unlink()
    assert list(file.lines()) == []


def test_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_FILES", 3)
    (tmp_path / "a.jsonl").write_bytes(b"one\n")
    (tmp_path / "notes.txt").write_bytes(b"no\n")
    (tmp_path / "dir.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    folder = Followed(tmp_path)
    assert list(folder.lines()) == [b"one"]
    (tmp_path / "b.json").write_bytes(b"two\n")
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b"three\n")
    assert list(folder.lines()) == [b"three", b"two"]
    for name in "cde":
        (tmp_path / f"{name}.json").write_bytes(name.encode() + b"\n")
    assert list(folder.lines()) == [b"c"]


def test_a_named_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file; pipe it"):
        list(Followed(tmp_path / "pipe").lines())


def export(*arguments: str, stdin: bytes = b"", **more: str) -> subprocess.CompletedProcess[bytes]:
    if arguments[0] == "--once" and len(arguments) > 1:
        done = run_script("metrics_exporter", *arguments)
        output = done.stdout.encode(), done.stderr.encode()
        return subprocess.CompletedProcess(done.args, done.returncode, *output)
    return subprocess.run(
        [*EXPORTER, *arguments],
        input=stdin,
        capture_output=True,
        env=os.environ | more,
        timeout=DEADLINE_S,
    )


def test_once_from_standard_input() -> None:
    done = export("--once", stdin=line() + b"\nnope\nnope\n" + row("ok"))
    assert done.returncode == 0, done.stderr
    found = samples(done.stdout.decode())
    assert by(found, "ie_runs_total", "status")["ok"] == 2
    assert done.stderr.decode().count("does not count") == 1, "said once for each reason"


def test_once_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(line())
    (tmp_path / "b.jsonl").write_bytes(row("ok") + b"\n" + row("void") + b"\n")
    runs = by(samples(export("--once", str(tmp_path)).stdout.decode()), "ie_runs_total", "status")
    assert (runs["ok"], runs["void"]) == (2, 1)
    one = by(
        samples(export("--once", str(tmp_path / "a.json")).stdout.decode()),
        "ie_runs_total",
        "status",
    )
    assert one["ok"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--once", "missing.jsonl"], 5, "missing.jsonl: no such file"),
        (["--port", "70000"], 2, "70000"),
        (["--port", "0", "no/such/folder/x.jsonl"], 5, "there is no directory"),
        (["--port", "0", "--address", "256.1.1.1", "."], 5, "cannot listen on 256.1.1.1"),
    ],
    ids=["missing", "port", "folder", "address"],
)
def test_what_cannot_be_used(arguments: list[str], code: int, said: str) -> None:
    done = export(*arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr.decode() and b"Traceback" not in done.stderr


def test_without_prometheus_client(tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('gone')")
    done = export("--once", stdin=line(), PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert b"pip install '.[monitoring]'" in done.stderr


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run the exporter on a free port; yield it and its address."""
    process = subprocess.Popen(
        [*EXPORTER, "--port", "0", *arguments],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        said = process.stderr.readline().decode()
        found = re.search(r"http://127\.0\.0\.1:[0-9]+", said)
        assert found, said
        yield process, found[0]
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stderr):
            assert pipe is not None
            pipe.close()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def until(ready: Callable[[], object], what: str) -> Any:
    """Return what `ready` returns once that is true."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if found := ready():
            return found
        time.sleep(0.2)
    raise AssertionError(f"waited {DEADLINE_S} s for {what}")


def ok_runs(url: str) -> float:
    return by(samples(get(f"{url}/metrics")), "ie_runs_total", "status")["ok"]


def test_serve_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with serving(str(path)) as (process, url):
        assert ok_runs(url) == 0
        path.write_bytes(line() + b"\n")
        until(lambda: ok_runs(url) == 1, "the first line")
        port = url.rpartition(":")[2]
        second = export("--port", port, str(path))
        assert second.returncode == 5
        assert os.strerror(errno.EADDRINUSE) in second.stderr.decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr is not None and b"stopped" in process.stderr.read()


def test_serve_standard_input_until_interrupted() -> None:
    with serving() as (process, url):
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(line() + b"\nbad\n")
        process.stdin.flush()
        until(lambda: ok_runs(url) == 1, "the first line")
        process.stdin.write(line())
        process.stdin.close()
        until(lambda: ok_runs(url) == 2, "the line without an end")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
        assert b"Traceback" not in process.stderr.read()


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (FOLDER / "grafana" / "dashboards" / "clocher.json").read_text(encoding="utf-8")
    )
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def rules() -> list[dict[str, str]]:
    loaded = yaml.safe_load((FOLDER / "metrics_memory.rules.yml").read_text(encoding="utf-8"))
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def test_expressions_name_metrics_that_exist() -> None:
    exported = set(taken(line(), json.dumps(ERROR).encode()))
    recorded = {rule["record"] for rule in rules()}
    for expression in [rule["expr"] for rule in rules()]:
        assert set(NAMES.findall(expression)) <= exported, expression
    shown = set()
    for expression in expressions():
        names = set(NAMES.findall(expression))
        assert names and names <= exported | recorded, expression
        shown |= names
    assert recorded <= shown, "a rule that no panel shows"
    for variable in dashboard()["templating"]["list"]:
        query = variable["query"]["query"]
        assert set(NAMES.findall(query)) <= exported
        assert re.search(r", (\w+)\)$", query)[1] in CONFIGURATION


def test_the_dashboard_holds_together() -> None:
    board = dashboard()
    source = yaml.safe_load(
        (FOLDER / "grafana/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8")
    )
    uid = source["datasources"][0]["uid"]
    panels = board["panels"]
    assert [p["id"] for p in panels] == list(range(1, len(panels) + 1))
    cells = set()
    for panel in panels:
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells and at["x"] + at["w"] <= 24, panel["title"]
        cells |= own
        assert {t["datasource"]["uid"] for t in panel["targets"]} == {uid}
    variables = {v["name"] for v in board["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)", " ".join(expressions()))) == variables


def test_compose_is_pinned_and_stays_on_this_machine() -> None:
    compose = yaml.safe_load((FOLDER / "docker-compose.yml").read_text(encoding="utf-8"))
    for service in compose["services"].values():
        assert re.search(r":v?[0-9]+\.[0-9]+\.[0-9]+$", service["image"])
        for mount in service["volumes"]:
            source, *_, last = mount.split(":")
            if source.startswith("."):
                assert (FOLDER / source).exists() and last == "ro", mount
            else:
                assert source in compose["volumes"]
    assert "--web.listen-address=127.0.0.1:9090" in compose["services"]["prometheus"]["command"]
    assert compose["services"]["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_prometheus_is_told_the_exporter_s_port() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert int(target.rpartition(":")[2]) == PORT


def test_the_page_lists_every_metric_label_and_reason() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(ie_\w+)", page, re.M))
    assert listed == set(taken(line(), json.dumps(ERROR).encode()))
    for word in [*CONFIGURATION, *REASONS, *STATUSES]:
        assert f"`{word}`" in page, word
    for rule in rules():
        assert f"`{rule['record']}`" in page


needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus and promtool are not on PATH (Debian: apt-get install prometheus)",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def embedded_run(tokens: int, *flags: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "clocher_runtime.cli", "--max-new", str(tokens), *flags],
        capture_output=True,
        check=True,
        cwd=ROOT,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@needs_prometheus
def test_a_real_prometheus(tmp_path: Path) -> None:
    """It accepts the files as they are; every query of the dashboard returns data."""
    for kind, name in (("config", "prometheus.yml"), ("rules", "metrics_memory.rules.yml")):
        checked = subprocess.run(["promtool", "check", kind, FOLDER / name], capture_output=True)
        assert checked.returncode == 0, checked.stderr
    runs = [embedded_run(n, *flags) for n, *flags in ((8,), (16, "--kv-dtype", "i8"), (12,))]
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b"".join(json.dumps(run).encode() + b"\n" for run in runs[:2]))
    config = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    with serving(str(path)) as (_, url):
        lint = subprocess.run(
            ["promtool", "check", "metrics"],
            input=get(f"{url}/metrics").encode(),
            capture_output=True,
        )
        complaints = (lint.stdout + lint.stderr).decode().splitlines()
        assert [c for c in complaints if not c.startswith("ie_rss_peak_mb_")] == []
        config = config.replace("127.0.0.1:9640", url.removeprefix("http://"))
        (tmp_path / "prometheus.yml").write_text(config.replace(": 15s", ": 1s"))
        text = (FOLDER / "metrics_memory.rules.yml").read_text(encoding="utf-8")
        (tmp_path / "metrics_memory.rules.yml").write_text(text.replace(": 15s", ": 1s"))
        server = f"http://127.0.0.1:{free_port()}"
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={tmp_path / 'prometheus.yml'}",
                    f"--storage.tsdb.path={tmp_path / 'data'}",
                    f"--web.listen-address={server.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            _check_queries(server, path, runs)
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def _query(server: str, expression: str) -> list[dict[str, Any]]:
    for variable in ("$device", "$model"):
        expression = expression.replace(variable, ".*")
    address = f"{server}/api/v1/query?query={urllib.parse.quote(expression)}"
    try:
        answer = json.loads(get(address))
    except (urllib.error.URLError, ConnectionError):
        return []
    assert answer["status"] == "success", (expression, answer)
    result: list[dict[str, Any]] = answer["data"]["result"]
    return [r for r in result if r["value"][1] != "NaN"]


def _check_queries(server: str, path: Path, runs: list[dict[str, Any]]) -> None:
    until(lambda: _query(server, "ie_tokens_per_second"), "the first scrape")
    with path.open("ab") as file:
        for run in runs[1:]:
            file.write(json.dumps(run).encode() + b"\n")
        file.write(json.dumps(ERROR).encode() + b"\n")
    until(lambda: _query(server, 'ie_runs_total{status="ok"} == 4'), "the lines that were added")
    for expression in [*expressions(), *(rule["expr"] for rule in rules())]:
        until(lambda e=expression: _query(server, e), expression)
    (total,) = _query(server, "sum(ie_touched_bytes_total)")
    expected = sum(run["bytes_touched"] for run in [*runs, runs[1]])
    assert float(total["value"][1]) == expected
    (ratio,) = _query(
        server, 'configuration:ie_effective_bandwidth_bytes_per_second:ratio1h{kv_dtype="i8"}'
    )
    measured = runs[1]["bytes_touched"] / runs[1]["wall_time_s"]
    assert float(ratio["value"][1]) == pytest.approx(measured, rel=1e-6)
