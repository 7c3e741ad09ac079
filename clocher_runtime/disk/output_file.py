"""Writing files: hashed, locked, atomic, and resumable from a partial file with a journal."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from clocher_kernels.errors import ClocherError, DeviceError, FormatError, ModelError, UsageError
from clocher_runtime.disk.files import byte_pieces, check_all_mapped, read_bytes
from clocher_runtime.disk.strict_json import parse_object

_STEP = 1 << 22
_FLUSH_BYTES = 1 << 26
_MAX_JOURNAL_BYTES = 1 << 30
PARTIAL = ".partial"


class OutputFile:
    """An append-only file, locked until closed; other threads hash and flush."""

    def __init__(self, path: Path) -> None:
        """Open or make a file; its content stays until the first `write` or `sync`."""
        self.path = path
        self.nbytes = 0
        self._descriptor = open_locked(path)
        self.digest = hashlib.sha256()  # of the bytes so far
        self._threads = ThreadPoolExecutor(3)
        self._flush: Future[None] | None = None
        self._dirty = 0
        self._cut = False

    def write(self, array: np.ndarray) -> str:
        """Append the bytes of an array and return their SHA-256."""
        self._cut_off()
        return self._hashed(self._written(piece) for piece in byte_pieces(array))

    def pad(self, nbytes: int) -> None:
        """Append zeros up to a size, if the file is smaller."""
        self.write(np.zeros(max(nbytes - self.nbytes, 0), np.uint8))

    def take(self, offset: int, nbytes: int, expected: str) -> bool:
        """Skip a plane that the file has here, after zeros; return whether its SHA-256 is right."""
        gap, end = offset - self.nbytes, offset + nbytes
        padding = self._read(self.nbytes, gap)
        self.digest.update(padding)
        pieces = (self._read(at, min(_STEP, end - at)) for at in range(offset, end, _STEP))
        self.nbytes = end
        return padding == bytes(gap) and self._hashed(pieces) == expected

    def sync(self) -> str:
        """Flush to the disk; return the SHA-256 of the file."""
        self._cut_off()
        if self._flush:
            self._flush.result()
        os.fsync(self._descriptor)
        return self.digest.hexdigest()

    def close(self) -> None:
        """Close the file and let other writers in."""
        self._threads.shutdown()
        os.close(self._descriptor)

    def _cut_off(self) -> None:
        """Drop an earlier writer's bytes behind those that were kept."""
        if not self._cut:
            if os.fstat(self._descriptor).st_size != self.nbytes:
                os.ftruncate(self._descriptor, self.nbytes)
            os.lseek(self._descriptor, self.nbytes, os.SEEK_SET)
            self._cut = True

    def _hashed(self, pieces: Iterable[memoryview]) -> str:
        one = hashlib.sha256()
        last: list[Future[None]] = []
        for piece in pieces:  # which is read or written while the last one is hashed
            for each in last:
                each.result()
            last = [self._threads.submit(each.update, piece) for each in (one, self.digest)]
        for each in last:
            each.result()
        return one.hexdigest()

    def _written(self, piece: memoryview) -> memoryview:
        write_all(self._descriptor, piece, self.path)
        self.nbytes += len(piece)
        self._dirty += len(piece)
        if self._dirty >= _FLUSH_BYTES and (self._flush is None or self._flush.done()):
            if self._flush:
                self._flush.result()
            # Else the disk idles until the end, and the last flush waits for everything.
            self._flush = self._threads.submit(os.fdatasync, self._descriptor)
            self._dirty = 0
        return piece

    def _read(self, start: int, count: int) -> memoryview:
        return memoryview(os.pread(self._descriptor, count, start))


