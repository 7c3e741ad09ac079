"""Choose the next tokens, and step the token inputs on.

A row of logits belongs to one thread. Sampling narrows a list of candidates, kept in ascending
order of id: all that are allowed, then the top_k largest, then the shortest descending run that has
top_p of the mass, then one of them. The narrowing is a radix selection on the bits of the logits,
so nothing is sorted, and masses are fp64, so the choice is that of the reference.
"""

from typing import NamedTuple

import numpy as np

from clocher_kernels.ops.sampling import NO_TOKEN, NONE_ALLOWED
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.record import executes, reader
from cpu_fallback.ops.bind import share, within

_LOWEST = np.float32(-np.inf)
_SIGN = 1 << 31
_BINS = 256

# Scratch: the record of the candidates; the bins of the selection, fp64; then the three arrays.
_ARRAYS = 64 + 8 * _BINS
_LEAST = np.float64(np.finfo(np.float64).tiny)


class Candidates(NamedTuple):
    """The addresses of the candidates' logits, fp32, ids, int32, and weights, fp64."""

    x: int
    ids: int
    weights: int


candidates_at = reader(Candidates)  # Read the record at an address


@device
def _largest(row, count):
    """Return the largest of count values, NaN if one of them is NaN or infinite."""
    lowest = v.splat(_LOWEST)
    a, b, c, d = lowest, lowest, lowest, lowest
    e, f = v.zero(), v.zero()
    for i in range(0, count - 63, 64):
        at = row + 4 * i
        p, q, r, s = v.load_f32(at), v.load_f32(at + 64), v.load_f32(at + 128), v.load_f32(at + 192)
        a, b, c, d = v.maximum(p, a), v.maximum(q, b), v.maximum(r, c), v.maximum(s, d)
        # Zero times what is not finite is NaN, which no sum loses.
        e, f = v.fma(r, v.zero(), v.fma(p, v.zero(), e)), v.fma(s, v.zero(), v.fma(q, v.zero(), f))
    i = count & -64
    while i < count:
        n = min(16, count - i)
        p = v.load_f32_n(row + 4 * i, n)
        a, e = v.maximum(v.select(v.first(n), p, lowest), a), v.fma(p, v.zero(), e)
        i += 16
    return v.hmax(v.maximum(v.maximum(a, b), v.maximum(c, d))) + v.hsum(v.add(e, f))


@device
def _greedy(row, count, top):
    """Return the index of the first value that is the largest."""
    for i in range(0, count - 15, 16):
        found = v.mask_bits(v.eq(v.load_f32(row + 4 * i), v.splat(top)))
        if found:
            return i + v.lowest_bit(found)
    for i in range(count & -16, count):
        if v.read_f32(row + 4 * i) == top:
            return i
    return 0


@device
def _keys(x):
    """Map fp32 lanes to int32 lanes of the same order; both zeros become 0."""
    code = v.bits_i32(v.add(x, v.zero()))
    magnitude = v.iand(code, v.isplat(0x7FFFFFFF))
    negative = v.ior(v.isub(v.isplat(0x7FFFFFFF), magnitude), v.isplat(_SIGN))
    return v.iselect(v.ilt(code, v.izero()), negative, code)


@device
def _key(address):
    """Do that for one fp32, plus 2^31: a number in 0 .. 2^32 - 1."""
    code = v.read_i32(address)
    if code == -_SIGN:
        code = 0
    if code < 0:
        code ^= 0x7FFFFFFF
    return code + _SIGN


@device
def _arrays(count, scratch):
    """Lay out the arrays of at most count candidates; return their record."""
    room = (count + 15) & -16
    x = scratch + _ARRAYS
    v.write_i64(scratch, x)
    v.write_i64(scratch + 8, x + 4 * room)
    v.write_i64(scratch + 16, x + 8 * room)
    return candidates_at(scratch)


_present = device(lambda count: (1 << min(16, count)) - 1)  # a bit for each of the first lanes


@device
def _candidates(row, count, mask, scratch):
    """Make the tokens that a mask allows, if there is one, candidates; return how many these are.

    Each weighs 1.
    """
    x, ids, weights = _arrays(count, scratch)
    n = np.int64(0)
    for i in range(0, count, 16):
        lanes = _present(count - i)
        if mask:
            lanes &= v.read_u16(mask + (i >> 3))
        if lanes == 0xFFFF:
            v.store_f32(x + 4 * n, v.load_f32(row + 4 * i))
            v.store_i32(ids + 4 * n, v.iadd(v.iota(), v.isplat(i)))
            v.store_f64(weights + 8 * n, v.ones64())
            n, lanes = n + 16, 0
        while lanes:
            j = i + v.lowest_bit(lanes)
            lanes &= lanes - 1
            v.write_i32(x + 4 * n, v.read_i32(row + 4 * j))
            v.write_i32(ids + 4 * n, j)
            v.write_f64(weights + 8 * n, np.float64(1))
            n += 1
    return n


