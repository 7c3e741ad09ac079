"""What an actor does with rows: it goes on with texts, or tells how likely they are.

For a pipeline of your own:

    ds = ray.data.read_json("prompts.jsonl")
    ds = ds.map_batches(
        Generate, fn_constructor_kwargs={"model": "models/llama", "cpus": 4},
        concurrency=8, batch_size=32, num_cpus=4,
    )

The model is loaded once per actor. Threads are as many as the actor's CPUs, which no other actor of
the machine has (`cpus`). A row's result depends on the row alone: neither on its actor, nor on its
batch, nor on the number of threads; what is drawn by chance is drawn by the row's own seed.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clocher_kernels.errors import NonFinite, UsageError
from clocher_runtime.api import LanguageModel, load
from clocher_runtime.config.values import shown
from clocher_runtime.quality.likelihood import Pair, Scorer
from clocher_runtime.ray import cpus as seats
from clocher_runtime.text.completion import OPTIONS, TextGeneration, side_by_side

Row = Mapping[str, Any]
_BAD = (UsageError, NonFinite)
"""What a row can do wrong. A model that is gone is not a row's fault, and ends the task."""


class Actor(ABC):
    """A model that takes rows.

    Args:
        model: as `load` takes it; each machine finds it under this name.
        cpus: CPUs of its own, and so threads; give Ray the same number as `num_cpus`.
        batch: rows computed side by side.
        **options: other arguments of `load`.

    Raises:
        ClocherError: see `load`.
    """

    def __init__(self, model: str | None, *, cpus: int = 1, batch: int = 8, **options: Any) -> None:
        self.cpus = seats.pin(cpus)
        seats.share_weights()
        self.model: LanguageModel = load(model, threads=cpus, batch=batch, **options)

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the columns of a batch with those of the results; `error` is "" where all is well.

        Args:
            batch: arrays of one length; a column is what a field of a row is.
        """
        names = list(batch)
        rows = [
            {name: plain for name in names if (plain := _plain(batch[name][at])) is not None}
            for at in range(len(batch[names[0]]))
        ]
        answers = self.answers(rows)
        made = {name: _column([answer.get(name) for answer in answers]) for name in self.columns}
        errors = _column([answer.get("error", "") for answer in answers])
        return {**batch, **made, "error": errors}

    columns: tuple[str, ...]
    """Fields of a result that is no error."""

    def answers(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return the result of each row, or {"error": ...} for one that cannot be used."""
        found: list[dict[str, Any]] = []
        asked: dict[int, Any] = {}
        for number, row in enumerate(rows):
            found.append({})
            try:
                asked[number] = self.read(row)
            except _BAD as error:
                found[number] = {"error": str(error)}
        try:
            made = dict(zip(asked, self.compute(list(asked.values())), strict=True))
        except _BAD:  # of one of them: alone each has the same result, or its own error
            made = {number: self._alone(rows[number]) for number in asked}
        for number, result in made.items():
            found[number] = result
        return found

    def _alone(self, row: Row) -> dict[str, Any]:
        try:
            return self.compute([self.read(row)])[0]
        except _BAD as error:
            return {"error": str(error)}

    @abstractmethod
    def read(self, row: Row) -> Any:
        """Return what `compute` takes of a row.

        Raises:
            UsageError: the row cannot be used.
        """

    @abstractmethod
    def compute(self, asked: list[Any]) -> list[dict[str, Any]]:
        """Return the results of rows that were read."""


class Generate(Actor):
    """Goes on with texts.

    A row has `prompt` (text or token ids) or `messages` (a conversation), and any of the arguments
    that `LanguageModel` takes: max_new, temperature, top_p, seed, stop, ... Other fields are left
    alone. A row without them takes those of `sampling`; without a seed, its number is added to that
    of `sampling`: `row`, from 0, which rows of a job have, and others may.

    Args:
        model: as `load` takes it.
        sampling: arguments of `LanguageModel.generate` for rows that do not name them.
        **actor: see `Actor`.
    """

    columns = ("text", "ids", "finish_reason", "prompt_tokens")

    def __init__(self, model: str | None, *, sampling: Row | None = None, **actor: Any) -> None:
        super().__init__(model, **actor)
        self._sampling = dict(sampling or {})

    def read(self, row: Row) -> TextGeneration:
        """Return the text that a row asks for, not begun."""
        options = {**self._sampling, **{key: row[key] for key in row if key in OPTIONS}}
        options["seed"] = options.get("seed", 0) + (0 if "seed" in row else row.get("row", 0))
        if ("prompt" in row) == ("messages" in row):
            raise UsageError("expected either prompt or messages; got both or none")
        if "messages" in row:
            return self.model.stream_chat(_conversation(row["messages"]), **options)
        return self.model.stream_generate(row["prompt"], **options)

    def compute(self, asked: list[Any]) -> list[dict[str, Any]]:
        """Generate side by side."""
        made = dict(side_by_side(asked, self.model.session.config.batch))
        return [
            {
                "text": made[at].text,
                "ids": list(made[at].ids),
                "finish_reason": made[at].finish_reason,
                "prompt_tokens": made[at].prompt_tokens,
            }
            for at in range(len(asked))
        ]


class Score(Actor):
    """Tells how likely texts are, as lm-evaluation-harness counts it.

    A row has `text`, which is scored whole and window by window if it is long, or `continuation`,
    scored after its `context`.

    Args:
        model: as `load` takes it.
        **actor: see `Actor`.
    """

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
        """Score side by side."""
        scores = iter(self._scorer.scores([pair for pairs in asked for pair in pairs]))
        found = []
        for pairs in asked:
            mine = [next(scores) for _ in pairs]
            found.append(
                {
                    "logprob": sum(each.logprob for each in mine),
                    "tokens": sum(len(pair.continuation) for pair in pairs),
                    "is_greedy": all(each.is_greedy for each in mine),
                }
            )
        return found


TASKS: Mapping[str, type[Actor]] = {"generate": Generate, "score": Score}


class Lines:
    """Rows as a job has them: JSON text in and out, which need not have the same fields.

    Args:
        task: a name of `TASKS`.
        model: see `Actor`.
        **actor: see the task's class.
    """

    def __init__(self, task: str, model: str | None, **actor: Any) -> None:
        self._actor = TASKS[task](model, **actor)

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return `row` and `answer`, a JSON object each.

        Args:
            batch: `row`, i64, and `line`, JSON objects.
        """
        rows = [
            {**json.loads(line), "row": int(number)}
            for number, line in zip(batch["row"], batch["line"], strict=True)
        ]
        answers = [json.dumps(answer) for answer in self._actor.answers(rows)]
        return {"row": batch["row"], "answer": _column(answers)}


def _conversation(given: Any) -> list[dict[str, Any]]:
    """Return messages; columns of Arrow have null for fields that a message lacks."""
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise UsageError(f"messages is {shown(given)}; expected a list of objects")
    return [{key: value for key, value in each.items() if value is not None} for each in given]


def _plain(value: Any) -> Any:
    """Return a cell of a column as Python has it; None for one that is empty."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value


def _column(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), object)
    column[:] = values if not values or not isinstance(values[0], list) else None
    for at, value in enumerate(values):
        column[at] = value
    return column
