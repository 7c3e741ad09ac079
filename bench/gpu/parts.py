"""Which parts there are, how long each may take, and its items.

Nothing heavy is imported here: the suite itself needs neither torch nor Triton.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.gpu.setting import Item


@dataclass(frozen=True)
class Part:
    """How a part is run.

    Attributes:
        call: the third of the suite that it belongs to; 0: all of them.
        stage: parts of one stage run side by side; those that time anything are alone in theirs.
        seconds: time limit of the part.
        item_seconds: time limit of one item.
        shards: processes that share its items.
    """

    call: int
    stage: int
    seconds: float
    item_seconds: float
    shards: int = 1


CALLS = (1, 2, 3)
BUDGET = 520.0
"""Seconds that a call may take; the limits of its stages come to no more."""

PARTS: dict[str, Part] = {
    "environment": Part(0, 0, 20, 20),
    "smoke": Part(1, 0, 60, 55, shards=8),
    "ceilings": Part(1, 1, 40, 30),
    "decode": Part(1, 2, 170, 60),
    "parity": Part(1, 3, 250, 90, shards=14),
    "peers": Part(2, 4, 40, 25),
    "linear": Part(2, 5, 180, 60),
    "moe": Part(2, 6, 40, 30),
    "batches": Part(2, 7, 100, 45),
    "generate": Part(2, 8, 140, 60),
    "attention": Part(3, 9, 60, 40),
    "sparse": Part(3, 10, 50, 40),
    "variants": Part(3, 11, 60, 45),
    "counters": Part(3, 12, 75, 40),
    "sanitize": Part(3, 13, 125, 120, shards=3),
    # These compile or tune at their first call, for as long as they like: they cost nobody else.
    "slow_peers": Part(3, 14, 130, 60),
}
INNER = ("exercise", "profiled")
"""What `sanitize` and `counters` run under their tools; no parts of the suite."""

NAMES = (*PARTS, *INNER)


def parts_of(calls: Iterable[int]) -> dict[str, Part]:
    """Return the parts of some calls, in the order of their stages."""
    wanted = set(calls)
    return {name: p for name, p in PARTS.items() if not p.call or p.call in wanted}


def items_of(part: str, dry: bool) -> "list[Item]":
    """Return the items of a part: few and tiny ones for a dry run."""
    from bench.gpu import (
        attention,
        ceilings,
        counters,
        decode,
        environment,
        generate,
        linear,
        moe,
        parity,
        peers,
        real_shapes,
        sanitize,
        smoke,
        sparse,
        variants,
    )

    if part == "parity":
        # The op table is what must not be missing if time runs out.
        return [*parity.items(dry), *real_shapes.items(dry), *decode.short_items(dry)]
    items = {
        "environment": environment.items,
        "smoke": smoke.items,
        "ceilings": ceilings.items,
        "decode": decode.items,
        "batches": decode.batch_items,
        "generate": generate.items,
        "peers": peers.items,
        "slow_peers": linear.slow_items,
        "linear": linear.items,
        "moe": moe.items,
        "attention": attention.items,
        "sparse": sparse.items,
        "variants": variants.items,
        "counters": counters.items,
        "profiled": counters.profiled,
        "sanitize": sanitize.items,
        "exercise": sanitize.exercise,
    }
    return items[part](dry)
