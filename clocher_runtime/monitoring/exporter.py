"""Totals of all runs as metrics of prometheus-client, from JSON lines, which are untrusted."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    disable_created_metrics,
    generate_latest,
    start_http_server,
)

from clocher_kernels.errors import FormatError
from clocher_runtime.command.console import SCHEMA
from clocher_runtime.disk.strict_json import parse_object
from clocher_runtime.monitoring.command import MAX_LINE_BYTES

disable_created_metrics()  # type: ignore[no-untyped-call]

HARNESS_SCHEMA = "clocher.bench/1"
STATUSES = ("ok", "error", "void", "warmup")
"""How a run can end; void and warm-up come from the harness. Only "ok" is measured."""
REASONS = ("bad_field", "not_json", "too_long", "too_many", "unknown_schema")
"""Why a line is not counted. "too_many": the limit of configurations is reached."""
MAX_LABEL_CHARS = 120
MAX_CONFIGURATIONS = 200
MAX_BUILDS = 50
MAX_ERROR_TYPES = 32
_MIB = 1 << 20
_RSS = "ie_rss_peak_bytes"
_LARGEST = 2.0**63
_ERROR_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9]{0,39}")


class Rejected(Exception):
    """A line that does not count; the reason is one of `REASONS`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Field(NamedTuple):
    """A number of the JSON line and its metric."""

    key: str  # "a.b" is key b of the object a
    metric: str  # without the "_total" of a counter
    scale: float  # from its unit to base units
    about: str


COUNTERS = (
    Field("tokens_generated", "ie_tokens_generated", 1, "Tokens generated."),
    Field("prefill_tokens", "ie_prefill_tokens", 1, "Prompt tokens processed."),
    Field("forward_passes", "ie_forward_passes", 1, "Steps of the strict windows."),
    Field("speculation.drafted", "ie_spec_drafted_tokens", 1, "Draft tokens that were verified."),
    Field("speculation.accepted", "ie_spec_accepted_tokens", 1, "Draft tokens accepted."),
    Field("speculation.passes", "ie_spec_passes", 1, "Forwards that only decode, of sequences."),
    Field("wall_time_s", "ie_window_seconds", 1, "Length of the strict windows."),
    Field("prefill_s", "ie_prefill_seconds", 1, "Part of the strict windows spent on prompts."),
    Field("bytes_touched", "ie_touched_bytes", 1, "Bytes touched in the strict windows."),
    Field("work_touch.bytes_touched", "ie_work_touch_bytes", 1, "Of them, by the work-touch."),
    Field("kv_hits", "ie_kv_hits", 1, "Keys and values of earlier tokens found in the cache."),
    Field("kv_misses", "ie_kv_misses", 1, "Tokens whose keys and values were computed."),
)
"""Summed over runs."""
GAUGES = (
    Field("tps_true", "ie_tokens_per_second", 1, "Tokens per second of strict window, last run."),
    Field("latency_p50_ms", "ie_token_latency_p50_seconds", 1e-3, "Median latency, last run."),
    Field("latency_p95_ms", "ie_token_latency_p95_seconds", 1e-3, "95th percentile, last run."),
    Field("latency_p99_ms", "ie_token_latency_p99_seconds", 1e-3, "99th percentile, last run."),
    Field("ttft_ms", "ie_time_to_first_token_seconds", 1e-3, "Time to first token, last run."),
    Field("rss_peak_mb", "ie_rss_peak_bytes", 1 << 20, "Peak resident set size, last run."),
    Field("kv_cache_mb", "ie_kv_cache_bytes", 1 << 20, "Memory of the KV cache, last run."),
    Field("numa_nodes", "ie_numa_nodes", 1, "NUMA nodes of the machine, last run."),
    Field(
        "effective_gbps",
        "ie_effective_bandwidth_bytes_per_second",
        1e9,
        "Bytes touched per second of strict window, last run.",
    ),
    Field("bytes_per_token", "ie_bytes_per_token", 1, "Weight bytes read for a token, last run."),
    Field("speculation.tokens_per_pass", "ie_tokens_per_pass", 1, "Of a forward, last run."),
    Field("coverage", "ie_coverage_ratio", 1, "Bytes touched / size of the weights, last run."),
)
"""Of the last run; absent where unknown."""


