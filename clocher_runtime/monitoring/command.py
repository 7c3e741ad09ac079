"""The program metrics_exporter: serve what runs measured to Prometheus."""

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, BinaryIO

import click

from clocher_kernels.errors import UsageError
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import option, script, switch
from clocher_runtime.command.parameters import PATH
from clocher_runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from clocher_runtime.monitoring.exporter import RunMetrics

PORT = 9640

MAX_LINE_BYTES = 16 << 20
MAX_FILES = 1000
SUFFIXES = (".json", ".jsonl")
_POLL_S = 1.0


class Lines:
    """The lines of a growing file or a stream, without blank ones; None for one too long."""

    def __init__(self) -> None:
        self._too_long = False

    def of(self, file: BinaryIO, last: bool = True) -> Iterator[bytes | None]:
        """Yield the lines from here on; one without an end only if it is the `last`."""
        while piece := file.readline(MAX_LINE_BYTES):
            if not piece.endswith(b"\n"):
                if len(piece) == MAX_LINE_BYTES:
                    self._too_long = True
                    continue
                if not last:
                    file.seek(-len(piece), os.SEEK_CUR)
                    return
            line = None if self._too_long else piece.removesuffix(b"\n")
            self._too_long = False
            if line is None or line.strip():
                yield line
        if last and self._too_long:
            yield None


class FollowedFile:
    """A file read as it grows, anew when replaced or truncated. It may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = Lines()
        self._inode = -1
        self._offset = 0

    def lines(self, last: bool = False) -> Iterator[bytes | None]:
        """Yield the lines that were added. Raises OSError."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return
        # Opening a named pipe would block until there is a writer.
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{self.path}: not a regular file; pipe it to standard input instead")
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._lines = Lines()
            self._inode, self._offset = found.st_ino, 0
        if last or found.st_size > self._offset:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                yield from self._lines.of(file, last)
                self._offset = file.tell()


class FollowedDirectory:
    """All files directly in a directory with a suffix in `SUFFIXES`; new ones are found."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, FollowedFile] = {}

    def lines(self, last: bool = False) -> Iterator[bytes | None]:
        """Yield the lines added to the first `MAX_FILES` files. Raises OSError."""
        for name in sorted(os.listdir(self.path)):
            known = name in self._files or len(self._files) >= MAX_FILES
            if not known and name.endswith(SUFFIXES) and _readable(self.path / name):
                self._files[name] = FollowedFile(self.path / name)
        for file in self._files.values():
            yield from file.lines(last)


def _readable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.R_OK)


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
    exit_codes={
        ExitCode.OK: "--once: printed; else: stopped by Ctrl-C or SIGTERM",
        ExitCode.USAGE: "a flag cannot be used, or prometheus-client is not installed",
        ExitCode.DEVICE: "SOURCE cannot be read, or the address cannot be listened on",
    },
)
def export(console: Console, source: Path, port: int, address: str, once: bool) -> None:
    """Serve the JSON lines in SOURCE as metrics on /metrics.

    The lines are those of clocher-run and of the harness. SOURCE is a file that is followed, a
    directory whose .json and .jsonl files are followed, or - for standard input, the default. A
    line that is neither is counted and does no harm.
    """
    try:
        from clocher_runtime.monitoring.exporter import RunMetrics
    except ImportError:
        raise UsageError(
            "metrics are served with prometheus-client, which is not installed; "
            "pip install '.[monitoring]' in a clone of Clocher"
        ) from None

    stream = str(source) == "-"
    if stream and sys.stdin.isatty():
        raise UsageError("standard input is a terminal; name a SOURCE, or pipe lines in")
    if once and not stream and not source.exists():
        raise OSError(f"{source}: no such file or directory")
    intake = _Intake(RunMetrics(), console)
    if once:
        intake.take(Lines().of(sys.stdin.buffer) if stream else _open(source).lines(last=True))
        click.echo(intake.metrics.text(), nl=False)
        return
    try:
        with intake.metrics.served(address, port) as actual:
            host = f"[{address}]" if ":" in address else address
            console.say(f"serving http://{host}:{actual}/metrics from {source}")
            if stream:
                intake.take(Lines().of(sys.stdin.buffer))
                console.say("the input ended; still serving")
                Event().wait()
            followed, pause = _open(source), Event()
            while True:
                intake.take(followed.lines())
                pause.wait(_POLL_S)
    except KeyboardInterrupt:
        console.say("stopped")


class _Intake:
    def __init__(self, metrics: "RunMetrics", console: Console) -> None:
        self.metrics = metrics
        self._console = console
        self._said: set[str] = set()

    def take(self, lines: Iterable[bytes | None]) -> None:
        for line in lines:
            why = self.metrics.take(line)
            if why is not None and why.reason not in self._said:
                self._said.add(why.reason)
                self._console.note(f"note: a line does not count ({why.reason}): {why}")


def _open(source: Path) -> FollowedFile | FollowedDirectory:
    if source.is_dir():
        return FollowedDirectory(source)
    if not source.parent.is_dir():
        raise OSError(f"{source}: there is no directory {source.parent}")
    return FollowedFile(source)
