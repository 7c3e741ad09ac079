"""Many mutants in worker processes, so that a crash, too, is only a result."""

import base64
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from clocher_kernels.errors import UsageError
from clocher_runtime.disk.output_file import write_file
from fuzz.oracle import (
    EXTRA_BYTES,
    Folder,
    Judgement,
    bounded_cpu,
    bounded_memory,
    judge,
)
from fuzz.readers import READERS, Mutator, Reader

SCHEMA = "clocher.mutant/1"
STEP = 500
"""Mutants between two reports of a worker."""

STALLED_SECONDS = 120
"""Without a word from any worker. Computing for too long ends sooner: see `bounded_cpu`."""
_TASK = 10_000
_KILLED = f"exit code {-signal.SIGKILL}"
_STORES = ("/dev/shm", "/run/shm")


@dataclass(slots=True)
class Failure:
    """A bug: one place in the code, and the first mutant that leads there.

    Attributes:
        judgement: what the oracle said of that mutant.
        index: its number.
        files: its files.
        count: mutants that lead to the same place.
    """

    judgement: Judgement
    index: int
    files: Mapping[str, bytes]
    count: int = 1


@dataclass(slots=True)
class Tally:
    """Results of one reader.

    Attributes:
        mutants: judged so far.
        accepted: sound in spite of the change.
        refused: class of the error -> how often.
        failures: by what tells bugs apart.
    """

    mutants: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Failure] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """Mutants that led to a bug."""
        return sum(failure.count for failure in self.failures.values())

    def add(self, other: "Tally") -> None:
        """Add the results of some more mutants."""
        self.mutants += other.mutants
        self.accepted += other.accepted
        self.refused += other.refused
        for key, failure in other.failures.items():
            known = self.failures.get(key)
            if known is None:
                self.failures[key] = failure
            else:
                known.count += failure.count

    def note(self, judgement: Judgement, index: int, files: Mapping[str, bytes]) -> None:
        """Count one mutant."""
        self.mutants += 1
        if judgement.outcome == "accepted":
            self.accepted += 1
        elif judgement.outcome == "refused":
            self.refused[judgement.detail] += 1
        else:
            one = Tally(
                failures={
                    f"{judgement.outcome} {judgement.detail}": Failure(judgement, index, files)
                }
            )
            self.add(one)

    def document(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        return {
            "mutants": self.mutants,
            "accepted": self.accepted,
            "refused": dict(sorted(self.refused.items())),
            "failed": self.failed,
            "failures": {key: f.count for key, f in sorted(self.failures.items())},
        }


@dataclass(frozen=True, slots=True)
class Task:
    """Mutants `start` up to, not including, `stop` of a reader.

    Attributes:
        without: those that end the process, and are counted.
        killed_at: the one at which the process was killed before.
    """

    reader: str
    seed: int
    start: int
    stop: int
    without: frozenset[int] = frozenset()
    killed_at: int = -1


def fuzz(
    names: Sequence[str],
    seed: int,
    start: int,
    count: int,
    jobs: int,
    progress: Callable[[str, int], None] | None = None,
) -> dict[str, Tally]:
    """Judge mutants `start` up to `start + count` of some readers.

    Args:
        names: of `READERS`.
        seed: the same seed makes the same mutants.
        start: number of the first one.
        count: how many for each reader.
        jobs: worker processes.
        progress: called with a reader and how many of its mutants have been judged since.
    """
    ends = range(start, start + count, _TASK)
    tasks = [
        Task(name, seed, first, min(first + _TASK, start + count))
        for first in ends
        for name in names
    ]
    tasks.reverse()
    tallies = {name: Tally() for name in names}
    workers = [_Worker() for _ in range(min(jobs, len(tasks)))]
    try:
        while tasks or any(worker.task for worker in workers):
            for worker in workers:
                if worker.task is None and tasks:
                    worker.start(tasks.pop())
            for worker in _ready(workers):
                assert worker.task is not None
                name = worker.task.reader
                for part in worker.results(tasks):
                    tallies[name].add(part)
                    if progress is not None:
                        progress(name, part.mutants)
    finally:
        for worker in workers:
            worker.close()
    return tallies


def reproduce(files: Mapping[str, bytes], reader: str) -> Judgement:
    """Judge the files of one mutant, in a process of its own."""
    worker = _Worker()
    try:
        worker.start((reader, dict(files)))
        if not worker.connection.poll(STALLED_SECONDS):
            return Judgement("hang", "outside Python")
        judgement: Judgement = worker.connection.recv()
        return judgement
    except EOFError:
        return worker.crash()
    finally:
        worker.close()


def save(directory: Path, name: str, seed: int, failure: Failure) -> Path:
    """Write the mutant of a failure, to be reproduced; return its file."""
    document = {
        "schema": SCHEMA,
        "reader": name,
        "seed": seed,
        "index": failure.index,
        "failure": f"{failure.judgement.outcome} {failure.judgement.detail}",
        "trace": failure.judgement.trace.splitlines(),
        "files": {file: base64.b64encode(d).decode() for file, d in failure.files.items()},
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{seed}-{failure.index}.json"
    write_file(path, json.dumps(document, indent=1).encode())
    return path


def load(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the reader and the files of a mutant that `save` wrote.

    Raises:
        UsageError: the file is not one of those.
    """
    try:
        document = json.loads(path.read_bytes())
        files = {name: base64.b64decode(text) for name, text in document["files"].items()}
        reader = document["reader"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not a saved mutant: {error}") from None
    if document.get("schema") != SCHEMA or reader not in READERS:
        raise UsageError(f"{path}: not a mutant of {SCHEMA} for one of {', '.join(READERS)}")
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise UsageError(f"{path}: a file of the mutant lies outside its directory")
    return reader, files


class _Worker:
    """A process that judges mutants. It is started when it is needed, and again after a crash."""

    def __init__(self) -> None:
        self.task: Task | None = None
        self.connection: Connection
        self._process: Any = None
        self._hung = False
        self._seen = -1

    def start(self, task: Task | tuple[str, dict[str, bytes]]) -> None:
        """Hand over a task; a mutant of its own is answered with a judgement."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self._index = context.RawValue("q", -1)
            # Memory that a library reserves for each of its threads would blur the limit.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
            os.environ["RUST_BACKTRACE"] = "0"  # it needs memory, and that is limited
            self._hung, self._seen = False, -1
            # Ours, not the worker's: a worker that is killed cannot tidy up.
            memory = next((s for s in _STORES if os.access(s, os.W_OK)), gettempdir())
            self._store = TemporaryDirectory(dir=memory, prefix="clocher-fuzz-")
            self._process = context.Process(
                target=work, args=(theirs, self._index, self._store.name), daemon=True
            )
            self._process.start()
            theirs.close()
        self.connection.send(task)
        self.task = task if isinstance(task, Task) else None
        self._begin = task.start if isinstance(task, Task) else 0

    def results(self, tasks: list[Task]) -> Iterator[Tally]:
        """Yield what has come in; after a crash put the rest of the task back."""
        task = self.task
        assert task is not None
        try:
            received = self.connection.recv()
            if isinstance(received, str):
                raise RuntimeError(f"the fuzzer itself failed:\n{received}")
            part, done = received
        except EOFError:
            part, done = Tally(), None
            at = int(self._index.value)
            if at < 0:
                raise RuntimeError("the fuzzer itself failed: a worker ended early") from None
            rest = replace(task, start=self._begin, killed_at=at)
            judgement = self.crash()
            # Once it may be somebody else's doing: no program kills itself like that.
            if judgement.detail != _KILLED or task.killed_at == at:
                files = Mutator(READERS[task.reader], task.seed).mutant(at)
                part.note(judgement, at, files)
                rest = replace(rest, without=task.without | {at})
            tasks.append(rest)
            self.close()
        if done is None or done >= task.stop:
            self.task = None
        else:
            self._begin = done
        yield part

    def kill_if_stalled(self) -> None:
        """Kill the process if it stands at the same mutant as when this was called before."""
        at = int(self._index.value)
        if at == self._seen:
            self._hung = True
            self._process.kill()
        self._seen = at

    def crash(self) -> Judgement:
        """Return what the end of the process means."""
        self._process.join()
        if self._hung or self._process.exitcode == -signal.SIGXCPU:
            return Judgement("hang", "outside Python")
        return Judgement("crash", f"exit code {self._process.exitcode}")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self.connection.close()
            self._store.cleanup()
            self._process = None
        self.task = None


def _ready(workers: list[_Worker]) -> Iterator[_Worker]:
    """Yield the workers that have something to say; kill those that hang outside Python."""
    busy = {worker.connection: worker for worker in workers if worker.task is not None}
    ready = wait(list(busy), STALLED_SECONDS)
    if not ready:
        for worker in busy.values():
            worker.kill_if_stalled()
    for connection in ready:
        yield busy[connection]  # type: ignore[index]


def work(connection: Connection, index: Any, store: str) -> None:
    """Judge what comes in until the other end hangs up; the main function of a worker."""
    # A library that panics writes to standard error before it says so.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            with TemporaryDirectory(dir=store) as folder:
                _do(task, Folder(Path(folder)), connection, index)
        except Exception:
            connection.send(traceback.format_exc())
            return


def _do(task: Any, folder: Folder, connection: Connection, index: Any) -> None:
    if isinstance(task, Task):
        _judge_all(task, folder, connection, index)
        return
    reader, files = task
    _warm(READERS[reader], Mutator(READERS[reader], 0), folder)
    bounded_cpu()
    connection.send(_judge_one(READERS[reader], folder, files))


def _judge_all(task: Task, folder: Folder, connection: Connection, index: Any) -> None:
    reader = READERS[task.reader]
    mutator = Mutator(reader, task.seed)
    index.value = -1
    _warm(reader, mutator, folder)
    for start in range(task.start, task.stop, STEP):
        stop = min(start + STEP, task.stop)
        tally = Tally()
        bounded_cpu()
        for at in range(start, stop):
            if at in task.without:
                continue
            index.value = at
            files = mutator.mutant(at)
            tally.note(_judge_one(reader, folder, files), at, files)
        connection.send((tally, stop))


def _judge_one(reader: Reader, folder: Folder, files: Mapping[str, bytes]) -> Judgement:
    folder.put(files)
    with bounded_memory(EXTRA_BYTES + 2 * sum(map(len, files.values()))):
        return judge(reader.read, reader.errors, folder.path)


def _warm(reader: Reader, mutator: Mutator, folder: Folder) -> None:
    """Open the sound files, so that imports and caches count against no mutant.

    Raises:
        AssertionError: one of them is refused, which would make every mutant of it worthless.
    """
    for files in mutator.originals:
        folder.put(files)
        judgement = judge(reader.read, reader.errors, folder.path)
        assert judgement.outcome == "accepted", f"seed of {reader.name}: {judgement}"
