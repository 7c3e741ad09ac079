"""Memory of a run: peak resident set size, work-touch, read bandwidth."""

import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from clocher_kernels.errors import DeviceError, ModelError
from clocher_kernels.guards import fields, read
from clocher_kernels.plan import Touch
from clocher_runtime.engine.backends import memory_reader
from clocher_runtime.models.inventory import EMBED

if TYPE_CHECKING:
    from clocher_runtime.engine.load import Model

_MIB = 1 << 20
_SECONDS = 0.1


def rss_peak_mib(status: Path = Path("/proc/self/status")) -> float:
    """Return the peak resident set size in MiB, of `VmHWM` or getrusage."""
    if kib := fields(read(status)).get("VmHWM:"):
        return kib / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _MIB if sys.platform == "darwin" else peak / 1024


def working_set(model: "Model") -> int:
    """Return the bytes of the weights that tokens read, with all experts."""
    total = sum(weight.nbytes for weight in model.weights.values())
    return total if model.spec.tied else total - model.weights[EMBED].nbytes


def read_gbps(nbytes: int, threads: int, backend: str) -> float | None:
    """Return the bandwidth of reading a working set with some threads, in GB/s (10^9)."""
    buffer = memory_reader(nbytes, backend)
    try:
        return None if buffer is None else buffer.gbps(threads, _SECONDS)
    except DeviceError:  # no more threads
        return None


class WorkTouch(Touch):
    """Reads mapped weights with a stride for every generated token, to emulate memory pressure.

    The files count as one ring of n bytes, one after another. The touch of token t = 0, 1, ...
    reads the bytes at (t * bytes_per_token + k * stride) mod n for every k >= 0 with
    k * stride < bytes_per_token. The next token goes on where this one stopped.

    Args:
        files: contents of the mapped files, u8 [size] each. They are read in place.
        bytes_per_token: bytes that a token walks over; 0 switches the touch off.
        stride: distance of the bytes that are read.
    """

    def __init__(self, files: Sequence[np.ndarray], bytes_per_token: int, stride: int) -> None:
        self._files = [file for file in files if file.size]
        self._size = sum(file.size for file in self._files)
        if bytes_per_token and not self._size:
            raise ModelError("work-touch: the model has no weight files to touch")
        super().__init__(bytes_per_token, stride)

    def __call__(self, tokens: int) -> None:
        """Touch the weights for some tokens that were just made."""
        for _ in range(tokens if self.bytes_per_token else 0):
            before, checksum = self._counters
            self._counters = before + 1, (checksum + self._walk()) % (1 << 64)

    def _walk(self) -> int:
        """Return the sum of the bytes that one token reads."""
        # Counted from the start of the ring's first lap: the walk is [at, stop).
        at = self.tokens * self.bytes_per_token % self._size
        stop = at + self.bytes_per_token
        total, begin = 0, 0
        while True:
            for file in self._files:
                end = begin + file.size
                piece = file[at - begin : min(stop, end) - begin : self.stride]
                total += int(piece.sum(dtype=np.uint64))
                at += piece.size * self.stride
                if end >= stop:
                    return total
                begin = end
