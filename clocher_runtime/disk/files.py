"""Opening and mapping model files: regular files only, of known size, read-only.

Lost pages of a mapped file (truncated, or the disk failed) raise SIGBUS, inside compiled kernels
too, where no exception is possible. Commands therefore install `ending_on_lost_pages`; the Python
API leaves SIGBUS alone.
"""

import ctypes
import hashlib
import mmap
import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self
from weakref import WeakSet

import numpy as np

from clocher_kernels import guards
from clocher_kernels.errors import FormatError, ModelChanged, ModelError, ModelNotFound, UsageError
from clocher_kernels.formats.base import Plane
from clocher_kernels.guards import refuse_in_window
from clocher_runtime.exit_codes import ExitCode

_SA_SIGINFO = 4
_ADDRESS_OFFSET = 16
_STEP = 1 << 22
# Whole: the bytes of a weight may begin with anything.
_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/\S+\noid \S+\nsize \d+\n")
_MAX_POINTER_BYTES = 1024
_WRITTEN = "it was written to"
_READ_BYTES, _PROBES = 8 << 20, 16
_ENDS, _SAMPLES = 16, 256
"""Pages compared after a file's times changed: of each end, and in between."""
_LEAVE = "leave the files of a model alone while it is in use, and load it again"


_MAPPED: WeakSet["MappedFile"] = WeakSet()
"""Live mappings."""


def check_all_mapped() -> None:
    """Check every mapped model file; see `MappedFile.check_unchanged`."""
    for mapped in list(_MAPPED):
        mapped.check_unchanged()


