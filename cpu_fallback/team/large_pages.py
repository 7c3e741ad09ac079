"""Memory in large pages, and giving back the pages of a mapped file that was copied there."""

import mmap
from contextlib import suppress

import numpy as np

HUGE = 2 << 20
_LINE = 64


def allocate(nbytes: int, large: bool = True) -> np.ndarray:
    """Return zeroed bytes [nbytes] in 2 MiB pages if the system gives them, else on a cache line.

    One thread draws about a fifth more from memory in large pages.

    Args:
        nbytes: how many.
        large: False refuses large pages, to measure what they give.
    """
    spare = HUGE if nbytes >= HUGE else _LINE
    # Shared memory, which is the default, would get large pages only if the administrator said so.
    memory = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % spare
    advice = "MADV_HUGEPAGE" if large else "MADV_NOHUGEPAGE"
    if spare == HUGE and hasattr(mmap, advice):
        with suppress(OSError):  # a kernel built without large pages
            memory.madvise(getattr(mmap, advice))
    return raw[start : start + nbytes]


def give_back(array: np.ndarray) -> int:
    """Let the system take back the resident pages that lie within a view of a read-only mapping.

    The view stays valid; reading it loads the pages from the file again. Other arrays are left
    alone, for their pages hold the only copy.

    Returns:
        The bytes given back.
    """
    memory = _mapping(array)
    if memory is None:
        return 0
    start = array.ctypes.data - np.frombuffer(memory, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last:
        return 0
    memory.madvise(mmap.MADV_DONTNEED, first, last - first)
    return last - first


def is_mapped(array: np.ndarray) -> bool:
    """Return whether a contiguous array is a view of a read-only mapping."""
    return _mapping(array) is not None


def _mapping(array: np.ndarray) -> mmap.mmap | None:
    """Return the read-only mapping that a contiguous array is a view of."""
    if not array.flags.c_contiguous:
        return None
    owner = array.base
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if isinstance(owner, mmap.mmap) and memoryview(owner).readonly:
        return owner
    return None
