"""Where the threads of a team run, copies of weights near them, and how many threads take part.

A thread whose core is taken away, by another process or by the CPU quota of a container, holds up
all others at the next barrier. If waiting there makes up a tenth of the time, the team tries with
fewer threads, and keeps to that unless steps become slower: a few that are all slower end a trial.
Later it tries with more again. A trial that does not pay is repeated after twice the time. A team
that has its cores for itself never tries anything. Results do not depend on the number of threads,
so none of this shows in them.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from clocher_kernels.ops.contract import Value
from clocher_kernels.plan import Plan
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.team.large_pages import allocate

if TYPE_CHECKING:
    from cpu_fallback.team.openmp import OpenMP

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placement:
    """The CPU of each thread of a team."""

    cpus: tuple[int, ...] = ()  # CPU of each rank; empty leaves threads where the system puts them
    sockets: tuple[int, ...] = ()  # socket of each rank, as long as `cpus`

    @property
    def effective(self) -> bool:
        """Whether threads are pinned: there are CPUs, and the system can do it."""
        return bool(self.cpus) and hasattr(os, "sched_setaffinity")

    def cpu(self, rank: int) -> int | None:
        """Return the CPU of a rank, None if it may run anywhere."""
        return self.cpus[rank % len(self.cpus)] if self.cpus else None

    def socket(self, rank: int) -> int:
        """Return the socket of a rank."""
        return self.sockets[rank % len(self.sockets)] if self.sockets else 0

    def homes(self, threads: int) -> dict[int, int]:
        """Return the sockets that a team lives on, each with a CPU of it, rank 0's first."""
        found: dict[int, int] = {}
        for rank in range(threads if self.cpus else 0):
            found.setdefault(self.socket(rank), self.cpus[rank % len(self.cpus)])
        return found


def pin(cpu: int | None, thread: int = 0) -> frozenset[int]:
    """Move a thread, by its native id, to a CPU; 0 is the calling thread, None leaves it alone.

    Return the CPUs that it might run on before; empty if it was left alone.
    """
    if cpu is None or not hasattr(os, "sched_setaffinity"):
        return frozenset()
    try:
        before = frozenset(os.sched_getaffinity(thread))
        os.sched_setaffinity(thread, {cpu})
    except OSError as error:
        _log.warning("could not pin a thread to CPU %d: %s", cpu, error.strerror)
        return frozenset()
    return before


def unpin(before: frozenset[int], thread: int) -> None:
    """Undo `pin` for a thread; nothing if the thread has ended or had not been moved."""
    if before:
        try:
            os.sched_setaffinity(thread, before)
        except OSError as error:
            _log.debug("could not restore the CPUs of a thread: %s", error.strerror)


def usable_cpus() -> int:
    """Return how many CPUs the calling thread may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def hot_weights(plan: Plan, weights: Mapping[str, Value], limit: int) -> list[str]:
    """Return the names of the weights that every step reads whole, in the order of the Plan.

    Embedding tables and experts are read in parts, so they are not among them. `limit` is bytes of
    all together, 0 for none; one that does not fit is passed over.
    """
    names: list[str] = []
    total = 0
    for call in plan.calls:
        if call.op == "embed":
            continue
        for name in call.args.values():
            value = weights.get(name)
            if name not in plan.weights or name in names or value is None or len(value.shape) > 2:
                continue
            size = value.nbytes
            if not limit or total + size <= limit:
                names.append(name)
                total += size
    return names


def replicate(weights: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    """Return copies of some weights whose memory the calling thread touched first."""
    copies: dict[str, Value] = {}
    for name in names:
        value = weights[name]
        if isinstance(value, QuantTensor):
            planes = {plane: _copy(array) for plane, array in value.planes.items()}
            copies[name] = replace(value, planes=planes)
        else:
            copies[name] = _copy(value)
    return copies


def call_on(cpu: int, function: Callable[[], T]) -> T:
    """Return what a function returns in a thread on a CPU; the caller's own CPUs stay as they are.

    Memory that it is the first to touch comes from the NUMA node of the CPU.
    """
    name = f"clocher-on-{cpu}"
    with ThreadPoolExecutor(1, name, initializer=pin, initargs=(cpu,)) as pool:
        return pool.submit(function).result()


def _copy(array: np.ndarray) -> np.ndarray:
    made = allocate(array.nbytes).view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


@dataclass(frozen=True, slots=True)
class Hints:
    """Settings of the CPU back end that change speed and never results; None: the kernel's own."""

    prefetch_distance: int | None = None  # bytes of weights to ask for ahead of use; 0: none
    stream_block_bytes: int | None = None  # stored bytes that are decoded at a time, of many tokens
    placement: Placement = field(default_factory=Placement)  # where threads run
    hot_replicate: bool = False  # keep weights that every step reads once per socket
    hot_limit: int = 0  # bytes of the copies of one socket, 0 for no limit
    # weights to copy into large pages if they lie in a mapped file and have no tiles
    copied: frozenset[str] = frozenset()
    adaptive: bool = True  # let threads sit out while others take their cores away
    stamped: bool = False  # write the time between launches (`stamps`)
    runtime: "OpenMP | None" = None  # whose threads take part; None: those of a team of its own


