"""How good a model is: `clocher perplexity`, `clocher bench quality`, `clocher gate`."""

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from math import exp
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from clocher_runtime.command.console import Console
from clocher_runtime.command.flags import engine_options, needed, option, place, script, switch
from clocher_runtime.command.parameters import COUNT, FILE, NEW, PATH
from clocher_runtime.config.engine import NUMERICS, WEIGHTS_ALONE, EngineConfig
from clocher_runtime.config.values import Given
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.subcommands.quantize import LIMIT_FLAGS, LIMITS

if TYPE_CHECKING:
    from clocher_runtime.engine.session import Session
    from clocher_runtime.text.tokenizer import Tokenizer

PLACE = place(
    "MODEL", "--model-dir", "Default: CLOCHER_MODEL_DIR, else the embedded model.", needed=False
)
BACKEND = option("--backend", click.Choice(["cpu", "cuda", "reference"]), default="cpu")
TEXT = (
    option("--text", FILE, required=True),
    option("--chars", COUNT, "use the first CHARS characters of the text"),
    option("--window", click.IntRange(2), "tokens", default=256),
)
OPTIONS = (
    *engine_options(*NUMERICS, of=WEIGHTS_ALONE),
    *engine_options("act_prec", "act_sparsity", "act_calibration", "threads"),
    BACKEND,
)


@contextmanager
def scored(config: EngineConfig) -> "Iterator[tuple[Session, Tokenizer, dict[str, Any]]]":
    """Yield a model's session, closed in the end, its tokenizer, and facts for result lines.

    Without a name it is the embedded model.
    """
    from clocher_runtime.checkpoints.locate import embedded_model
    from clocher_runtime.command.loading import load, numerics
    from clocher_runtime.text.tokenizer import Tokenizer

    named = config.model_dir
    path = named or embedded_model()
    given = {"context": Given("--context", ""), "model_dir": Given("MODEL", str(path))}
    how = replace(config, model_dir=path, speculate="off", given={**given, **config.given})
    loaded = load(how)
    with closing(loaded.session()) as session:
        facts = {"model": str(named or "embedded"), **numerics(session)}
        facts |= {"act_sparsity": config.act_sparsity} if config.act_sparsity else {}
        assert isinstance(loaded.tokenizer, Tokenizer)  # only the stub has another
        yield session, loaded.tokenizer, facts


def _config(backend: str, model_dir: Path | None, **settings: Any) -> EngineConfig:
    """Return the configuration of the flags; `backend`: a device, or "reference"."""
    settings["backend" if backend == "reference" else "device"] = backend
    named = model_dir or os.environ.get("CLOCHER_MODEL_DIR") or None
    return EngineConfig(model_dir=named and Path(named), **settings)


@script(
    "clocher perplexity",
    *PLACE,
    *TEXT,
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
    console: Console, text: Path, chars: int | None, window: int, limit: int | None, **model: Any
) -> None:
    """Print the perplexity of a model on a text, as one JSON line on standard output."""
    from clocher_runtime.disk.files import read_text
    from clocher_runtime.quality.compare import cut
    from clocher_runtime.quality.likelihood import Pair, Scorer

    given = {"context": Given("--window", str(window))}
    config = _config(**model, context=window, chunk=window, all_logits=True, given=given)
    words = read_text(text)[:chars]
    with console.counting() as tell, scored(config) as (session, tokenizer, facts):
        documents = cut(words, tokenizer.encode, window, windows_per_document=1, limit=limit)
        pairs = [Pair(each[:1], each[1:]) for each in documents.windows]
        found = Scorer(session, tokenizer).scores(pairs, partial(tell, "windows"))
    loss = -fmean(each.logprob for each in found) / (window - 1)
    line = {
        **facts,
        "windows": len(found),
        "window_tokens": window,
        "loss_nats": loss,
        "perplexity": exp(loss),
    }
    click.echo(json.dumps(line))


_ABOUT_TASK = """Score a model on tasks; print one JSON line for each, and a table.

A task is mmlu, hellaswag, arc_challenge, gsm8k, humaneval or lambada, whose lines are found in
--data: nothing is downloaded. Prompts and numbers are those of lm-evaluation-harness, which runs
other tasks: python -m clocher_runtime.adapters.lm_eval_model --tasks NAME."""


