"""Read files into the page cache in the background."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from clocher_kernels import guards
from clocher_kernels.errors import ModelError
from clocher_runtime.disk.files import open_regular

_BLOCK = 8 << 20
_SAMPLES = 16


def read_ahead(paths: Sequence[Path]) -> None:
    """Read files in a thread, unless cached or too large for the memory (Linux)."""
    left = guards.available()
    if left is None or not hasattr(os, "RWF_NOWAIT"):
        return
    try:
        absent = [path for path in paths if not _is_cached(path)]
        if not absent or sum(os.path.getsize(path) for path in absent) > left // 2:
            return
    except (OSError, ModelError):
        return
    threading.Thread(target=_read, args=(absent,), name="clocher-reading", daemon=True).start()


def _is_cached(path: Path) -> bool:
    """Return whether evenly spread pages of a file are all in memory."""
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        for i in range(_SAMPLES):
            page = [bytearray(1)]
            try:
                os.preadv(descriptor, page, size * i // _SAMPLES, os.RWF_NOWAIT)
            except BlockingIOError:
                return False
    return True


def _read(paths: Sequence[Path]) -> None:
    block = bytearray(_BLOCK)
    for path in paths:
        try:
            with open_regular(path) as descriptor:
                while os.readv(descriptor, [block]):
                    pass
        except (OSError, ModelError):
            return
