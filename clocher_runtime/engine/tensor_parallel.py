"""Tensor parallelism in processes: this one leads, the others follow step by step.

The leader schedules, samples and talks to its callers like any session. Before a step it sends the
others what the host wrote into the inputs, and how large the step is; then all execute it, and
speak to each other by what `process_group` made. Every rank computes the same logits to the last
bit, samples the same tokens and steps its inputs on by itself, so most steps send a few bytes.

A follower that ends, or is ended, shows as the end of a pipe or of a connection, and ends the
session; a follower whose leader is gone ends too.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clocher_kernels import errors
from clocher_kernels.errors import ClocherError, DeviceError, UsageError
from clocher_kernels.plan import Call, Plan
from clocher_runtime.engine.backends import Executor, Tuning, acted_on, ranks_of
from clocher_runtime.engine.binding import Bound, bind
from clocher_runtime.engine.footprint import Sizes
from clocher_runtime.engine.load import Model
from clocher_runtime.models.division import Division

STEP, WALK, WARM, AWAKE, ASLEEP = range(5)
HEADER = 5
"""Integers of a command: what, tokens, rows, masks that were written (-1: all, -2: no input was),
and bytes of the inputs that follow."""
_NO_INPUT = -2
_MASKS = "allowed"
_MODULE = "clocher_runtime.engine.rank_process"
_FAREWELL_S = 5.0


class Job(msgspec.Struct, frozen=True):
    """What a follower is to load, and how it is bound; as `bind` has it.

    Attributes:
        path: of the model.
        files: names and sizes of its weight files, so that both know the same.
    """

    path: str
    files: list[tuple[str, int]]
    precision: str | None
    sizes: Sizes
    backend: str
    rank: int
    count: int
    threads: int
    act_prec: str | None
    tuning: Tuning | None
    pretranspose: str | None


class Answer(msgspec.Struct, frozen=True):
    """What a follower says of its start: nothing, or the error that ended it."""

    kind: str = ""
    text: str = ""


def files_of(model: Model) -> list[tuple[str, int]]:
    """Return names and sizes of the weight files of a model."""
    return sorted((str(file.path.resolve()), file.nbytes) for file in model.checkpoint.files)


def bind_ranks(model: Model, sizes: Sizes, *, count: int, threads: int, **how: Any) -> Bound:
    """Bind a model to `count` processes; the arguments are those of `bind`.

    Args:
        count: ranks, this process included.
        threads: of all ranks together.

    Raises:
        UsageError: the model cannot be divided among them, or what was asked for is for one rank.
        DeviceError: torch is not installed, or a follower cannot be started, or ends.
        ModelError, OutOfMemory: see `bind`.
    """
    for what in ("act_sparse", "beside"):
        if how.get(what) is not None:
            name = "a draft model" if what == "beside" else "act_sparsity"
            raise UsageError(
                f"{name} with tensor_parallel {count}: it is for one rank; leave one out"
            )
    Division(model.spec, model.formats, 0, count)  # refuses before processes are started
    each, tuning = max(1, threads // count), how.get("tuning")
    ranks = ranks_of(how["backend"], 0, count)
    with tempfile.TemporaryDirectory(prefix="clocher-ranks-") as folder:
        team = _Team(str(Path(folder) / "store"))
        try:
            for rank in range(1, count):
                job = Job(
                    path=str(model.checkpoint.path),
                    files=files_of(model),
                    precision=model.asked,
                    sizes=sizes,
                    backend=how["backend"],
                    rank=rank,
                    count=count,
                    threads=each,
                    act_prec=how["act_prec"],
                    tuning=_tuning_of(tuning, rank, each),
                    pretranspose=how["pretranspose"],
                )
                team.start(job)
            how["tuning"] = _tuning_of(tuning, 0, each)
            own = bind(model, sizes, threads=each, ranks=ranks, **how)
            team.connect(ranks.connect)
        except BaseException:
            team.close()
            raise
    return replace(own, executor=LeadingExecutor(own.executor, team))


def _tuning_of(tuning: Tuning | None, rank: int, threads: int) -> Tuning | None:
    """Return a tuning with the CPUs of a rank."""
    if tuning is None or not tuning.cpus:
        return tuning
    own = slice(rank * threads, (rank + 1) * threads)
    return replace(tuning, cpus=tuning.cpus[own], sockets=tuning.sockets[own])


class _Team:
    """The processes that follow.

    Args:
        store: path of the file by which the ranks find each other.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, job: Job) -> None:
        """Start a process; it loads its part while this one goes on.

        Raises:
            DeviceError: it cannot be started.
        """
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for this process, which ends that one
            )
        except OSError as error:
            raise DeviceError(f"rank {job.rank} cannot be started: {error}") from None
        self._processes.append(process)
        self._write([process], msgspec.json.encode(job) + b"\n")

    def connect(self, own: Callable[[str], None]) -> None:
        """Wait until all have loaded, and connect them and this process.

        Args:
            own: connects this process by the store.

        Raises:
            ClocherError: what ended one of them.
        """
        for rank, process in enumerate(self._processes, start=1):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise DeviceError(f"rank {rank} ended with {process.wait()} while it loaded")
            answer = msgspec.json.decode(line, type=Answer)
            if answer.kind:
                kind: type[ClocherError] = getattr(errors, answer.kind, DeviceError)
                raise kind(f"rank {rank}: {answer.text}")
        self._write(self._processes, self._store.encode() + b"\n")
        own(self._store)

    def send(self, command: bytes) -> None:
        """Send a command to all.

        Raises:
            DeviceError: one of them is gone.
        """
        self._write(self._processes, command)

    def close(self) -> None:
        """End the processes; they end by themselves when nothing more can come."""
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
        for process in self._processes:
            try:
                process.wait(_FAREWELL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _write(self, to: Sequence["subprocess.Popen[bytes]"], data: bytes) -> None:
        for process in to:
            assert process.stdin is not None
            try:
                process.stdin.write(data)
                process.stdin.flush()
            except (OSError, ValueError):
                raise DeviceError(
                    f"rank {self._processes.index(process) + 1} of tensor parallelism has ended "
                    f"({process.poll()}); load the model again"
                ) from None


class LeadingExecutor:
    """An executor whose steps others do too, each a part of them. See `Executor`.

    Args:
        own: executes this rank's part.
        team: the others, connected.
    """

    def __init__(self, own: Executor, team: _Team) -> None:
        self.plan: Plan = own.plan
        self.isa = own.isa
        self._own, self._team = own, team
        self._masks = _NO_INPUT

    @property
    def acted_on(self) -> frozenset[str]:
        """Fields of the tuning that change what happens."""
        return acted_on(self._own)

    def array(self, name: str) -> np.ndarray:
        """Return the host array of an input buffer, at capacity."""
        return self._own.array(name)

    def upload(self, masks: int | None = None) -> None:
        """Let the next step begin with sending the inputs to the others."""
        self._own.upload(masks)
        self._masks = -1 if masks is None else masks

    def step(self, tokens: int, rows: int) -> None:
        """Execute a step, on all ranks."""
        self._command(STEP, tokens, rows)
        self._own.step(tokens, rows)

    def walk(self, tokens: int, rows: int) -> Generator[Call, None, None]:
        """Execute a step call by call; to its end, also if nobody looks at the rest."""
        self._command(WALK, tokens, rows)
        calls = self._own.walk(tokens, rows)
        try:
            yield from calls
        finally:
            for _ in calls:
                pass

    def fetch(self, name: str, count: int) -> np.ndarray:
        """Return the first rows of an output buffer, which all ranks have."""
        return self._own.fetch(name, count)

    def peek(self, name: str, count: int) -> np.ndarray:
        """Return the first rows of a buffer of this rank."""
        return self._own.peek(name, count)

    def synchronize(self) -> None:
        """Wait until this rank's device has done all steps."""
        self._own.synchronize()

    def warm(self) -> None:
        """Compile and capture what steps need, on all ranks."""
        self._command(WARM)
        self._own.warm()

    @contextmanager
    def running(self) -> Generator[object, None, None]:
        """Keep all ranks awake between steps."""
        self._command(AWAKE)
        try:
            with self._own.running() as context:
                yield context
        finally:
            with suppress(DeviceError):  # a step has told of it
                self._command(ASLEEP)

    def close(self) -> None:
        """End the other ranks, and this one's threads."""
        self._team.close()
        self._own.close()

    def _command(self, what: int, tokens: int = 0, rows: int = 0) -> None:
        inputs, masks = b"", _NO_INPUT
        if what in (STEP, WALK) and self._masks != _NO_INPUT:
            masks, self._masks = self._masks, _NO_INPUT
            inputs = b"".join(
                part.tobytes() for part in inputs_of(self.plan, self._own, tokens, rows, masks)
            )
        header = np.array([what, tokens, rows, masks, len(inputs)], np.int64)
        self._team.send(header.tobytes() + inputs)


def inputs_of(
    plan: Plan, executor: Executor, tokens: int, rows: int, masks: int
) -> Iterator[np.ndarray]:
    """Yield the parts of an executor's inputs that a step reads, in one order on all ranks.

    Args:
        masks: how many of them the sampling op reads; -1: all.
    """
    counts = {"M": tokens, "R": rows}
    for name, buffer in plan.buffers.items():
        if buffer.role == "input":
            array = executor.array(name)
            if name == _MASKS:
                yield array if masks < 0 else array[:masks]
            else:
                yield array[: counts.get(buffer.rows, len(array))]
