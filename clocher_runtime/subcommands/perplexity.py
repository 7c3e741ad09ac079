"""`clocher perplexity`: how well a model predicts a text."""

import json
import os
from contextlib import closing
from functools import partial
from pathlib import Path

import click

from clocher_runtime.command.script_run import COUNT, FILE, Report, option, place, script
from clocher_runtime.command.settings import KV_DTYPES, PRECISIONS, SETTINGS
from clocher_runtime.exit_codes import ExitCode

READ_CODES = (
    (ExitCode.OK, "done"),
    (ExitCode.USAGE, "a flag or the text cannot be used"),
    (ExitCode.MODEL, "a model is missing, damaged or of an unknown kind"),
    (ExitCode.DEVICE, "the back end is not there"),
    (ExitCode.MEMORY, "out of memory"),
)


def _env(name: str) -> list[str]:
    """Return the variables that a run has for a setting, the strongest first."""
    return list(SETTINGS[name].env)


def _model_of_environment() -> Path | None:
    named = next(filter(None, map(os.environ.get, _env("model_dir"))), None)
    return Path(named) if named else None


@script(
    "clocher perplexity",
    place(
        "MODEL",
        "--model-dir",
        "Default: CLOCHER_MODEL_DIR, else the embedded model.",
        needed=False,
    ),
    option("--text", FILE, required=True),
    option("--chars", COUNT, "use the first CHARS characters of the text"),
    option("--window", click.IntRange(2), default=256),
    option("--limit", COUNT, "score at most LIMIT windows"),
    option("--precision", click.Choice(PRECISIONS), "default: as stored", envvar=_env("precision")),
    option("--kv-dtype", click.Choice(KV_DTYPES), default="f32", envvar=_env("kv_dtype")),
    option(
        "--act-prec",
        click.Choice(["int8", "fp8", "fp16", "bf16", "fp32"]),
        "default: the back end's",
        envvar=_env("act_prec"),
    ),
    option(
        "--act-sparsity", str, "drop small activations; default: none", envvar=_env("act_sparsity")
    ),
    option("--act-calibration", FILE, "for --act-sparsity 0.25", envvar=_env("act_calibration")),
    option("--threads", COUNT, "default: all usable cores", envvar=_env("threads")),
    option("--backend", click.Choice(["cpu", "reference"]), default="cpu"),
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
    report: Report,
    model_dir: Path | None,
    text: Path,
    chars: int | None,
    window: int,
    limit: int | None,
    precision: str | None,
    kv_dtype: str,
    act_prec: str | None,
    act_sparsity: str | None,
    act_calibration: Path | None,
    threads: int | None,
    backend: str,
) -> None:
    """Print the perplexity of a model on a text, as one JSON line on standard output."""
    from clocher_runtime.checkpoints import open_checkpoint
    from clocher_runtime.checkpoints.locate import embedded_model, locate
    from clocher_runtime.command.loading import calibration_ids
    from clocher_runtime.engine.load import load_model
    from clocher_runtime.engine.session import Session
    from clocher_runtime.engine.topology import default_threads
    from clocher_runtime.quality import compare
    from clocher_runtime.text.tokenizer import Tokenizer

    model_dir = model_dir or _model_of_environment()
    checkpoint = open_checkpoint(locate(model_dir, "MODEL") if model_dir else embedded_model())
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
        act_sparsity=act_sparsity,
        act_calibration=calibration_ids(act_calibration, checkpoint) if act_calibration else None,
        chunk=window,
        all_logits=True,
    )
    used = {"kv_dtype": session.kv_dtype, "act_prec": session.act_prec}
    used |= {"act_sparsity": act_sparsity} if act_sparsity else {}
    with report.counting() as tell, closing(session):
        score = compare.perplexity(session, ids, window, limit, partial(tell, "windows"))
    line = {
        "model": str(model_dir or "embedded"),
        "precision": model.precision,
        **used,
        "windows": score.windows,
        "window_tokens": score.window_tokens,
        "loss_nats": score.loss,
        "perplexity": score.perplexity,
    }
    click.echo(json.dumps(line))


COMMAND = perplexity
main = perplexity.run
