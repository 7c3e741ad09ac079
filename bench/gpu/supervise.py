"""Which parts there are, and their processes: time limits, and going on after what ends one early.

Nothing heavy is imported here: the suite itself needs neither torch nor Triton.
"""

import contextlib
import ctypes
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu.record import Record, Row

if TYPE_CHECKING:
    from bench.gpu.setting import Item, Setting

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


@dataclass(frozen=True)
class Part:
    """How a part is run; parts run one after another.

    Attributes:
        call: which one it belongs to; `environment` is part of every one.
        seconds: time limit of the part.
        item_seconds: time limit of one item.
        shards: processes that share its items, side by side.
    """

    call: int
    seconds: float
    item_seconds: float
    shards: int = 1


CALLS = (0, 1, 2, 3, 4)
BUDGET = 520.0
"""Seconds that a call may take; the limits of its parts come to no more."""

PARTS: dict[str, Part] = {
    # A machine that has just started reads every import from a cold disk.
    "environment": Part(0, 50, 50),
    "smoke": Part(0, 60, 55, shards=8),
    "ceilings": Part(0, 40, 30),
    "decode": Part(1, 170, 60),
    "parity": Part(1, 250, 90, shards=14),
    "linear": Part(2, 180, 60),
    "moe": Part(2, 40, 30),
    "batches": Part(2, 100, 45),
    "generate": Part(2, 140, 60),
    "peers": Part(3, 40, 25),
    "attention": Part(3, 60, 40),
    "sparse": Part(3, 50, 40),
    "variants": Part(3, 60, 45),
    "counters": Part(3, 75, 40),
    "sanitize": Part(3, 125, 120, shards=3),
    "passes": Part(4, 120, 60),
    # A model is made on the machine first.
    "speculation": Part(4, 220, 210),
    # These compile or tune at their first call, for as long as they like: they cost nobody else.
    "slow_peers": Part(4, 130, 60),
}
INNER = ("exercise", "profiled")
"""What `sanitize` and `counters` run under their tools; no parts of the suite."""

NAMES = (*PARTS, *INNER)


def parts_of(calls: Iterable[int]) -> dict[str, Part]:
    """Return the parts of some calls, in their order."""
    wanted = set(calls)
    return {n: p for n, p in PARTS.items() if p.call in wanted or n == "environment"}


_MAKERS = {
    "environment": ("machine:items",),
    "smoke": ("smoke:items",),
    "ceilings": ("machine:ceiling_items",),
    "decode": ("decode:items",),
    # The op table is what must not be missing if time runs out; products compile longest.
    "parity": (
        "parity:items",
        "products:checked_items",
        "moe:checked_items",
        "attention:checked_items",
        "decode:short_items",
    ),
    "batches": ("decode:batch_items",),
    "generate": ("generate:items",),
    "passes": ("passes:items",),
    "speculation": ("passes:text_items",),
    "peers": ("peers:items",),
    "slow_peers": ("products:slow_items",),
    "linear": ("products:items",),
    "moe": ("moe:items",),
    "attention": ("attention:items",),
    "sparse": ("products:sparse_items",),
    "variants": ("products:variant_items", "decode:variant_items"),
    "counters": ("tools:counter_items",),
    "profiled": ("tools:profiled_items",),
    "sanitize": ("tools:sanitize_items",),
    "exercise": ("tools:exercise_items",),
}
"""What makes the items of a part: module and function. A part imports nothing else."""


def items_of(part: str, dry: bool) -> "list[Item]":
    """Return the items of a part: few and tiny ones for a dry run.

    What cannot be imported becomes an item that fails and says why.
    """
    from bench.gpu.setting import Item

    items = []
    for maker in _MAKERS[part]:
        try:
            items += pkgutil.resolve_name(f"bench.gpu.{maker}")(dry)
        except ImportError as error:
            items.append(Item(f"import-{maker.split(':')[0]}", partial(_fail, error)))
    return items


def _fail(error: ImportError, setting: "Setting") -> "list[Row]":
    raise error


@dataclass
class Job:
    """One process of a part, started anew when an item kills it.

    Attributes:
        command: what to run; it goes on where the record ends.
        path: the record.
        seconds: time limit of all starts together.
        item_seconds: time limit of one item.
    """

    name: str
    command: Sequence[str]
    path: Path
    seconds: float
    item_seconds: float
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
        made.append(Job(name, command, path, seconds, item))
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
