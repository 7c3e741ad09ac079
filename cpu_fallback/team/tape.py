"""The compiled interpreter of a Plan, and the loops in which the threads of a team execute it.

A tape is an int64 array, one record per launch:

    [address of the kernel, 1 to meet at the barrier first, shares per thread, address of the count
     of shares taken, number of fields n, n fields]

and then one 0. `lead` is what the calling thread does for a step, `serve` what a worker does until
the team stops. Every thread walks a tape of the same launches, and each kernel divides its work
by rank. Nothing of a model is compiled in: another Plan is another array.

A launch with one share per thread is divided evenly. A launch with S > 1 is divided into S shares
for each thread, as if the team were S times as large. A thread executes three quarters of its own
one after another, then whichever is next of all that are left, so a thread that was held up
leaves work to the others. Results do not depend on rank or size, so neither do they depend on this.

Atomics, waiting and the barrier of a thread team, and the control block they live in.

The control block is an int64 array of 64-byte lines, one for each thing that threads contend for:

    word  0  M, tokens of this step             word  8  steps started << 16 | threads taking part
          1  R, output rows of this step        word 16  stop: 1 sends workers out of `serve`
          2  address of the tapes' addresses    words 17 - 20: see `openmp`
          3  address of rank 0's scratch        word 24  threads that have arrived at the barrier
          4  bytes of scratch per rank          word 32  barriers passed
          5  nanoseconds of the last step       word 40  of rank 0: ns lost at barriers
                                                word 48  of rank 1, and so on

Waiting is bounded at every stage: about 20 us of spinning with pauses, then some 600 us of
yielding the processor, then sleeping, 50 us at first and 1 ms after some 40 ms. A team that has
lost a core to another process slows down and does not collapse; what its threads lose is counted,
for `Pace`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_process_triple

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, cgutils, device, i64, void

M, R, TAPES, SCRATCH, SCRATCH_BYTES, STEP_NS = range(6)
EPOCH, STOP, ARRIVED, PASSED, LOST = 8, 16, 24, 32, 40
LINE = 8  # Words of a line; rank r has word LOST + LINE * r

_SPINS = 600
# Longer than a nap lasts: a thread that waits for a napping one must not nap, too. Both would then
# nap at every barrier.
_YIELDS = 4000
_NAPS = 400
_NAP_NS = 50_000
_LONG_NAP_NS = 1_000_000
_MONOTONIC = 6 if sys.platform == "darwin" else 1
_SECOND = 1_000_000_000

_ARCH = get_process_triple().split("-")[0]


def _pointer(b: Any, address: Any) -> Any:
    return b.inttoptr(address, v.INT64.as_pointer())


@v.op(i64, i64)
def load_acquire(b, address):
    """Return an int64; what its writer wrote before is visible."""
    return b.load_atomic(_pointer(b, address), "acquire", 8)


@v.op(void, i64, i64)
def store_release(b, address, value):
    """Store an int64 after all that this thread wrote before."""
    b.store_atomic(value, _pointer(b, address), "release", 8)


@v.op(i64, i64, i64)
def fetch_add(b, address, value):
    """Add to an int64 atomically and return what it was."""
    return b.atomic_rmw("add", _pointer(b, address), value, "acq_rel")


@v.op(void)
def pause(b):
    """Tell the processor that this is a spin loop."""
    if CURRENT.neon or _ARCH in ("aarch64", "arm64"):
        v.call(b, "llvm.aarch64.hint", v.VOID, ir.Constant(v.INT32, 1))
    elif _ARCH in ("x86_64", "i686"):
        v.call(b, "llvm.x86.sse2.pause", v.VOID)


@v.op(void)
def yield_core(b):
    """Let another thread have this core."""
    v.call(b, "sched_yield", v.INT32)


@v.op(void, i64)
def sleep_ns(b, nanoseconds):
    """Sleep; less than a second."""
    seconds_and_rest = ir.VectorType(v.INT64, 2)
    zeros = ir.Constant(seconds_and_rest, [0, 0])
    slot = cgutils.alloca_once(b, seconds_and_rest)
    b.store(b.insert_element(zeros, nanoseconds, ir.Constant(v.INT32, 1)), slot)
    v.call(b, "nanosleep", v.INT32, slot, ir.Constant(slot.type, None))


@v.op(i64)
def now_ns(b):
    """Return nanoseconds of a clock that never goes back."""
    seconds_and_rest = ir.VectorType(v.INT64, 2)
    slot = cgutils.alloca_once(b, seconds_and_rest)
    v.call(b, "clock_gettime", v.INT32, ir.Constant(v.INT32, _MONOTONIC), slot)
    time = b.load(slot)
    seconds, rest = (b.extract_element(time, ir.Constant(v.INT32, i)) for i in range(2))
    return b.add(b.mul(seconds, v.number(_SECOND)), rest)


@device
def wait_a_little(turn):
    """Wait for the turn-th time in a row: spin, then yield, then sleep."""
    if turn < _SPINS:
        pause()
    elif turn < _SPINS + _YIELDS:
        yield_core()
    elif turn < _SPINS + _YIELDS + _NAPS:
        sleep_ns(_NAP_NS)
    else:
        sleep_ns(_LONG_NAP_NS)


@device
def barrier(ctl, rank, size):
    """Wait until all `size` threads are here; what they wrote before is visible to all after."""
    if size == 1:
        return
    passed = load_acquire(ctl + 8 * PASSED)
    if fetch_add(ctl + 8 * ARRIVED, 1) == size - 1:
        store_release(ctl + 8 * ARRIVED, 0)
        store_release(ctl + 8 * PASSED, passed + 1)
        return
    turn, since = 0, 0
    while load_acquire(ctl + 8 * PASSED) == passed:
        if turn == _SPINS:
            since = now_ns()
        wait_a_little(turn)
        turn += 1
    if since:
        lost = ctl + 8 * (LOST + LINE * rank)
        v.write_i64(lost, v.read_i64(lost) + now_ns() - since)


_HEADER = 5
_SHARED = "(shared)"


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel call on the tape, by every thread of the team."""

    kernel: Kernel  # what to call
    # int64 values it reads: addresses, sizes, counts, bits of floats. A Kernel stands for its
    # address.
    fields: Sequence[int | Kernel]
    reads: frozenset[str] = frozenset()  # names of the buffers it reads
    writes: frozenset[str] = frozenset()  # names of the buffers it writes
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

    `first`: the tape of another thread of the team, where shares are counted; its launches differ
    from these only in addresses. `stamp` makes the launch that writes a time: the 2i-th when a
    thread arrives at the i-th launch, the next one when it starts there, the last at the end.
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


