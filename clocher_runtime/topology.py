"""How many threads a run should have: usable CPUs, physical cores and the container's CPU quota."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def usable_cpus() -> frozenset[int]:
    """Return the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def physical_cores(cpus: frozenset[int], root: Path = _ROOT) -> int:
    """Return how many physical cores lie behind some CPUs.

    Siblings of one core (SMT, "hyper-threads") count once. A CPU that sysfs does not describe
    counts as a core of its own.

    Args:
        cpus: CPU numbers.
        root: root of the file system; tests pass a recorded tree.
    """
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        text = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
        cores.add(frozenset(parse_cpu_list(text) or {cpu}))
    return len(cores)


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the CPUs that control groups grant to this process; None without a limit.

    The tightest limit of the process's group and of its ancestors counts, in version 2
    (`cpu.max`) and version 1 (`cpu.cfs_quota_us` / `cpu.cfs_period_us`). Where the path of the
    group is not visible, as in most containers, the mounted root is that group.
    """
    limits = [limit for limit in _limits(root) if limit is not None]
    return min(limits, default=None)


def default_threads(root: Path = _ROOT) -> int:
    """Return the thread count of a run that does not name one.

    It is the number of physical cores among the usable CPUs, and not more than the CPU quota
    rounded down; at least 1. A second thread on a core competes for the same vector units and
    the same memory port, so it does not help.
    """
    cores = physical_cores(usable_cpus(), root)
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the CPUs of a kernel list such as "0-3,8"; empty for text that is not one."""
    cpus: set[int] = set()
    try:
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return frozenset()
    return frozenset(cpus)


def _limits(root: Path) -> Iterator[float | None]:
    cgroup = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for group in _ancestors(cgroup, path):
                quota, _, period = _read(group / "cpu.max").partition(" ")
                yield _ratio(quota, period)
        elif "cpu" in controllers.split(","):
            for mount in (cgroup / controllers, cgroup / "cpu"):
                for group in _ancestors(mount, path):
                    yield _ratio(
                        _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
                    )


def _ancestors(mount: Path, path: str) -> Iterator[Path]:
    """Yield a group's directory and those above it, up to the mount."""
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _ratio(quota: str, period: str) -> float | None:
    """Return quota / period; None for "max", -1 or a missing file."""
    try:
        granted, length = int(quota), int(period)
    except ValueError:
        return None
    return granted / length if granted > 0 and length > 0 else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
