"""Atomics, waiting and the barrier of a thread team, and the control block they live in.

The control block is an int64 array of 64-byte lines, one for each thing that threads contend for:

    word  0  M, tokens of this step             word  8  epoch: steps started
          1  R, output rows of this step        word 16  stop: 1 sends workers out of `serve`
          2  threads                            word 24  threads that have arrived at the barrier
          3  address of the tape                word 32  barriers passed
          4  end of the tape
          5  address of rank 0's scratch
          6  bytes of scratch per rank

Waiting is bounded at every stage: about 20 us of spinning with pauses, then yielding the processor,
then sleeping. A team that has lost a core to another process slows down and does not collapse.
"""

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_process_triple
from numba.core import cgutils

from cpu_fallback.jit import device
from cpu_fallback.vector import call, i64, op, void

M, R, SIZE, TAPE, TAPE_END, SCRATCH, SCRATCH_BYTES = range(7)
EPOCH, STOP, ARRIVED, PASSED = 8, 16, 24, 32
WORDS = 40

_SPINS = 600
_YIELDS = 200
_NAP_NS = 50_000

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_ARCH = get_process_triple().split("-")[0]


def _pointer(b: Any, address: Any) -> Any:
    return b.inttoptr(address, _I64.as_pointer())


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
    if _ARCH in ("x86_64", "i686"):
        call(b, "llvm.x86.sse2.pause", ir.VoidType())
    elif _ARCH in ("aarch64", "arm64"):
        call(b, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(_I32, 1))


@op(void)
def yield_core(b):
    """Let another thread have this core."""
    call(b, "sched_yield", _I32)


@op(void, i64)
def sleep_ns(b, nanoseconds):
    """Sleep; less than a second."""
    seconds_and_rest = ir.VectorType(_I64, 2)
    zeros = ir.Constant(seconds_and_rest, [0, 0])
    slot = cgutils.alloca_once(b, seconds_and_rest)
    b.store(b.insert_element(zeros, nanoseconds, ir.Constant(_I32, 1)), slot)
    call(b, "nanosleep", _I32, slot, ir.Constant(slot.type, None))


@device
def wait_a_little(turn):
    """Wait for the turn-th time in a row: spin, then yield, then sleep."""
    if turn < _SPINS:
        pause()
    elif turn < _SPINS + _YIELDS:
        yield_core()
    else:
        sleep_ns(_NAP_NS)


@device
def barrier(ctl, size):
    """Wait until all `size` threads are here; what they wrote before is visible to all after."""
    if size == 1:
        return
    passed = load_acquire(ctl + 8 * PASSED)
    if fetch_add(ctl + 8 * ARRIVED, 1) == size - 1:
        store_release(ctl + 8 * ARRIVED, 0)
        store_release(ctl + 8 * PASSED, passed + 1)
        return
    turn = 0
    while load_acquire(ctl + 8 * PASSED) == passed:
        wait_a_little(turn)
        turn += 1
