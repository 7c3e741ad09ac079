"""Actors for `ray.data.Dataset.map_batches`: generate from rows, or score them (docs/ray.md).

A row has a seed of its own: its result does not depend on actor, batch or threads.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clocher_kernels.errors import NonFinite, UsageError
from clocher_runtime.api import LanguageModel, load
from clocher_runtime.config.values import shown
from clocher_runtime.quality.likelihood import Pair, Scorer
from clocher_runtime.text.completion import OPTIONS, TextGeneration, side_by_side

TILE_CACHE = ("CLOCHER_TILE_CACHE_MB", str(64 << 10))
"""Variable and default: packed weights that all actors of a machine map."""
Row = Mapping[str, Any]
_BAD_ROW = (UsageError, NonFinite)


class Actor:
    """A model that processes rows.

    `model` and `options` are arguments of `load`; `cpus` is the number of threads and should be
    Ray's `num_cpus`; `batch` rows are computed together.
    """

    columns: tuple[str, ...]

    def __init__(self, model: str | None, *, cpus: int = 1, batch: int = 8, **options: Any) -> None:
        os.environ.setdefault(*TILE_CACHE)
        self.model: LanguageModel = load(model, threads=cpus, batch=batch, **options)

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the columns of a batch with those of the results; `error` is "" on success."""
        rows = [
            {n: _plain(cell) for n, cell in zip(batch, cells, strict=True) if cell is not None}
            for cells in zip(*batch.values(), strict=True)
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
        scores = self._scorer.grouped(asked)
        return [
            {
                "logprob": sum(each.logprob for each in scored),
                "tokens": sum(len(pair.continuation) for pair in pairs),
                "is_greedy": all(each.is_greedy for each in scored),
            }
            for pairs, scored in zip(asked, scores, strict=True)
        ]


TASKS: Mapping[str, type[Actor]] = {"generate": Generate, "score": Score}


class Lines:
    """Tasks of a job: rows and results as JSON lines, since rows may have different fields."""

    def __init__(self, task: str, model: str | None, **actor: Any) -> None:
        self._actor = TASKS[task](model, **actor)

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Replace the rows of each task in `lines` by results; `first` is its first row, i64."""
        tasks = zip(batch["first"], batch["lines"], strict=True)
        return {**batch, "lines": _column([self._results(int(at), rows) for at, rows in tasks])}

    def _results(self, first: int, lines: str) -> str:
        rows = dict(enumerate(map(json.loads, lines.split("\n")), first))
        # The driver has replaced lines that are no object by their error.
        good = {at: {**row, "row": at} for at, row in rows.items() if set(row) != {"error"}}
        rows |= zip(good, self._actor.answers(list(good.values())), strict=True)
        return "".join(f"{json.dumps({'row': at, **row})}\n" for at, row in rows.items())


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _column(values: Sequence[Any]) -> np.ndarray:
    return np.fromiter(values, object, len(values))
