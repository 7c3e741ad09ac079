"""Atomics, waiting and the barrier of a thread team, and the control block they live in.

The control block is an int64 array of 64-byte lines, one for each thing that threads contend for:

    word  0  M, tokens of this step             word  8  steps started << 16 | threads taking part
          1  R, output rows of this step        word 16  stop: 1 sends workers out of `serve`
          2  address of the tapes' addresses    words 17 - 20: see `openmp`
          3  address of rank 0's scratch        word 24  threads that have arrived at the barrier
          4  bytes of scratch per rank          word 32  barriers passed
          5  nanoseconds of the last step       word 40  of rank 0: ns lost at barriers
                                                word 48  of rank 1, and so on

Waiting is bounded at every stage: about 20 us of spinning with pauses, then yielding the processor,
then sleeping, 50 us at first and 1 ms after some 40 ms. A team that has lost a core to another
process slows down and does not collapse; what its threads lose is counted, for `pace`.
"""

import sys
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_process_triple

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.late import cgutils, i64, void
from cpu_fallback.lanes.vector import INT32, INT64, VOID, call, number, op

M, R, TAPES, SCRATCH, SCRATCH_BYTES, STEP_NS = range(6)
EPOCH, STOP, ARRIVED, PASSED, LOST = 8, 16, 24, 32, 40
LINE = 8  # Words of a line; rank r has word LOST + LINE * r

_SPINS = 600
_YIELDS = 200
_NAPS = 400
_NAP_NS = 50_000
_LONG_NAP_NS = 1_000_000
_MONOTONIC = 6 if sys.platform == "darwin" else 1
_SECOND = 1_000_000_000

_ARCH = get_process_triple().split("-")[0]


def _pointer(b: Any, address: Any) -> Any:
    return b.inttoptr(address, INT64.as_pointer())


@op(i64, i64)
def load_acquire(b, address):
    """Return an int64; what its writer wrote before is visible."""
    return b.load_atomic(_pointer(b, address), "acquire", 8)


@op(void, i64, i64)
def store_release(b, address, value):
    """Store an int64 after all that this thread wrote before."""
    b.store_atomic(value, _pointer(b, address), "release", 8)


@op(i64, i64, i64)
def fetch_add(b, address, value):
    """Add to an int64 atomically and return what it was."""
    return b.atomic_rmw("add", _pointer(b, address), value, "acq_rel")


@op(void)
def pause(b):
    """Tell the processor that this is a spin loop."""
    if CURRENT.neon or _ARCH in ("aarch64", "arm64"):
        call(b, "llvm.aarch64.hint", VOID, ir.Constant(INT32, 1))
    elif _ARCH in ("x86_64", "i686"):
        call(b, "llvm.x86.sse2.pause", VOID)


@op(void)
def yield_core(b):
    """Let another thread have this core."""
    call(b, "sched_yield", INT32)


@op(void, i64)
def sleep_ns(b, nanoseconds):
    """Sleep; less than a second."""
    seconds_and_rest = ir.VectorType(INT64, 2)
    zeros = ir.Constant(seconds_and_rest, [0, 0])
    slot = cgutils.alloca_once(b, seconds_and_rest)
    b.store(b.insert_element(zeros, nanoseconds, ir.Constant(INT32, 1)), slot)
    call(b, "nanosleep", INT32, slot, ir.Constant(slot.type, None))


@op(i64)
def now_ns(b):
    """Return nanoseconds of a clock that never goes back."""
    seconds_and_rest = ir.VectorType(INT64, 2)
    slot = cgutils.alloca_once(b, seconds_and_rest)
    call(b, "clock_gettime", INT32, ir.Constant(INT32, _MONOTONIC), slot)
    time = b.load(slot)
    seconds, rest = (b.extract_element(time, ir.Constant(INT32, i)) for i in range(2))
    return b.add(b.mul(seconds, number(_SECOND)), rest)


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
