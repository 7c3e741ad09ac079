"""Checked parsing of one JSON line about a run; the input is untrusted."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from clocher_kernels.errors import FormatError
from clocher_runtime.command.console import SCHEMA
from clocher_runtime.disk.strict_json import parse_object

HARNESS_SCHEMA = "clocher.bench/1"
STATUSES = ("ok", "error", "void", "warmup")
"""How a run can end; void and warm-up come from the harness. Only "ok" is measured."""
REASONS = ("bad_field", "not_json", "too_long", "too_many", "unknown_schema")
"""Why a line is not counted. "too_many": the limit of configurations is reached."""
MAX_LABEL_CHARS = 120
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
    """One line; without a measurement the last three are None."""

    status: str  # one of `STATUSES`
    error: str = ""  # its kind, if the status is "error"
    build: Build | None = None
    configuration: Configuration | None = None
    values: Mapping[str, float | None] | None = None  # metric -> number in base units


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
    values = {field.metric: _number(line, field) for field in (*COUNTERS, *GAUGES)}
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