@script(
    "clocher bench quality",
    *PLACE,
    option("--task", str, "name of a task", name="tasks", multiple=True, required=True),
    option("--data", PATH, "file of a task, or directory of such files"),
    option("--limit", COUNT, "score the first LIMIT items"),
    option("--shots", click.IntRange(0), "examples in a prompt; default: 5 for gsm8k, else none"),
    switch("--run-code", "let humaneval run programs that the model wrote, as the current user"),
    option("--keep", PATH, "write what is done there, and go on from it"),
    option("--batch", COUNT, "texts side by side", default=8),
    option("--context", COUNT, "tokens of the longest text; default: the model's, at most 4096"),
    *OPTIONS,
    examples=(
        ("the embedded model", "clocher bench quality --task hellaswag --data DIR"),
        (
            "two tasks; run it again to continue",
            "clocher bench quality MODEL --task mmlu --task gsm8k --data DIR --keep done.jsonl",
        ),
        (
            "what 4 bits cost",
            "clocher bench quality models/llama --task mmlu --data DIR --precision int4w",
        ),
    ),
    epilog="Killed at any moment, a run with --keep loses a few items; run it again to go on.",
    help=_ABOUT_TASK,
)
def quality(console: Console, tasks: tuple[str, ...], keep: Path | None, **how: Any) -> None:
    """Score the items of tasks; print their lines, and a table."""
    from clocher_runtime.api import LanguageModel
    from clocher_runtime.disk.kept import Kept
    from clocher_runtime.disk.strict_json import finite
    from clocher_runtime.quality.tasks import read_task, run_task, truncated

    reading = [how.pop(name) for name in ("data", "shots", "limit", "run_code")]
    asked = [read_task(task, *reading) for task in tasks]
    generates = all(each.generates for each in asked)  # then few logits are needed
    config = _config(**how, all_logits=not generates)
    rows: list[str] = []
    with console.counting() as tell, scored(config) as (session, tokenizer, facts):
        complete = LanguageModel(session.model, session, tokenizer).complete_each
        for task, each in zip(tasks, asked, strict=True):
            about = {"task": task, **facts, "context": session.context, **each.facts}
            if cut := truncated(each, session, tokenizer):
                console.note(
                    f"{task}: {cut} of {len(each.items)} prompts are longer than a context of "
                    f"{session.context} tokens and lose their beginning; raise --context"
                )
            progress = partial(tell, task)
            found = run_task(each, session, tokenizer, Kept(keep, about), progress, complete)
            click.echo(json.dumps(finite({**about, "truncated": cut, **found})))
            rows += _table_rows(task, found)
    console.note("\n".join(["task            metric                   value  ±     items", *rows]))


def _table_rows(task: str, found: dict[str, Any]) -> Iterator[str]:
    for numbers in found.values():
        for name, value in numbers.items():
            if f"{name}_stderr" in numbers:
                error = numbers[f"{name}_stderr"]
                error = "" if error is None else f"{error:.4f}"
                yield f"{task:15.15} {name:22} {value:7.4f}  {error:7} {numbers['count']}"


@script(
    "clocher gate",
    *place("MODEL", "--model", "Again for each model.", multiple=True),
    needed("--reference", "float model"),
    *TEXT,
    option("--document-separator", str, "text between documents; default: blocks of windows"),
    option(
        "--document-windows",
        COUNT,
        "windows of a document, without a separator; default: those in 1024 tokens",
    ),
    option("--documents", COUNT, "score at most DOCUMENTS documents"),
    *engine_options(*NUMERICS, of=WEIGHTS_ALONE, envvar=None),
    option(
        "--act-prec",
        click.Choice(["fp32", "default"]),
        "activations of the models; default: what the runtime uses",
        default="fp32",
    ),
    BACKEND,
    option("--threads", COUNT, "default: all usable cores"),
    option("--limits", click.Choice(list(LIMITS)), "default: by what differs"),
    *LIMIT_FLAGS,
    option("--min-cosine", float, "of each tensor; default: by its format"),
    option("--speed/--no-speed", None, "measure decoding", default=True),
    option("--json", NEW, "write all numbers", name="json_path"),
    option("--report", PATH, "directory for quality.json and quality.md", name="directory"),
    examples=(
        (
            "A quantised model against its origin",
            "clocher gate models/llama-int4 --reference models/llama --text held_out.txt",
        ),
        (
            "What would rounding at load cost?",
            "clocher gate models/llama --precision int8w --reference models/llama \\\n"
            "    --text held_out.txt",
        ),
        (
            "Several, with their table in a file",
            "clocher gate models/llama-int8 models/llama-int4 --reference models/llama \\\n"
            "    --text held_out.txt --report results/llama",
        ),
    ),
    exit_codes={
        ExitCode.OK: "every model passes",
        ExitCode.REJECTED: "a model fails",
        ExitCode.UNDECIDED: "none fails, but one needs more text for a decision",
    },
)
def gate(console: Console, **options: Any) -> int:
    """Judge quantised models against the float model they were made from, on held-out text."""
    from clocher_runtime.command.ptq import judge

    return judge(console, options)
