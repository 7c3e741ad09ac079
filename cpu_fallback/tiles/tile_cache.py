"""The tile cache: packed weights on disk, in files named by what they were packed from.

It is off unless CLOCHER_TILE_CACHE_MB gives it room: packing is at least as fast as finding out
which file would do, since that takes a hash of the same bytes. It pays where weights have to be
packed by something slower than this machine.

A file is a header (a magic number and a hash of what follows) and the tiles. Files appear by
rename, so a process sees a whole file or none. Processes that want tiles at the same time wait for
the one that packs them. A file is mapped, not copied: they have its pages in memory once. What is
truncated or damaged does not fit its header, and is packed again. When the files together are
larger than the limit, those used least recently go.

Packing many tensors at once: what binding asks for is packed while binding goes on.

Inside of `packing` a thread queues the parts of each tensor, and all CPUs work at them, without
waiting between tensors. At the end of `packing` all are done.
"""

import fcntl
import hashlib
import logging
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.lanes.objects import (
    cache_root,
    locked,
    open_private,
    private_directory,
    replacing,
)
from cpu_fallback.team.placement import usable_cpus
from cpu_fallback.tiles.layout import SIGNED, Layout

Part = Callable[[], None]
Made = TypeVar("Made")


@dataclass(frozen=True)
class _Job:
    """A tensor that is being packed."""

    nbytes: int  # of the tensor, as it is stored
    parts: Sequence[Future[None]]  # its parts, some of them done
    failed: Callable[[], None]  # called if they never all will be


