"""`clocher perplexity`: perplexity of a model on a text; and the loading of scored models."""

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
    Report,
    engine_options,
    option,
    place,
    script,
)
from clocher_runtime.config.engine import EXACT, NUMERICS, EngineConfig
from clocher_runtime.config.setting import Given, every
from clocher_runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from clocher_runtime.engine.session import Session
    from clocher_runtime.text.tokenizer import Tokenizer

READ_CODES = (
    (ExitCode.OK, "done"),
    (ExitCode.USAGE, "a flag or the text cannot be used"),
    (ExitCode.MODEL, "a model is missing, damaged or of an unknown kind"),
    (ExitCode.DEVICE, "the back end is not there"),
    (ExitCode.MEMORY, "out of memory"),
)
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
    PLACE,
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
    exit_codes=READ_CODES,
)
def perplexity(
    report: Report, text: Path, chars: int | None, window: int, limit: int | None, **model: Any
) -> None:
    """Print the perplexity of a model on a text, as one JSON line on standard output."""
    from clocher_runtime.quality import compare

    with report.counting() as tell, scored(**model, context=window, chunk=window) as ready:
        ids = ready.tokenizer.encode(text.read_text(encoding="utf-8")[:chars])
        score = compare.perplexity(ready.session, ids, window, limit, partial(tell, "windows"))
    line = {
        **ready.facts,
        "windows": score.windows,
        "window_tokens": score.window_tokens,
        "loss_nats": score.loss,
        "perplexity": score.perplexity,
    }
    click.echo(json.dumps(line))


COMMAND = perplexity
main = perplexity.run
