"""Print the perplexity of a model on a text, one JSON line on stdout.

python scripts/perplexity.py --text tests/data/valid.txt --chars 60000
python scripts/perplexity.py --text tests/data/valid.txt --chars 60000 --precision int4w
"""

import json
from contextlib import closing
from functools import partial
from pathlib import Path

import click

from clocher_kernels.ops.attention import KV_DTYPES
from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.model_choice import embedded_model
from clocher_runtime.command.script_run import COUNT, FILE, PATH, Report, option, script
from clocher_runtime.engine.load import PRECISIONS, load_model
from clocher_runtime.engine.session import Session
from clocher_runtime.engine.topology import default_threads
from clocher_runtime.quality.compare import perplexity
from clocher_runtime.text.tokenizer import Tokenizer


@script(
    "perplexity",
    None,
    option("--model-dir", PATH, "default: the embedded model"),
    option("--text", FILE, required=True),
    option("--chars", COUNT, "use the first CHARS characters of the text"),
    option("--window", click.IntRange(2), default=256),
    option("--limit", COUNT, "score at most LIMIT windows"),
    option("--precision", click.Choice(PRECISIONS), "default: as stored"),
    option("--kv-dtype", click.Choice(KV_DTYPES), default="f32"),
    option("--act-prec", click.Choice(["fp32", "int8"]), "default: the back end's"),
    option("--threads", COUNT, "default: all usable cores"),
    option("--backend", click.Choice(["cpu", "reference"]), default="cpu"),
    help=__doc__,
)
def main(
    report: Report,
    model_dir: Path | None,
    text: Path,
    chars: int | None,
    window: int,
    limit: int | None,
    precision: str | None,
    kv_dtype: str,
    act_prec: str | None,
    threads: int | None,
    backend: str,
) -> None:
    """Score the text and print the line."""
    checkpoint = open_checkpoint(model_dir or embedded_model())
    model = load_model(checkpoint, precision)
    tokenizer = Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config)
    ids = tokenizer.encode(text.read_text(encoding="utf-8")[:chars])
    session = Session(
        model,
        backend=backend,
        threads=threads or default_threads(),
        context=window,
        kv_dtype=kv_dtype,
        act_prec=act_prec,
        chunk=window,
        all_logits=True,
    )
    with report.counting() as tell, closing(session):
        score = perplexity(session, ids, window, limit, partial(tell, "windows"))
    line = {
        "model": str(model_dir or "embedded"),
        "precision": model.precision,
        "kv_dtype": kv_dtype,
        "act_prec": act_prec,
        "windows": score.windows,
        "window_tokens": score.window_tokens,
        "loss_nats": score.loss,
        "perplexity": score.perplexity,
    }
    click.echo(json.dumps(line))


if __name__ == "__main__":
    main()
