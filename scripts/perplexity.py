"""Print the perplexity of a model on a text, one JSON line on stdout.

python scripts/perplexity.py --text tests/data/valid.txt --chars 60000
python scripts/perplexity.py --text tests/data/valid.txt --chars 60000 --precision int4w
"""

import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from clocher_runtime.checkpoints import open_checkpoint
from clocher_runtime.command.model_choice import embedded_model
from clocher_runtime.command.script_run import reporting
from clocher_runtime.engine.load import PRECISIONS, load_model
from clocher_runtime.engine.session import KV_DTYPES, Session
from clocher_runtime.engine.topology import default_threads
from clocher_runtime.quality.perplexity import perplexity
from clocher_runtime.text.tokenizer import Tokenizer


@click.command(help=__doc__)
@click.option("--model-dir", type=click.Path(path_type=Path), help="default: the embedded model")
@click.option("--text", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=True)
@click.option("--chars", type=click.IntRange(1), help="use the first CHARS characters of the text")
@click.option("--window", type=click.IntRange(2), default=256, show_default=True)
@click.option("--limit", type=click.IntRange(1), help="score at most LIMIT windows")
@click.option("--precision", type=click.Choice(PRECISIONS), help="default: as stored")
@click.option("--kv-dtype", type=click.Choice(KV_DTYPES), default="f32", show_default=True)
@click.option("--act-prec", type=click.Choice(["fp32", "int8"]), help="default: the back end's")
@click.option("--threads", type=click.IntRange(1), help="default: all usable cores")
@click.option("--backend", type=click.Choice(["cpu", "reference"]), default="cpu")
def main(
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
    with reporting("perplexity"):
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
        terminal = Console(stderr=True)
        quiet = not terminal.is_terminal
        with Progress(console=terminal, transient=True, disable=quiet) as bars:
            bar = bars.add_task("windows", total=None)
            score = perplexity(
                session,
                ids,
                window,
                limit,
                lambda done, total: bars.update(bar, completed=done, total=total),
            )
        session.close()
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
