"""Set small activations of a token to zero, by a given threshold or by one of its own."""

from typing import NamedTuple

import numpy as np

from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.memory import load_f32_n, read_f32, store_f32_n
from cpu_fallback.lanes.record import executes
from cpu_fallback.lanes.simd import (
    absolute,
    add,
    bits_i32,
    hsum,
    iadd,
    ihsum,
    ilt,
    iselect,
    isplat,
    izero,
    lt,
    mul,
    select,
    splat,
    zero,
)
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.team.tape import Launch


@device
def _below(x, k, limit):
    """Return how many magnitudes have bits below a limit."""
    found, bound, one = izero(), isplat(limit), isplat(1)
    for i in range(0, k, 16):
        n = min(16, k - i)
        bits = bits_i32(absolute(load_f32_n(x + 4 * i, n)))
        found = iadd(found, iselect(ilt(bits, bound), one, izero()))
    return ihsum(found) - (-(-k // 16) * 16 - k) * (limit > 0)


@device
def _kept(x, k, most, least):
    """Return how many channels of a token are kept."""
    total, squares = zero(), zero()
    for i in range(0, k, 16):
        size = absolute(load_f32_n(x + 4 * i, min(16, k - i)))
        total, squares = add(total, size), add(squares, mul(size, size))
    sum_of = hsum(total)
    width = np.float32(k)
    bottom = width * hsum(squares)
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
    """Return the largest limit that at least `count` magnitudes reach, as bits."""
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
            bound = splat(read_f32(a.threshold))
            for i in range(0, k, 16):
                n = min(16, k - i)
                values = load_f32_n(x + 4 * i, n)
                kept = select(lt(absolute(values), bound), zero(), values)
                store_f32_n(y + 4 * i, kept, n)
        else:
            low = isplat(_limit(x, k, _kept(x, k, a.most, a.least)))
            for i in range(0, k, 16):
                n = min(16, k - i)
                values = load_f32_n(x + 4 * i, n)
                small = ilt(bits_i32(absolute(values)), low)
                store_f32_n(y + 4 * i, select(small, zero(), values), n)


def _lower(call: BoundCall) -> list[Launch]:
    return [call.launch(drop_small, Drop(int(call.has("threshold"))))]


LOWER = {"drop_small": _lower}
