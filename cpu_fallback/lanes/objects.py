"""The kernel cache: one object file per kernel in a directory named by what they were made from."""

import functools
import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import llvmlite

from clocher_kernels import ops
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.private_files import locked, open_private, private_directory

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
        directory = self._checked(create=True) if self._writable else None
        if directory is None:
            return
        temporary = directory / f".{name}.{os.getpid()}"
        try:
            temporary.unlink(missing_ok=True)  # of another process that had this number
            with open(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(directory / f"{name}.o")
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._give_up(error)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from compiling for the same cache, as far as they can be."""
        directory = self._checked(create=True) if self._writable else None
        with ExitStack() as held:
            if directory is not None:
                try:
                    held.enter_context(locked(directory / ".lock"))
                except OSError as error:
                    self._give_up(error)
            yield

    def _checked(self, create: bool) -> Path | None:
        """Return the real path of the directory; None if it is not there, or not private."""
        if self.directory is None or not self._readable:
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
    # Kernels read records that the contracts of the ops lay out.
    for folder in (Path(__file__).parents[1], Path(ops.__file__).parent):
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
