"""Choose the next tokens, and step the token inputs on.

A row of logits belongs to one thread. Sampling narrows a list of candidates, kept in ascending
order of id: those above a bound that top_k or min_p sets, then the top_k largest, then the shortest
descending run that has top_p of the mass, then one of them. The narrowing is a radix selection on
the bits of the logits, so nothing is sorted, and masses are fp64, so the choice is that of the
reference.
"""

from typing import NamedTuple

import numpy as np

from clocher_kernels.ops.sampling import FORBIDDEN, NO_TOKEN, NONE_ALLOWED
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.bind import share, within

_FORBIDDEN = np.float32(FORBIDDEN)
_LEAST_ALLOWED = np.nextafter(_FORBIDDEN, np.float32(0))
_LN2 = np.float32(np.log(2))
_SIGN = 1 << 31
_BINS = 256
_GROUP = 64  # Logits of which the largest stands for all, to bound the top_k largest from below

_ARRAYS = 8 * _BINS  # Where in the scratch, behind the bins of the selection, fp64, candidates are
_LEAST = np.float64(np.finfo(np.float64).tiny)


class Candidates(NamedTuple):
    """The addresses of the bins, and of the candidates' logits, fp32, ids, int32, weights, fp64."""

    bins: int
    x: int
    ids: int
    weights: int


_present = device(lambda count: (1 << min(16, count)) - 1)  # a bit for each of the first lanes


@device
def _allowed(i, count, mask):
    """Return which of the 16 tokens from i on are there and allowed by a mask, if there is one."""
    lanes = _present(count - i)
    if mask:
        lanes &= v.read_u16(mask + (i >> 3))
    return lanes


@device
def _largest(row, begin, end, count, mask):
    """Return the largest allowed logit of tokens begin .. end - 1, `FORBIDDEN` if there is none.

    NaN if one of them, allowed or not, is NaN or infinite.
    """
    top, odd = v.splat(_FORBIDDEN), v.zero()
    for i in range(begin, end, 16):
        x = v.load_up_to(row + 4 * i, count - i)
        # Zero times what is not finite is NaN, which no sum loses.
        odd = v.fma(x, v.zero(), odd)
        top = v.maximum(v.select(v.mask_of(_allowed(i, count, mask)), x, top), top)
    return v.hmax(top) + v.hsum(odd)


@device
def _greedy(row, count, mask, top):
    """Return the first allowed token whose logit is `top`."""
    for i in range(0, count, 16):
        x = v.load_up_to(row + 4 * i, count - i)
        found = v.mask_bits(v.eq(x, v.splat(top))) & _allowed(i, count, mask)
        if found:
            return i + v.lowest_bit(found)
    return np.int64(0)


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
    """Lay out the arrays of at most count candidates."""
    room, x = (count + 15) & -16, scratch + _ARRAYS
    return Candidates(scratch, x, x + 4 * room, x + 8 * room)


@device
def _candidates(row, count, mask, least, listed):
    """Make the allowed tokens with logits of at least `least` candidates; return how many."""
    x, ids, n = listed.x, listed.ids, np.int64(0)
    for i in range(0, count, 16):
        values = v.load_up_to(row + 4 * i, count - i)
        lanes = v.mask_bits(v.le(v.splat(least), values)) & _allowed(i, count, mask)
        if lanes == 0xFFFF:
            v.store_f32(x + 4 * n, values)
            v.store_i32(ids + 4 * n, v.iadd(v.iota(), v.isplat(i)))
            n, lanes = n + 16, 0
        while lanes:
            j = i + v.lowest_bit(lanes)
            lanes &= lanes - 1
            v.write_i32(x + 4 * n, v.read_i32(row + 4 * j))
            v.write_i32(ids + 4 * n, j)
            n += 1
    return n


@device
def _equal(listed, n):
    """Give each of n candidates the weight 1."""
    for i in range(0, n, 16):
        v.store_f64(listed.weights + 8 * i, v.ones64())


@device
def _bound(row, count, mask, k, listed):
    """Return a lower bound of the k-th largest allowed logit: that of the largest of groups."""
    groups = count // _GROUP
    if not 0 < k < groups:
        return _LEAST_ALLOWED
    for g in range(groups):
        begin = _GROUP * g
        v.write_f32(listed.x + 4 * g, _largest(row, begin, begin + _GROUP, count, mask))
    _equal(listed, groups)
    least = np.float32(np.inf)
    for i in range(_gather(listed, groups, np.float64(k))):
        least = min(least, v.read_f32(listed.x + 4 * i))
    return max(least, _LEAST_ALLOWED)


@device
def _gather(listed, n, target):
    """Walk by descending logit and ascending id until n candidates weigh `target`; keep those.

    A radix selection finds where the walk ends, 8 bits of the key at a time; if all together do
    not weigh enough, it ends at the last. `target` must be positive, so one is kept.
    """
    bins, x, weights = listed.bins, listed.x, listed.weights
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
    return _keep(listed, n, prefix, above, target)


@device
def _move(listed, source, to):
    """Copy a candidate to an earlier place."""
    v.write_i32(listed.x + 4 * to, v.read_i32(listed.x + 4 * source))
    v.write_i32(listed.ids + 4 * to, v.read_i32(listed.ids + 4 * source))
    v.write_f64(listed.weights + 8 * to, v.read_f64(listed.weights + 8 * source))


