"""The compiled interpreter of a Plan, and the loops in which the threads of a team execute it.

A tape is an int64 array, one record per launch:

    [address of the kernel, 1 to meet at the barrier first, shares per thread, address of the count
     of shares taken, number of fields n, n fields]

and then one 0. `lead` is what the calling thread does for a step, `serve` what a worker does until
it is told to stop. Every thread walks a tape of the same launches, and each kernel divides its work
by rank. Nothing of a model is compiled in: another Plan is another array.

A launch with one share per thread is divided evenly. A launch with S > 1 is divided into S shares
for each thread, as if the team were S times as large. A thread executes three quarters of its own
one after another, then whichever is next of all that are left, so a thread that was held up
leaves work to the others. Results do not depend on rank or size, so neither do they depend on this.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device, kernel
from cpu_fallback.lanes.late import i64
from cpu_fallback.lanes.record import reader, words
from cpu_fallback.lanes.vector import caller
from cpu_fallback.team import sync
from cpu_fallback.team.sync import (
    LINE,
    barrier,
    fetch_add,
    load_acquire,
    now_ns,
    store_release,
    wait_a_little,
)

_HEADER = 5
_SHARED = "(shared)"


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel call on the tape, by every thread of the team."""

    kernel: Kernel  # what to call
    # int64 values it reads: addresses, sizes, counts, bits of floats. A Kernel stands for its
    # address.
    fields: Sequence[int | Kernel]
    reads: frozenset[str]  # names of the buffers it reads
    writes: frozenset[str]  # names of the buffers it writes
    scratch: int = 0  # bytes of scratch memory that it needs per thread
    # how many shares per thread the work is divided into. More than 1 lets threads help each other
    # out; the kernel is then called once for each share.
    shares: int = 1
    # bytes of memory of all threads that it reads or writes. The address becomes its last field;
    # the next launch with shared memory may overwrite what is there.
    shared: int = 0


def barriers(launches: Sequence[Launch]) -> list[bool]:
    """Return, for each launch, whether the team must meet before it.

    It must if the launch touches what an earlier one wrote since the last meeting, or writes what
    an earlier one read: then a slow thread may still be at the earlier one.
    """
    flags = []
    read: set[str] = set()
    written: set[str] = set()
    for launch in launches:
        writes = launch.writes | ({_SHARED} if launch.shared else set())
        touched = launch.reads | writes
        meet = bool(touched & written or writes & read)
        if meet:
            read, written = set(), set()
        read |= launch.reads
        written |= writes
        flags.append(meet)
    return flags


def encode(
    launches: Sequence[Launch],
    first: np.ndarray | None = None,
    stamp: Callable[[int], Launch] | None = None,
) -> np.ndarray:
    """Return the tape of these launches, int64. Their kernels must be compiled.

    Args:
        launches: what to execute.
        first: the tape of another thread of the team, where shares are counted; its launches differ
            from these only in addresses.
        stamp: makes the launch that writes a time: the 2i-th when a thread arrives at the i-th
            launch, the next one when it starts there, the last at the end.
    """
    steps = list(zip(launches, barriers(launches), strict=True))
    if stamp:
        stamped: list[tuple[Launch, bool]] = []
        for i, (launch, meet) in enumerate(steps):
            stamped += [(stamp(2 * i), False), (stamp(2 * i + 1), meet), (launch, False)]
        steps = [*stamped, (stamp(2 * len(launches)), False)]
    length = sum(_HEADER + len(launch.fields) for launch, _ in steps) + 1
    counts = sum(launch.shares > 1 for launch, _ in steps)
    words = np.zeros(length + (counts + 1) * LINE, np.int64)
    base = (words if first is None else first).ctypes.data + 8 * length
    base += -base % (8 * LINE)
    at = 0
    for launch, meet in steps:
        count = 0
        if launch.shares > 1:
            count, base = base, base + 8 * LINE
        fields = [f.address if isinstance(f, Kernel) else f for f in launch.fields]
        record = [launch.kernel.address, int(meet), launch.shares, count, len(fields), *fields]
        words[at : at + len(record)] = record
        at += len(record)
    return words


def clear_counts(words: np.ndarray) -> None:
    """Set the counts of shares taken to zero, as they are between steps."""
    at = 0
    while words[at]:
        at += _HEADER + int(words[at + 4])
    words[at:] = 0


call_kernel = caller(5)  # (kernel, rec, ctl, rank, size, scratch)


