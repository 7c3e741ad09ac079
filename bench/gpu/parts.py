"""Which parts there are, how long each may take, and its items.

Nothing heavy is imported here: the suite itself needs neither torch nor Triton.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.gpu.setting import Item


@dataclass(frozen=True)
class Part:
    """How a part is run.

    Attributes:
        stage: parts of one stage run side by side; those that time anything are alone in theirs.
        seconds: time limit of the part.
        item_seconds: time limit of one item.
        shards: processes that share its items.
    """

    stage: int
    seconds: float
    item_seconds: float
    shards: int = 1


PARTS: dict[str, Part] = {
    "environment": Part(0, 30, 30),
    "ceilings": Part(1, 40, 30),
    "parity": Part(2, 150, 90, shards=10),
    "sanitize": Part(2, 150, 145, shards=3),
    "peers": Part(2, 120, 60),
    "linear": Part(3, 120, 60),
    "moe": Part(4, 50, 40),
    "decode": Part(5, 150, 90),
    "attention": Part(6, 60, 40),
    "sparse": Part(7, 50, 40),
}
EXERCISE = "exercise"
"""What `sanitize` runs under the checking tools; not a part of the suite."""

NAMES = (*PARTS, EXERCISE)


def items_of(part: str, dry: bool) -> "list[Item]":
    """Return the items of a part: few and tiny ones for a dry run."""
    return _ITEMS[part](dry)


def _environment(dry: bool) -> "list[Item]":
    from bench.gpu import environment

    return environment.items(dry)


def _ceilings(dry: bool) -> "list[Item]":
    from bench.gpu import ceilings

    return ceilings.items(dry)


def _parity(dry: bool) -> "list[Item]":
    from bench.gpu import decode, parity, real_shapes

    return [*decode.short_items(dry), *real_shapes.items(dry), *parity.items(dry)]


def _sanitize(dry: bool) -> "list[Item]":
    from bench.gpu import sanitize

    return sanitize.items(dry)


def _exercise(dry: bool) -> "list[Item]":
    from bench.gpu import sanitize

    return sanitize.exercise(dry)


def _peers(dry: bool) -> "list[Item]":
    from bench.gpu import peers

    return peers.items(dry)


def _linear(dry: bool) -> "list[Item]":
    from bench.gpu import linear

    return linear.items(dry)


def _moe(dry: bool) -> "list[Item]":
    from bench.gpu import moe

    return moe.items(dry)


def _attention(dry: bool) -> "list[Item]":
    from bench.gpu import attention

    return attention.items(dry)


def _sparse(dry: bool) -> "list[Item]":
    from bench.gpu import sparse

    return sparse.items(dry)


def _decode(dry: bool) -> "list[Item]":
    from bench.gpu import decode

    return decode.items(dry)


_ITEMS: "dict[str, Callable[[bool], list[Item]]]" = {
    "environment": _environment,
    "ceilings": _ceilings,
    "parity": _parity,
    "sanitize": _sanitize,
    "exercise": _exercise,
    "peers": _peers,
    "linear": _linear,
    "moe": _moe,
    "attention": _attention,
    "sparse": _sparse,
    "decode": _decode,
}