@contextmanager
def open_regular(path: Path, follow: bool = True) -> Iterator[int]:
    """Yield a regular file's read descriptor; `follow` allows a symbolic link."""
    refuse_in_window("read a model file")
    try:
        # Without O_NONBLOCK a pipe in place of the file would hang here.
        links = 0 if follow else os.O_NOFOLLOW
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | links)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFound(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ModelError(f"{path}: not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_bytes(path: Path, limit: int, follow: bool = True) -> bytes:
    """Return a file of at most `limit` bytes; `follow` as in `open_regular`."""
    with open_regular(path, follow) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise FormatError(f"{path}: {size} bytes; the limit for this file is {limit}")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            data = file.read(size)
    _refuse_pointer(data, path)
    return data


def read_text(path: Path) -> str:
    """Return a text of the user. Raises UsageError, OSError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8: {error}") from None


def _refuse_pointer(head: bytes, path: Path) -> None:
    """Refuse a Git LFS pointer."""
    if _POINTER.match(head):
        raise ModelNotFound(
            f"{path}: a git-lfs pointer, not the file itself; run `git lfs pull` in its directory"
        )


class MappedFile(mmap.mmap):
    """A file mapped read-only, which lives as long as views of it."""

    path: Path
    nbytes: int
    _absolute: str
    _opened: os.stat_result
    _mtime_ns: int  # at which the content was that of the mapping
    _address: int
    _digest = ""

    def __new__(cls, path: Path, nbytes: int | None = None) -> Self:
        """Map a file of `nbytes`, if given. Raises ModelError, ModelNotFound, FormatError."""
        with open_regular(path) as descriptor:
            found = os.fstat(descriptor)
            size = found.st_size
            if size == 0 or nbytes not in (None, size):
                raise FormatError(
                    f"{path}: {size} bytes, expected {nbytes or 'some'}; the file is truncated or "
                    "belongs to another model"
                )
            try:
                self = super().__new__(cls, descriptor, size, access=mmap.ACCESS_READ)
            except OSError as error:
                raise ModelError(f"{path}: cannot be mapped: {error}") from None
        self.path, self.nbytes = path, size
        self._absolute, self._opened = os.path.abspath(path), found
        self._mtime_ns = found.st_mtime_ns
        self._address = int(self.bytes(0, size).ctypes.data)
        if size <= _MAX_POINTER_BYTES:
            _refuse_pointer(self[:], path)
        _MAPPED.add(self)
        return self

    def bytes(self, start: int, stop: int) -> np.ndarray:
        """Return a read-only view of a range of bytes, u8."""
        return np.frombuffer(self, np.uint8)[start:stop]

    def plane(self, plane: Plane, offset: int) -> np.ndarray:
        """Return a read-only view of a stored array whose range was checked."""
        data = self.bytes(offset, offset + plane.nbytes)
        return data.view(plane.storage).reshape(plane.shape)

    def holds(self, address: int) -> bool:
        """Return whether an address is in the mapping's pages."""
        end = self._address + self.nbytes + -self.nbytes % mmap.PAGESIZE
        return self._address <= address < end

    def change(self) -> str | None:
        """Return how the file at the path differs from the mapped one, or None."""
        try:
            found = os.stat(self._absolute)
        except OSError as error:
            return f"it is gone: {error.strerror}"
        if not os.path.samestat(found, self._opened):
            return "another file has taken its place"
        if found.st_size != self.nbytes:
            return f"it has {found.st_size} bytes, it had {self.nbytes}"
        return None if found.st_mtime_ns == self._mtime_ns else _WRITTEN

    def remember(self) -> None:
        """Sample some pages, so that new times alone are no change from now on."""
        self._digest = self._sample()

    def check_unchanged(self) -> None:
        """Raise ModelChanged unless the path still names the mapped file with the same content.

        Compares size, time and inode; if only the time differs, sampled pages: 1 MiB and both ends.
        """
        change = self.change()
        if change == _WRITTEN and self._digest and self._sample() == self._digest:
            self._mtime_ns = os.stat(self._absolute).st_mtime_ns
            change = self.change()  # another file may have come meanwhile
        if change:
            raise ModelChanged(f"{self.path}: changed since it was loaded: {change}; {_LEAVE}")

    def _sample(self) -> str:
        pages = -(-self.nbytes // mmap.PAGESIZE)
        ends = {*range(_ENDS), *range(max(pages - _ENDS, 0), pages)}
        places = ends | {pages * i // _SAMPLES for i in range(_SAMPLES)}
        digest = hashlib.blake2b(digest_size=16)
        # Read, not mapped: a touched page maps its neighbours, which count as resident memory.
        with suppress(OSError), open(self._absolute, "rb", buffering=0) as file:
            for place in sorted(places):
                digest.update(os.pread(file.fileno(), mmap.PAGESIZE, place * mmap.PAGESIZE))
        return digest.hexdigest()

    def sha256(self, progress: Callable[[int], object] = lambda done: None, before: int = 0) -> str:
        """Return the SHA-256, dropping pages on the way; `progress` gets `before` + bytes done."""
        digest = hashlib.sha256()
        for number, piece in enumerate(byte_pieces(self.bytes(0, self.nbytes))):
            digest.update(piece)
            self.release()
            progress(before + number * _STEP)
        return digest.hexdigest()

    def release(self) -> None:
        """Let the kernel drop the resident pages; views stay valid."""
        self.madvise(mmap.MADV_DONTNEED)


def byte_pieces(array: np.ndarray) -> Iterator[memoryview]:
    """Yield the bytes of an array, 4 MiB at a time."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return (data[start : start + _STEP].data for start in range(0, len(data), _STEP))


def sha256_of(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def read_ahead(paths: Sequence[Path]) -> None:
    """Read files into the page cache in a thread, unless cached or too large (Linux)."""
    left = guards.available()
    if left is None or not hasattr(os, "RWF_NOWAIT"):
        return
    try:
        absent = [path for path in paths if not _is_cached(path)]
        if not absent or sum(os.path.getsize(path) for path in absent) > left // 2:
            return
    except (OSError, ModelError):
        return
    threading.Thread(target=_read_all, args=(absent,), name="clocher-reading", daemon=True).start()


def _is_cached(path: Path) -> bool:
    """Return whether evenly spread pages of a file are all in memory."""
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        for i in range(_PROBES):
            page = [bytearray(1)]
            try:
                os.preadv(descriptor, page, size * i // _PROBES, os.RWF_NOWAIT)
            except BlockingIOError:
                return False
    return True


def _read_all(paths: Sequence[Path]) -> None:
    block = bytearray(_READ_BYTES)
    with suppress(OSError, ModelError):
        for path in paths:
            with open_regular(path) as descriptor:
                while os.readv(descriptor, [block]):
                    pass


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux (glibc, musl)."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@contextmanager
def ending_on_lost_pages(report: Callable[[str], None]) -> Iterator[None]:
    """End the process with `ExitCode.MODEL` if a page of a model file is lost (Linux only).

    `report` gets the message in the thread that read the page; Python can run there, as such reads
    come from compiled code. Other SIGBUS keep their handler.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    before = _Action()
    ended: list[str] = []

    def handle(number: int, info: int, context: int) -> None:
        address = ctypes.c_void_p.from_address(info + _ADDRESS_OFFSET).value or 0
        mapped = next((each for each in list(_MAPPED) if each.holds(address)), None)
        if mapped is None:
            sigaction(signal.SIGBUS, ctypes.byref(before), None)  # and it happens again
            return
        reason = mapped.change() or "the disk failed"
        message = f"{mapped.path}: cannot be read any more: {reason}; {_LEAVE}"
        while ended:  # another thread is about to end the process
            signal.pause()
        ended.append(message)
        try:
            report(message)
        finally:
            os._exit(ExitCode.MODEL)

    handler = _Handler(handle)
    ours = _Action(handler=ctypes.cast(handler, ctypes.c_void_p), flags=_SA_SIGINFO)
    sigaction(signal.SIGBUS, ctypes.byref(ours), ctypes.byref(before))
    try:
        yield
    finally:
        sigaction(signal.SIGBUS, ctypes.byref(before), None)
