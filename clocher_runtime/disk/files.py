"""The one door to model files: regular files only, sizes known first, mapped read-only."""

import mmap
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from clocher_kernels.errors import FormatError, ModelChanged, ModelError, ModelNotFound
from clocher_kernels.formats.base import Plane
from clocher_kernels.guards import refuse_in_window

_LEAVE = "leave the files of a model alone while it is in use, and load it again"


@dataclass(frozen=True, slots=True)
class _Mapped:
    """What was mapped, where, and what the file's path said of it then."""

    path: Path
    absolute: str
    address: int
    nbytes: int
    inode: tuple[int, int]
    mtime_ns: int

    def change(self) -> str | None:
        """Return how what the path names differs from what was mapped; None: it does not."""
        try:
            found = os.stat(self.absolute)
        except OSError as error:
            return f"it is gone: {error.strerror}"
        if (found.st_dev, found.st_ino) != self.inode:
            return "another file has taken its place"
        if found.st_size != self.nbytes:
            return f"it has {found.st_size} bytes, it had {self.nbytes}"
        return None if found.st_mtime_ns == self.mtime_ns else "it was written to"

    def holds(self, address: int) -> bool:
        """Return whether a page of the file was mapped to an address."""
        end = self.address + self.nbytes + -self.nbytes % mmap.PAGESIZE
        return self.address <= address < end


_MAPPED: WeakKeyDictionary[mmap.mmap, _Mapped] = WeakKeyDictionary()
"""What is mapped now. A mapping outlives its `MappedFile` while there are views of it."""


def lost_page(address: int) -> str | None:
    """Return the message for a page that could not be read; None: it is no model file's."""
    for mapped in list(_MAPPED.values()):
        if mapped.holds(address):
            reason = mapped.change() or "the disk failed"
            return f"{mapped.path}: cannot be read any more: {reason}; {_LEAVE}"
    return None


def check_all_mapped() -> None:
    """Check every model file that is mapped now; see `MappedFile.check_unchanged`."""
    _check_unchanged(list(_MAPPED.values()))


def _check_unchanged(files: Iterable[_Mapped]) -> None:
    for mapped in files:
        if change := mapped.change():
            raise ModelChanged(f"{mapped.path}: changed since it was loaded: {change}; {_LEAVE}")


@contextmanager
def open_regular(path: Path, follow: bool = True) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor.

    Args:
        path: the file.
        follow: whether it may be a symbolic link.

    Raises:
        ModelNotFound: there is no such file.
        ModelError: it cannot be read, or it is a directory, a pipe or a device.
        WindowError: a timed window is open.
    """
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
    """Return the content of a file of at most `limit` bytes; `follow` is as in `open_regular`.

    Raises:
        ModelError: as `open_regular`.
        FormatError: the file is larger.
    """
    with open_regular(path, follow) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise FormatError(f"{path}: {size} bytes; the limit for this file is {limit}")
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(size)


class MappedFile:
    """A file mapped read-only. The mapping lives as long as a view of it does.

    Attributes:
        path: the file.
        nbytes: its size when it was mapped.
    """

    def __init__(self, path: Path, nbytes: int | None = None) -> None:
        """Map a file.

        Args:
            path: the file.
            nbytes: the size that it must have, where that is known.

        Raises:
            ModelError: as `open_regular`.
            FormatError: the file is empty or of another size.
        """
        with open_regular(path) as descriptor:
            found = os.fstat(descriptor)
            self.path = path
            self.nbytes = found.st_size
            if self.nbytes == 0 or nbytes not in (None, self.nbytes):
                raise FormatError(
                    f"{path}: {self.nbytes} bytes, expected {nbytes or 'some'}; the file is "
                    "truncated or belongs to another model"
                )
            try:
                self._map = mmap.mmap(descriptor, self.nbytes, access=mmap.ACCESS_READ)
            except OSError as error:
                raise ModelError(f"{path}: cannot be mapped: {error}") from None
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._mapped = _MAPPED[self._map] = _Mapped(
            path,
            os.path.abspath(path),
            _address(self._bytes),
            self.nbytes,
            (found.st_dev, found.st_ino),
            found.st_mtime_ns,
        )

    def bytes(self, start: int, stop: int) -> np.ndarray:
        """Return a read-only view of a range of bytes, u8."""
        return self._bytes[start:stop]

    def plane(self, plane: Plane, offset: int) -> np.ndarray:
        """Return a read-only view of a stored array; its range has been checked before."""
        data = self._bytes[offset : offset + plane.nbytes]
        return data.view(plane.storage).reshape(plane.shape)

    def check_unchanged(self) -> None:
        """Check that the path still names the file that was mapped, and that nobody wrote to it.

        Size, time of the last change and inode tell; no byte is read.

        Raises:
            ModelChanged: it does not, or somebody did.
        """
        _check_unchanged([self._mapped])

    def read_ahead(self, view: np.ndarray) -> None:
        """Let the kernel start to read the pages of a view, so that its first use need not wait.

        A view of other memory is left alone.
        """
        start = _address(view) - _address(self._bytes)
        if view.nbytes and 0 <= start < self.nbytes:
            first = start - start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, first, start + view.nbytes - first)

    def release(self) -> None:
        """Let the kernel take back the resident pages; views stay valid and read them again."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
