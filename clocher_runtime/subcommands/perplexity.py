"""`clocher perplexity`, `clocher bench quality`: a model's loss on a text, its score on a task."""

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from clocher_runtime.command.script_run import (
    COUNT,
    FILE,
    PATH,
    Report,
    engine_options,
    option,
    place,
    script,
)
from clocher_runtime.config.engine import EXACT, NUMERICS, EngineConfig
from clocher_runtime.config.values import Given, every

if TYPE_CHECKING:
    from clocher_runtime.engine.session import Session
    from clocher_runtime.text.tokenizer import Tokenizer

PLACE = place(
    "MODEL", "--model-dir", "Default: CLOCHER_MODEL_DIR, else the embedded model.", needed=False
)
OPTIONS = (
    *engine_options(*NUMERICS, defaults=EXACT),
    *engine_options("act_prec", "act_sparsity", "act_calibration", "threads"),
    option("--backend", click.Choice(["cpu", "cuda", "reference"]), default="cpu"),
)


class Scored(NamedTuple):
    """A model ready for scoring; its session keeps all logits, `facts` go to result lines."""

    session: "Session"
    tokenizer: "Tokenizer"
    facts: dict[str, Any]


@contextmanager
def scored(model_dir: Path | None, backend: str = "cpu", **settings: Any) -> Iterator[Scored]:
    """Load the model of the flags; close it in the end. `backend`: a device, or "reference"."""
    from clocher_runtime.checkpoints.locate import embedded_model
    from clocher_runtime.command.loading import load, numerics
    from clocher_runtime.text.tokenizer import Tokenizer

    variables = dict(every(EngineConfig))["model_dir"].env
    named = next(filter(None, map(os.environ.get, variables)), None)
    model_dir = model_dir or (Path(named) if named else None)
    settings["backend" if backend == "reference" else "device"] = backend
    config = EngineConfig(
        model_dir=model_dir or embedded_model(),
        speculate="off",
        all_logits=True,
        given={"model_dir": Given("MODEL", str(model_dir))} if model_dir else {},
        **settings,
    )
    loaded = load(config)
    with closing(loaded.session()) as session:
        facts = {"model": str(model_dir or "embedded"), **numerics(session)}
        facts |= {"act_sparsity": config.act_sparsity} if config.act_sparsity else {}
        assert isinstance(loaded.tokenizer, Tokenizer)  # only the stub has another
        yield Scored(session, loaded.tokenizer, facts)


@script(
    "clocher perplexity",
    *PLACE,
    option("--text", FILE, required=True),
    option("--chars", COUNT, "use the first CHARS characters of the text"),
    option("--window", click.IntRange(2), default=256),
    option("--limit", COUNT, "score at most LIMIT windows"),
    *OPTIONS,
    examples=(
        ("The embedded model", "clocher perplexity --text held_out.txt"),
        (
            "Another, rounded to 4 bits, on the beginning of the text",
            "clocher perplexity models/llama --text held_out.txt --chars 60000 --precision int4w",
        ),
    ),
)
def perplexity(
    report: Report, text: Path, chars: int | None, window: int, limit: int | None, **model: Any
) -> None:
    """Print the perplexity of a model on a text, as one JSON line on standard output."""
    from clocher_runtime.disk.files import read_text
    from clocher_runtime.quality import compare

    words = read_text(text)[:chars]
    with report.counting() as tell, scored(**model, context=window, chunk=window) as ready:
        ids = ready.tokenizer.encode(words)
        score = compare.perplexity(ready.session, ids, window, limit, partial(tell, "windows"))
    line = {
        **ready.facts,
        "windows": score.windows,
        "window_tokens": window,
        "loss_nats": score.loss,
        "perplexity": score.perplexity,
    }
    click.echo(json.dumps(line))


_ABOUT_TASK = """Score a model on a task file; print one JSON line on standard output.

A task file has a JSON object a line, of either kind:

\b
  {"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}
  {"text": "A whole text, whose perplexity is computed."}

A choice follows its context as it is, so it begins with a space where one belongs. Nothing is
downloaded. Numbers are those of lm-evaluation-harness for the same texts."""


@script(
    "clocher bench quality",
    *PLACE,
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
    help=_ABOUT_TASK,
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


COMMAND = perplexity
main = perplexity.run
