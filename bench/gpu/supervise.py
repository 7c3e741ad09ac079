"""Run parts in processes of their own, with time limits; go on after whatever ends one early."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.parts import Part
from bench.gpu.record import Record

LOST = 3
"""Exit code of a part whose GPU does not answer any more: a new process goes on."""
NO_DEVICE = 4
"""Exit code of a part that finds no usable GPU: a new process would not either."""

_POLL_SECONDS = 0.1
_TICK_SECONDS = 10
_PR_SET_PDEATHSIG = 1
# The interpreter is slow, and a dry run may share its machine: there the budget alone is a limit.
_DRY_SLACK = 4
_MOST_STARTS = 12
_LOG_LINES = 12
# Many processes run side by side, and what they compute on the CPU is small.
_FEW_THREADS = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}


@dataclass
class Job:
    """One process of a part, started anew when an item kills it.

    Attributes:
        command: what to run; it goes on where the record ends.
        path: the record.
        stage: jobs of one stage run side by side.
        seconds: time limit of all starts together.
        item_seconds: time limit of one item.
    """

    name: str
    command: Sequence[str]
    path: Path
    seconds: float
    item_seconds: float
    stage: int = 0
    starts: int = 0
    ended: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _deadline: float = 0.0
    _started: float = 0.0

    @property
    def log(self) -> Path:
        """Where what the process prints goes."""
        return self.path.with_suffix(".log")

    def start(self) -> None:
        """Start the process, or start it again."""
        now = time.monotonic()
        self._deadline = self._deadline or now + self.seconds
        self._started = now
        self.starts += 1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **_FEW_THREADS},
            )

    def poll(self) -> bool:
        """Look after the process; return whether the job has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            late = time.monotonic() > self._deadline
            if late or self._item_age() > self.item_seconds:
                self.stop()
                self._note("timeout", f"stopped after {self._item_age():.0f} s")
                return self._go_on("time limit" if late else "", late)
            return False
        if code == 0:
            self.ended = "finished"
            return True
        if code == NO_DEVICE:
            self.ended = "no device"
            return True
        if code != LOST:
            self._note("crashed", f"exit status {code}: {self._tail()}")
        return self._go_on("", time.monotonic() > self._deadline)

    def stop(self) -> None:
        """End the process and its children."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def record(self) -> Record | None:
        """Return what the process has written so far."""
        return Record.load(self.path) if self.path.exists() else None

    def _item_age(self) -> float:
        """Seconds since the process last wrote, which it does before and after each item."""
        written = self.path.stat().st_mtime if self.path.exists() else 0.0
        return min(time.time() - written, time.monotonic() - self._started)

    def _note(self, status: str, text: str) -> None:
        record = self.record()
        if record is not None and record.running is not None:
            record.add(record.running, [{"status": status, "reason": text}])
            record.save(self.path)

    def _go_on(self, why: str, late: bool) -> bool:
        """Start again if there is time and it got anywhere; return whether the job has ended."""
        record = self.record()
        got_somewhere = record is not None and len(record.done) >= self.starts
        if late or self.starts >= _MOST_STARTS or not got_somewhere:
            self.ended = why or ("time limit" if late else f"gave up: {self._tail()}")
            return True
        self.start()
        return False

    def _tail(self) -> str:
        if not self.log.exists():
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-_LOG_LINES:] if line.strip())[-600:]


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def jobs_of(
    name: str, part: Part, folder: Path, dry: bool, shards: int, only: Sequence[str] = ()
) -> list[Job]:
    """Return the jobs of a part; their records go to a folder."""
    made = []
    slack = _DRY_SLACK if dry else 1
    for shard in range(shards):
        path = folder / f"{name}.{shard}.json"
        command = [sys.executable, "-m", "bench.gpu", name, "--out", str(path)]
        command += ["--shard", str(shard), "--shards", str(shards)]
        command += ["--dry-run"] if dry else []
        for text in only:
            command += ["--only", text]
        seconds, item = part.seconds * slack, part.item_seconds * slack
        made.append(Job(name, command, path, seconds, item, part.stage))
    return made


def run_jobs(
    jobs: Sequence[Job],
    at_once: int,
    tell: Callable[[str], None],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Run jobs, at most `at_once` side by side, until all have ended.

    Args:
        jobs: what to run.
        at_once: the most processes.
        tell: called with a line for each job that did not finish.
        tick: called every ten seconds.
    """
    waiting, active = list(jobs), []
    ticked = time.monotonic()
    try:
        while waiting or active:
            if time.monotonic() - ticked > _TICK_SECONDS:
                tick()
                ticked = time.monotonic()
            while waiting and len(active) < at_once:
                job = waiting.pop(0)
                job.start()
                active.append(job)
            for job in list(active):
                if job.poll():
                    active.remove(job)
                    if job.ended != "finished":
                        tell(f"{job.path.stem}: {job.ended}")
            time.sleep(_POLL_SECONDS)
    finally:
        for job in active:
            job.stop()
