"""The control groups of this process, as the kernel's files describe them."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

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
