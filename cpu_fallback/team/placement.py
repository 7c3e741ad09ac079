"""Where the threads of a team run, and copies of weights near them."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from clocher_kernels.ops.contract import Value
from clocher_kernels.plan import Plan
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.team.large_pages import allocate

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

    Returns:
        The CPUs that it might run on before; empty if it was left alone.
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
            size = sum(array.nbytes for array in _arrays(value))
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
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        pin(cpu)
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name=f"clocher-on-{cpu}")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _arrays(value: Value) -> list[np.ndarray]:
    return list(value.planes.values()) if isinstance(value, QuantTensor) else [value]


def _copy(array: np.ndarray) -> np.ndarray:
    made = allocate(array.nbytes).view(array.dtype).reshape(array.shape)
    made[...] = array
    return made
