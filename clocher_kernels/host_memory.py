"""Available memory, checked before large allocations: beyond a cgroup's limit SIGKILL follows."""

from pathlib import Path

from clocher_kernels.cgroups import ROOT, groups, read
from clocher_kernels.errors import OutOfMemory

_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
_RECLAIMED = ("inactive_file", "active_file")
"""Page cache: counted as used by a group, but reclaimed before processes are killed."""


def available(root: Path = ROOT) -> int | None:
    """Return the allocatable bytes, by `MemAvailable` and cgroup limits; None if unknown."""
    known = [_left(version, group) for version, group in groups("memory", root)]
    kib = _fields(read(root / "proc/meminfo")).get("MemAvailable:")
    known.append(None if kib is None else kib << 10)
    return min((nbytes for nbytes in known if nbytes is not None), default=None)


def require(nbytes: int, what: str, instead: str, root: Path = ROOT) -> None:
    """Raise OutOfMemory, "`what` ... `instead`", if fewer than `nbytes` are available."""
    left = available(root)
    if left is not None and nbytes > left:
        raise OutOfMemory(
            f"{what} {nbytes >> 20} MiB, {left >> 20} MiB are available to this process; {instead}"
        )


def _left(version: int, group: Path) -> int | None:
    limit, used, prefix = _FILES[version]
    most, now = read(group / limit), read(group / used)
    if not (most.isdigit() and now.isdigit()):
        return None
    stat = _fields(read(group / "memory.stat"))
    return max(0, int(most) - int(now) + sum(stat.get(prefix + name, 0) for name in _RECLAIMED))


def _fields(text: str) -> dict[str, int]:
    """Parse lines like "name 123" or "name: 123 kB"."""
    pairs = (line.split()[:2] for line in text.splitlines())
    return {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].isdigit()}
