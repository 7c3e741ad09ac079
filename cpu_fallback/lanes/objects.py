"""The kernel cache: one object file per kernel in a directory named by what they were made from.

Files that no other user can have written: what the caches of the CPU back end are made of.

Machine code from a cache is run as it is, and a hash in a file does not show who wrote it. So every
directory on the way to a cache, the cache itself and each of its files must belong to this user, to
root or to the owner of `/`, and no other user may be able to write them; in a directory on the way
the sticky bit is enough. Nothing here waits without end: a pipe is no file, and a lock is given up.
"""

import errno
import fcntl
import functools
import hashlib
import logging
import math
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import llvmlite

from clocher_kernels import ops
from cpu_fallback.lanes.isa import CURRENT

WAIT_SECONDS = 60.0
"""How long a lock is waited for. It is held while one kernel is compiled or a file renamed."""

_PAUSE = 0.02
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def private_directory(root: Path, *names: str, create: bool = False) -> Path:
    """Return the real path of root/names, once it is sure that no other user can change it.

    Symbolic links on the way to `root`, where caches are, are followed, and its parents checked
    too; the names below it must be no links. `create`: make what is missing, for this user only.
    Raises OSError: `strerror` says what is wrong, `filename` where.
    """
    # What links lead to is checked, and cannot be replaced then.
    path = Path(os.path.realpath(root), *names)
    for directory in (*reversed(path.parents), path):
        _check(directory, _lstat(directory, create))
    if os.lstat(path).st_mode & _BY_OTHERS:
        raise _refusal("others can write it: chmod go-w", path)  # whatever its sticky bit says
    return path


def open_private(path: Path, flags: int) -> int:
    """Open a regular file that no other user can write; return its descriptor. Raises OSError.

    A file that is made is for this user only. Its directory is a private one.
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
    """Keep other processes out by a lock on a file, which is made if need be. Raises OSError."""
    lock = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        _wait(lock, path, seconds)
        yield
    finally:
        os.close(lock)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file that takes the place of another at the end, or vanishes. Raises OSError."""
    temporary = path.parent / f".{path.stem}.{os.getpid()}"
    try:
        temporary.unlink(missing_ok=True)  # of another process that had this number
        with open(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


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


_log = logging.getLogger(__name__)
_DIGEST = hashlib.sha256().digest_size


class ObjectCache:
    """Object files by kernel name, in a directory that no other user can write.

    Where there is no such directory, kernels are compiled again in every process, and stay in its
    memory; a warning is logged once.
    """

    _instance: "ObjectCache | None" = None

    def __init__(self, root: Path | None) -> None:
        self.directory = None if root is None else root / "kernels" / fingerprint()
        self._readable = self._writable = root is not None
        self._real: Path | None = None

    @classmethod
    def get(cls) -> "ObjectCache":
        """Return the cache of this process."""
        if cls._instance is None:
            cls._instance = cls(cache_root())
        return cls._instance

    def read(self, name: str) -> bytes | None:
        """Return the object file of a kernel, or None if there is none or it cannot be trusted."""
        directory = self._checked(create=False)
        if directory is None:
            return None
        try:
            descriptor = open_private(directory / f"{name}.o", os.O_RDONLY)
            with open(descriptor, "rb", buffering=0) as file:
                stored = file.readall()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s is compiled again: %s: %s", name, error.filename, error.strerror)
            return None
        digest, code = stored[:_DIGEST], stored[_DIGEST:]
        return code if hashlib.sha256(code).digest() == digest else None

    def write(self, name: str, code: bytes) -> None:
        """Store the object file of a kernel; a full disk costs the next process a compilation."""
        directory = self._checked(create=True)
        if directory is None:
            return
        try:
            with replacing(directory / f"{name}.o") as file:
                file.write(hashlib.sha256(code).digest() + code)
        except OSError as error:
            self._give_up(error)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from compiling for the same cache, as far as they can be."""
        directory = self._checked(create=True)
        with ExitStack() as held:
            if directory is not None:
                try:
                    held.enter_context(locked(directory / ".lock"))
                except OSError as error:
                    self._give_up(error)
            yield

    def _checked(self, create: bool) -> Path | None:
        """Return the real path of the directory; None if it is not there, or not private."""
        if self.directory is None or not (self._writable if create else self._readable):
            return None
        if self._real is not None and not create:
            return self._real
        root, *names = self.directory.parents[1], *self.directory.parts[-2:]
        try:
            self._real = private_directory(root, *names, create=create)
            return self._real
        except OSError as error:
            if create or not isinstance(error, FileNotFoundError):
                # What others can write is not read either; what only cannot be made is not there.
                self._readable = False
                self._give_up(error)
            return None

    def _give_up(self, error: OSError) -> None:
        """Store nothing more, and say so."""
        if self._writable:
            self._writable = False
            _log.warning(
                "kernels are compiled again in each process, for the cache %s cannot be used: "
                "%s: %s; set CLOCHER_CACHE_DIR to a directory of your own",
                self.directory,
                error.filename or "writing",
                error.strerror,
            )


def cache_root() -> Path | None:
    """Return the directory that holds Clocher's caches: $CLOCHER_CACHE_DIR if set.

    Without it, without $XDG_CACHE_HOME and without a home directory there is none; a warning is
    logged once.
    """
    wanted = os.environ.get("CLOCHER_CACHE_DIR")
    if wanted:
        root = os.path.expanduser(wanted)
        if root.startswith("~"):
            return _nowhere(f"CLOCHER_CACHE_DIR is {wanted!r}, a home directory that is not known")
        return Path(root)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # to be ignored, says the XDG specification
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "clocher" if os.path.isabs(base) else _nowhere("no home directory")


@functools.cache
def _nowhere(why: str) -> None:
    _log.warning("nothing is cached: %s; set CLOCHER_CACHE_DIR to a directory of your own", why)


def fingerprint() -> str:
    """Return a name for what determines machine code: sources, versions and ISA."""
    digest = hashlib.sha256()
    kernels = Path(ops.__file__).parents[1]  # whose contracts and blocks of bits kernels read
    for folder in (Path(__file__).parents[1], kernels / "ops", kernels / "formats"):
        for source in sorted(folder.rglob("*.py")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    versions = (sys.version, _numba_version(), llvmlite.__version__, sys.platform)
    digest.update(repr((versions, os.uname().machine, CURRENT)).encode())
    return f"{CURRENT.name}-{digest.hexdigest()[:16]}"


def _numba_version() -> bytes:
    """Return the file that says which Numba there is; importing it for that would be slow."""
    for place in sys.path:
        with suppress(OSError):
            return Path(place, "numba", "_version.py").read_bytes()
    import numba

    return str(numba.__version__).encode()
