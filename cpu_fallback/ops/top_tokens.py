"""The tokens of the largest logits of a row, in one pass over it.

A row belongs to one thread. It keeps the K best so far in order; a logit gets in only if it is
above the least of them. Of logits in no order few are, so the pass is little more than reading.
"""

import numpy as np

from clocher_kernels.ops.sampling import NO_TOKEN
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.maths import lowest_bit, mask_bits
from cpu_fallback.lanes.memory import (
    load_f32,
    load_f32_n,
    read_f32,
    read_i32,
    write_f32,
    write_i32,
)
from cpu_fallback.lanes.record import executes
from cpu_fallback.lanes.simd import add, first, fma, hsum, lt, maximum, select, splat, zero
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.team.tape import Launch

_LOWEST = np.float32(-np.inf)


@device
def _insert(values, ids, k, value, token):
    """Put a token behind those of the k best that are not below it, and drop the last of them."""
    at = k - 1
    while at > 0 and read_f32(values + 4 * (at - 1)) < value:
        write_f32(values + 4 * at, read_f32(values + 4 * (at - 1)))
        write_i32(ids + 4 * at, read_i32(ids + 4 * (at - 1)))
        at -= 1
    write_f32(values + 4 * at, value)
    write_i32(ids + 4 * at, token)


@device
def _admit(row, i, above, values, ids, k):
    """Insert what is above the least of the k best, of the lanes of a mask; return the least."""
    least = read_f32(values + 4 * (k - 1))
    while above:
        token = i + lowest_bit(above)
        above &= above - 1
        value = read_f32(row + 4 * token)
        if value > least:  # earlier lanes may have raised it
            _insert(values, ids, k, value, token)
            least = read_f32(values + 4 * (k - 1))
    return least


@device
def _best(row, v, values, ids, k):
    """Write the k largest of v logits and their ids in order; return NaN if one is not finite."""
    for at in range(k):
        write_f32(values + 4 * at, _LOWEST)
        write_i32(ids + 4 * at, NO_TOKEN)
    least, e, f = _LOWEST, zero(), zero()
    for i in range(0, v - 63, 64):
        at = row + 4 * i
        p, q, r, s = load_f32(at), load_f32(at + 64), load_f32(at + 128), load_f32(at + 192)
        # Zero times what is not finite is NaN, which no sum loses.
        e, f = fma(r, zero(), fma(p, zero(), e)), fma(s, zero(), fma(q, zero(), f))
        bar = splat(least)
        if mask_bits(lt(bar, maximum(maximum(p, q), maximum(r, s)))):
            for j in range(i, i + 64, 16):
                above = mask_bits(lt(splat(least), load_f32(row + 4 * j)))
                if above:
                    least = _admit(row, j, above, values, ids, k)
    i = v & -64
    while i < v:
        n = min(16, v - i)
        p = load_f32_n(row + 4 * i, n)
        e = fma(p, zero(), e)
        p = select(first(n), p, splat(_LOWEST))
        least = _admit(row, i, mask_bits(lt(splat(least), p)), values, ids, k)
        i += 16
    return hsum(add(e, f))


@executes("top_tokens")
def top_tokens(a, rank, size, scratch):
    """Find the first tokens of each row; each thread has a range of rows."""
    begin, end = share(a.R, rank, size)
    for r in range(begin, end):
        ids = a.candidates + 4 * r * a.K
        odd = _best(a.logits + 4 * r * a.V, a.V, scratch, ids, a.K)
        if odd != odd:
            for at in range(a.K):
                write_i32(ids + 4 * at, NO_TOKEN)


def _top_tokens(call: BoundCall) -> list[Launch]:
    return [call.launch(top_tokens, scratch=4 * call.dim("K"))]


LOWER = {"top_tokens": _top_tokens}
