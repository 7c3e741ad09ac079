"""`clocher bench quality`: a model's score on a task file."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from clocher_runtime.command.script_run import COUNT, PATH, Report, option, script
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.subcommands.perplexity import OPTIONS, PLACE, scored

NAME = "clocher bench quality"

_ABOUT = """Score a model on a task file; print one JSON line on standard output.

A task file has a JSON object a line, of either kind:

\b
  {"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}
  {"text": "A whole text, whose perplexity is computed."}

A choice follows its context as it is, so it begins with a space where one belongs. Nothing is
downloaded. Numbers are those of lm-evaluation-harness for the same texts."""

_CODES = (
    (ExitCode.OK, "done"),
    (ExitCode.USAGE, "a flag cannot be used, or an item is too long for the context"),
    (ExitCode.MODEL, "the model or the task file is missing or damaged"),
    (ExitCode.DEVICE, "the back end is not there"),
    (ExitCode.MEMORY, "out of memory"),
    (ExitCode.INTERRUPTED, "interrupted (Ctrl-C)"),
)


@script(
    NAME,
    PLACE,
    option("--task", PATH, "the task file, of JSON lines", required=True),
    option("--limit", COUNT, "score the first LIMIT items"),
    option("--batch", COUNT, "texts side by side", default=8),
    option("--context", COUNT, "tokens of the longest text; default: the model's, at most 4096"),
    *OPTIONS,
    examples=(
        ("the embedded model", "clocher bench quality --task questions.jsonl"),
        (
            "what 4 bits cost",
            "clocher bench quality models/llama --task questions.jsonl --precision int4w",
        ),
    ),
    exit_codes=_CODES,
    help=_ABOUT,
)
def quality(
    report: Report, task: Path, limit: int | None, batch: int, context: int | None, **model: Any
) -> None:
    """Score the items of a file and print the line."""
    from clocher_runtime.disk.strict_json import finite
    from clocher_runtime.quality.likelihood import Scorer, read_task, score_task

    items = read_task(task)[:limit]
    with report.counting() as tell, scored(**model, batch=batch, context=context) as ready:
        scorer = Scorer(ready.session, ready.tokenizer)
        found = score_task(scorer, items, partial(tell, "texts and choices"))
        facts = {**ready.facts, "context": ready.session.context}
    click.echo(json.dumps(finite({"task": str(task), **facts, **found})))


COMMAND = quality
main = quality.run
