"""The tokens of the largest logits of a row, in one pass over it.

A row belongs to one thread. It keeps the K best so far in order; a logit gets in only if it is
above the least of them. Of logits in no order few are, so the pass is little more than reading.
"""

import numpy as np

from clocher_kernels.ops.sampling import NO_TOKEN
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.team.tape import Launch

_LOWEST = np.float32(-np.inf)


@device
def _insert(values, ids, k, value, token):
    """Put a token behind those of the k best that are not below it, and drop the last of them."""
    at = k - 1
    while at > 0 and v.read_f32(values + 4 * (at - 1)) < value:
        v.write_f32(values + 4 * at, v.read_f32(values + 4 * (at - 1)))
        v.write_i32(ids + 4 * at, v.read_i32(ids + 4 * (at - 1)))
        at -= 1
    v.write_f32(values + 4 * at, value)
    v.write_i32(ids + 4 * at, token)


@device
def _admit(row, i, above, values, ids, k):
    """Insert what is above the least of the k best, of the lanes of a mask; return the least."""
    least = v.read_f32(values + 4 * (k - 1))
    while above:
        token = i + v.lowest_bit(above)
        above &= above - 1
        value = v.read_f32(row + 4 * token)
        if value > least:  # earlier lanes may have raised it
            _insert(values, ids, k, value, token)
            least = v.read_f32(values + 4 * (k - 1))
    return least


@device
def _best(row, count, values, ids, k):
    """Write the k largest logits and their ids in order; return NaN if one is not finite."""
    for at in range(k):
        v.write_f32(values + 4 * at, _LOWEST)
        v.write_i32(ids + 4 * at, NO_TOKEN)
    least, e, f = _LOWEST, v.zero(), v.zero()
    for i in range(0, count - 63, 64):
        at = row + 4 * i
        p, q, r, s = v.load_f32(at), v.load_f32(at + 64), v.load_f32(at + 128), v.load_f32(at + 192)
        # Zero times what is not finite is NaN, which no sum loses.
        e, f = v.fma(r, v.zero(), v.fma(p, v.zero(), e)), v.fma(s, v.zero(), v.fma(q, v.zero(), f))
        bar = v.splat(least)
        if v.mask_bits(v.lt(bar, v.maximum(v.maximum(p, q), v.maximum(r, s)))):
            for j in range(i, i + 64, 16):
                above = v.mask_bits(v.lt(v.splat(least), v.load_f32(row + 4 * j)))
                if above:
                    least = _admit(row, j, above, values, ids, k)
    i = count & -64
    while i < count:
        n = min(16, count - i)
        p = v.load_f32_n(row + 4 * i, n)
        e = v.fma(p, v.zero(), e)
        p = v.select(v.first(n), p, v.splat(_LOWEST))
        least = _admit(row, i, v.mask_bits(v.lt(v.splat(least), p)), values, ids, k)
        i += 16
    return v.hsum(v.add(e, f))


@executes("top_tokens")
def top_tokens(a, rank, size, scratch):
    """Find the first tokens of each row; each thread has a range of rows."""
    begin, end = share(a.R, rank, size)
    for r in range(begin, end):
        ids = a.candidates + 4 * r * a.K
        odd = _best(a.logits + 4 * r * a.V, a.V, scratch, ids, a.K)
        if odd != odd:
            for at in range(a.K):
                v.write_i32(ids + 4 * at, NO_TOKEN)


def _top_tokens(call: BoundCall) -> list[Launch]:
    return [call.launch(top_tokens, scratch=4 * call.dim("K"))]


LOWER = {"top_tokens": _top_tokens}