@device
def _keep(listed, n, last, above, target):
    """Keep the candidates above the key `last`, and those at it until they weigh `target`."""
    x, kept = listed.x, np.int64(0)
    for i in range(0, n, 16):
        below = v.mask_bits(v.ilt(_keys(v.load_f32(x + 4 * i)), v.isplat(last - _SIGN)))
        lanes = ~below & _present(n - i)
        while lanes:
            j = i + v.lowest_bit(lanes)
            lanes &= lanes - 1
            weight, tie = v.read_f64(listed.weights + 8 * j), _key(x + 4 * j) == last
            if not tie or above < target:
                _move(listed, j, kept)
                kept += 1
            if tie:
                above += weight
    return kept


@device
def _accumulate(weights, n):
    """Replace weights by their running sums, in order, and return the last."""
    total = np.float64(0)
    for i in range(n):
        total += v.read_f64(weights + 8 * i)
        v.write_f64(weights + 8 * i, total)
    return total


@device
def _heavy(listed, n, least):
    """Keep the candidates that weigh at least `least`; return how many."""
    kept = np.int64(0)
    for i in range(n):
        if v.read_f64(listed.weights + 8 * i) >= least:
            _move(listed, i, kept)
            kept += 1
    return kept


@device
def _drawn(a, r, row, mask, top, temperature, scratch):
    """Return the id drawn for row r; `top` is the largest allowed logit."""
    top_k, top_p = v.read_i32(a.top_k + 4 * r), v.read_f32(a.top_p + 4 * r)
    min_p = v.read_f32(a.min_p + 4 * r)
    listed = _arrays(a.V, scratch)
    ids, weights = listed.ids, listed.weights
    least = _bound(row, a.V, mask, top_k, listed)
    if min_p > 0:
        # Of its power of two; half of that, for the product is rounded.
        power = (v.read_i32(a.min_p + 4 * r) >> 23) - 128
        least = max(least, top + temperature * (np.float32(power) * _LN2))
    n = _candidates(row, a.V, mask, least, listed)
    if 0 < top_k < n:
        _equal(listed, n)
        n = _gather(listed, n, np.float64(top_k))
    for i in range(0, n, 16):
        v.store_f64(weights + 8 * i, v.boltzmann(v.load_f32(listed.x + 4 * i), top, temperature))
    if min_p > 0:
        n = _heavy(listed, n, np.float64(min_p))
    if top_p < np.float32(1):
        total = np.float64(0)
        for i in range(n):
            total += v.read_f64(weights + 8 * i)
        target = max(np.float64(top_p) * total, _LEAST)
        # All that are lighter have, together, less than the run leaves out.
        n = _heavy(listed, n, (total - target) / np.float64(2 * n + 1))
        n = _gather(listed, n, target)
    if n == 0:  # of settings that are none
        return _greedy(row, a.V, mask, top)
    number = v.uniform(v.read_i64(a.seeds + 8 * r), v.read_i32(a.draws + 4 * r))
    target = number * _accumulate(weights, n)
    low, high = np.int64(0), n - 1
    while low < high:
        middle = (low + high) >> 1
        if v.read_f64(weights + 8 * middle) > target:
            high = middle
        else:
            low = middle + 1
    return np.int64(v.read_i32(ids + 4 * low))


@device
def _edit(a, row, begin, end):
    """Edit the logits of a row."""
    for i in range(begin, end):
        token, edit = v.read_i32(a.edit_ids + 4 * i), a.edits + 12 * i
        if 0 <= token < a.V:
            x, strength = v.read_f32(row + 4 * token), v.read_f32(edit)
            x = x / strength if x > 0 else x * strength
            x = (x - v.read_f32(edit + 4)) + v.read_f32(edit + 8)
            v.write_f32(row + 4 * token, max(x, _FORBIDDEN))


@executes("sample")
def sample(a, rank, size, scratch):
    """Choose a token per row, none where a logit is not finite; each thread has a range of rows."""
    begin, end = share(a.R, rank, size)
    for r in range(begin, end):
        row, mask = a.logits + 4 * r * a.V, v.read_i32(a.masked + 4 * r)
        mask = a.allowed + 4 * a.W * within(mask - 1, a.C) if mask > 0 else np.int64(0)
        first = within(v.read_i32(a.edit_begin + 4 * r), a.E + 1)
        last = min(v.read_i32(a.edit_end + 4 * r), min(a.E, first + a.V))
        top = _largest(row, np.int64(0), a.V, a.V, mask)
        if first < last:
            _edit(a, row, first, last)
            # It stays NaN if it was.
            top = (top - top) + _largest(row, np.int64(0), a.V, a.V, mask)
        temperature = v.read_f32(a.temperature + 4 * r)
        if top != top:
            chosen = np.int64(NO_TOKEN)
        elif top < _LEAST_ALLOWED:
            chosen = np.int64(NONE_ALLOWED)
        elif temperature == np.float32(0):
            chosen = _greedy(row, a.V, mask, top)
        else:
            chosen = _drawn(a, r, row, mask, top, temperature, scratch)
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