class Journal:
    """A partial file's finished entries as JSON lines, the first one naming the job.

    Lines are not flushed; readers verify the bytes. `add` drops the entries beyond `kept`.
    """

    def __init__(self, path: Path, job: str) -> None:
        """Read a job's journal; that of another job counts as empty."""
        self.path = path
        self._job = job
        self.entries = self._read()
        self.kept = 0
        self._descriptor: int | None = None

    def add(self, entry: dict[str, Any]) -> None:
        """Append an entry, first starting a new journal with those kept."""
        new = [entry]
        if self._descriptor is None:
            self._descriptor = open_new(self.path)
            new = [{"job": self._job}, *self.entries[: self.kept], entry]
        text = "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in new)
        write_all(self._descriptor, memoryview(text.encode()), self.path)

    def remove(self) -> None:
        """Close and delete the journal."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read(self) -> list[dict[str, Any]]:
        try:
            lines = read_bytes(self.path, _MAX_JOURNAL_BYTES, follow=False).split(b"\n")
        except ModelError:  # there is none, or what is there is no journal
            return []
        found = []
        # What follows the last line break was cut off.
        for line in lines[:-1]:
            try:
                found.append(parse_object(line, str(self.path)))
            except FormatError:
                break
        return found[1:] if found and found[0] == {"job": self._job} else []


class JsonlWriter:
    """Context manager for a locked JSONL file, renamed from FILE.partial at the end."""

    def __init__(self, path: Path, source: str) -> None:
        self.lines = 0
        self._path, self._source = path, source
        if os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path)):
            raise UsageError(f"{source}: {path} cannot be written: it is a link or no file")
        self.partial = path.with_name(path.name + PARTIAL)
        try:
            descriptor = open_locked(self.partial)
            if os.fstat(descriptor).st_size:  # what an earlier run had finished
                os.replace(self.partial, f"{self.partial}.old")
                os.close(descriptor)
                descriptor = open_locked(self.partial)
        except UsageError:
            raise UsageError(
                f"{source}: {path} is being written by another run, or for another flag; "
                "name another file"
            ) from None
        except OSError as error:
            raise self._refused(error) from None
        self._file = os.fdopen(descriptor, "w", encoding="ascii", newline="\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            with self._file:  # the lock is released last, after the rename
                self._file.flush()
                os.fsync(self._file.fileno())
                if error is None:
                    os.replace(self.partial, self._path)
                    sync_directory(self._path.parent)
                elif not self.lines:
                    self.partial.unlink()
        except OSError as failure:
            if error is None:
                raise self._refused(failure) from None

    def write(self, document: Mapping[str, Any]) -> None:
        """Append a line; raises UsageError, DeviceError if the disk is full."""
        try:
            self._file.write(f"{json.dumps(document, allow_nan=False)}\n")
        except OSError as error:
            raise self._refused(error) from None
        self.lines += 1

    def _refused(self, error: OSError) -> ClocherError:
        what = f"{self._source}: {self._path} cannot be written: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DeviceError(f"{what}; free some space, or name a file on another disk")
        return UsageError(f"{what}; name a file in a directory that exists and is writable")


def open_locked(path: Path) -> int:
    """Open or make a file for reading and writing, locked until closed."""
    # Without O_NONBLOCK a pipe of this name could hang this.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o666)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise OSError(
                errno.EEXIST, "a pipe, a device or a second name of a file; remove it", str(path)
            )
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A writer that finished in between has renamed the file that was opened.
        if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise BlockingIOError
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError | FileNotFoundError):
            raise UsageError(f"{path.parent}: another conversion is writing there") from None
        raise
    return descriptor


def open_new(path: Path) -> int:
    """Make a new file in place of whatever has its name, without following links."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write_all(descriptor: int, data: memoryview, path: Path) -> None:
    """Write everything; an OSError names the path."""
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError as error:
        if error.errno == errno.EFAULT:
            check_all_mapped()
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that replaces a path on success."""
    partial = path.with_name(path.name + PARTIAL)
    with os.fdopen(open_new(partial), "wb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    sync_directory(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically; an OSError names it."""
    with replacing(path) as file:
        write_all(file.fileno(), memoryview(data), path)


def check_free(path: Path, nbytes: int, reclaimed: int = 0) -> int:
    """Return the free bytes of a path's disk with `reclaimed`.

    Raises OSError if they are below `nbytes`, or nothing may be written there.
    """
    whole = Path(os.path.abspath(path))
    existing = next(place for place in (whole, *whole.parents) if place.is_dir())
    if not os.access(existing, os.W_OK):
        raise OSError(errno.EACCES, "nothing may be written there", str(existing))
    free = shutil.disk_usage(existing).free + reclaimed
    if nbytes > free:
        from rich.filesize import decimal

        short = decimal(nbytes - free)
        message = f"needs {decimal(nbytes)}, the disk has {decimal(free)} free: {short} too little"
        raise OSError(errno.ENOSPC, message, str(path))
    return free


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
