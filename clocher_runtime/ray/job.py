"""A job: every row of a file through actors of a Ray cluster, each stored exactly once.

OUT/job.json describes the job; OUT/tasks/N.jsonl has the results of a finished task, whose first
row is N; a new driver computes the others. At the end OUT/results.jsonl replaces them. An invalid
row becomes {"error": ...}.
"""

import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from clocher_kernels.errors import DeviceError, FormatError, UsageError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model, locate
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.output_file import open_locked, replacing, write_file
from clocher_runtime.disk.strict_json import parse_object
from clocher_runtime.quantize.plan import describe_source
from clocher_runtime.ray.actors import Lines

RETRIES = 5
_VERSION = 3  # of job.json
_RESTARTS = 100  # of an actor: machines come and go, but not during loading
_MAX_INPUT = 1 << 34
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Job:
    """A job: `task` is a name of `TASKS`, `options` are arguments of its actor.

    `cpus` are per actor; `actors` None: as many as fit the cluster. `batch` rows are computed
    together; at most `task_rows` are lost with an actor.
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


class Outcome(NamedTuple):
    """The end of a job: rows of the input, rows already done, errors, the results file."""

    rows: int
    resumed: int
    errors: int
    results: Path


@contextmanager
def opened(out: Path, asked: Mapping[str, Any]) -> Iterator[None]:
    """Lock a directory, new or of the same job. Raises UsageError, OSError."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = open_locked(out / ".lock")
    except UsageError:
        raise UsageError(f"{out}: another driver is at work there; wait for it") from None
    try:
        _check(out, json.loads(json.dumps({"version": _VERSION, **asked})))
        yield
    finally:
        os.close(lock)


def _check(out: Path, asked: dict[str, Any]) -> None:
    manifest = out / "job.json"
    if manifest.exists():
        before = parse_object(read_bytes(manifest, 1 << 24), str(manifest))
        if before.get("version") != _VERSION:
            raise UsageError(
                f"{out} holds a job of version {before.get('version')!r:.9}, expected {_VERSION}; "
                "finish it with the Clocher that began it, or name another directory"
            )
        for key in {**before, **asked}:
            if before.get(key) != asked.get(key):
                raise UsageError(
                    f"{out} holds another job: {key} is {before.get(key)!r:.120} there, "
                    f"{asked.get(key)!r:.120} here; name another directory"
                )
    elif strange := [each.name for each in out.iterdir() if each.name != ".lock"]:
        raise UsageError(
            f"{out} holds {strange[0]!r} and no job; name a new directory for this one"
        )
    else:
        write_file(manifest, f"{json.dumps(asked, indent=1)}\n".encode())


def read_rows(path: Path) -> list[str]:
    """Return the rows of a JSONL file as JSON text, {"error": ...} if not an object."""
    rows = []
    for number, line in enumerate(read_bytes(path, _MAX_INPUT).split(b"\n"), start=1):
        if line.strip():
            try:
                parse_object(line, f"line {number}")
                rows.append(line.decode())
            except FormatError as error:
                rows.append(json.dumps({"error": str(error)}))
    if not rows:
        raise UsageError(f"{path} has no rows; expected a JSON object a line")
    return rows


def run_job(job: Job, address: str | None = None, progress: Progress | None = None) -> Outcome:
    """Compute the rows of a job that are not stored yet; `progress` gets (done, total).

    `address` defaults to RAY_ADDRESS, else a local cluster. Raises UsageError, ModelError,
    DeviceError.
    """
    rows = read_rows(job.source)
    checkpoint = open_checkpoint(
        embedded_model() if job.model is None else locate(job.model, "MODEL")
    )
    asked = {
        "task": job.task,
        "model": describe_source(checkpoint),
        "config_sha256": _sha256(json.dumps(dict(checkpoint.config))),
        "options": dict(job.options),
        "input_sha256": _sha256("".join(f"{row}\n" for row in rows)),
        "rows": len(rows),
        "task_rows": job.task_rows,
    }
    parts = {at: job.out / f"tasks/{at}.jsonl" for at in range(0, len(rows), job.task_rows)}
    results = job.out / "results.jsonl"
    with opened(job.out, asked):
        whole = results.exists()
        left = {
            at: "\n".join(rows[at : at + job.task_rows])
            for at, part in parts.items()
            if not (whole or part.exists())
        }
        resumed = done = len(rows) - sum(lines.count("\n") + 1 for lines in left.values())
        if left:
            (job.out / "tasks").mkdir(exist_ok=True)
            for at, lines in _computed(connect(address), job, left):
                write_file(parts[at], lines.encode())
                done += lines.count("\n")
                if progress:
                    progress(done, len(rows))
        if not whole:
            with replacing(results) as file:
                file.writelines(part.read_bytes() for part in parts.values())
        shutil.rmtree(job.out / "tasks", ignore_errors=True)
        with results.open("rb") as file:
            errors = sum(b'"error": ' in line and "error" in json.loads(line) for line in file)
    return Outcome(len(rows), resumed, errors, results)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _computed(ray: Any, job: Job, left: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """Yield first rows of tasks and their results."""
    from ray.data import ActorPoolStrategy, DataContext
    from ray.exceptions import RayError

    room = int(ray.cluster_resources().get("CPU", 0)) // job.cpus
    if room < (job.actors or 1):
        raise UsageError(
            f"{job.actors or 1} actors of {job.cpus} CPUs; the Ray cluster has CPUs for {room}"
        )
    items = [{"first": at, "lines": lines} for at, lines in left.items()]
    model = job.model
    if model is not None and Path(model).exists():  # an actor runs in another directory
        model = str(Path(model).absolute())
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # its import sets it to INFO
    DataContext.get_current().enable_progress_bars = False
    with warnings.catch_warnings():  # Ray 2.60 has no other name for the last two yet
        warnings.simplefilter("ignore", DeprecationWarning)
        found = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            Lines,
            fn_constructor_args=(job.task, model),
            fn_constructor_kwargs={"cpus": job.cpus, "batch": job.batch, **job.options},
            compute=ActorPoolStrategy(size=min(job.actors or room, len(items))),
            batch_size=1,
            num_cpus=job.cpus,
            max_restarts=_RESTARTS,
            max_task_retries=RETRIES,
        )
    try:
        for block in found.iter_batches(batch_size=None, prefetch_batches=0):
            yield from zip(map(int, block["first"]), map(str, block["lines"]), strict=True)
    except RayError as error:
        raise DeviceError(
            f"Ray gave up: {_last_line(error)}; tasks that are done stay stored in {job.out}"
        ) from None


def connect(address: str | None = None) -> Any:
    """Return `ray`, connected to a cluster, until this process ends. Raises DeviceError."""
    try:
        import ray
    except ImportError:
        raise DeviceError(
            "Ray is not installed; pip install '.[ray]' in a clone of Clocher"
        ) from None
    logging.getLogger("ray").setLevel(logging.ERROR)  # errors come as exceptions
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    quiet: Any = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    try:
        ray.init(address, ignore_reinit_error=True, **quiet)
    except ConnectionError as error:
        raise DeviceError(f"no Ray cluster at {address}: {_last_line(error)}") from None
    return ray


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
