"""Files that no other user can have written: what the caches of the CPU back end are made of.

Machine code from a cache is run as it is, and a hash in a file does not show who wrote it. So every
directory on the way to a cache, the cache itself and each of its files must belong to this user, to
root or to the owner of `/`, and no other user may be able to write them; in a directory on the way
the sticky bit is enough. Nothing here
waits without end: a pipe is no file, and a lock is given up.
"""

import errno
import fcntl
import math
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_SECONDS = 60.0
"""How long a lock is waited for. It is held while one kernel is compiled or a file renamed."""

_PAUSE = 0.02
_MAX_LINKS = 40
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def private_directory(root: Path, *names: str, create: bool = False) -> Path:
    """Return the real path of root/names, once it is sure that no other user can change it.

    Symbolic links on the way to `root` are followed, as each of them lies in a directory that was
    checked before; the names below it must be none.

    Args:
        root: where caches are; its parents are checked too.
        names: directories below it.
        create: make what is missing, for this user only.

    Raises:
        OSError: it is not there, cannot be made or searched, or another user could write it;
            `strerror` says which, `filename` where.
    """
    here = Path("/") if root.is_absolute() else Path(os.getcwd())
    for directory in (*reversed(here.parents), here):
        _check(directory, os.lstat(directory))
    todo = [*reversed(names), *reversed(os.fspath(root).split("/"))]
    links = 0
    while todo:
        name = todo.pop()
        if name in ("", ".", ".."):
            here = here.parent if name == ".." else here
            continue
        path = here / name
        status = _lstat(path, create)
        if stat.S_ISLNK(status.st_mode) and len(todo) >= len(names) and links < _MAX_LINKS:
            links += 1
            target = os.readlink(path)
            here = Path("/") if target.startswith("/") else here
            todo += reversed(target.split("/"))
            continue
        _check(path, status)
        here = path
    if os.lstat(here).st_mode & _BY_OTHERS:
        raise _refusal("others can write it: chmod go-w", here)  # whatever its sticky bit says
    return here


def open_private(path: Path, flags: int) -> int:
    """Open a regular file that no other user can write, and return its descriptor.

    A file that is made is for this user only. Its directory is a private one.

    Raises:
        OSError: it cannot be opened, or it is a link or a pipe, or another user can write it.
    """
    safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # without the second a pipe would hang here
    descriptor = os.open(path, flags | safe, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refusal("not a regular file", path)
        _check_owner(path, status)
        if status.st_mode & _BY_OTHERS:
            raise _refusal("others can write it: chmod go-w", path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(path: Path, seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Keep other processes out by a lock on a file, which is made if need be.

    Raises:
        OSError: the file cannot be opened; TimeoutError, another process keeps the lock.
    """
    lock = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        _wait(lock, path, seconds)
        yield
    finally:
        os.close(lock)


def _wait(lock: int, path: Path, seconds: float) -> None:
    pause = threading.Event()
    for _ in range(math.ceil(seconds / _PAUSE)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pause.wait(_PAUSE)
    raise TimeoutError(errno.ETIMEDOUT, f"locked by another process for {seconds:g} s", str(path))


def _lstat(path: Path, create: bool) -> os.stat_result:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        if not create:
            raise
    path.mkdir(mode=0o700, exist_ok=True)  # another process may be as fast
    return os.lstat(path)


def _check(path: Path, status: os.stat_result) -> None:
    """Raise unless no other user can replace what lies in a directory on the way."""
    if stat.S_ISLNK(status.st_mode):
        raise _refusal("a symbolic link inside the cache, which is not followed", path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
    _check_owner(path, status)
    if status.st_mode & _BY_OTHERS and not status.st_mode & stat.S_ISVTX:
        raise _refusal("others can write it: chmod go-w", path)


def _check_owner(path: Path, status: os.stat_result) -> None:
    # Root, and the owner of `/` where root is another user's number, can do anything anyway.
    if status.st_uid not in (os.geteuid(), 0, os.lstat("/").st_uid):
        raise _refusal(f"it belongs to user {status.st_uid}", path)


def _refusal(reason: str, path: Path) -> PermissionError:
    return PermissionError(errno.EPERM, reason, str(path))
