"""What is checked before costly actions: no timed window is open, and memory suffices."""

import ctypes
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from clocher_kernels.errors import OutOfMemory, WindowError

_open_window: str | None = None


def open_window(name: str) -> None:
    """Mark a timed window as open; WindowError if one is: windows never nest."""
    global _open_window
    if _open_window is not None:
        raise WindowError(
            f"timed window {name!r} opened inside {_open_window!r}; windows never nest: "
            "close the outer one first"
        )
    _open_window = name


def close_window() -> None:
    """Mark the timed window as closed."""
    global _open_window
    _open_window = None


def refuse_in_window(action: str) -> None:
    """Raise WindowError if a window is open; `action` is a phrase: "compile a kernel"."""
    if _open_window is not None:
        raise WindowError(
            f"refused to {action} while the timed window {_open_window!r} is open; "
            "do it before the window (warm up first)"
        )


ROOT = Path("/")


def groups(controller: str, root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """Yield the (cgroup version, directory) of this process's group and its ancestors.

    The limits of all apply; a directory may be missing. In most containers the mounted root is the
    group. `controller` is version 1's name, such as "cpu".
    """
    mounts = root / "sys/fs/cgroup"
    for line in read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from ((2, group) for group in _ancestors(mounts, path))
        elif controller in controllers.split(","):
            for mount in dict.fromkeys((mounts / controllers, mounts / controller)):
                yield from ((1, group) for group in _ancestors(mount, path))


def read(path: Path) -> str:
    """Return the text of a small kernel file, "" if it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _ancestors(mount: Path, path: str) -> Iterator[Path]:
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
_RECLAIMED = ("inactive_file", "active_file")
"""Page cache: counted as used by a group, but reclaimed before processes are killed."""


def available(root: Path = ROOT) -> int | None:
    """Return the allocatable bytes, by `MemAvailable` and cgroup limits; None if unknown."""
    known = [_left(version, group) for version, group in groups("memory", root)]
    kib = fields(read(root / "proc/meminfo")).get("MemAvailable:")
    known.append(None if kib is None else kib << 10)
    return min((nbytes for nbytes in known if nbytes is not None), default=None)


def unused(root: Path = ROOT) -> int:
    """Return the bytes of memory that hold nothing, no page cache either; 0 if unknown."""
    return fields(read(root / "proc/meminfo")).get("MemFree:", 0) << 10


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
    stat = fields(read(group / "memory.stat"))
    return max(0, int(most) - int(now) + sum(stat.get(prefix + name, 0) for name in _RECLAIMED))


def fields(text: str) -> dict[str, int]:
    """Parse lines like "name 123" or "name: 123 kB"."""
    pairs = (line.split()[:2] for line in text.splitlines())
    return {p[0]: int(p[1]) for p in pairs if len(p) == 2 and p[1].isdigit()}


def no_driver() -> str:
    """Return why there is no GPU driver or device, else ""; needs no torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver on this machine (libcuda.so.1 is missing)"
    status = driver.cuInit(0)
    if status:
        return f"the NVIDIA driver does not start (cuInit returned {status})"
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no GPU"
    return ""
