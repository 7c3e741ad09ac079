"""The compiled interpreter of a Plan, and the loops in which the threads of a team execute it.

A tape is an int64 array, one record per launch:

    [address of the kernel, 1 to meet at the barrier first, number of fields n, n fields]

`lead` is what the calling thread does for a step, `serve` what a worker does until it is told to
stop. Every thread walks the same tape, and each kernel divides its work by rank. Nothing of a
model is compiled in: another Plan is another array.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba import types

from cpu_fallback import sync
from cpu_fallback.jit import Kernel, device
from cpu_fallback.memory import read_i64, write_i64
from cpu_fallback.sync import barrier, load_acquire, store_release, wait_a_little
from cpu_fallback.vector import i64, op, void

_I64 = ir.IntType(64)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel call on the tape, by every thread of the team.

    Attributes:
        kernel: what to call.
        fields: int64 values it reads: addresses, sizes, counts, bits of floats. A Kernel stands for
            its address.
        reads: names of the buffers it reads.
        writes: names of the buffers it writes.
        scratch: bytes of scratch memory that it needs per thread.
    """

    kernel: Kernel
    fields: Sequence[int | Kernel]
    reads: frozenset[str]
    writes: frozenset[str]
    scratch: int = 0


def barriers(launches: Sequence[Launch]) -> list[bool]:
    """Return, for each launch, whether the team must meet before it.

    It must if the launch touches what an earlier one wrote since the last meeting, or writes what
    an earlier one read: then a slow thread may still be at the earlier one.
    """
    flags = []
    read: set[str] = set()
    written: set[str] = set()
    for launch in launches:
        touched = launch.reads | launch.writes
        meet = bool(touched & written or launch.writes & read)
        if meet:
            read, written = set(), set()
        read |= launch.reads
        written |= launch.writes
        flags.append(meet)
    return flags


def encode(launches: Sequence[Launch]) -> np.ndarray:
    """Return the tape of these launches, int64. Their kernels must be compiled."""
    words: list[int] = []
    for launch, meet in zip(launches, barriers(launches), strict=True):
        words += [launch.kernel.address, int(meet), len(launch.fields)]
        words += [f.address if isinstance(f, Kernel) else f for f in launch.fields]
    return np.array(words, np.int64)


@op(void, i64, i64, i64, i64, i64, i64)
def call_kernel(b, address, rec, ctl, rank, size, scratch):
    """Call the kernel at an address."""
    kind = ir.FunctionType(ir.VoidType(), [_I64] * 5)
    b.call(b.inttoptr(address, kind.as_pointer()), [rec, ctl, rank, size, scratch])


@device
def walk(ctl, rank):
    """Execute the tape as one thread of the team, and meet the others at its end."""
    size = read_i64(ctl + 8 * sync.SIZE)
    scratch = read_i64(ctl + 8 * sync.SCRATCH) + rank * read_i64(ctl + 8 * sync.SCRATCH_BYTES)
    at = read_i64(ctl + 8 * sync.TAPE)
    end = read_i64(ctl + 8 * sync.TAPE_END)
    while at < end:
        if read_i64(at + 8):
            barrier(ctl, size)
        call_kernel(read_i64(at), at + 24, ctl, rank, size, scratch)
        at += 24 + 8 * read_i64(at + 16)
    barrier(ctl, size)


def _lead(ctl, tokens, rows):
    """Execute one step as rank 0, waking the workers that wait in `serve`."""
    write_i64(ctl + 8 * sync.M, tokens)
    write_i64(ctl + 8 * sync.R, rows)
    store_release(ctl + 8 * sync.EPOCH, load_acquire(ctl + 8 * sync.EPOCH) + 1)
    walk(ctl, 0)


def _serve(ctl, rank, seen):
    """Execute each step as a worker until told to stop.

    Args:
        ctl: address of the control block.
        rank: this worker's number, from 1.
        seen: steps it has executed before.

    Returns:
        Steps it has executed by now.
    """
    turn = 0
    while True:
        if load_acquire(ctl + 8 * sync.EPOCH) != seen:
            seen += 1
            walk(ctl, rank)
            turn = 0
        elif load_acquire(ctl + 8 * sync.STOP):
            return seen
        else:
            wait_a_little(turn)
            turn += 1


lead = Kernel(_lead)
serve = Kernel(_serve, types.int64)
