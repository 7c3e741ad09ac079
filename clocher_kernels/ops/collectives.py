"""Ranks: executors that share the work of one Plan, what they say to each other, and their parts.

With tensor parallelism each rank has a part of the heads, of the hidden layers and of the
vocabulary, executes the same calls on it, and exchanges activations where a call needs more than
its part (`clocher_runtime.models.divide`). How they exchange them is the business of a `Ranks`: the
executor takes the one that is `current` when it is made. One that is alone has everything.

A dimension of `total` elements is divided into runs of whole units; `part` says which. Parts differ
by at most one unit, so groups of 32 columns need neither padding nor a number of ranks that divides
them.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3, for columns, rows and vocabulary.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np

from clocher_kernels.ops.contract import EXACT, Case, OpSpec, Param, nearest

Array = np.ndarray


class Ranks(Protocol):
    """The executors that share a Plan, as one of them sees it.

    Arrays are NumPy's or torch's, whichever the executor has.

    Attributes:
        rank: its own number, from 0.
        count: how many there are.
    """

    rank: int
    count: int

    def all_reduce(self, x: Any) -> None:
        """Add up an array of all ranks, in place; every rank gets the same bits."""

    def all_gather(self, x: Any, y: Any, unit: int) -> None:
        """Write the columns x [M, A*, S] of each rank where they belong in y [M, A*, N] of all."""


class Alone:
    """The only rank there is."""

    rank, count = 0, 1

    def all_reduce(self, x: Any) -> None:
        """Do nothing: the sum is there."""

    def all_gather(self, x: Any, y: Any, unit: int) -> None:
        """Copy all columns."""
        y[...] = x


_ranks: ContextVar[Ranks] = ContextVar("ranks", default=Alone())  # noqa: B039  it has no state


def current() -> Ranks:
    """Return the ranks that an executor made now belongs to."""
    return _ranks.get()


@contextmanager
def joined(ranks: Ranks) -> Generator[None, None, None]:
    """Let executors that are made meanwhile belong to some ranks."""
    token = _ranks.set(ranks)
    try:
        yield
    finally:
        _ranks.reset(token)


def part(total: int, unit: int, rank: int, count: int) -> tuple[int, int]:
    """Return the run [first, last) of `total` elements that is a rank's, in units."""
    units = -(-total // unit)
    first, last = units * rank // count, units * (rank + 1) // count
    return min(unit * first, total), min(unit * last, total)


def all_reduce(*, x: Array) -> None:
    """Add up an array of all ranks.

    Args:
        x: [M, K] fp32, updated.
    """
    current().all_reduce(x)


def all_gather(*, x: Array, y: Array, unit: int) -> None:
    """Put the columns of all ranks side by side.

    Args:
        x: [M, A*, S] fp32: this rank's, as `part` says.
        y: [M, A*, N] fp32, written.
        unit: columns come in multiples of it.
    """
    current().all_gather(x, y, unit)


def own_columns(*, x: Array, y: Array, start: int) -> None:
    """Copy the columns that are this rank's.

    Args:
        x: [M, N] fp32.
        y: [M, S] fp32, written.
        start: the first of them.
    """
    y[...] = x[:, start : start + y.shape[1]]


def own_experts(
    *, ids: Array, weights: Array, own_ids: Array, own_weights: Array, first: int, count: int
) -> None:
    """Leave to each token those of its experts that are this rank's; others weigh nothing.

    An expert that weighs nothing is named as another one that the token has here, so that no more
    weights are read; where it has none, as the rank's first.

    Args:
        ids: [M, A] i32, experts.
        weights: [M, A] fp32.
        own_ids: [M, A] i32, written: numbers among this rank's experts.
        own_weights: [M, A] fp32, written.
        first: this rank's first expert.
        count: how many experts it has.
    """
    local = ids.astype(np.int64) - first
    is_own = (local >= 0) & (local < count)
    stand_in = np.where(is_own.any(axis=1), local[np.arange(len(ids)), is_own.argmax(axis=1)], 0)
    own_ids[...] = nearest(np.where(is_own, local, stand_in[:, None]), count)
    own_weights[...] = np.where(is_own, weights, np.float32(0))


SPECS = (
    OpSpec(
        "all_reduce",
        "add up what all ranks have",
        (Param("x", "inout", "M K"),),
        all_reduce,
        (Case("m3-k37", {"M": 3, "K": 37}),),
        EXACT,
        flops=1,
    ),
    OpSpec(
        "all_gather",
        "put the columns of all ranks side by side",
        (Param("x", "in", "M A* S", narrow=True), Param("y", "out", "M A* N", narrow=True)),
        all_gather,
        (
            Case("m3-n37", {"M": 3, "S": 37, "N": 37}, {"unit": 1}),
            Case("m3-a2-n20", {"M": 3, "A": 2, "S": 20, "N": 20}, {"unit": 1}),
        ),
        EXACT,
        flops=0,
    ),
    OpSpec(
        "own_columns",
        "copy the columns that are a rank's",
        (Param("x", "in", "M N", narrow=True), Param("y", "out", "M S", narrow=True)),
        own_columns,
        (
            Case("last-m2", {"M": 2, "N": 300, "S": 150}, {"start": 150}),
            Case("first-m3", {"M": 3, "N": 37, "S": 20}, {"start": 0}),
        ),
        EXACT,
        flops=0,
    ),
    OpSpec(
        "own_experts",
        "leave to tokens the experts that are a rank's",
        (
            Param("ids", "in", "M A", "i32", below="E"),
            Param("weights", "in", "M A"),
            Param("own_ids", "out", "M A", "i32"),
            Param("own_weights", "out", "M A"),
        ),
        own_experts,
        (
            Case("half-m5-a2", {"M": 5, "A": 2, "E": 6}, {"first": 3, "count": 3}),
            Case("few-m7-a4", {"M": 7, "A": 4, "E": 32}, {"first": 8, "count": 8}),
        ),
        EXACT,
        flops=1,
    ),
)
