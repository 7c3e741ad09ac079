"""Actors for `ray.data.Dataset.map_batches`: generate from rows, or score them (docs/ray.md).

A row has a seed of its own: its result does not depend on actor, batch or threads.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clocher_kernels.errors import NonFinite, UsageError
from clocher_runtime.api import LanguageModel, load
from clocher_runtime.config.values import shown
from clocher_runtime.disk.output_file import open_locked
from clocher_runtime.engine.topology import in_order, read_cpus
from clocher_runtime.quality.likelihood import Pair, Scorer
from clocher_runtime.text.completion import OPTIONS, TextGeneration, side_by_side

SHARED_MB = 64 << 10
"""MiB of packed weights in the tile cache, shared by all actors of a machine."""
Row = Mapping[str, Any]
_BAD_ROW = (UsageError, NonFinite)
_locks: list[int] = []  # descriptors, open as long as this process has the CPUs


def claim(count: int, cpus: Sequence[int] | None = None, root: Path | None = None) -> list[int]:
    """Lock CPUs (default: physical cores first) in `root`; return them, [] if too few are free."""
    cpus = [cpu.id for cpu in in_order(read_cpus(), "compact")] if cpus is None else cpus
    root = root or Path(tempfile.gettempdir()) / f"clocher-cpus-{os.geteuid()}"
    taken: dict[int, int] = {}
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        if root.lstat().st_uid != os.geteuid():
            return []
        for cpu in cpus:
            if len(taken) < count:
                try:
                    taken[cpu] = open_locked(root / f"{cpu}.lock")
                except UsageError:  # held by another actor
                    continue
    except OSError:  # no lock directory
        pass
    if len(taken) < count:
        for descriptor in taken.values():
            os.close(descriptor)
        return []
    _locks.extend(taken.values())
    return list(taken)


def pin(count: int) -> list[int]:
    """Pin this process to free CPUs and share packed weights; return them, [] if unpinned."""
    os.environ.setdefault("CLOCHER_TILE_CACHE_MB", str(SHARED_MB))
    cpus = claim(count)
    for thread in os.listdir("/proc/self/task") if cpus else ():
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:  # it has ended
            continue
    return cpus


def release() -> None:
    """Unlock the CPUs of this process."""
    while _locks:
        os.close(_locks.pop())


class Actor:
    """A model that processes rows.

    `model` and `options` are arguments of `load`; `cpus` is also the number of threads and should
    be Ray's `num_cpus`; `batch` rows are computed together.
    """

    columns: tuple[str, ...]

    def __init__(self, model: str | None, *, cpus: int = 1, batch: int = 8, **options: Any) -> None:
        self.cpus = pin(cpus)
        self.model: LanguageModel = load(model, threads=cpus, batch=batch, **options)

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the columns of a batch with those of the results; `error` is "" on success."""
        count = len(next(iter(batch.values())))
        cells = {n: [_plain(column[at]) for at in range(count)] for n, column in batch.items()}
        rows = [
            {name: cells[name][at] for name in cells if cells[name][at] is not None}
            for at in range(count)
        ]
        answers = self.answers(rows)
        made = {name: _column([answer.get(name) for answer in answers]) for name in self.columns}
        return {**batch, **made, "error": _column([answer.get("error", "") for answer in answers])}

    def answers(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return the result of each row, or {"error": ...} for an invalid one."""
        found: dict[int, dict[str, Any]] = {}
        asked: dict[int, Any] = {}
        for number, row in enumerate(rows):
            try:
                asked[number] = self.read(row)
            except _BAD_ROW as error:
                found[number] = {"error": str(error)}
        try:
            found |= zip(asked, self.compute(list(asked.values())), strict=True)
        except _BAD_ROW as error:  # one by one: each gets its result or its error
            if len(rows) == 1:
                return [{"error": str(error)}]
            found |= {number: self.answers([rows[number]])[0] for number in asked}
        return [found[number] for number in range(len(rows))]

    def read(self, row: Row) -> Any:
        """Return what `compute` takes for a row; raises UsageError."""
        raise UsageError(f"{type(self).__name__} reads no rows")

    def compute(self, asked: list[Any]) -> list[dict[str, Any]]:
        """Return the results of rows that were read."""
        raise UsageError(f"{type(self).__name__} computes no rows")


class Generate(Actor):
    """Generates text from rows with `prompt` or `messages`, and arguments of a generation.

    `sampling` has the defaults; the default seed is its seed plus the row's number.
    """

    columns = ("text", "ids", "finish_reason", "prompt_tokens")

    def __init__(self, model: str | None, *, sampling: Row | None = None, **actor: Any) -> None:
        super().__init__(model, **actor)
        self._sampling = dict(sampling or {})

    def read(self, row: Row) -> TextGeneration:
        """Return the generation of a row, not started."""
        options = {**self._sampling, **{key: row[key] for key in row if key in OPTIONS}}
        options["seed"] = options.get("seed", 0) + (0 if "seed" in row else row.get("row", 0))
        if ("prompt" in row) == ("messages" in row):
            raise UsageError("expected either prompt or messages; got both or none")
        if "prompt" in row:
            return self.model.stream_generate(row["prompt"], **options)
        given = row["messages"]
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            raise UsageError(f"messages is {shown(given)}; expected a list of objects")
        # Arrow columns have null for missing fields.
        messages = [{k: value for k, value in each.items() if value is not None} for each in given]
        return self.model.stream_chat(messages, **options)

    def compute(self, asked: list[Any]) -> list[dict[str, Any]]:
        """Generate as a batch."""
        made = dict(side_by_side(asked, self.model.session.config.batch))
        whole = [{name: getattr(made[at], name) for name in self.columns} for at in sorted(made)]
        return [each | {"ids": list(each["ids"])} for each in whole]


class Score(Actor):
    """Computes log probabilities of rows with `text`, or `continuation` after `context`."""

    columns = ("logprob", "tokens", "is_greedy")

    def __init__(self, model: str | None, **actor: Any) -> None:
        super().__init__(model, all_logits=True, speculate="off", **actor)
        self._scorer = Scorer(self.model.session, self.model.tokenizer)

    def read(self, row: Row) -> list[Pair]:
        """Return the pairs of a row."""
        for name in ("text", "context", "continuation"):
            if not isinstance(row.get(name, ""), str):
                raise UsageError(f"{name} is {shown(row[name])}; expected text")
        if ("text" in row) == ("continuation" in row):
            raise UsageError("expected either text or continuation; got both or none")
        if "continuation" in row:
            return [self._scorer.pair(row.get("context", ""), row["continuation"])]
        if windows := self._scorer.windows(row["text"]):
            return windows
        raise UsageError("text has no tokens")

    def compute(self, asked: list[Any]) -> list[dict[str, Any]]:
        """Score as a batch."""
        scores = iter(self._scorer.scores([pair for pairs in asked for pair in pairs]))
        mine = [[next(scores) for _ in pairs] for pairs in asked]
        return [
            {
                "logprob": sum(each.logprob for each in scored),
                "tokens": sum(len(pair.continuation) for pair in pairs),
                "is_greedy": all(each.is_greedy for each in scored),
            }
            for pairs, scored in zip(asked, mine, strict=True)
        ]


TASKS: Mapping[str, type[Actor]] = {"generate": Generate, "score": Score}


class Lines:
    """Rows of a job as JSON text, since rows may have different fields."""

    def __init__(self, task: str, model: str | None, **actor: Any) -> None:
        self._actor = TASKS[task](model, **actor)

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return `row` and `answer` of a batch with `row`, i64, and `line`: JSON objects."""
        numbered = zip(batch["row"], batch["line"], strict=True)
        rows = [{**json.loads(line), "row": int(number)} for number, line in numbered]
        answers = [json.dumps(answer) for answer in self._actor.answers(rows)]
        return {"row": batch["row"], "answer": _column(answers)}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _column(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), object)
    for at, value in enumerate(values):
        column[at] = value
    return column
