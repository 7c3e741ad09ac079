"""A job: every row of a file through actors of a Ray cluster, each stored exactly once.

OUT/job.json describes the job; OUT/rows.jsonl has finished rows in any order, from which a new
driver resumes; OUT/results.jsonl replaces it at the end. An invalid row becomes {"error": ...}.
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
from typing import Any, NamedTuple, Self

from clocher_kernels.errors import DeviceError, FormatError, UsageError
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.checkpoints.locate import embedded_model, locate
from clocher_runtime.disk.files import read_bytes
from clocher_runtime.disk.output_file import open_locked, replacing, write_all, write_file
from clocher_runtime.disk.strict_json import parse_object
from clocher_runtime.quantize.plan import describe_source
from clocher_runtime.ray.actors import Lines

RETRIES = 5
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


class Record:
    """A job's locked directory; `done`: row -> (offset, size). Raises UsageError, OSError."""

    def __init__(self, out: Path, asked: Mapping[str, Any], count: int) -> None:
        self.path, self.results, self._rows = out, out / "results.jsonl", out / "rows.jsonl"
        self._count = count
        self.done: dict[int, tuple[int, int]] = {}
        out.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = open_locked(out / ".lock")
        except UsageError:
            raise UsageError(f"{out}: another driver is at work there; wait for it") from None
        self._file = -1
        try:
            self._check(json.loads(json.dumps({"version": 2, **asked, "rows": count})))
            self.is_whole = self.results.exists()
            if not self.is_whole:
                self._file = os.open(self._rows, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                self._resume()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock."""
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)

    def add(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Store results by row number, flushed to disk; rows already stored are skipped."""
        for row in sorted(set(answers) - set(self.done)):
            line = f"{json.dumps({'row': row, **answers[row]})}\n".encode()
            self.done[row] = (self._size, len(line))
            self._size += len(line)
            write_all(self._file, memoryview(line), self._rows)
        os.fsync(self._file)

    def finish(self) -> int:
        """Write the results; return the number of error rows."""
        if len(self.done) != self._count:
            raise FormatError(
                f"{self.path}: {len(self.done)} of {self._count} rows are done; run it again"
            )
        errors = 0
        with replacing(self.results) as file:
            for row in range(self._count):
                line = os.pread(self._file, self.done[row][1], self.done[row][0])
                errors += b'"error": ' in line and "error" in json.loads(line)
                file.write(line)
        self._rows.unlink()
        self.is_whole = True
        return errors

    def _check(self, asked: dict[str, Any]) -> None:
        manifest = self.path / "job.json"
        if manifest.exists():
            before = parse_object(read_bytes(manifest, 1 << 24), str(manifest))
            for key in {**before, **asked}:
                if before.get(key) != asked.get(key):
                    raise UsageError(
                        f"{self.path} holds another job: {key} is {before.get(key)!r:.120} there, "
                        f"{asked.get(key)!r:.120} here; name another directory"
                    )
        elif strange := [each.name for each in self.path.iterdir() if each.name != ".lock"]:
            raise UsageError(
                f"{self.path} holds {strange[0]!r} and no job; name a new directory for this one"
            )
        else:
            write_file(manifest, f"{json.dumps(asked, indent=1)}\n".encode())

    def _resume(self) -> None:
        """Read stored rows; an incomplete last line is cut off."""
        self._size = 0
        with open(self._file, "rb", closefd=False) as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                row = parse_object(line, str(self._rows)).get("row")
                if type(row) is not int or not 0 <= row < self._count or row in self.done:
                    raise FormatError(f"{self._rows}: row {row!r:.40} is unknown or there twice")
                self.done[row] = (self._size, len(line))
                self._size += len(line)
        os.ftruncate(self._file, self._size)
        os.lseek(self._file, self._size, os.SEEK_SET)


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
    digest = hashlib.sha256("".join(f"{row}\n" for row in rows).encode())
    config = json.dumps(dict(checkpoint.config)).encode()
    asked = {
        "task": job.task,
        "model": describe_source(checkpoint),
        "config_sha256": hashlib.sha256(config).hexdigest(),
        "options": dict(job.options),
        "input_sha256": digest.hexdigest(),
    }
    with Record(job.out, asked, len(rows)) as record:
        if record.is_whole:
            with record.results.open("rb") as file:
                errors = sum("error" in json.loads(line) for line in file)
            return Outcome(len(rows), len(rows), errors, record.results)
        resumed = len(record.done)
        found = {at: json.loads(row) for at, row in enumerate(rows) if row.startswith('{"error": ')}
        record.add({at: row for at, row in found.items() if set(row) == {"error"}})
        left = [{"row": at, "line": row} for at, row in enumerate(rows) if at not in record.done]
        if left:
            with connected(address) as ray:
                _compute(ray, job, left, record, progress or (lambda done, total: None))
        return Outcome(len(rows), resumed, record.finish(), record.results)


def _compute(
    ray: Any, job: Job, left: list[dict[str, Any]], record: Record, progress: Progress
) -> None:
    from ray.data import ActorPoolStrategy, DataContext
    from ray.exceptions import RayError

    room = int(ray.cluster_resources().get("CPU", 0)) // job.cpus
    if room < (job.actors or 1):
        raise UsageError(
            f"{job.actors or 1} actors of {job.cpus} CPUs; the Ray cluster has CPUs for {room}"
        )
    total, tasks = len(record.done) + len(left), -(-len(left) // job.task_rows)
    model = job.model
    if model is not None and Path(model).exists():  # an actor runs in another directory
        model = str(Path(model).absolute())
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # its import sets it to INFO
    DataContext.get_current().enable_progress_bars = False
    with warnings.catch_warnings():  # Ray 2.60 has no other name for the last two yet
        warnings.simplefilter("ignore", DeprecationWarning)
        found = ray.data.from_items(left, override_num_blocks=tasks).map_batches(
            Lines,
            fn_constructor_args=(job.task, model),
            fn_constructor_kwargs={"cpus": job.cpus, "batch": job.batch, **job.options},
            compute=ActorPoolStrategy(size=min(job.actors or room, tasks)),
            batch_size=job.task_rows,
            num_cpus=job.cpus,
            max_restarts=_RESTARTS,
            max_task_retries=RETRIES,
        )
    try:
        for block in found.iter_batches(batch_size=None, prefetch_batches=0):
            pairs = zip(block["row"], block["answer"], strict=True)
            record.add({int(at): json.loads(answer) for at, answer in pairs})
            progress(len(record.done), total)
    except RayError as error:
        done = f"{len(record.done)} of {total} rows are stored"
        raise DeviceError(f"Ray gave up: {_last_line(error)}; {done}") from None


@contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """Yield `ray`, connected to a cluster; a started one is stopped. Raises DeviceError."""
    try:
        import ray
    except ImportError:
        raise DeviceError(
            "Ray is not installed; pip install '.[ray]' in a clone of Clocher"
        ) from None
    if ray.is_initialized():
        yield ray
        return
    logging.getLogger("ray").setLevel(logging.ERROR)  # errors come as exceptions
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="error")
    except ConnectionError as error:
        raise DeviceError(f"no Ray cluster at {address}: {_last_line(error)}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
