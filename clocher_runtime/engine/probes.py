"""Memory of a run: peak resident set size, work-touch, read bandwidth."""

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from clocher_kernels.errors import DeviceError
from clocher_kernels.guards import available
from clocher_runtime.engine.backends import Reader, reader
from clocher_runtime.models.inventory import EMBED

if TYPE_CHECKING:
    from clocher_runtime.engine.load import Model

_MIB = 1 << 20


def _getrusage_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_peak_bytes(
    status: Path = Path("/proc/self/status"), fallback: Callable[[], int] = _getrusage_bytes
) -> int:
    """Return the peak resident set size in bytes, of `VmHWM` or getrusage; 0 if unknown."""
    try:
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "VmHWM":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return max(fallback(), 0)
    except OSError:
        return 0


def rss_peak_mib() -> float:
    """Return the peak resident set size of this process in MiB."""
    return rss_peak_bytes() / _MIB


MOST_BYTES = 256 << 20
"""Read at most to measure bandwidth; more than most caches hold."""
_SECONDS = 0.1


def working_set(model: "Model") -> int:
    """Return the bytes of the weights that tokens read, with all experts."""
    total = sum(weight.nbytes for weight in model.weights.values())
    return total if model.spec.tied else total - model.weights[EMBED].nbytes


def memory_reader(nbytes: int, backend: str = "cpu") -> Reader | None:
    """Return a buffer as large as a working set, at most `MOST_BYTES`."""
    nbytes = min(nbytes, MOST_BYTES)
    left = available()
    if left is not None and left < 2 * nbytes:
        return None
    try:
        return reader(backend, nbytes)
    except (OSError, MemoryError):
        return None


def read_gbps(nbytes: int, threads: int, backend: str = "cpu") -> float | None:
    """Return the bandwidth of reading a working set with some threads, in GB/s (10^9)."""
    buffer = memory_reader(nbytes, backend)
    try:
        return None if buffer is None else buffer.gbps(threads, _SECONDS)
    except DeviceError:  # no more threads
        return None
