"""CPUs of its own for every actor of a machine, and weights that they have together.

Ray counts CPUs and pins nobody: two actors of one CPU each may share a core, while another idles.
So an actor takes CPUs as one takes a seat. There is a file for each, and whoever holds its lock has
the CPU; the system lets go of a lock when a process ends, however it ends. Actors of several jobs,
and of several Ray clusters of one user, see the same files.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from clocher_kernels.errors import UsageError
from clocher_runtime.disk.output_file import open_locked
from clocher_runtime.engine.topology import in_order, read_cpus

SHARED_MB = 64 << 10
"""MiB of packed weights that a machine keeps for its actors; those used least recently go."""

_held: list[int] = []
"""Locks of this process: descriptors that stay open as long as it lives."""


def claim(count: int, cpus: Sequence[int] | None = None, root: Path | None = None) -> list[int]:
    """Take CPUs that no other actor of this machine has.

    Args:
        count: how many.
        cpus: those to choose from, the best first; None: all that this process may use, physical
            cores before their siblings.
        root: directory of the locks; None: one of this user's among temporary files.

    Returns:
        Their numbers; none if fewer than `count` are free, and then none is taken.
    """
    cpus = [cpu.id for cpu in in_order(read_cpus(), "compact")] if cpus is None else cpus
    root = Path(tempfile.gettempdir()) / f"clocher-cpus-{os.geteuid()}" if root is None else root
    taken: dict[int, int] = {}
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        if root.lstat().st_uid != os.geteuid():
            return []
        for cpu in cpus:
            if len(taken) == count:
                break
            try:
                taken[cpu] = open_locked(root / f"{cpu}.lock")
            except UsageError:  # somebody else's
                continue
    except OSError:  # no place for locks: nobody is pinned
        pass
    if len(taken) < count:
        for descriptor in taken.values():
            os.close(descriptor)
        return []
    _held.extend(taken.values())
    return list(taken)


def pin(count: int) -> list[int]:
    """Take CPUs and keep this process on them, with all threads that it has and will have.

    Returns:
        Their numbers; none if they are not free: the process then runs where the system puts it.
    """
    cpus = claim(count)
    if cpus:
        for thread in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(thread), cpus)
            except ProcessLookupError:  # it has ended
                continue
    return cpus


def share_weights() -> None:
    """Let the actors of a machine have packed weights in memory once, unless the environment says.

    They are files of the tile cache, which each process maps; see docs/ray.md.
    """
    os.environ.setdefault("CLOCHER_TILE_CACHE_MB", str(SHARED_MB))


def leave() -> None:
    """Give the CPUs of this process back."""
    while _held:
        os.close(_held.pop())
