"""Read bandwidth of the memory: the limit that decode is measured against.

    python -m bench.bandwidth [--threads 1,2] [--pages 4k,2m] [--json FILE]

A compiled loop reads a buffer that no cache holds, each thread a contiguous share, as the matrix
kernels do. "2m" asks for huge pages and says how many came; "4k" refuses them.
"""

import ctypes
import mmap
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import click
import numpy as np

from bench.ops.experiment import TEAMS, Listed, Row, experiment, turns
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel
from cpu_fallback.lanes.memory import load_i32, write_i64
from cpu_fallback.lanes.simd import ihsum, ior, izero

PAGES = ("4k", "2m")
DEFAULT_BYTES = 512 << 20

PAGES_READ = click.option(
    "--pages", type=click.Choice(PAGES), default="2m", show_default=True, help="of what is read"
)
MIB = click.option(
    "--mib",
    type=click.IntRange(2),
    default=DEFAULT_BYTES >> 20,
    show_default=True,
    help="Bytes to move.",
)

_HUGE = 2 << 20
_LINES = 512


def read_lines(start, nbytes, out):  # type: ignore[no-untyped-def]  # Numba infers the types
    """Read `nbytes` bytes, a multiple of 512, and store a value that depends on all of them."""
    a, b, c, d = izero(), izero(), izero(), izero()
    e, f, g, h = izero(), izero(), izero(), izero()
    at, end = start, start + nbytes
    while at < end:
        a = ior(a, load_i32(at))
        b = ior(b, load_i32(at + 64))
        c = ior(c, load_i32(at + 128))
        d = ior(d, load_i32(at + 192))
        e = ior(e, load_i32(at + 256))
        f = ior(f, load_i32(at + 320))
        g = ior(g, load_i32(at + 384))
        h = ior(h, load_i32(at + 448))
        at += 512
    write_i64(out, ihsum(ior(ior(ior(a, b), ior(c, d)), ior(ior(e, f), ior(g, h)))))


_KERNEL = Kernel(read_lines)


class Reader:
    """A buffer to read.

    Args:
        pages: "4k" or "2m".
        nbytes: its size, rounded down to 2 MiB; at least that.

    Attributes:
        nbytes: its size.
        huge_share: share of it that lies in huge pages, 0 .. 1.
    """

    def __init__(self, pages: str, nbytes: int = DEFAULT_BYTES) -> None:
        self.nbytes = max(nbytes // _HUGE, 1) * _HUGE
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, self.nbytes + _HUGE, flags=private)
        wanted = "MADV_HUGEPAGE" if pages == "2m" else "MADV_NOHUGEPAGE"
        if hasattr(mmap, wanted):
            self._map.madvise(getattr(mmap, wanted))
        whole = np.frombuffer(self._map, np.uint8)
        start = -whole.ctypes.data % _HUGE
        self._data = whole[start : start + self.nbytes]
        self._data[:] = 1
        self.huge_share = _huge_bytes(self._data.ctypes.data) / self.nbytes
        signature = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self._call = signature(_KERNEL.address)

    def gbps(self, threads: int, at_least: float = 0.2) -> float:
        """Read the buffer with some threads and return 10^9 bytes a second.

        Args:
            threads: they share the buffer.
            at_least: seconds to go on for; the rate of a shared machine's memory changes within
                less than what it is compared with takes.
        """
        passes = [self._pass(threads)]
        while sum(passes) < at_least:
            passes.append(self._pass(threads))
        return len(passes) * self.nbytes / sum(passes) / 1e9

    def _pass(self, threads: int) -> float:
        """Read the buffer once and return the seconds it took."""
        units = self.nbytes // _LINES
        shares = [units * i // threads * _LINES for i in range(threads + 1)]
        times = np.zeros((threads, 2), np.int64)
        sums = np.zeros((threads, 8), np.int64)
        gate = threading.Barrier(threads)

        def work(rank: int) -> None:
            gate.wait()
            times[rank, 0] = time.perf_counter_ns()
            start = self._data.ctypes.data + shares[rank]
            self._call(start, shares[rank + 1] - shares[rank], sums[rank].ctypes.data)
            times[rank, 1] = time.perf_counter_ns()

        helpers = [threading.Thread(target=work, args=(rank,)) for rank in range(1, threads)]
        for helper in helpers:
            helper.start()
        work(0)
        for helper in helpers:
            helper.join()
        if not (sums[:, 0] == 16 * 0x01010101).all():
            raise RuntimeError("the read loop did not read what is there")
        return float(times[:, 1].max() - times[:, 0].min()) / 1e9


def _huge_bytes(address: int) -> int:
    """Return the bytes of huge pages in the mapping that holds an address."""
    inside = False
    try:
        lines = Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    for line in lines:
        if match := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


@experiment(
    "bandwidth",
    __doc__,
    "pages | huge | threads | GB/s | best",
    "{pages} | {huge_share:.0%} | {threads} | {gbps:.1f} | {best_gbps:.1f}",
    title="read",
    rounds=11,
)
@TEAMS
@click.option("--pages", type=Listed.of(PAGES), default=",".join(PAGES), show_default=True)
@MIB
def main(threads: tuple[int, ...], pages: tuple[str, ...], mib: int, rounds: int) -> Iterator[Row]:
    """Yield a row for each kind of pages and thread count."""
    readers = {kind: Reader(kind, mib << 20) for kind in pages}
    runs = {
        (kind, count): partial(reader.gbps, count)
        for kind, reader in readers.items()
        for count in threads
    }
    for (kind, count), samples in turns(runs, rounds).items():
        yield {
            "op": "read",
            "pages": kind,
            "huge_share": readers[kind].huge_share,
            "threads": count,
            "isa": CURRENT.name,
            "gbps": median(samples),
            "best_gbps": max(samples),
            "samples": samples,
        }


if __name__ == "__main__":
    main()
