"""`clocher perplexity`: how well a model predicts a text."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from clocher_runtime.command.script_run import COUNT, FILE, Report, option, script
from clocher_runtime.exit_codes import ExitCode
from clocher_runtime.subcommands.scored_model import OPTIONS, PLACE, scored

READ_CODES = (
    (ExitCode.OK, "done"),
    (ExitCode.USAGE, "a flag or the text cannot be used"),
    (ExitCode.MODEL, "a model is missing, damaged or of an unknown kind"),
    (ExitCode.DEVICE, "the back end is not there"),
    (ExitCode.MEMORY, "out of memory"),
)


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
