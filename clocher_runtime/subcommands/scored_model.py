"""The model that a subcommand scores texts with: its flags, and a session that keeps logits."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clocher_runtime.command.script_run import COUNT, FILE, option, place
from clocher_runtime.command.settings import KV_DTYPES, PRECISIONS, SETTINGS

if TYPE_CHECKING:
    from clocher_runtime.engine.session import Session
    from clocher_runtime.text.tokenizer import Tokenizer


def _env(name: str) -> list[str]:
    """Return the variables that a run has for a setting, the strongest first."""
    return list(SETTINGS[name].env)


def _model_of_environment() -> Path | None:
    named = next(filter(None, map(os.environ.get, _env("model_dir"))), None)
    return Path(named) if named else None


PLACE = place(
    "MODEL",
    "--model-dir",
    "Default: CLOCHER_MODEL_DIR, else the embedded model.",
    needed=False,
)
OPTIONS = (
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
    option("--backend", click.Choice(["cpu", "cuda", "reference"]), default="cpu"),
)
"""Flags of `scored`, beside `PLACE`."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A model that is ready to score texts.

    Attributes:
        session: keeps the logits of every token.
        tokenizer: of the model.
        facts: of it, as result lines have them.
    """

    session: "Session"
    tokenizer: "Tokenizer"
    facts: dict[str, Any]


@contextmanager
def scored(
    model_dir: Path | None,
    precision: str | None,
    act_sparsity: str | None,
    act_calibration: Path | None,
    threads: int | None,
    **session: Any,
) -> Iterator[Scored]:
    """Load the model that the flags name, and close it in the end.

    Args:
        model_dir: None: that of the environment, or the embedded one.
        precision: of the weights; None: as stored.
        act_sparsity: see `Session`.
        act_calibration: text file for it.
        threads: None: all usable cores.
        **session: other arguments of `Session`.
    """
    from clocher_runtime.checkpoints import open_checkpoint
    from clocher_runtime.checkpoints.locate import embedded_model, locate
    from clocher_runtime.command.loading import calibration_ids
    from clocher_runtime.engine.load import load_model
    from clocher_runtime.engine.session import Session
    from clocher_runtime.engine.topology import default_threads
    from clocher_runtime.text.tokenizer import Tokenizer

    model_dir = model_dir or _model_of_environment()
    checkpoint = open_checkpoint(locate(model_dir, "MODEL") if model_dir else embedded_model())
    model = load_model(checkpoint, precision)
    calibration = calibration_ids(act_calibration, checkpoint) if act_calibration else None
    tokenizer = Tokenizer(checkpoint.tokenizer_source, checkpoint.tokenizer_config)
    bound = Session(
        model,
        threads=threads or default_threads(),
        act_sparsity=act_sparsity,
        act_calibration=calibration,
        all_logits=True,
        **session,
    )
    facts = {
        "model": str(model_dir or "embedded"),
        "precision": model.precision,
        "kv_dtype": bound.kv_dtype,
        "act_prec": bound.act_prec,
    }
    facts |= {"act_sparsity": act_sparsity} if act_sparsity else {}
    with closing(bound):
        yield Scored(bound, tokenizer, facts)
