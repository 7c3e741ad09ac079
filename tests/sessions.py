"""Sessions as most tests want them: one thread, no drafts."""

from typing import Any

from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.session import Session

_OF_SESSION = ("draft", "calibration", "progress", "packing")


def make_session(model: Model, **settings: Any) -> Session:
    """Return a session; settings are fields of `EngineConfig`, or arguments of `Session`."""
    own = {name: settings.pop(name) for name in _OF_SESSION if name in settings}
    return Session(model, EngineConfig(**{"threads": 1, "speculate": "off", **settings}), **own)