@dataclass
class Together:
    """The tensors that a thread has queued."""

    pool: ThreadPoolExecutor  # what works at them
    jobs: list[_Job] = field(default_factory=list)  # in the order in which they were asked for
    queued: int = 0  # bytes of their tensors
    # set when all are packed, or given up
    ended: threading.Event = field(default_factory=threading.Event)

    def add(
        self,
        parts: Sequence[Part],
        nbytes: int,
        done: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        """Queue the parts of a tensor of so many stored bytes.

        `done` is called by a thread of the pool after the last part, `failed` if that never comes.
        """
        lock, left = threading.Lock(), len(parts)

        def work(part: Part) -> None:
            nonlocal left
            part()
            with lock:
                left -= 1
                is_last = not left
            if is_last:
                done()

        futures = [self.pool.submit(work, part) for part in parts]
        self.jobs.append(_Job(nbytes, futures, failed))
        self.queued += nbytes


class _Here(threading.local):
    together: Together | None = None


_here = _Here()


def current() -> Together | None:
    """Return what this thread's tensors are queued in; None outside of `packing`."""
    return _here.together


@contextmanager
def packing(report: Callable[[int], None]) -> Iterator[Together]:
    """Pack in the background what this thread asks for inside, and wait for it at the end.

    `report` gets the stored bytes of each tensor when it is packed.
    """
    with ThreadPoolExecutor(usable_cpus()) as pool:
        together = _here.together = Together(pool)
        try:
            yield together
            _here.together = None
            while together.jobs:
                job = together.jobs[0]
                for part in job.parts:
                    part.result()
                report(job.nbytes)
                del together.jobs[0]
        except BaseException:  # an interrupt too: tiles that are not whole must not be found later
            pool.shutdown(wait=True, cancel_futures=True)
            for job in together.jobs:
                job.failed()
            raise
        finally:
            _here.together = None
            together.ended.set()


def run(parts: Sequence[Callable[[], Made]]) -> list[Made]:
    """Work at the parts of one tensor on all CPUs; return what they return."""
    if len(parts) < 2 or usable_cpus() == 1:
        return [part() for part in parts]
    with ThreadPoolExecutor(usable_cpus()) as pool:
        return [future.result() for future in [pool.submit(part) for part in parts]]


LIMIT_VARIABLE = "CLOCHER_TILE_CACHE_MB"

_log = logging.getLogger(__name__)
_NAME = "tiles"
_MAGIC = b"clocher tiles 2\n"
_DIGEST_BYTES = 32
_HEADER = 4096  # so that tiles begin on a page: kernels read them where they are mapped
_CHUNK = 4 << 20

_given_up: set[Path] = set()  # Directories that this process does not use any more


@dataclass(frozen=True)
class TileCache:
    """Packed tensors by the hash of what they were packed from; `limit` is bytes of all files.

    A cache that cannot be read or written, or that others can write, costs time and never a result.
    """

    root: Path
    limit: int

    @property
    def directory(self) -> Path:
        """Where the files are."""
        return self.root / _NAME

    @classmethod
    def get(cls) -> "TileCache | None":
        """Return the cache that the environment asks for, None for none. Raises UsageError."""
        raw = os.environ.get(LIMIT_VARIABLE) or "0"
        if not re.fullmatch("[0-9]{1,9}", raw):
            raise UsageError(
                f"{LIMIT_VARIABLE}: got {raw[:60]!r}, expected MiB as an integer from 0 (off)"
            )
        root = cache_root() if int(raw) else None
        return None if root is None else cls(root, int(raw) << 20)

    def read(self, key: str, nbytes: int) -> np.ndarray | None:
        """Return the tiles of a key, mapped, u8 [nbytes]; None if there are none or damaged ones.

        They are read-only, and begin on a page.
        """
        if self.directory in _given_up:
            return None
        try:
            path = private_directory(self.root, _NAME) / f"{key}.tiles"
            with open(open_private(path, os.O_RDONLY), "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != _HEADER + nbytes:
                    return None
                mapped = mmap.mmap(file.fileno(), _HEADER + nbytes, prot=mmap.PROT_READ)
            whole = np.frombuffer(mapped, np.uint8)
            tiles = whole[_HEADER:]
            if whole[:_HEADER].tobytes() != _header(tiles):
                _log.warning("%s is damaged; its tensor is packed again", path)
                return None
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._give_up("read", error)
            return None
        return tiles

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from packing meanwhile; one that waits too long packs, too."""
        with ExitStack() as held:
            if self.directory not in _given_up:
                with suppress(OSError):  # then two pack: it costs time and never a result
                    directory = private_directory(self.root, _NAME, create=True)
                    held.enter_context(locked(directory / ".packing"))
            yield

    def write(self, key: str, data: np.ndarray) -> None:
        """Store tiles, u8, and make room for them."""
        if _HEADER + data.nbytes > self.limit or self.directory in _given_up:
            return
        try:
            directory = private_directory(self.root, _NAME, create=True)
            path, lock = directory / f"{key}.tiles", directory / ".lock"
            header = _header(data)
            with ExitStack() as writing:
                with locked(lock):
                    file = writing.enter_context(replacing(path))
                    fcntl.flock(file, fcntl.LOCK_EX)  # `_tidy` knows by it that we live
                file.write(header)
                file.write(data.data)
        except OSError as error:
            self._give_up("store", error)
            return
        with suppress(OSError), locked(lock):  # else the next one makes room
            self._tidy(path)

    def _give_up(self, what: str, error: OSError) -> None:
        """Leave the directory alone from now on: the next tensor would not fare better."""
        _given_up.add(self.directory)
        _log.warning("could not %s packed weights in %s: %s", what, self.directory, error)

    def _tidy(self, keep: Path) -> None:
        """Remove what dead writers left behind, then the files used least recently."""
        for left in keep.parent.glob(".*.*"):
            with suppress(OSError), open(open_private(left, os.O_RDONLY), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error if its writer lives
                left.unlink()
        files = [(path.lstat(), path) for path in keep.parent.glob("*.tiles")]
        total = sum(status.st_size for status, _ in files)
        for status, path in sorted(files, key=lambda found: found[0].st_mtime_ns):
            if total > self.limit and path != keep:
                path.unlink(missing_ok=True)
                total -= status.st_size


def key_of(layout: Layout, tensor: QuantTensor, version: int) -> str:
    """Return a name for all that determines the tiles of a tensor: 64 hexadecimal digits.

    Of the instruction set tiles depend on no more than whether bytes are signed.
    """
    planes = {name: np.ascontiguousarray(array) for name, array in sorted(tensor.planes.items())}
    stored = [(name, array.dtype.str, array.shape) for name, array in planes.items()]
    described = repr((version, SIGNED, layout, tensor.format.name, tensor.shape, stored)).encode()
    return _combine([described, *(hash_of(array) for array in planes.values())]).hex()


def _header(tiles: np.ndarray) -> bytes:
    return (_MAGIC + hash_of(tiles)).ljust(_HEADER, b"\0")


def hash_of(array: np.ndarray) -> bytes:
    """Return a hash of the bytes of a contiguous array, computed on all CPUs."""
    data = array.reshape(-1).view(np.uint8).data
    chunks = (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK))
    return _combine(run([partial(_hash, chunk) for chunk in chunks]))


def _hash(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _combine(digests: Sequence[bytes]) -> bytes:
    """Return a hash of several strings that no other several strings have."""
    return _hash(b"".join(len(digest).to_bytes(8, "little") + digest for digest in digests))
