"""The program metrics_exporter: serve what runs measured to Prometheus."""

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import BinaryIO

import click

from clocher_kernels.errors import UsageError
from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import option, script, switch
from clocher_runtime.command.parameters import PATH
from clocher_runtime.exit_codes import ExitCode

PORT = 9640

MAX_LINE_BYTES = 16 << 20
MAX_FILES = 1000
SUFFIXES = (".json", ".jsonl")
_POLL_S = 1.0


@dataclass(slots=True)
class Place:
    """Where the reading of a file or a stream is."""

    inode: int = -1
    offset: int = 0
    too_long: bool = False  # within a line that is


def lines_of(file: BinaryIO, place: Place, last: bool = True) -> Iterator[bytes | None]:
    """Yield the lines from here on, without blank ones; None for one too long.

    One without an end is only yielded if it is the `last`.
    """
    while piece := file.readline(MAX_LINE_BYTES):
        if not piece.endswith(b"\n"):
            if len(piece) == MAX_LINE_BYTES:
                place.too_long = True
                continue
            if not last:
                file.seek(-len(piece), os.SEEK_CUR)
                return
        line = None if place.too_long else piece.removesuffix(b"\n")
        place.too_long = False
        if line is None or line.strip():
            yield line
    if last and place.too_long:
        yield None


class Followed:
    """A file that grows, or all with a suffix in `SUFFIXES` directly in a directory, new ones too.

    It is read anew when replaced or truncated. A file may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file could never be there."""
        self._folder = path if path.is_dir() else None
        if not path.parent.is_dir():
            raise OSError(f"{path}: there is no directory {path.parent}")
        self._places = {} if self._folder else {path: Place()}

    def lines(self, last: bool = False) -> Iterator[bytes | None]:
        """Yield the lines that were added, of a directory to its first `MAX_FILES` files; OSError.

        One without an end is only yielded if it is the `last`.
        """
        for path in sorted(self._folder.iterdir()) if self._folder else ():
            fits = path.name.endswith(SUFFIXES) and len(self._places) < MAX_FILES
            if fits and path not in self._places and path.is_file() and os.access(path, os.R_OK):
                self._places[path] = Place()
        for path, place in self._places.items():
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            # Opening a named pipe would block until there is a writer.
            if not stat.S_ISREG(found.st_mode):
                raise OSError(f"{path}: not a regular file; pipe it to standard input instead")
            if found.st_ino != place.inode or found.st_size < place.offset:
                place.inode, place.offset, place.too_long = found.st_ino, 0, False
            if last or found.st_size > place.offset:
                with path.open("rb") as file:
                    file.seek(place.offset)
                    yield from lines_of(file, place, last)
                    place.offset = file.tell()


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
    metrics, said = RunMetrics(), set[str]()

    def take(lines: Iterable[bytes | None]) -> None:
        for line in lines:
            why = metrics.take(line)
            if why is not None and why.reason not in said:
                said.add(why.reason)
                console.note(f"note: a line does not count ({why.reason}): {why}")

    if once:
        take(lines_of(sys.stdin.buffer, Place()) if stream else Followed(source).lines(last=True))
        click.echo(metrics.text(), nl=False)
        return
    try:
        with metrics.served(address, port) as actual:
            host = f"[{address}]" if ":" in address else address
            console.say(f"serving http://{host}:{actual}/metrics from {source}")
            if stream:
                take(lines_of(sys.stdin.buffer, Place()))
                console.say("the input ended; still serving")
                Event().wait()
            followed, pause = Followed(source), Event()
            while True:
                take(followed.lines())
                pause.wait(_POLL_S)
    except KeyboardInterrupt:
        console.say("stopped")
