"""How fast memory can be read: the limit that decoding is measured against.

A token reads every weight once, and the key and values of the tokens before it. If all of that fits
in a cache, the cache is the limit, so what is read to learn it is as large as what a token reads.
"""

from clocher_kernels.errors import DeviceError
from clocher_kernels.host_memory import available
from clocher_runtime.engine.backends import Reader, reader
from clocher_runtime.engine.load import Model
from clocher_runtime.models.inventory import EMBED

MOST_BYTES = 256 << 20
"""Read at most; more than most caches hold."""

_SECONDS = 0.1


def working_set(model: Model) -> int:
    """Return the bytes of the weights that tokens read, of the experts all.

    Of an embedding that is not the output head as well, a token reads one row: it is left out.
    """
    total = sum(weight.nbytes for weight in model.weights.values())
    return total if model.spec.tied else total - model.weights[EMBED].nbytes


def memory_reader(nbytes: int, backend: str = "cpu") -> Reader | None:
    """Return a buffer as large as a working set, or as `MOST_BYTES` if that is less.

    Returns:
        None where memory is not measured: of another back end than the CPU's, and where less than
        twice the buffer is free, since a smaller one could lie in a cache that the weights do not
        fit in.
    """
    nbytes = min(nbytes, MOST_BYTES)
    left = available()
    if left is not None and left < 2 * nbytes:
        return None
    try:
        return reader(backend, nbytes)
    except (OSError, MemoryError):
        return None


def read_gbps(nbytes: int, threads: int, backend: str = "cpu") -> float | None:
    """Return how fast a working set can be read on this machine, in 10^9 bytes a second.

    It takes about 0.1 s, and the first time on a machine a moment to compile.

    Args:
        nbytes: what is read again and again, see `working_set`.
        threads: that read it, each a share.
        backend: whose memory it is.

    Returns:
        None where it is not measured, see `memory_reader`.
    """
    buffer = memory_reader(nbytes, backend)
    try:
        return None if buffer is None else buffer.gbps(threads, _SECONDS)
    except DeviceError:  # no more threads
        return None