class Configuration(NamedTuple):
    """Labels of series: what makes two runs incomparable."""

    label: str
    model: str
    device: str
    precision: str
    act_prec: str
    kv_dtype: str
    threads: str
    batch: str


class Build(NamedTuple):
    """Labels of ie_build_info."""

    version: str
    commit: str
    device: str
    isa: str
    gpu: str
    cpu: str


class Run(NamedTuple):
    """One line; without a measurement the last three are empty."""

    status: str  # one of `STATUSES`
    error: str = ""  # its kind, if the status is "error"
    build: Build | None = None
    configuration: Configuration | None = None
    values: Mapping[str, float] = {}  # metric -> number in base units, where known


def read_line(data: bytes) -> Run:
    """Parse a line of `clocher-run` or of the harness. Raises Rejected."""
    try:
        line = parse_object(data, "line")
    except FormatError as error:
        raise Rejected("not_json", str(error)) from None
    schema = line.get("schema")
    if schema == SCHEMA:
        return _read_run(line, {})
    if schema != HARNESS_SCHEMA:
        known = f"{SCHEMA}, {HARNESS_SCHEMA}"
        raise Rejected("unknown_schema", f"schema is {schema!r:.60}; known: {known}")
    status, run = _status(line), line.get("line")
    if run is not None and not isinstance(run, dict):
        raise Rejected("bad_field", f"line is {type(run).__name__}, expected an object or null")
    if status == "ok":
        if run is None or run.get("schema") != SCHEMA or run.get("status") != "ok":
            raise Rejected("bad_field", "line of a run that is ok: expected one that is ok")
        return _read_run(run, line)
    return Run(status, _error_type(run or {}) if status == "error" else "")


def _read_run(line: Mapping[str, Any], row: Mapping[str, Any]) -> Run:
    status = _status(line)
    if status != "ok":
        return Run(status, _error_type(line) if status == "error" else "")
    build = Build(
        version=_text(line, "version"),
        commit=_text(_object(row, "build"), "commit"),
        device=_text(line, "device"),
        isa=_text(line, "isa"),
        gpu=_text(_object(line, "gpu"), "name"),
        cpu=_text(_object(row, "machine"), "cpu"),
    )
    names = Configuration._fields[1:]
    configuration = Configuration(_text(row, "label"), *(_text(line, name) for name in names))
    numbers = {field.metric: _number(line, field) for field in (*COUNTERS, *GAUGES)}
    values = {metric: number for metric, number in numbers.items() if number is not None}
    return Run(status, "", build, configuration, values)


def _status(line: Mapping[str, Any]) -> str:
    status = line.get("status")
    if status not in STATUSES:
        raise Rejected("bad_field", f"status is {status!r:.60}; known: {', '.join(STATUSES)}")
    return str(status)


def _error_type(line: Mapping[str, Any]) -> str:
    found = line.get("type")
    return found if isinstance(found, str) and _ERROR_TYPE.fullmatch(found) else "unknown"


def _object(line: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = line.get(key)
    if value is not None and not isinstance(value, dict):
        raise Rejected("bad_field", f"{key} is {type(value).__name__}, expected an object")
    return value or {}


def _text(line: Mapping[str, Any], key: str) -> str:
    value = line.get(key)
    if value is None:
        return ""
    if type(value) is int:
        return str(value)[:MAX_LABEL_CHARS]
    if not isinstance(value, str):
        raise Rejected("bad_field", f"{key} is {type(value).__name__}, expected text")
    # Invisible characters, and ones that move a terminal's cursor.
    shown = value[:MAX_LABEL_CHARS]
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)


