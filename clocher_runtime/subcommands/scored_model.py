"""The model that a subcommand scores texts with: its flags, and a session that keeps logits."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clocher_runtime.command.script_run import engine_option, option, place
from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.config.setting import Given, every

if TYPE_CHECKING:
    from clocher_runtime.engine.session import Session
    from clocher_runtime.text.tokenizer import Tokenizer


_SETTINGS = dict(every(EngineConfig))


def _model_of_environment() -> Path | None:
    named = next(filter(None, map(os.environ.get, _SETTINGS["model_dir"].env)), None)
    return Path(named) if named else None


PLACE = place(
    "MODEL",
    "--model-dir",
    "Default: CLOCHER_MODEL_DIR, else the embedded model.",
    needed=False,
)
OPTIONS = (
    engine_option("precision"),
    engine_option("kv_dtype", "storage of the KV cache", default="f32"),
    engine_option("act_prec"),
    engine_option("act_sparsity"),
    engine_option("act_calibration"),
    engine_option("threads"),
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
def scored(model_dir: Path | None, backend: str = "cpu", **settings: Any) -> Iterator[Scored]:
    """Load the model that the flags name, and close it in the end.

    Args:
        model_dir: None: that of the environment, or the embedded one.
        backend: a device, or "reference".
        **settings: other fields of `EngineConfig`.
    """
    from clocher_runtime.checkpoints.locate import embedded_model
    from clocher_runtime.command.loading import load
    from clocher_runtime.text.tokenizer import Tokenizer

    model_dir = model_dir or _model_of_environment()
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
        facts = {
            "model": str(model_dir or "embedded"),
            "precision": loaded.model.precision,
            "kv_dtype": session.sizes.cache_dtype,
            "act_prec": session.act_prec,
        }
        facts |= {"act_sparsity": config.act_sparsity} if config.act_sparsity else {}
        assert isinstance(loaded.tokenizer, Tokenizer)  # only the stub has another
        yield Scored(session, loaded.tokenizer, facts)
