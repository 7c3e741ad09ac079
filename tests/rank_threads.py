"""Ranks that are threads of this process, so that a test needs no other one."""

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import numpy as np

from clocher_kernels.ops.collectives import part

PATIENCE_S = 120


class Table:
    """Where the ranks lay down what they exchange."""

    def __init__(self, count: int) -> None:
        self.laid: list[np.ndarray | None] = [None] * count
        self.meet = threading.Barrier(count, timeout=PATIENCE_S)


class ThreadRanks:
    """The ranks as one of the threads sees them; see `collectives.Ranks`."""

    def __init__(self, table: Table, rank: int, count: int) -> None:
        self.rank, self.count, self.exchanges = rank, count, 0
        self._table = table

    def _of_all(self, x: np.ndarray) -> list[np.ndarray]:
        self.exchanges += 1
        self._table.laid[self.rank] = np.array(x)
        self._table.meet.wait()
        found = [np.asarray(each) for each in self._table.laid]
        self._table.meet.wait()
        return found

    def all_reduce(self, x: np.ndarray) -> None:
        first, *others = self._of_all(x)
        x[...] = sum(others, start=first)

    def all_gather(self, x: np.ndarray, y: np.ndarray, unit: int) -> None:
        for rank, columns in enumerate(self._of_all(x)):
            first, last = part(y.shape[-1], unit, rank, self.count)
            y[..., first:last] = columns


def on_ranks(count: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Return what each rank's thread makes of its ranks; raise what one of them raises."""
    table, made, failed = Table(count), [None] * count, []

    def run(rank: int) -> None:
        try:
            made[rank] = work(ThreadRanks(table, rank, count))
        except BaseException as error:
            failed.append(error)
            table.meet.abort()

    threads = [
        threading.Thread(target=copy_context().run, args=(run, rank)) for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = [e for e in failed if not isinstance(e, threading.BrokenBarrierError)]
    if first or failed:
        raise (first or failed)[0]
    return made