class Asked:
    """Hints as kernels ask for them when they are bound; `names` are the fields that matter."""

    def __init__(self, hints: Hints | None = None) -> None:
        self._hints = hints or Hints()
        self.names: set[str] = set()

    def prefetch_distance(self, default: int) -> int:
        """Return the bytes to ask for ahead of use, 0 for none."""
        self.names.add("prefetch_distance")
        wanted = self._hints.prefetch_distance
        return default if wanted is None else wanted

    def block_columns(self, default: int, row_bytes: int, columns: int, rows: int) -> int:
        """Return how many columns of a block of rows to decode at a time.

        It is a multiple of 128, at least that; `default` without a hint, and at most.
        """
        self.names.add("stream_block_bytes")
        wanted = self._hints.stream_block_bytes
        if wanted is None:
            return default
        fitting = wanted * columns // max(row_bytes * rows, 1)
        return max(128, min(fitting, default) // 128 * 128)


WINDOW_NS: Final = 100_000_000
"""Steps of one size are compared over at least this time: the period of a CPU quota."""

_GLIMPSE_NS: Final = 10_000_000
_FEW_STEPS: Final = 3
_HOPELESS: Final = 1.5
_GAIN: Final = 1.1  # How much faster steps must become for more threads to be worth it
_LOSS: Final = 1.05
"""How much slower steps may become with fewer: the CPU time that is left over serves others."""
_LOST: Final = 0.1
_MOST_PATIENCE: Final = 64
_MANY: Final = 64
"""Tokens of a step in which all take part: its launches are long, and shares even out what a thread
loses in them, while a trial with fewer would last for seconds."""


class Pace:
    """The number of threads that take part: `active`, 1 .. the size of the team.

    In a step of `_MANY` tokens and more it is all of them.
    """

    def __init__(self, threads: int) -> None:
        self.active = threads
        self._threads = threads
        self._size = (0, 0)
        self._before = 0  # threads to go back to if the trial that is on does not pay
        self._settling = False  # a trial begins with what is left of a throttled period
        self._mean = 0.0  # ns of a step without the trial
        self._patience = self._left = 1
        self._turn = 0
        self._begin()

    def of(self, tokens: int) -> int:
        """Return how many threads take part in a step."""
        return self.active if tokens < _MANY else self._threads

    def stepped(self, size: tuple[int, int], ns: int, lost: Callable[[], int]) -> None:
        """Take note of a step of so many tokens and rows; only steps of one size are compared.

        `lost` returns what the thread that lost most has lost at barriers since the last call.
        """
        if size != self._size or size[0] >= _MANY:
            self._abandon(size, lost)
        if size[0] >= _MANY:
            return
        self._steps += 1
        self._ns += ns
        self._fastest = min(self._fastest, ns)
        if self._ns >= WINDOW_NS:
            contended = lost() > _LOST * self._ns
            if self._settling:
                self._settling = False
                self._begin()
            else:
                self._close(contended)
        elif self._hopeless():
            lost()
            self._close(True)

    def _begin(self) -> None:
        self._steps, self._ns, self._fastest = 0, 0, WINDOW_NS

    def _end_trial(self) -> None:
        self._before, self._left, self._settling = 0, self._patience, False

    def _abandon(self, size: tuple[int, int], lost: Callable[[], int]) -> None:
        self._size = size
        if self._before:  # no verdict: the larger team, or short replies would keep it small
            self.active = max(self._before, self.active)
            self._end_trial()
        lost()
        self._begin()

    def _hopeless(self) -> bool:
        """Return whether a trial can end early.

        With fewer threads no step is as fast as those before were on average; with more, steps take
        much longer.
        """
        if self.active < self._before:
            return self._steps >= _FEW_STEPS and self._fastest > _LOSS * self._mean
        return self._before > 0 and self._ns >= _GLIMPSE_NS and self._slower_by(_HOPELESS)

    def _slower_by(self, factor: float) -> bool:
        return self._ns > factor * self._mean * self._steps

    def _close(self, contended: bool) -> None:
        """End a window, and a trial if one is on; perhaps begin one."""
        if self._before:
            if self._slower_by(1 / _GAIN if self.active > self._before else _LOSS):
                self.active = self._before
                self._patience = min(2 * self._patience, _MOST_PATIENCE)
            else:
                self._patience = 1
            self._end_trial()
        else:
            self._mean = self._ns / self._steps
            self._consider(contended)
        self._begin()

    def _consider(self, contended: bool) -> None:
        if not contended and self.active == self._threads:
            self._patience = self._left = 1
            return
        self._left -= 1
        if self._left > 0:
            return
        # In turns for one foreign thread, for as many as the team has, and for a single free core.
        self._turn = (self._turn + 1) % 3
        if contended and self.active > 1:
            trial = (self.active - 1, self.active // 2, 1)[self._turn]
        else:
            trial = min(
                (self.active + 1, 2 * self.active, self._threads)[self._turn], self._threads
            )
        self._before, self.active, self._settling = self.active, trial, True
        if trial == self._before:
            self._end_trial()
