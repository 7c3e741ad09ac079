"""Sessions as most tests want them: one thread, no drafts; losses of texts in them."""

from collections.abc import Sequence
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

from clocher_runtime.config.engine import EngineConfig
from clocher_runtime.engine.load import Model
from clocher_runtime.engine.pages import KvPages, PagePool
from clocher_runtime.engine.session import Session
from clocher_runtime.quality.likelihood import Pair, Scorer

_OF_SESSION = ("draft", "calibration", "progress", "packing")


def make_session(model: Model, **settings: Any) -> Session:
    """Return a session; settings are fields of `EngineConfig`, or arguments of `Session`."""
    own = {name: settings.pop(name) for name in _OF_SESSION if name in settings}
    return Session(model, EngineConfig(**{"threads": 1, "speculate": "off", **settings}), **own)


class PageStats(NamedTuple):
    """Pages of a pool: blank, unused but findable, in use."""

    blank: int
    cached: int
    used: int


def pool_stats(pool: PagePool) -> PageStats:
    """Count the pages of a pool, one by one."""
    cached = sum(page in pool._names for page in pool._unused)
    return PageStats(pool.available - cached, cached, sum(users > 0 for users in pool._users))


def page_stats(pages: KvPages) -> list[PageStats]:
    """Count the pages of each pool."""
    return [pool_stats(pool) for pool in pages._pools]


def pages_used(session: Session) -> int:
    """Return the pages in use, without those of calls that left."""
    with session._lock.taken("pages_used"):
        session.scheduler.sweep()
        return sum(stats.used for stats in page_stats(session.scheduler.pages))


def loss_of(session: Session, ids: Sequence[int], window: int) -> float:
    """Return the mean loss of whole windows, each alone, in nats per token."""
    starts = range(0, len(ids) - window + 1, window)
    pairs = [Pair(ids[at : at + 1], ids[at + 1 : at + window]) for at in starts]
    scorer = Scorer(session, SimpleNamespace(bos_id=0))  # type: ignore[arg-type]
    return -fmean(each.logprob for each in scorer.scores(pairs)) / (window - 1)
