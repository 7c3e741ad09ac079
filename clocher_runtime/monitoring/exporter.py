"""Totals of all runs as metrics of prometheus-client, from JSON lines, which are untrusted."""

import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from clocher_kernels.errors import FormatError, UnsupportedModel
from clocher_runtime.command.console import SCHEMA
from clocher_runtime.disk.strict_json import one_of, parse_object, read_as
from clocher_runtime.monitoring.command import MAX_LINE_BYTES

HARNESS_SCHEMA = "clocher.bench/1"
STATUSES = ("ok", "error", "void", "warmup")
"""How a run can end; void and warm-up come from the harness. Only "ok" is measured."""
REASONS = ("bad_field", "not_json", "too_long", "too_many", "unknown_schema")
"""Why a line is not counted. "too_many": the limit of configurations is reached."""
MAX_LABEL_CHARS = 120
MAX_CONFIGURATIONS = 200
MAX_BUILDS = 50
MAX_ERROR_TYPES = 32
_RSS_LAST, _RSS_MOST = "ie_rss_peak_mb_last", "ie_rss_peak_mb_max"
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


BUILD = {
    "version": "line.version",
    "commit": "build.commit",
    "device": "line.device",
    "isa": "line.isa",
    "gpu": "line.gpu.name",
    "cpu": "machine.cpu",
}
"""Labels of ie_build_info, and where their texts are in a row of the harness."""
_NAMES = ("model", "device", "precision", "act_prec", "kv_dtype", "threads", "batch")
CONFIGURATION = {"label": "label", **{name: f"line.{name}" for name in _NAMES}}
"""Labels of series: what makes two runs incomparable."""


def _object(kinds: Mapping[str, Any]) -> Any:
    """Return the type of a JSON object that may have values of these kinds at these paths."""
    fields, inner = {}, defaultdict[str, dict[str, Any]](dict)
    for path, kind in kinds.items():
        key, _, rest = path.partition(".")
        if rest:
            inner[key][rest] = kind
        else:
            fields[key] = kind
    fields |= {key: _object(within) for key, within in inner.items()}
    return msgspec.defstruct("Object", [(key, kind | None, None) for key, kind in fields.items()])


_Number = Annotated[float, msgspec.Meta(ge=0, le=2.0**63)]
_Row = _object(
    dict.fromkeys(("line.schema", "line.status", "line.type"), object)
    | dict.fromkeys((*BUILD.values(), *CONFIGURATION.values()), str | int)
    | {f"line.{field.key}": _Number for field in (*COUNTERS, *GAUGES)}
)


def read_line(data: bytes) -> tuple[str, Any]:
    """Return the status and `_Row` of a line of `clocher-run` or the harness. Raises Rejected."""
    try:
        line = parse_object(data, "line")
    except FormatError as error:
        raise Rejected("not_json", str(error)) from None
    if line.get("schema") not in (SCHEMA, HARNESS_SCHEMA):
        known = f"{SCHEMA}, {HARNESS_SCHEMA}"
        raise Rejected("unknown_schema", f"schema is {line.get('schema')!r:.60}; known: {known}")
    try:
        status = one_of(line, "status", "", STATUSES, "line")
        row = read_as(line if line["schema"] != SCHEMA else {"line": line}, _Row, "row")
    except (FormatError, UnsupportedModel) as error:
        raise Rejected("bad_field", str(error)) from None
    if status == "ok" and (_at(row, "line.schema"), _at(row, "line.status")) != (SCHEMA, "ok"):
        raise Rejected("bad_field", "line of a run that is ok: expected one that is ok")
    return status, row


def _at(row: Any, path: str) -> Any:
    for key in path.split("."):
        row = getattr(row, key, None)
    return row


def _labels(row: Any, paths: Mapping[str, str]) -> tuple[str, ...]:
    values = (_at(row, path) for path in paths.values())
    shown = ("" if value is None else str(value)[:MAX_LABEL_CHARS] for value in values)
    # Invisible characters, and ones that move a terminal's cursor, are replaced.
    return tuple(
        "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in s) for s in shown
    )


