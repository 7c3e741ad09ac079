"""Set small activations of a token to zero, by a given threshold or by one of its own."""

from typing import NamedTuple

import numpy as np

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.team.tape import Launch


@device
def _below(x, k, limit):
    """Return how many magnitudes have bits below a limit."""
    found, bound, one = v.izero(), v.isplat(limit), v.isplat(1)
    for i in range(0, k, 16):
        n = min(16, k - i)
        bits = v.bits_i32(v.absolute(v.load_f32_n(x + 4 * i, n)))
        found = v.iadd(found, v.iselect(v.ilt(bits, bound), one, v.izero()))
    return v.ihsum(found) - (-(-k // 16) * 16 - k) * (limit > 0)


@device
def _kept(x, k, most, least):
    """Return how many channels of a token are kept."""
    total, squares = v.zero(), v.zero()
    for i in range(0, k, 16):
        size = v.absolute(v.load_f32_n(x + 4 * i, min(16, k - i)))
        total, squares = v.add(total, size), v.add(squares, v.mul(size, size))
    sum_of = v.hsum(total)
    width = np.float32(k)
    bottom = width * v.hsum(squares)
    even = np.float32(1)
    if bottom > np.float32(0):
        even = sum_of * sum_of / bottom
    if not even <= np.float32(1):
        even = np.float32(1)
    wanted = (least + (most - least) * even) * width
    count = int(wanted)
    if np.float32(count) < wanted:
        count += 1
    return max(1, min(count, k))


@device
def _limit(x, k, count):
    limit = 0
    for place in range(30, -1, -1):
        higher = limit + (1 << place)
        if k - _below(x, k, higher) >= count:
            limit = higher
    return limit


class Drop(NamedTuple):
    """Nothing besides the contract."""

    given: int


@executes("drop_small", Drop)
def drop_small(a, rank, size, scratch):
    """Copy a token but for what is small; each thread has a range of tokens."""
    first, last = share(a.M, rank, size)
    k = a.K
    for t in range(first, last):
        x, y = a.x + 4 * t * k, a.y + 4 * t * k
        if a.given:
            bound = v.splat(v.read_f32(a.threshold))
            for i in range(0, k, 16):
                n = min(16, k - i)
                values = v.load_f32_n(x + 4 * i, n)
                kept = v.select(v.lt(v.absolute(values), bound), v.zero(), values)
                v.store_f32_n(y + 4 * i, kept, n)
        else:
            low = v.isplat(_limit(x, k, _kept(x, k, a.most, a.least)))
            for i in range(0, k, 16):
                n = min(16, k - i)
                values = v.load_f32_n(x + 4 * i, n)
                small = v.ilt(v.bits_i32(v.absolute(values)), low)
                v.store_f32_n(y + 4 * i, v.select(small, v.zero(), values), n)


def _lower(call: BoundCall) -> list[Launch]:
    return [call.launch(drop_small, Drop(int(call.has("threshold"))))]


LOWER = {"drop_small": _lower}
