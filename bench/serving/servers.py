"""Servers that are measured: found at an address, or started here and ended again."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.clock.machine import read, since
from bench.measure import NotMeasured
from bench.serving.client import Target, get
from clocher_runtime.engine.topology import usable_cpus

READY_S = 600.0
_END_S, _ORPHANS_S = 45.0, 5.0
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})? (\S+)", re.M)
_TICK, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
_LOG, _AT_ONCE_S = 1 << 24, 0.1


@dataclass(slots=True)
class Server:
    """A server that answers.

    Attributes:
        name: in rows.
        target: where it listens.
        model: that it calls its own.
        slots: streams that it serves side by side.
        pid: of its first process; None: not started here.
        load_s: from its start to its first answer.
        about: what it said when it was ready.
    """

    name: str
    target: Target
    model: str = ""
    slots: int = 8
    pid: int | None = None
    load_s: float | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def cpu_seconds(self) -> float | None:
        """Return the CPU time of its processes; None: not ours to know."""
        return None if self.pid is None else sum(map(_cpu_seconds, family(self.pid)))

    def rss_bytes(self) -> int:
        """Return the memory that its processes hold, shared pages counted for each."""
        return sum(map(_rss_bytes, family(self.pid))) if self.pid is not None else 0

    async def metrics(self) -> dict[str, float]:
        """Return its gauges and counters, labels added up.

        Raises:
            NotMeasured: it gives none.
        """
        answer = await get(self.target, "/metrics")
        if answer.error:
            raise NotMeasured(f"{self.name}: /metrics: {answer.error}")
        return samples(answer.body.decode("utf-8", "replace"))

    async def health(self) -> dict[str, Any]:
        """Return what it says of itself."""
        answer = await get(self.target, "/health")
        found = json.loads(answer.body) if answer.body[:1] == b"{" else {}
        return {**found, "http_status": answer.status}


def others_percent(servers: Sequence[Server]) -> Iterator[float | None]:
    """Yield the CPUs' share that neither we nor the servers took since it was asked before.

    Rows of one case come at once, and have it in common. None: not known here.
    """

    def spent() -> float:
        return sum(server.cpu_seconds() or 0.0 for server in servers)

    before, ours = read(), spent()
    last: float | None = None
    while True:
        seconds, state = since(before)
        known = state.others_percent is not None and all(server.pid for server in servers)
        if seconds > _AT_ONCE_S:
            used = spent() - ours  # less than nothing if a process was killed
            own = 100 * used / (seconds * len(usable_cpus()))
            last = max(0.0, state.others_percent - own) if known and used >= 0 else None
            before, ours = read(), spent()
        yield last


def samples(text: str) -> dict[str, float]:
    """Return the values of a page of metrics, by name; those of all labels added up."""
    found: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def family(pid: int) -> list[int]:
    """Return a process and all that come from it."""
    found = [pid]
    for parent in found:
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, _read(path).split())
    return found


@contextmanager
def at(url: str, key: str = "") -> Iterator[Server]:
    """Yield a server that somebody else started."""
    server = Server(url, Target.of(url, key))
    asyncio.run(_introduce(server))
    yield server


@contextmanager
def clocher(model_dir: Path, command: str, arguments: str = "") -> Iterator[Server]:
    """Start clocher-serve on a model and end it."""
    program = shutil.which(command, path=str(Path(sys.executable).parent)) or shutil.which(command)
    if program is None:
        raise NotMeasured(f"{command}: no such program; install 'clocher[serve]'")
    line = [program, "--model-dir", str(model_dir), "--host", "127.0.0.1", "--port", "0"]
    line += ["--speculate", "off"]  # beside bare steps; arguments may say otherwise

    def ready(said: str) -> dict[str, Any] | None:
        documents = (json.loads(text) for text in said.splitlines() if text.startswith("{"))
        return next((found for found in documents if found.get("event") == "ready"), None)

    with _started("clocher", [*line, *shlex.split(arguments)], ready) as server:
        yield server


@contextmanager
def llama(binary: str, gguf: Path, streams: int, tokens: int, arguments: str) -> Iterator[Server]:
    """Start llama-server on a file, with a slot for each stream and one cache for all, and end it.

    Args:
        binary: llama-server.
        gguf: the model.
        streams: slots.
        tokens: that the cache holds.
        arguments: more of them; they come last, so they win.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [binary, "-m", str(gguf), "--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    line += ["-np", str(streams), "-c", str(tokens), "--kv-unified", *shlex.split(arguments)]
    url = f"http://127.0.0.1:{port}"

    def ready(said: str) -> dict[str, Any] | None:
        try:
            answer = asyncio.run(get(Target.of(url), "/health"))
        except OSError:
            return None
        return {"url": url} if answer.status == 200 else None

    with _started("llama-server", line, ready) as server:
        yield server


@contextmanager
def _started(name: str, line: list[str], ready: Any) -> Iterator[Server]:
    """Start a program, wait until `ready` makes something of what it printed, and end it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        try:
            process = subprocess.Popen(line, stdout=out, stderr=log, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise NotMeasured(f"{line[0]}: {error.strerror}") from None
        try:
            while (said := ready(_whole(out))) is None:
                if process.poll() is not None or time.perf_counter() - began > READY_S:
                    last = " / ".join(_whole(log).strip().splitlines()[-3:])
                    raise NotMeasured(f"{name} is not ready, exit {process.poll()}: {last}")
                time.sleep(0.02)
            server = Server(name, Target.of(said["url"]), pid=process.pid, about=said)
            server.load_s = time.perf_counter() - began
            asyncio.run(_introduce(server))
            yield server
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    orphans = family(process.pid)[1:]
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    until = time.perf_counter() + _ORPHANS_S
    while left := [pid for pid in orphans if Path(f"/proc/{pid}").exists()]:
        if time.perf_counter() < until:
            time.sleep(0.05)
            continue
        print(f"note: processes {left} outlived their server", file=sys.stderr)
        break


async def _introduce(server: Server) -> None:
    answer = await get(server.target, "/v1/models")
    try:
        about = json.loads(answer.body)["data"][0]
        server.model, server.slots = about["id"], about.get("batch", server.slots)
    except (ValueError, LookupError, TypeError):
        raise NotMeasured(f"{server.name}: /v1/models names no model ({answer.error})") from None


def _whole(file: Any) -> str:
    # The child writes at an offset that both share, so nothing may move it here.
    found = os.pread(file.fileno(), _LOG, 0)
    # What has no end of line yet is not read; a document may be half there.
    return found[: found.rfind(b"\n") + 1].decode("utf-8", "replace")


def _cpu_seconds(pid: int) -> float:
    # The name of a process may hold blanks and brackets.
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK if fields else 0.0


def _rss_bytes(pid: int) -> int:
    fields = _read(Path(f"/proc/{pid}/statm")).split()
    return int(fields[1]) * _PAGE if fields else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # it has ended
        return ""
