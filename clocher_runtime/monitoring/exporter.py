"""Totals of all runs, as metrics of prometheus-client, and the server that shows them."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
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
_LABELS = [f.name for f in fields(Configuration)]
_BUILD_LABELS = [f.name for f in fields(Build)]


@dataclass(slots=True)
class _Series:
    """Numbers of one configuration."""

    totals: Counter[str] = field(default_factory=Counter)
    last: dict[str, float] = field(default_factory=dict)
    rss_max: float | None = None


class RunMetrics(Collector):
    """Takes lines and collects metrics; one thread may do each.

    The number of series is bounded: `MAX_CONFIGURATIONS`, `MAX_BUILDS`, `MAX_ERROR_TYPES`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines = 0
        self._runs = dict.fromkeys(STATUSES, 0)
        self._rejected = dict.fromkeys(REASONS, 0)
        self._errors: Counter[str] = Counter()
        self._builds: dict[Build, None] = {}
        self._series: dict[Configuration, _Series] = {}

    def take(self, line: bytes | None) -> Rejected | None:
        """Count a line; None stands for one that was too long to read.

        Returns:
            Why it does not count; None if it does.
        """
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
            metrics = [*self._of_exporter(), *self._of_runs(), *self._of_configurations()]
        yield from metrics

    def text(self) -> str:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry()).decode()

    @contextmanager
    def served(self, address: str, port: int) -> Iterator[int]:
        """Serve the metrics over HTTP while the context is open.

        Args:
            address: to listen on.
            port: 0 takes a free one.

        Yields:
            The port.

        Raises:
            OSError: the address cannot be listened on.
        """
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
                series = self._series[run.configuration] = _Series()
            for counter in COUNTERS:
                series.totals[counter.metric] += run.values[counter.metric] or 0  # type: ignore[assignment]
            found = {gauge.metric: run.values[gauge.metric] for gauge in GAUGES}
            series.last = {name: value for name, value in found.items() if value is not None}
            rss = series.last.get(_RSS)
            if rss is not None:
                series.rss_max = max(rss, series.rss_max or 0.0)
            if run.build in self._builds or len(self._builds) < MAX_BUILDS:
                self._builds[run.build] = None
        if run.error:
            known = run.error in self._errors or len(self._errors) < MAX_ERROR_TYPES
            self._errors[run.error if known else _OTHER] += 1
        self._runs[run.status] += 1

    def _of_exporter(self) -> Iterator[Metric]:
        yield CounterMetricFamily("ie_exporter_lines", "Lines read.", self._lines)
        rejected = CounterMetricFamily(
            "ie_exporter_lines_rejected", "Lines that do not count.", labels=["reason"]
        )
        for reason, count in self._rejected.items():
            rejected.add_metric([reason], count)
        yield rejected

    def _of_runs(self) -> Iterator[Metric]:
        info = InfoMetricFamily("ie_build", "What ran, and on what.", labels=_BUILD_LABELS)
        for build in self._builds:
            info.add_metric(list(astuple(build)), {})
        yield info
        runs = CounterMetricFamily("ie_runs", "Runs by how they ended.", labels=["status"])
        for status, count in self._runs.items():
            runs.add_metric([status], count)
        yield runs
        errors = CounterMetricFamily("ie_run_errors", "Failed runs by error.", labels=["type"])
        for name, count in self._errors.items():
            errors.add_metric([name], count)
        yield errors

    def _of_configurations(self) -> Iterator[Metric]:
        for counter in COUNTERS:
            total = CounterMetricFamily(counter.metric, counter.about, labels=_LABELS)
            for configuration, series in self._series.items():
                total.add_metric(list(astuple(configuration)), series.totals[counter.metric])
            yield total
        for gauge in GAUGES:
            last = GaugeMetricFamily(gauge.metric, gauge.about, labels=_LABELS)
            for configuration, series in self._series.items():
                if gauge.metric in series.last:
                    last.add_metric(list(astuple(configuration)), series.last[gauge.metric])
            yield last
        latest = GaugeMetricFamily(
            "ie_rss_peak_mb_last", "ie_rss_peak_bytes / 2^20.", labels=_LABELS
        )
        most = GaugeMetricFamily("ie_rss_peak_mb_max", "Largest of all runs.", labels=_LABELS)
        for configuration, series in self._series.items():
            names = list(astuple(configuration))
            if _RSS in series.last:
                latest.add_metric(names, series.last[_RSS] / _MIB)
            if series.rss_max is not None:
                most.add_metric(names, series.rss_max / _MIB)
        yield latest
        yield most
