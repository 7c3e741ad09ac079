"""Totals of all runs as metrics of prometheus-client, and their server."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from clocher_runtime.monitoring.records import (
    COUNTERS,
    GAUGES,
    REASONS,
    STATUSES,
    Build,
    Configuration,
    Rejected,
    Run,
    read_line,
)
from clocher_runtime.monitoring.sources import MAX_LINE_BYTES

MAX_CONFIGURATIONS = 200
MAX_BUILDS = 50
MAX_ERROR_TYPES = 32
_OTHER = "other"
_MIB = 1 << 20
_RSS = "ie_rss_peak_bytes"
_LABELS = Configuration._fields


class _Series(NamedTuple):
    totals: Counter[str]
    last: dict[str, float]
    most: dict[str, float]


class RunMetrics(Collector):
    """Takes lines and collects metrics, with a bounded number of series; one thread may do each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines = 0
        self._runs = dict.fromkeys(STATUSES, 0)
        self._rejected = dict.fromkeys(REASONS, 0)
        self._errors: Counter[str] = Counter()
        self._builds: dict[Build, None] = {}
        self._series: dict[Configuration, _Series] = {}

    def take(self, line: bytes | None) -> Rejected | None:
        """Count a line (None: too long to read); return why it is rejected, if it is."""
        why = None
        try:
            if line is None:
                raise Rejected("too_long", f"more than {MAX_LINE_BYTES} bytes")
            run = read_line(line)
            with self._lock:
                self._add(run)
        except Rejected as error:
            why = error
        with self._lock:
            self._lines += 1
            if why is not None:
                self._rejected[why.reason] += 1
        return why

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        with self._lock:
            metrics = list(self._metrics())
        yield from metrics

    def text(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry()).decode()

    @contextmanager
    def served(self, address: str, port: int) -> Iterator[int]:
        """Serve the metrics over HTTP while the context is open; yield the port."""
        try:
            server, thread = start_http_server(port, address, self._registry())
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

    def _registry(self) -> CollectorRegistry:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def _add(self, run: Run) -> None:
        if run.configuration is not None and run.build is not None and run.values is not None:
            series = self._series.get(run.configuration)
            if series is None:
                if len(self._series) >= MAX_CONFIGURATIONS:
                    raise Rejected("too_many", f"more than {MAX_CONFIGURATIONS} configurations")
                series = self._series[run.configuration] = _Series(Counter(), {}, {})
            for counter in COUNTERS:
                series.totals[counter.metric] += run.values[counter.metric] or 0  # type: ignore[assignment]
            found = {gauge.metric: run.values[gauge.metric] for gauge in GAUGES}
            series.last.clear()
            series.last.update({name: v for name, v in found.items() if v is not None})
            if (rss := series.last.get(_RSS)) is not None:
                series.most[_RSS] = max(rss, series.most.get(_RSS, 0.0))
            if run.build in self._builds or len(self._builds) < MAX_BUILDS:
                self._builds[run.build] = None
        if run.error:
            known = run.error in self._errors or len(self._errors) < MAX_ERROR_TYPES
            self._errors[run.error if known else _OTHER] += 1
        self._runs[run.status] += 1

    def _metrics(self) -> Iterator[Metric]:
        yield CounterMetricFamily("ie_exporter_lines", "Lines read.", self._lines)
        about = "Lines that do not count."
        yield _counted("ie_exporter_lines_rejected", about, "reason", self._rejected)
        info = InfoMetricFamily("ie_build", "What ran, and on what.", labels=Build._fields)
        for build in self._builds:
            info.add_metric(build, {})
        yield info
        yield _counted("ie_runs", "Runs by how they ended.", "status", self._runs)
        yield _counted("ie_run_errors", "Failed runs by error.", "type", self._errors)
        for field in COUNTERS:
            series = self._series.items()
            rows = [(each, float(one.totals[field.metric])) for each, one in series]
            yield _labelled(CounterMetricFamily, field.metric, field.about, rows)
        for field in GAUGES:
            yield self._gauge(field.metric, field.about, field.metric)
        yield self._gauge("ie_rss_peak_mb_last", "ie_rss_peak_bytes / 2^20.", _RSS, _MIB)
        rows = [(each, one.most[_RSS] / _MIB) for each, one in self._series.items() if one.most]
        yield _labelled(GaugeMetricFamily, "ie_rss_peak_mb_max", "Largest of all runs.", rows)

    def _gauge(self, name: str, about: str, metric: str, unit: float = 1) -> Metric:
        series = self._series.items()
        rows = [(each, one.last[metric] / unit) for each, one in series if metric in one.last]
        return _labelled(GaugeMetricFamily, name, about, rows)


def _labelled(
    family: type[Any], name: str, about: str, rows: Sequence[tuple[Configuration, float]]
) -> Metric:
    made: Metric = family(name, about, labels=_LABELS)
    for configuration, value in rows:
        made.add_metric(configuration, value)  # type: ignore[attr-defined]
    return made


def _counted(name: str, about: str, label: str, counts: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