@device
def _divide(kernel, rec, ctl, rank, size, scratch, shares, count):
    """Execute own shares, then of those that are left; the last to find none resets the count."""
    own = (3 * shares) >> 2
    rest = shares - own
    for i in range(own):
        call_kernel(kernel, rec, ctl, rank * shares + i, size * shares, scratch)
    while True:
        taken = fetch_add(count, 1)
        if taken >= size * rest:
            if taken == size * rest + size - 1:
                store_release(count, 0)
            return
        owner, i = taken % size, taken // size
        call_kernel(kernel, rec, ctl, owner * shares + own + i, size * shares, scratch)


@device
def walk(ctl, rank, size):
    """Execute a tape as one of `size` threads, and meet the others at its end."""
    scratch = v.read_i64(ctl + 8 * sync.SCRATCH) + rank * v.read_i64(ctl + 8 * sync.SCRATCH_BYTES)
    at = v.read_i64(v.read_i64(ctl + 8 * sync.TAPES) + 8 * rank)
    while True:
        kernel = v.read_i64(at)
        if kernel == 0:
            break
        if v.read_i64(at + 8):
            barrier(ctl, rank, size)
        shares, rec = v.read_i64(at + 16), at + 8 * _HEADER
        if shares > 1 and size > 1:
            _divide(kernel, rec, ctl, rank, size, scratch, shares, v.read_i64(at + 24))
        else:
            call_kernel(kernel, rec, ctl, rank, size, scratch)
        at = rec + 8 * v.read_i64(at + 32)
    barrier(ctl, rank, size)


@device
def begin(ctl, tokens, rows, size):
    """Begin a step: kernels tell steps apart by their number, and workers wait for the next one."""
    v.write_i64(ctl + 8 * sync.M, tokens)
    v.write_i64(ctl + 8 * sync.R, rows)
    steps = load_acquire(ctl + 8 * sync.EPOCH) >> 16
    store_release(ctl + 8 * sync.EPOCH, (steps + 1) << 16 | size)


def _lead(ctl, tokens, rows, size):
    """Execute one step as rank 0 of `size` threads, waking the workers that wait in `serve`."""
    start = now_ns()
    begin(ctl, tokens, rows, size)
    walk(ctl, 0, size)
    v.write_i64(ctl + 8 * sync.STEP_NS, now_ns() - start)


def _serve(ctl, rank, seen):
    """Execute each step that this worker takes part in, until told to stop.

    A step that it takes part in cannot end without it, so it never misses one. `seen` is the last
    step that it has seen before; the one that it has seen by now is returned.
    """
    turn = 0
    while True:
        epoch = load_acquire(ctl + 8 * sync.EPOCH)
        if epoch >> 16 != seen:
            seen = epoch >> 16
            if rank < epoch & 0xFFFF:
                walk(ctl, rank, epoch & 0xFFFF)
                turn = 0
        elif load_acquire(ctl + 8 * sync.STOP):
            return seen
        else:
            wait_a_little(turn)
            turn += 1


lead = Kernel(_lead)
serve = Kernel(_serve, i64)


_NOTHING: frozenset[str] = frozenset()


class Column(NamedTuple):
    """Where a time goes: address of the first thread's, bytes from one thread to the next."""

    address: int
    stride: int


_column_at = reader(Column)


@kernel
def stamp(rec, ctl, rank, size, scratch):
    """Write the time of this thread."""
    column = _column_at(rec)
    v.write_i64(column.address + rank * column.stride, now_ns())


@dataclass(frozen=True, slots=True, eq=False)
class Stamps:
    """The times of a step: where its time goes, thread by thread.

    A stamp is a launch that writes the clock into a table. Two come before every launch: one when
    the thread arrives, one when the team has met. They cost a fraction of a microsecond each.
    """

    calls: tuple[int, ...]  # for each launch, the index of its call in the Plan
    # int64 ns [threads, 2 * launches + 1]: arrival and start of each launch, then the end
    times: np.ndarray

    @classmethod
    def table(cls, calls: Sequence[int], threads: int) -> "Stamps":
        """Return an empty table for these launches."""
        return cls(tuple(calls), np.zeros((threads, 2 * len(calls) + 1), np.int64))

    def at(self, column: int) -> Launch:
        """Return the launch that stamps a column."""
        place = Column(self.times.ctypes.data + 8 * column, self.times.strides[0])
        return Launch(stamp, tuple(words(place)), _NOTHING, _NOTHING)
