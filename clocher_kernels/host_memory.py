"""How much memory this process may still take, and the refusal to take more.

A process that goes beyond the limit of its control group is killed, without a word, by a signal
that it cannot catch. So whoever is about to take much memory asks here first.
"""

from pathlib import Path

from clocher_kernels.cgroups import ROOT, groups, read
from clocher_kernels.errors import OutOfMemory

_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
_RECLAIMED = ("inactive_file", "active_file")
"""What counts as used by a group and is given up before anybody is killed: the page cache."""


def available(root: Path = ROOT) -> int | None:
    """Return the bytes that can be taken, None where nothing says so.

    It is what the machine has available (`MemAvailable`), or what the limits of the control groups
    of this process leave, whichever is less.

    Args:
        root: root of the file system; tests pass a recorded tree.
    """
    known = [_left(version, group) for version, group in groups("memory", root)]
    kib = _fields(read(root / "proc/meminfo")).get("MemAvailable:")
    known.append(None if kib is None else kib << 10)
    return min((nbytes for nbytes in known if nbytes is not None), default=None)


def require(nbytes: int, what: str, instead: str, root: Path = ROOT) -> None:
    """Refuse to take what is not there.

    Args:
        nbytes: to be taken.
        what: what for, as the beginning of a sentence: "packed weights need".
        instead: what to do about it.
        root: root of the file system; tests pass a recorded tree.

    Raises:
        OutOfMemory: the machine, or a control group, has less.
    """
    left = available(root)
    if left is not None and nbytes > left:
        raise OutOfMemory(
            f"{what} {nbytes >> 20} MiB, {left >> 20} MiB are available to this process; {instead}"
        )


def _left(version: int, group: Path) -> int | None:
    """Return what the limit of a group leaves; None without one."""
    limit, used, prefix = _FILES[version]
    most, now = read(group / limit), read(group / used)
    if not (most.isdigit() and now.isdigit()):
        return None
    stat = _fields(read(group / "memory.stat"))
    return max(0, int(most) - int(now) + sum(stat.get(prefix + name, 0) for name in _RECLAIMED))


def _fields(text: str) -> dict[str, int]:
    """Return the numbers of lines like "name 123" or "name: 123 kB"."""
    pairs = (line.split()[:2] for line in text.splitlines())
    return {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].isdigit()}