_METRICS: dict[str, tuple[type[Any], str, Iterable[str]]] = {
    "ie_exporter_lines": (CounterMetricFamily, "Lines read.", ()),
    "ie_exporter_lines_rejected": (CounterMetricFamily, "Lines that do not count.", ("reason",)),
    "ie_runs": (CounterMetricFamily, "Runs by how they ended.", ("status",)),
    "ie_run_errors": (CounterMetricFamily, "Failed runs by error.", ("type",)),
    "ie_build_info": (GaugeMetricFamily, "What ran, and on what.", BUILD),
    **{f.metric: (CounterMetricFamily, f.about, CONFIGURATION) for f in COUNTERS},
    **{f.metric: (GaugeMetricFamily, f.about, CONFIGURATION) for f in GAUGES},
    _RSS_LAST: (GaugeMetricFamily, "ie_rss_peak_bytes / 2^20.", CONFIGURATION),
    _RSS_MOST: (GaugeMetricFamily, "Largest of all runs.", CONFIGURATION),
}


class RunMetrics(Collector):
    """Takes lines, and has their metrics, with a bounded number of series."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the server's threads collect
        self._values: dict[str, defaultdict[tuple[str, ...], float]] = {
            name: defaultdict(float) for name in _METRICS
        }
        for name, known in (("ie_exporter_lines_rejected", REASONS), ("ie_runs", STATUSES)):
            self._values[name].update({(each,): 0.0 for each in known})  # shown from the start
        self._values["ie_exporter_lines"][()] = 0.0
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def take(self, line: bytes | None) -> Rejected | None:
        """Count a line (None: too long to read); return why it is rejected, if it is."""
        with self._lock:
            self._values["ie_exporter_lines"][()] += 1
            try:
                if line is None:
                    raise Rejected("too_long", f"more than {MAX_LINE_BYTES} bytes")
                self._add(*read_line(line))
            except Rejected as why:
                self._values["ie_exporter_lines_rejected"][why.reason,] += 1
                return why
        return None

    def text(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        with self._lock:
            for name, (family, about, labels) in _METRICS.items():
                found = family(name, about, labels=[*labels])
                for row, value in self._values[name].items():
                    found.add_metric(row, value)
                yield found

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

    def _add(self, status: str, row: Any) -> None:
        if status == "ok":
            self._measure(row)
        elif status == "error":
            errors, kind = self._values["ie_run_errors"], _at(row, "line.type")
            if not (isinstance(kind, str) and _ERROR_TYPE.fullmatch(kind)):
                kind = "unknown"
            known = (kind,) in errors or len(errors) < MAX_ERROR_TYPES
            errors[kind if known else "other",] += 1
        self._values["ie_runs"][status,] += 1

    def _measure(self, row: Any) -> None:
        build, configuration = _labels(row, BUILD), _labels(row, CONFIGURATION)
        known, builds = self._values[COUNTERS[0].metric], self._values["ie_build_info"]
        if configuration not in known and len(known) >= MAX_CONFIGURATIONS:
            raise Rejected("too_many", f"more than {MAX_CONFIGURATIONS} configurations")
        if build in builds or len(builds) < MAX_BUILDS:
            builds[build] = 1
        for each in COUNTERS:
            number = _at(row, f"line.{each.key}") or 0.0
            self._values[each.metric][configuration] += number * each.scale
        last = {}
        for each in GAUGES:
            number = _at(row, f"line.{each.key}")
            last[each.metric] = None if number is None else number * each.scale
        last[_RSS_LAST] = rss = _at(row, "line.rss_peak_mb")
        last[_RSS_MOST] = max(self._values[_RSS_MOST][configuration], rss or 0.0) or None
        for metric, value in last.items():
            if value is not None:
                self._values[metric][configuration] = value
            else:  # the last run could not know it
                self._values[metric].pop(configuration, None)