def _number(line: Mapping[str, Any], field: Field) -> float | None:
    *outer, key = field.key.split(".")
    for name in outer:
        line = _object(line, name)
    value = line.get(key)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise Rejected("bad_field", f"{field.key} is {type(value).__name__}, expected a number")
    if not 0 <= value <= _LARGEST or not math.isfinite(value):
        raise Rejected("bad_field", f"{field.key} is {value!r:.60}, expected 0 to 2^63")
    return float(value * field.scale)


class RunMetrics:
    """Takes lines, and has their metrics, with a bounded number of series."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._lines = self._counter("ie_exporter_lines", "Lines read.")
        about = "Lines that do not count."
        self._rejected = self._counter("ie_exporter_lines_rejected", about, ("reason",), REASONS)
        about = "Runs by how they ended."
        self._runs = self._counter("ie_runs", about, ("status",), STATUSES)
        self._errors = self._counter("ie_run_errors", "Failed runs by error.", ("type",))
        about = "What ran, and on what."
        self._info = Info("ie_build", about, Build._fields, registry=self._registry)
        labels = Configuration._fields
        self._totals = {each: self._counter(each.metric, each.about, labels) for each in COUNTERS}
        self._last = {each: self._gauge(each.metric, each.about) for each in GAUGES}
        self._rss_last = self._gauge("ie_rss_peak_mb_last", "ie_rss_peak_bytes / 2^20.")
        self._rss_most = self._gauge("ie_rss_peak_mb_max", "Largest of all runs.")
        self._peaks: dict[Configuration, float] = {}  # of resident memory, in bytes
        self._builds: set[Build] = set()
        self._error_types: set[str] = set()

    def take(self, line: bytes | None) -> Rejected | None:
        """Count a line (None: too long to read); return why it is rejected, if it is."""
        self._lines.inc()
        try:
            if line is None:
                raise Rejected("too_long", f"more than {MAX_LINE_BYTES} bytes")
            self._add(read_line(line))
        except Rejected as why:
            self._rejected.labels(why.reason).inc()
            return why
        return None

    def text(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    @contextmanager
    def served(self, address: str, port: int) -> Iterator[int]:
        """Serve the metrics over HTTP while the context is open; yield the port."""
        try:
            server, thread = start_http_server(port, address, self._registry)
        except OSError as error:
            reason = error.strerror or error
            raise OSError(
                f"cannot listen on {address} port {port}: {reason}; --port 0 takes a free port"
            ) from None
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _counter(
        self, name: str, about: str, labels: Sequence[str] = (), values: Sequence[str] = ()
    ) -> Counter:
        made = Counter(name, about, labels, registry=self._registry)
        for value in values:  # shown from the start
            made.labels(value)
        return made

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(name, about, Configuration._fields, registry=self._registry)

    def _add(self, run: Run) -> None:
        if run.configuration is not None and run.build is not None:
            self._measure(run.configuration, run.values)
            if run.build in self._builds or len(self._builds) < MAX_BUILDS:
                self._builds.add(run.build)
                self._info.labels(*run.build).info({})
        if run.error:
            known = run.error in self._error_types or len(self._error_types) < MAX_ERROR_TYPES
            name = run.error if known else "other"
            self._error_types.add(name)
            self._errors.labels(name).inc()
        self._runs.labels(run.status).inc()

    def _measure(self, configuration: Configuration, values: Mapping[str, float]) -> None:
        if len(self._peaks) >= MAX_CONFIGURATIONS and configuration not in self._peaks:
            raise Rejected("too_many", f"more than {MAX_CONFIGURATIONS} configurations")
        for field, total in self._totals.items():
            total.labels(*configuration).inc(values.get(field.metric, 0))
        gauges = [(self._last[field], values.get(field.metric)) for field in GAUGES]
        rss = values.get(_RSS)
        peak = max(self._peaks.get(configuration, 0.0), rss or 0.0)
        self._peaks[configuration] = peak
        gauges += [(self._rss_last, rss and rss / _MIB), (self._rss_most, peak / _MIB or None)]
        for gauge, value in gauges:
            if value is not None:
                gauge.labels(*configuration).set(value)
            else:  # the last run could not know it
                with suppress(KeyError):
                    gauge.remove(*configuration)