@device
def _gather(scratch, n, target):
    """Walk by descending logit and ascending id until n candidates weigh `target`; keep those.

    A radix selection finds where the walk ends, 8 bits of the key at a time; if all together do
    not weigh enough, it ends at the last. `target` must be positive, so one is kept.
    """
    listed, bins = candidates_at(scratch), scratch + 64
    x, weights = listed.x, listed.weights
    prefix, above = np.int64(0), np.float64(0)
    for shift in range(24, -1, -8):
        for digit in range(_BINS):
            v.write_f64(bins + 8 * digit, np.float64(0))
        for i in range(0, n, 16):
            keys = v.iadd(_keys(v.load_f32(x + 4 * i)), v.isplat(_SIGN))
            # Two shifts, for one by 32 is undefined.
            same = v.ieq(v.shr(v.shr(keys, shift), 8), v.isplat(prefix))
            lanes = v.mask_bits(same) & _present(n - i)
            while lanes:
                j = i + v.lowest_bit(lanes)
                lanes &= lanes - 1
                at = bins + 8 * ((_key(x + 4 * j) >> shift) & 255)
                v.write_f64(at, v.read_f64(at) + v.read_f64(weights + 8 * j))
        chosen, total = np.int64(0), above
        for back in range(_BINS):
            digit = _BINS - 1 - back
            weight = v.read_f64(bins + 8 * digit)
            if weight > 0 and total < target:
                chosen, above = digit, total
                total += weight
        prefix = (prefix << 8) | chosen
    return _keep(scratch, n, prefix, above, target)


@device
def _keep(scratch, n, last, above, target):
    """Keep the candidates above the key `last`, and those at it until they weigh `target`."""
    listed = candidates_at(scratch)
    x, ids, weights = listed.x, listed.ids, listed.weights
    kept = np.int64(0)
    for i in range(0, n, 16):
        below = v.mask_bits(v.ilt(_keys(v.load_f32(x + 4 * i)), v.isplat(last - _SIGN)))
        lanes = ~below & _present(n - i)
        while lanes:
            j = i + v.lowest_bit(lanes)
            lanes &= lanes - 1
            weight, tie = v.read_f64(weights + 8 * j), _key(x + 4 * j) == last
            if not tie or above < target:
                v.write_i32(ids + 4 * kept, v.read_i32(ids + 4 * j))
                v.write_f64(weights + 8 * kept, weight)
                v.write_i32(x + 4 * kept, v.read_i32(x + 4 * j))
                kept += 1
            if tie:
                above += weight
    return kept


@device
def _accumulate(scratch, n):
    """Replace weights by their running sums, in order, and return the last."""
    weights, total = candidates_at(scratch).weights, np.float64(0)
    for i in range(n):
        total += v.read_f64(weights + 8 * i)
        v.write_f64(weights + 8 * i, total)
    return total


@device
def _drawn(a, r, n, top, temperature, scratch):
    """Return the id of one of n candidates of row r; `top` is the largest logit."""
    x, ids, weights = candidates_at(scratch)
    top_k, top_p = v.read_i32(a.top_k + 4 * r), v.read_f32(a.top_p + 4 * r)
    if 0 < top_k < n:
        n = _gather(scratch, n, np.float64(top_k))
    for i in range(0, n, 16):
        v.store_f64(weights + 8 * i, v.boltzmann(v.load_f32(x + 4 * i), top, temperature))
    if top_p < np.float32(1):
        total = np.float64(0)
        for i in range(n):
            total += v.read_f64(weights + 8 * i)
        n = _gather(scratch, n, max(np.float64(top_p) * total, _LEAST))
    number = v.uniform(v.read_i64(a.seeds + 8 * r), v.read_i32(a.draws + 4 * r))
    target = number * _accumulate(scratch, n)
    low, high = np.int64(0), n - 1
    while low < high:
        middle = (low + high) >> 1
        if v.read_f64(weights + 8 * middle) > target:
            high = middle
        else:
            low = middle + 1
    return v.read_i32(ids + 4 * low)


@device
def _allowed(a, r, mask, temperature, scratch):
    """Return the token chosen for row r, of those that a mask allows."""
    row, mask = a.logits + 4 * r * a.V, a.allowed + 4 * a.W * within(mask - 1, a.C)
    n = _candidates(row, a.V, mask, scratch)
    if n == 0:
        return np.int64(NONE_ALLOWED)
    x, ids, _ = candidates_at(scratch)
    top = _largest(x, n)
    if temperature == np.float32(0):
        return np.int64(v.read_i32(ids + 4 * _greedy(x, n, top)))
    return np.int64(_drawn(a, r, n, top, temperature, scratch))


@executes("sample")
def sample(a, rank, size, scratch):
    """Choose a token per row, none where a logit is not finite; each thread has a range of rows."""
    begin, end = share(a.R, rank, size)
    for r in range(begin, end):
        row, temperature = a.logits + 4 * r * a.V, v.read_f32(a.temperature + 4 * r)
        mask, top = v.read_i32(a.masked + 4 * r), _largest(row, a.V)
        if top != top:
            chosen = np.int64(NO_TOKEN)
        elif mask > 0:
            chosen = _allowed(a, r, mask, temperature, scratch)
        elif temperature == np.float32(0):
            chosen = _greedy(row, a.V, top)
        else:
            _candidates(row, a.V, np.int64(0), scratch)
            chosen = _drawn(a, r, a.V, top, temperature, scratch)
        v.write_i32(a.ids + 4 * r, chosen)


@executes("advance")
def advance(a, rank, size, scratch):
    """Make the sampled tokens the next step's tokens; each thread has a range of rows."""
    begin, end = share(a.R, rank, size)
    for r in range(begin, end):
        t = v.read_i32(a.rows + 4 * r)
        if 0 <= t < a.M:
            v.write_i32(a.ids + 4 * t, max(v.read_i32(a.sampled + 4 * r), 0))
            _increment(a.positions + 4 * t)
            _increment(a.ends + 4 * t)
        _increment(a.draws + 4 * r)


@device
def _increment(address):
    v.write_i32(address, v.read_i32(address) + 1)


LOWER = {
    "sample": lambda call: [
        call.launch(sample, scratch=_ARRAYS + 16 * (-(-call.dim("V") // 16) * 16))
    ],
    "advance": advance,
}
