"""The kernel cache: one object file per kernel in a directory named by what they were made from."""

import fcntl
import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llvmlite
import numba

from cpu_fallback.isa import CURRENT

_log = logging.getLogger(__name__)
_DIGEST = hashlib.sha256().digest_size


class ObjectCache:
    """Object files by kernel name.

    A directory that cannot be written is read if it can be; what it lacks is then compiled again in
    every process, and a warning is logged.
    """

    _instance: "ObjectCache | None" = None

    def __init__(self, root: Path) -> None:
        self.directory = root / "kernels" / fingerprint()
        self._writable = True

    @classmethod
    def get(cls) -> "ObjectCache":
        """Return the cache of this process."""
        if cls._instance is None:
            cls._instance = cls(cache_root())
        return cls._instance

    def read(self, name: str) -> bytes | None:
        """Return the object file of a kernel, or None if there is none or it is damaged."""
        try:
            stored = (self.directory / f"{name}.o").read_bytes()
        except OSError:
            return None
        digest, code = stored[:_DIGEST], stored[_DIGEST:]
        return code if hashlib.sha256(code).digest() == digest else None

    def write(self, name: str, code: bytes) -> None:
        """Store the object file of a kernel; a full disk costs the next process a compilation."""
        if not self._writable:
            return
        temporary = self.directory / f".{name}.{os.getpid()}"
        try:
            with open(temporary, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.directory / f"{name}.o")
        except OSError as error:
            temporary.unlink(missing_ok=True)
            _log.warning("could not store the kernel %s: %s", name, error.strerror)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from compiling for the same cache."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            self._writable = False
            _log.warning(
                "kernels are compiled again in each process: the cache %s cannot be written (%s); "
                "set CLOCHER_CACHE_DIR to a directory that can",
                self.directory,
                error.strerror,
            )
            yield
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def cache_root() -> Path:
    """Return the directory that holds Clocher's caches: $CLOCHER_CACHE_DIR if set."""
    if wanted := os.environ.get("CLOCHER_CACHE_DIR"):
        return Path(wanted).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "clocher"


def fingerprint() -> str:
    """Return a name for what determines machine code: sources, versions and ISA."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    versions = (sys.version, numba.__version__, llvmlite.__version__, sys.platform)
    digest.update(repr((versions, os.uname().machine, CURRENT)).encode())
    return f"{CURRENT.name}-{digest.hexdigest()[:16]}"
