"""Sessions as most tests want them: one thread, no drafts; losses of texts in them."""

from collections.abc import Sequence
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.session import Session
from clocher_runtime.quality.likelihood import Pair, Scorer

_OF_SESSION = ("draft", "calibration", "progress", "packing")


def make_session(model: Model, **settings: Any) -> Session:
    """Return a session; settings are fields of `EngineConfig`, or arguments of `Session`."""
    own = {name: settings.pop(name) for name in _OF_SESSION if name in settings}
    return Session(model, EngineConfig(**{"threads": 1, "speculate": "off", **settings}), **own)


def loss_of(session: Session, ids: Sequence[int], window: int) -> float:
    """Return the mean loss of whole windows, each alone, in nats per token."""
    starts = range(0, len(ids) - window + 1, window)
    pairs = [Pair(ids[at : at + 1], ids[at + 1 : at + window]) for at in starts]
    scorer = Scorer(session, SimpleNamespace(bos_id=0))  # type: ignore[arg-type]
    return -fmean(each.logprob for each in scorer.scores(pairs)) / (window - 1)
