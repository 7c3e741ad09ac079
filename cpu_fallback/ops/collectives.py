"""What the ranks of a model exchange, and what of it is a rank's own."""

from typing import NamedTuple

import numpy as np

from clocher_kernels.ops.collectives import current
from cpu_fallback.lanes.memory import read_f32, read_i32, write_f32, write_i32
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.bind import BoundCall, share, within
from cpu_fallback.ops.linear import copy_f32
from cpu_fallback.team.tape import Launch, call_kernel


class Leaving(NamedTuple):
    """The address of what the calling thread calls (`team.calls`)."""

    function: int


@executes("all_reduce", Leaving)
def all_reduce(a, rank, size, scratch):
    """Leave it to the ranks, with the number of rows."""
    if rank == 0:
        call_kernel(a.function, a.rec, a.ctl, rank, size, a.M)


@executes("all_gather", Leaving)
def all_gather(a, rank, size, scratch):
    """Leave it to the ranks, with the number of rows."""
    if rank == 0:
        call_kernel(a.function, a.rec, a.ctl, rank, size, a.M)


@executes("own_columns")
def own_columns(a, rank, size, scratch):
    """Copy a run of columns; each thread has a range of rows."""
    first, last = share(a.M, rank, size)
    for m in range(first, last):
        copy_f32(a.x + 4 * (m * a.N + a.start), a.y + 4 * m * a.S, a.S)


@executes("own_experts")
def own_experts(a, rank, size, scratch):
    """Rename the experts of each token; each thread has a range of tokens."""
    first, last = share(a.M, rank, size)
    for m in range(first, last):
        at = 4 * m * a.A
        stand_in = 0
        for i in range(a.A - 1, -1, -1):
            local = read_i32(a.ids + at + 4 * i) - a.first
            if 0 <= local < a.count:
                stand_in = local
        for i in range(a.A):
            local = read_i32(a.ids + at + 4 * i) - a.first
            is_own = 0 <= local < a.count
            own = local if is_own else stand_in
            write_i32(a.own_ids + at + 4 * i, within(own, a.count))
            weight = read_f32(a.weights + at + 4 * i)
            write_f32(a.own_weights + at + 4 * i, weight if is_own else np.float32(0))


def _all_reduce(call: BoundCall) -> list[Launch]:
    ranks, x = current(), call.array("x")
    function = call.hints.calls.address(lambda rows: ranks.all_reduce(x[:rows]))
    return [call.launch(all_reduce, Leaving(function))]


def _all_gather(call: BoundCall) -> list[Launch]:
    ranks, x, y, unit = current(), call.array("x"), call.array("y"), int(call.attr("unit"))
    function = call.hints.calls.address(lambda m: ranks.all_gather(x[:m], y[:m], unit))
    return [call.launch(all_gather, Leaving(function))]


LOWER = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "own_columns": own_columns,
    "own_experts": own_experts,
}
