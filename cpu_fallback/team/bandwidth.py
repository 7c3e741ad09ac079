"""Read bandwidth of the memory: a compiled loop that reads a buffer and does nothing else.

Each thread reads a contiguous share, as the matrix kernels do. They meet in compiled code and
read the clock there, so neither the interpreter nor its lock is in the time.
"""

import ctypes
import threading

import numpy as np

from clocher_kernels.errors import DeviceError
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel
from cpu_fallback.team.large_pages import HUGE, allocate
from cpu_fallback.team.tape import fetch_add, load_acquire, now_ns, wait_a_little

_LINES = 512
_LEAST_BYTES = 64 << 20
_SUM = 16 * 0x01010101


def read_lines(start, nbytes, passes, gate, threads, out):  # type: ignore[no-untyped-def]
    """Read `nbytes` bytes, a multiple of 512, some times over, when all threads are at the gate.

    Writes to `out`: the time before, the time after, and a value that depends on every byte read.
    """
    fetch_add(gate, 1)
    turn = 0
    while load_acquire(gate) < threads:
        wait_a_little(turn)
        turn += 1
    a, b, c, d = v.izero(), v.izero(), v.izero(), v.izero()
    e, f, g, h = v.izero(), v.izero(), v.izero(), v.izero()
    end = start + nbytes
    v.write_i64(out, now_ns())
    while passes > 0:
        at = start
        while at < end:
            a = v.ior(a, v.load_i32(at))
            b = v.ior(b, v.load_i32(at + 64))
            c = v.ior(c, v.load_i32(at + 128))
            d = v.ior(d, v.load_i32(at + 192))
            e = v.ior(e, v.load_i32(at + 256))
            f = v.ior(f, v.load_i32(at + 320))
            g = v.ior(g, v.load_i32(at + 384))
            h = v.ior(h, v.load_i32(at + 448))
            at += 512
        passes -= 1
        # In the loop, for the compiler must not take one pass for all: a foreign call may write.
        v.write_i64(out + 8, now_ns())
    v.write_i64(
        out + 16, v.ihsum(v.ior(v.ior(v.ior(a, b), v.ior(c, d)), v.ior(v.ior(e, f), v.ior(g, h))))
    )


_KERNEL = Kernel(read_lines)


class Reader:
    """A buffer to read.

    Args:
        pages: "4k" or "2m": 2 MiB pages where the system gives them, or refused.
        nbytes: its size, rounded down to 2 MiB; at least that.

    Raises:
        OSError: there is no memory for it.
    """

    def __init__(self, pages: str, nbytes: int) -> None:
        self.nbytes = max(nbytes // HUGE, 1) * HUGE
        self._data = allocate(self.nbytes, large=pages == "2m")
        self._data[:] = 1
        signature = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 6)
        self._call = signature(_KERNEL.address)

    def gbps(self, threads: int, at_least: float = 0.2) -> float:
        """Read the buffer with some threads and return 10^9 bytes a second.

        It goes on for `at_least` seconds, for the rate of a shared machine's memory changes.

        Raises:
            DeviceError: the system does not start so many threads.
        """
        passes = -(-_LEAST_BYTES // self.nbytes)
        times = [self._ns(threads, passes)]
        while sum(times) < at_least * 1e9:
            times.append(self._ns(threads, passes))
        return len(times) * passes * self.nbytes / sum(times)

    def _ns(self, threads: int, passes: int) -> int:
        """Read the buffer some times over and return the nanoseconds it took."""
        units = self.nbytes // _LINES
        shares = [units * i // threads * _LINES for i in range(threads + 1)]
        found = np.zeros((threads, 8), np.int64)  # a cache line for each thread
        gate = np.zeros(1, np.int64)

        def work(rank: int) -> None:
            start, nbytes = self._data.ctypes.data + shares[rank], shares[rank + 1] - shares[rank]
            at, out = gate.ctypes.data, found[rank].ctypes.data
            self._call(start, nbytes, passes, at, threads, out)

        others = [threading.Thread(target=work, args=(rank,)) for rank in range(1, threads)]
        try:
            for other in others:
                other.start()
        except BaseException as error:
            gate[0] = threads  # the threads that wait go on, and end
            if not isinstance(error, RuntimeError):
                raise
            raise DeviceError(
                f"the system does not start {threads} threads to read memory with; lower "
                "--threads, or raise the limit of processes (ulimit -u)"
            ) from None
        work(0)
        for other in others:
            other.join()
        if not (found[:, 2] == _SUM).all():
            raise RuntimeError("the read loop did not read what is there")
        return int(found[:, 1].max() - found[:, 0].min())