call_kernel = v.caller(5)  # (kernel, rec, ctl, rank, size, scratch)


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
    scratch = v.read_i64(ctl + 8 * SCRATCH) + rank * v.read_i64(ctl + 8 * SCRATCH_BYTES)
    at = v.read_i64(v.read_i64(ctl + 8 * TAPES) + 8 * rank)
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
    v.write_i64(ctl + 8 * M, tokens)
    v.write_i64(ctl + 8 * R, rows)
    steps = load_acquire(ctl + 8 * EPOCH) >> 16
    store_release(ctl + 8 * EPOCH, (steps + 1) << 16 | size)


@Kernel
def lead(ctl, tokens, rows, size):
    """Execute one step as rank 0 of `size` threads, waking the workers that wait in `serve`."""
    start = now_ns()
    begin(ctl, tokens, rows, size)
    walk(ctl, 0, size)
    v.write_i64(ctl + 8 * STEP_NS, now_ns() - start)


def _serve(ctl, rank, seen):
    """Execute each step that this worker takes part in, until the team stops.

    A step that it takes part in cannot end without it, so it never misses one. `seen` is the last
    step that it has seen before; the one that it has seen by now is returned.
    """
    turn = 0
    while True:
        epoch = load_acquire(ctl + 8 * EPOCH)
        if epoch >> 16 != seen:
            seen = epoch >> 16
            if rank < epoch & 0xFFFF:
                walk(ctl, rank, epoch & 0xFFFF)
                turn = 0
        elif load_acquire(ctl + 8 * STOP):
            return seen
        else:
            wait_a_little(turn)
            turn += 1


serve = Kernel(_serve, i64)


@Kernel
def stamp(rec, ctl, rank, size, scratch):
    """Write the time of this thread; fields: where the first thread's goes, bytes to the next."""
    v.write_i64(v.read_i64(rec) + rank * v.read_i64(rec + 8), now_ns())


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
        return Launch(stamp, (self.times.ctypes.data + 8 * column, self.times.strides[0]))
