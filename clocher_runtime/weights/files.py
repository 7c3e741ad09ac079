"""The one door to model files: regular files only, sizes known first, mapped read-only."""

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from clocher_kernels.errors import FormatError, ModelError, ModelNotFound
from clocher_kernels.formats.base import Plane
from clocher_kernels.guards import refuse_in_window


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor.

    Raises:
        ModelNotFound: there is no such file.
        ModelError: it cannot be read, or it is a directory, a pipe or a device.
        WindowError: a timed window is open.
    """
    refuse_in_window("read a model file")
    try:
        # Without O_NONBLOCK a pipe in place of the file would hang here.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a file of at most `limit` bytes.

    Raises:
        ModelError: as `open_regular`.
        FormatError: the file is larger.
    """
    with open_regular(path) as descriptor:
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
            self.path = path
            self.nbytes = os.fstat(descriptor).st_size
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

    def bytes(self, start: int, stop: int) -> np.ndarray:
        """Return a read-only view of a range of bytes, u8."""
        return self._bytes[start:stop]

    def plane(self, plane: Plane, offset: int) -> np.ndarray:
        """Return a read-only view of a stored array; its range has been checked before."""
        data = self._bytes[offset : offset + plane.nbytes]
        return data.view(plane.storage).reshape(plane.shape)

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
