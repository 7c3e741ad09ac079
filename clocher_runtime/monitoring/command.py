"""The program metrics_exporter: serve what runs measured to Prometheus."""

import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING

import click

from clocher_kernels.errors import UsageError
from clocher_runtime.command.script_run import PATH, Report, option, script, switch
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.monitoring import require_prometheus_client
from clocher_runtime.monitoring.sources import FollowedDirectory, FollowedFile, stream_lines

if TYPE_CHECKING:
    from clocher_runtime.monitoring.exporter import RunMetrics

PORT = 9640

_POLL_S = 1.0


@script(
    "metrics_exporter",
    click.Argument(["source"], type=PATH, default="-"),
    option("--port", click.IntRange(0, 65535), default=PORT),
    option("--address", str, "Address to listen on.", default="127.0.0.1"),
    switch("--once", "Read what is there, print the metrics and end."),
    examples=(
        ("Follow a file", "python scripts/metrics_exporter.py build/bench/bench.jsonl"),
        (
            "The metrics of one run",
            "clocher-run --prompt 'def add(' | python scripts/metrics_exporter.py --once",
        ),
    ),
    epilog="docs/monitoring describes the metrics.",
    exit_codes=(
        (ExitCode.OK, "--once: printed; else: stopped by Ctrl-C or SIGTERM"),
        (ExitCode.USAGE, "a flag cannot be used, or prometheus-client is not installed"),
        (ExitCode.DEVICE, "SOURCE cannot be read, or the address cannot be listened on"),
    ),
)
def export(report: Report, source: Path, port: int, address: str, once: bool) -> None:
    """Serve the JSON lines in SOURCE as metrics on /metrics.

    The lines are those of clocher-run and of the harness. SOURCE is a file that is followed, a
    directory whose .json and .jsonl files are followed, or - for standard input, the default. A
    line that is neither is counted and does no harm.
    """
    require_prometheus_client()
    from clocher_runtime.monitoring.exporter import RunMetrics

    stream = str(source) == "-"
    if stream and sys.stdin.isatty():
        raise UsageError("standard input is a terminal; name a SOURCE, or pipe lines in")
    if once and not stream and not source.exists():
        raise OSError(f"{source}: no such file or directory")
    intake = _Intake(RunMetrics(), report)
    if once:
        intake.take(stream_lines(sys.stdin.buffer) if stream else _open(source).lines(last=True))
        click.echo(intake.metrics.text(), nl=False)
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with intake.metrics.served(address, port) as actual:
            host = f"[{address}]" if ":" in address else address
            report.done(f"serving http://{host}:{actual}/metrics from {source}")
            if stream:
                intake.take(stream_lines(sys.stdin.buffer))
                report.done("the input ended; still serving")
                Event().wait()
            intake.follow(_open(source))
    except KeyboardInterrupt:
        report.done("stopped")


class _Intake:
    def __init__(self, metrics: "RunMetrics", report: Report) -> None:
        self.metrics = metrics
        self._report = report
        self._said: set[str] = set()

    def take(self, lines: Iterable[bytes | None]) -> None:
        for line in lines:
            why = self.metrics.take(line)
            if why is not None and why.reason not in self._said:
                self._said.add(why.reason)
                self._report.note(f"note: a line does not count ({why.reason}): {why}")

    def follow(self, source: FollowedFile | FollowedDirectory) -> None:
        pause = Event()
        while True:
            self.take(source.lines())
            pause.wait(_POLL_S)


def _open(source: Path) -> FollowedFile | FollowedDirectory:
    if source.is_dir():
        return FollowedDirectory(source)
    if not source.parent.is_dir():
        raise OSError(f"{source}: there is no directory {source.parent}")
    return FollowedFile(source)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
