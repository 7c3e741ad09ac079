"""A job: every row of a file through actors of a Ray cluster, each exactly once.

Who may die, and what happens:

- An actor, or its machine: Ray starts another and gives it the rows of the task again. Nothing of
  a task is stored before it is whole.
- The driver: the next one reads what is stored (`record`) and asks for the rest.
- A row that cannot be used becomes a row with an `error`. What is wrong with the model ends the job
  at once, and with rows that kill every actor after `RETRIES` actors; what is done stays done.
"""

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clocher_kernels.errors import DeviceError, UsageError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model, locate
from clocher_runtime.quantize.plan import describe_source
from clocher_runtime.ray.actors import TASKS, Lines
from clocher_runtime.ray.record import Record, read_rows

RETRIES = 5
"""Times that a task is given to another actor because one died with it."""

_RESTARTS = 100
"""Times that an actor is started again: machines come and go, but not while a model loads."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done, and where.

    Attributes:
        task: a name of `actors.TASKS`.
        model: as `load` takes it; every machine finds it under this name. None: the embedded one.
        source: the rows, a JSON object a line.
        out: directory of the results; see `record`.
        options: of the actor, on which results depend.
        cpus: of each actor.
        actors: how many; None: as many as the cluster has CPUs for.
        batch: rows that an actor computes side by side.
        task_rows: rows that an actor is given at a time, and that are lost with it.
    """

    task: str
    model: str | None
    source: Path
    out: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    cpus: int = 1
    actors: int | None = None
    batch: int = 8
    task_rows: int = 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        rows: of the input.
        resumed: of them, done by a driver before this one.
        errors: rows that could not be used.
        results: the file.
    """

    rows: int
    resumed: int
    errors: int
    results: Path


def run_job(job: Job, address: str | None = None, progress: Progress | None = None) -> Outcome:
    """Do what is left of a job.

    Args:
        job: what is to be done.
        address: of a Ray cluster; None: that of RAY_ADDRESS, else one is started on this machine,
            unless this process has one.
        progress: called with (done, total) rows.

    Raises:
        UsageError: the directory holds another job, or there are no rows.
        ModelError: the model or the input cannot be read.
        DeviceError: Ray is not there, or gave up.
    """
    if job.task not in TASKS:
        raise UsageError(f"task is {job.task!r:.40}; expected one of {', '.join(TASKS)}")
    rows = read_rows(job.source)
    with Record(job.out, asked(job, rows), len(rows)) as record:
        if record.is_whole:
            return Outcome(len(rows), len(rows), _errors(record.results), record.results)
        resumed = len(record.done)
        refused = {at: row for at, line in enumerate(rows) if (row := _refused(line))}
        record.add(refused)
        left = [at for at in range(len(rows)) if at not in record.done]
        if left:
            _compute(job, rows, left, record, address, progress)
        return Outcome(len(rows), resumed, record.finish(), record.results)


def asked(job: Job, rows: list[str]) -> dict[str, Any]:
    """Return all that the results of a job depend on. Sizes of the cluster are not among it."""
    where = embedded_model() if job.model is None else locate(job.model, "MODEL")
    checkpoint = open_checkpoint(where)
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row}\n".encode())
    return {
        "task": job.task,
        "model": describe_source(checkpoint),
        "config_sha256": hashlib.sha256(json.dumps(dict(checkpoint.config)).encode()).hexdigest(),
        "options": dict(job.options),
        "input_sha256": digest.hexdigest(),
    }


def _refused(line: str) -> dict[str, Any] | None:
    """Return the result of a line that was no row."""
    if not line.startswith('{"error": '):
        return None
    row = json.loads(line)
    return row if set(row) == {"error"} else None


def _errors(results: Path) -> int:
    with results.open(encoding="utf-8") as file:
        return sum("error" in json.loads(line) for line in file)


def _compute(
    job: Job,
    rows: list[str],
    left: list[int],
    record: Record,
    address: str | None,
    progress: Progress | None,
) -> None:
    """Send rows through actors, and store what comes back."""
    with connected(address) as ray:
        _send(ray, job, rows, left, record, progress)


def _send(
    ray: Any,
    job: Job,
    rows: list[str],
    left: list[int],
    record: Record,
    progress: Progress | None,
) -> None:
    from ray.data import ActorPoolStrategy, DataContext
    from ray.exceptions import RayError

    cluster = int(ray.cluster_resources().get("CPU", 0)) // job.cpus
    if not cluster or (job.actors or 1) > cluster:
        raise UsageError(
            f"{job.actors or 1} actors of {job.cpus} CPUs; the Ray cluster has CPUs for {cluster}"
        )
    tasks = -(-len(left) // job.task_rows)
    actors = min(job.actors or cluster, tasks)
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # its import has set it to INFO
    DataContext.get_current().enable_progress_bars = False
    items = [{"row": at, "line": rows[at]} for at in left]
    source = ray.data.from_items(items, override_num_blocks=tasks)
    with warnings.catch_warnings():  # Ray 2.60 has no other name for these two yet
        warnings.simplefilter("ignore", DeprecationWarning)
        found = source.map_batches(
            Lines,
            fn_constructor_kwargs={
                "task": job.task,
                "model": _path(job.model),
                "cpus": job.cpus,
                "batch": job.batch,
                **job.options,
            },
            compute=ActorPoolStrategy(size=actors),
            batch_size=job.task_rows,
            num_cpus=job.cpus,
            max_restarts=_RESTARTS,
            max_task_retries=RETRIES,
        )
    try:
        for block in found.iter_batches(batch_size=None, prefetch_batches=0):
            pairs = zip(block["row"], block["answer"], strict=True)
            record.add({int(at): json.loads(answer) for at, answer in pairs})
            if progress is not None:
                progress(len(record.done), len(rows))
    except RayError as error:
        done = f"{len(record.done)} of {len(rows)} rows are done and stay so"
        raise DeviceError(f"Ray gave up: {_last_line(error)}; {done}") from None


def _path(model: str | None) -> str | None:
    """Return a name that means the same in the directory where an actor runs."""
    return str(Path(model).absolute()) if model is not None and Path(model).exists() else model


@contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster; one that was started for this is ended.

    Args:
        address: see `run_job`.

    Raises:
        DeviceError: Ray is not installed, or the cluster does not answer.
    """
    try:
        import ray
    except ImportError:
        raise DeviceError(
            "Ray is not installed; pip install '.[ray]' in a clone of Clocher"
        ) from None
    if ray.is_initialized():
        yield ray
        return
    # What goes wrong comes as an exception.
    logging.getLogger("ray").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        ray.init(
            address=address, include_dashboard=False, log_to_driver=False, logging_level="error"
        )
    except ConnectionError as error:
        raise DeviceError(f"no Ray cluster at {address}: {_last_line(error)}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _last_line(error: BaseException) -> str:
    """Return what an error of Ray says in the end: before that are the frames of an actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
