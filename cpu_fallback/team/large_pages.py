"""Memory in large pages, and giving back the pages of a mapped file that was copied there.

`fetch_ahead` asks the system for memory while the process does something else. Where a virtual
machine has to get it from its host, that takes longer than to fill it.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import numpy as np

from clocher_kernels import guards

HUGE = 2 << 20
_LINE = 64
_BATCH = 16 * HUGE
_NEARLY_FULL, _MANY = 1 << 30, 32 << 20
_PAGE_OUT = 21  # MADV_PAGEOUT of Linux

T = TypeVar("T")


class Kept(dict[int, T]):
    """What is made of weights, by the id of what holds them, as long as that lives."""

    def of(self, owner: object, verb: str, make: Callable[[], T]) -> T:
        """Return what is made of an object when it is first asked for. Raises WindowError."""
        key = id(owner)
        if key not in self:
            guards.refuse_in_window(verb)
            self[key] = make()
            weakref.finalize(owner, self.pop, key, None)
        return self[key]


def allocate(nbytes: int, large: bool = True) -> np.ndarray:
    """Return zeroed bytes [nbytes] in 2 MiB pages if the system gives them, else on a cache line.

    One thread draws about a fifth more from memory in large pages; not `large` refuses them.
    """
    spare = HUGE if nbytes >= HUGE else _LINE
    # Shared memory, which is the default, would get large pages only if the administrator said so.
    memory = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % spare
    if spare == HUGE:
        _advise(memory, "MADV_HUGEPAGE" if large else "MADV_NOHUGEPAGE")
    return raw[start : start + nbytes]


def fetched(nbytes: int) -> np.ndarray:
    """Return zeroed bytes [nbytes] from what `fetch_ahead` asked for, else as `allocate` does."""
    piece = None if _ahead is None or nbytes < HUGE else _ahead.take(nbytes)
    return allocate(nbytes) if piece is None else piece


def _advise(memory: mmap.mmap, advice: str) -> None:
    if hasattr(mmap, advice):
        with suppress(OSError):  # a kernel built without large pages
            memory.madvise(getattr(mmap, advice))


class _Ahead:
    """Zeroed memory that is handed out from its beginning and fetched from its end."""

    def __init__(self, nbytes: int) -> None:
        size = -(-nbytes // HUGE) * HUGE
        self._memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _advise(self._memory, "MADV_HUGEPAGE")
        raw = np.frombuffer(self._memory, np.uint8)
        self._start = -raw.ctypes.data % HUGE
        self._bytes = raw[self._start : self._start + size]
        self._taken, self._fetched = 0, size  # to where, and from where on
        self._is_fetching = False
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def spare(self) -> int:
        """Bytes that are fetched and not handed out."""
        return self._bytes.nbytes - max(self._fetched, self._taken)

    def take(self, nbytes: int) -> np.ndarray | None:
        """Return bytes on a cache line, None if there are not as many left."""
        with self._changed:
            end = self._taken + nbytes
            if end > self._bytes.nbytes:
                return None
            while self._is_fetching and end > self._fetched:
                self._changed.wait()
            piece = self._bytes[self._taken : end]
            self._taken = -(-end // _LINE) * _LINE
            return piece

    def fetch(self) -> None:
        """Have the system provide the pages that are not taken yet, the last ones first."""
        while True:
            with self._changed:
                end = self._fetched
                start = max(end - _BATCH, -(-self._taken // HUGE) * HUGE)
                if self._is_closed or start >= end:
                    return
                self._fetched, self._is_fetching = start, True
            # Many at a time, for which NumPy lets go of Python's lock. Zeros are there already.
            self._bytes[start : end : mmap.PAGESIZE] = 0
            with self._changed:
                self._is_fetching = False
                self._changed.notify_all()

    def close(self) -> None:
        """Give back what is not taken."""
        with self._changed:
            self._is_closed = True
            while self._is_fetching:
                self._changed.wait()
            start = -(-self._taken // HUGE) * HUGE
            left = self._bytes.nbytes - start
            if left > 0:
                self._memory.madvise(mmap.MADV_DONTNEED, self._start + start, left)
            self._taken = self._fetched = self._bytes.nbytes


_ahead: _Ahead | None = None


def fetch_ahead(nbytes: int) -> None:
    """Let a thread ask the system for memory that `fetched` will hand out.

    Pieces of it stay in memory until the last of them is not used any more; `stop_ahead` gives back
    what is not handed out. Nothing happens where the system is no Linux, has one CPU for this
    process, or less than four times as much memory.
    """
    global _ahead
    left = guards.available()
    if _ahead is not None or nbytes < HUGE or left is None or left < 4 * nbytes:
        return
    if not hasattr(mmap, "MADV_HUGEPAGE") or len(os.sched_getaffinity(0)) < 2:
        return
    try:
        _ahead = _Ahead(nbytes)
    except OSError:  # no address space; its user will report that
        return
    threading.Thread(target=_ahead.fetch, name="clocher-memory", daemon=True).start()


def spare() -> int:
    """Return the bytes that `fetch_ahead` has got and that are not taken."""
    return 0 if _ahead is None else _ahead.spare


def stop_ahead() -> None:
    """Give back what `fetch_ahead` has got and that is not taken."""
    global _ahead
    if _ahead is not None:
        _ahead.close()
        _ahead = None


def give_back(array: np.ndarray) -> int:
    """Let the system take back the resident pages that lie within a view of a read-only mapping.

    The view stays valid; reading it loads the pages from the file again. Other arrays are left
    alone, for their pages hold the only copy. Where memory is nearly full, the file's pages leave
    the cache too: the system would drop those that are not read yet, as it has had them longer.
    Returns the bytes given back.
    """
    memory, first, last = _pages(array)
    if memory is None or first >= last:
        return 0
    if last - first >= _MANY and 0 < guards.unused() < _NEARLY_FULL:
        with suppress(OSError):  # a kernel before 5.4
            memory.madvise(_PAGE_OUT, first, last - first)
    memory.madvise(mmap.MADV_DONTNEED, first, last - first)
    return last - first


def ask_for(array: np.ndarray) -> None:
    """Let the system begin to read a large view of a mapping, in large pieces, if it has to."""
    memory, first, last = _pages(array)
    if memory is not None and last - first >= _MANY:
        memory.madvise(mmap.MADV_WILLNEED, first, last - first)


def _pages(array: np.ndarray) -> tuple[mmap.mmap | None, int, int]:
    """Return the read-only mapping of a view, and where in it its whole pages begin and end."""
    memory = _mapping(array)
    if memory is None:
        return None, 0, 0
    start = array.ctypes.data - np.frombuffer(memory, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    return memory, first, (start + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE


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
