"""Sample the next tokens in a few launches of fixed size.

A row takes four: the largest logit (enough for greedy rows), the bins, the cuts, the draw. Weights
are integer numbers of units, so sums are exact in any order. They are summed in bins of equal logit
width; only the bins that may hold a cut of top-k or top-p are searched by token. A rank is 64 bits:
the logit's bits, order-preserving, above the inverted id; larger ones come first.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.scalar import (
    is_last,
    logit_of,
    or_nan,
    probability_of,
    rank_of,
    start,
    uniform,
    weight_of,
)
from clocher_kernels.ops import sampling as op

# The last bin holds weights that round to zero.
BINS = tl.constexpr(2048)
# Range of the other bins in natural logs: exp(-32) is less than half a unit of 2^-44.
_SPAN = tl.constexpr(32.0)
# Listed tokens processed together.
_LISTED = tl.constexpr(512)
KEEP_ALL = tl.constexpr(-(1 << 63))
FORBIDDEN, NO_TOKEN = tl.constexpr(op.FORBIDDEN), tl.constexpr(op.NO_TOKEN)
NONE_ALLOWED = tl.constexpr(op.NONE_ALLOWED)
_LARGEST_RANK = tl.constexpr((1 << 63) - 1)


def unit_for(vocabulary: int) -> float:
    """Return the units of the largest weight; the sum over all tokens fits in 62 bits."""
    return 2.0 ** min(44, 62 - vocabulary.bit_length())


@triton.jit
def load_logits(logits, row, token, C: tl.constexpr):
    """Load logits of a row; minus infinity beyond it."""
    x = tl.load(logits + row.to(tl.int64) * C.ROW + token, token < C.V, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def without_forbidden(x, allowed, masked, row, token, C: tl.constexpr):
    """Set logits that the row's mask or its edits do not allow to minus infinity."""
    mask = tl.load(masked + row)
    words = allowed + (tl.minimum(mask, C.MASKS) - 1).to(tl.int64) * C.WORDS + token // 32
    # Rows without a mask read nothing.
    word = tl.load(words, token < tl.where(mask > 0, C.V, 0), other=-1)
    return tl.where(((word >> (token % 32)) & 1 != 0) & (x > FORBIDDEN), x, float("-inf"))


@triton.jit
def _edit(logits, edit_ids, edits, edit_begin, edit_end, row, part, C: tl.constexpr):
    """Edit the logits of a part of a row."""
    logits += row.to(tl.int64) * C.ROW
    at = tl.minimum(tl.maximum(tl.load(edit_begin + row), 0), C.E)
    end = tl.minimum(tl.minimum(tl.load(edit_end + row), C.E), at + C.V)
    while at < end:
        each = at + tl.arange(0, _LISTED)
        token = tl.load(edit_ids + each, each < end, other=-1)
        here = (token >= part * C.BLOCK) & (token < tl.minimum((part + 1) * C.BLOCK, C.V))
        x = tl.load(logits + token, here, other=0.0)
        strength = tl.load(edits + 3 * each, here, other=1.0)
        x = tl.where(x > 0, tl.div_rn(x, strength), x * strength)
        x -= tl.load(edits + 3 * each + 1, here, other=0.0)
        x += tl.load(edits + 3 * each + 2, here, other=0.0)
        tl.store(logits + token, tl.where(x < FORBIDDEN, FORBIDDEN, x), here)
        at += _LISTED


@triton.jit
def bin_of(x, largest, temperature):
    """Return the bins of logits, monotonic in the logit."""
    # A tiny temperature must not make infinity, which times zero is NaN.
    per_logit = tl.minimum(BINS / _SPAN / temperature, 1e30)
    distance = tl.where(x == largest, 0.0, (largest - x) * per_logit)
    return tl.minimum(distance, BINS - 1.0).to(tl.int32)


@triton.jit
def find_bins(counts, masses, k, p):
    """Find the bins of a row that the cuts are in, and set all bins to zero.

    Return (k_bin, k_need, k_above, p_low, p_high, p_above): the bin of the k-th token (-1 if top-k
    cuts off no weight), the tokens kept of it, the weight before it (all, without a cut); the first
    and last bin that top-p's cut may be in (last < first if none), the weight before them.
    """
    bin_ = tl.arange(0, BINS)
    count = tl.load(counts + bin_, cache_modifier=".cg")
    mass = tl.load(masses + bin_, cache_modifier=".cg")
    tl.store(counts + bin_, tl.zeros_like(count))
    tl.store(masses + bin_, tl.zeros_like(mass))
    mass_to = tl.cumsum(mass, 0)

    k_bin = tl.sum((tl.cumsum(count, 0) < k).to(tl.int32))
    k_bin = tl.where((k > 0) & (k_bin < BINS - 1), k_bin, -1)
    last = tl.where(k_bin < 0, BINS, k_bin)
    k_need = k - tl.sum(tl.where(bin_ < last, count, 0))
    k_above = tl.sum(tl.where(bin_ < last, mass, 0))
    # The weight kept by top-k is between k_above and k_above plus the whole bin.
    least = share_of(p, k_above)
    most = share_of(p, k_above + tl.sum(tl.where(bin_ == k_bin, mass, 0)))
    p_low = tl.sum((mass_to < least).to(tl.int32))
    p_high = tl.minimum(tl.sum((mass_to < most).to(tl.int32)), last)
    p_above = tl.sum(tl.where(bin_ < p_low, mass, 0))
    return k_bin, k_need, k_above, p_low, tl.where(p < 1, p_high, -1), p_above


@triton.jit
def share_of(p, mass):
    """Return the units that reach a share of a weight, at least 1."""
    return tl.maximum(tl.ceil(p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _walk(
    ranks, count, low, high, middle, largest, temperature, C: tl.constexpr, BY_MASS: tl.constexpr
):
    """Split the listed tokens of some bins at a middle rank.

    Return the number or the weight of those of at least `middle`, their least rank, the largest
    rank of the others, and the weight of the first.
    """
    amount = tl.zeros((_LISTED,), tl.int64)
    weight = tl.zeros((_LISTED,), tl.int64)
    above = tl.full((_LISTED,), _LARGEST_RANK, tl.int64)
    below = tl.full((_LISTED,), KEEP_ALL, tl.int64)
    begin = count * 0
    while begin < count:
        at = begin + tl.arange(0, _LISTED)
        rank = tl.load(ranks + at, at < count, other=0, cache_modifier=".cg")
        x = logit_of(rank)
        which = bin_of(x, largest, temperature)
        inside = (at < count) & (which >= low) & (which <= high)
        first = inside & (rank >= middle)
        units = tl.where(first, weight_of(x, largest, temperature, C.UNIT), 0)
        weight += units
        amount += units if BY_MASS else first.to(tl.int64)
        above = tl.where(first, tl.minimum(above, rank), above)
        below = tl.where(inside & (rank < middle), tl.maximum(below, rank), below)
        begin += _LISTED
    return tl.sum(amount), tl.min(above), tl.max(below), tl.sum(weight)


@triton.jit
def find_cut(
    ranks, count, low, high, need, largest, temperature, C: tl.constexpr, BY_MASS: tl.constexpr
):
    """Find the last kept token by bisection over the listed ranks of bins low .. high.

    At least `need` tokens or units are kept. Return its rank and the weight of all kept.
    """
    _, least, _, _ = _walk(ranks, count, low, high, KEEP_ALL, largest, temperature, C, BY_MASS)
    _, _, most, _ = _walk(ranks, count, low, high, _LARGEST_RANK, largest, temperature, C, BY_MASS)
    while least < most:
        # The mean, rounded up; their sum could overflow.
        middle = (least | most) - ((least ^ most) >> 1)
        amount, above, below, _ = _walk(
            ranks, count, low, high, middle, largest, temperature, C, BY_MASS
        )
        enough = amount >= need
        least = tl.where(enough, above, least)
        most = tl.where(enough, most, below)
    _, _, _, weight = _walk(ranks, count, low, high, least, largest, temperature, C, BY_MASS)
    return least, weight


# Tokens of a program.
_BLOCK = 2048

# What a row keeps between launches, int64: kept ranks are at least CUT; the rest says in which bins
# the cuts are, what is before them, how many tokens are in these bins; STATE is their number.
CUT, K_BIN, K_NEED, K_ABOVE, P_LOW, P_HIGH, P_ABOVE, LISTED, STATE = map(tl.constexpr, range(9))


@triton.jit
def _largest(
    logits, allowed, masked, edit_ids, edits, edit_begin, edit_end, largest, tops, firsts, ids,
    arrivals, C: tl.constexpr,
):  # fmt: skip
    """Edit a row; find its largest logit and its lowest id, the greedy token; NaN if not finite."""
    start(C.PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    token = part * C.BLOCK + tl.arange(0, C.BLOCK)
    x = load_logits(logits, row, token, C)
    odd = (token < C.V) & ((tl.abs(x) < float("inf")) == 0)
    tl.debug_barrier()  # a logit is not edited before it is read, nor read before it is edited
    _edit(logits, edit_ids, edits, edit_begin, edit_end, row, part, C)
    tl.debug_barrier()
    x = load_logits(logits, row, token, C)
    odd |= (token < C.V) & ((tl.abs(x) < float("inf")) == 0)
    x = without_forbidden(x, allowed, masked, row, token, C)
    top, index = tl.max(tl.where(odd, float("inf"), x), 0, return_indices=True)
    tl.store(tops + row * C.PROGRAMS + part, top)
    tl.store(firsts + row * C.PROGRAMS + part, part * C.BLOCK + index)
    if is_last(arrivals + row, C.PROGRAMS):
        each = tl.arange(0, C.WIDTH)
        at, inside = row * C.PROGRAMS + each, each < C.PROGRAMS
        top_of = tl.load(tops + at, inside, other=float("-inf"), cache_modifier=".cg")
        first_of = tl.load(firsts + at, inside, other=C.V - 1, cache_modifier=".cg")
        best = tl.max(top_of)
        found = tl.min(tl.where(top_of == best, first_of, C.V - 1))
        found = tl.where(best == float("-inf"), NONE_ALLOWED, found)
        found = tl.where(best == float("inf"), NO_TOKEN, found)
        tl.store(largest + row, or_nan(best))
        tl.store(ids + row, found)


@triton.jit
def _block_of(logits, allowed, masked, min_p, row, part, top, heat, C: tl.constexpr):
    """Return the tokens of a part of a row and their logits, minus infinity if not allowed."""
    at = part * C.BLOCK + tl.arange(0, C.BLOCK)
    x = load_logits(logits, row, at, C)
    x = without_forbidden(x, allowed, masked, row, at, C)
    least = tl.load(min_p + row)
    if least > 0:
        x = tl.where(probability_of(x, top, heat) >= least, x, float("-inf"))
    return at, x


@triton.jit
def _fill_bins(
    logits, allowed, masked, largest, temperature, top_k, top_p, min_p, counts, bin_masses, state,
    arrivals, C: tl.constexpr,
):  # fmt: skip
    start(C.PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    state += row * STATE
    top = tl.load(largest + row)
    if (heat == 0) | (top != top):
        return
    by_count = (k > 0) & (k < C.V)
    if (by_count == 0) & (p >= 1):
        if part == 0:
            tl.store(state + CUT, KEEP_ALL)
            tl.store(state + K_BIN, -1)
            tl.store(state + P_LOW, 0)
            tl.store(state + P_HIGH, -1)
        return
    at, x = _block_of(logits, allowed, masked, min_p, row, part, top, heat, C)
    counts += row * BINS
    bin_masses += row * BINS
    # An invalid temperature may give a negative bin: keep it within bounds.
    which = tl.maximum(bin_of(x, top, heat), 0)
    # Most tokens are in the last bin: they weigh nothing, and no cut needs their count.
    weighs = (at < C.V) & (which < BINS - 1)
    tl.atomic_add(counts + which, 1, weighs, sem="relaxed")
    tl.atomic_add(bin_masses + which, weight_of(x, top, heat, C.UNIT), weighs, sem="relaxed")
    if is_last(arrivals + row, C.PROGRAMS):
        k_bin, k_need, k_above, p_low, p_high, p_above = find_bins(
            counts, bin_masses, tl.where(by_count, k, 0), p
        )
        tl.store(state + CUT, KEEP_ALL)
        tl.store(state + K_BIN, k_bin)
        tl.store(state + K_NEED, k_need)
        tl.store(state + K_ABOVE, k_above)
        tl.store(state + P_LOW, p_low)
        tl.store(state + P_HIGH, p_high)
        tl.store(state + P_ABOVE, p_above)
        tl.store(state + LISTED, 0)


@triton.jit
def _cut(
    logits, allowed, masked, largest, temperature, top_p, min_p, ranks, state, arrivals,
    C: tl.constexpr,
):  # fmt: skip
    """List the tokens of the cuts' bins, in any order, and find the cuts there."""
    start(C.PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    heat, top = tl.load(temperature + row), tl.load(largest + row)
    state += row * STATE
    if (heat == 0) | (top != top):
        return
    k_bin = tl.load(state + K_BIN)
    p_low, p_high = tl.load(state + P_LOW), tl.load(state + P_HIGH)
    if (k_bin < 0) & (p_high < p_low):
        return
    at, x = _block_of(logits, allowed, masked, min_p, row, part, top, heat, C)
    which = bin_of(x, top, heat)
    listed = (at < C.V) & ((which == k_bin) | ((which >= p_low) & (which <= p_high)))
    nth = tl.cumsum(listed.to(tl.int32), 0)
    begin = tl.atomic_add(state + LISTED, tl.sum(listed.to(tl.int64)), sem="relaxed")
    ranks += row.to(tl.int64) * C.V
    tl.store(ranks + begin + nth - 1, rank_of(x, at), listed)
    if is_last(arrivals + row, C.PROGRAMS):
        count = tl.load(state + LISTED, cache_modifier=".cg")
        mass = tl.load(state + K_ABOVE)
        cut = mass * 0 + KEEP_ALL
        if k_bin >= 0:
            need = tl.load(state + K_NEED)
            cut, inside = find_cut(ranks, count, k_bin, k_bin, need, top, heat, C, False)
            mass += inside
        if p_high >= p_low:
            need = share_of(tl.load(top_p + row), mass) - tl.load(state + P_ABOVE)
            p_cut, _ = find_cut(ranks, count, p_low, p_high, need, top, heat, C, True)
            cut = tl.maximum(cut, p_cut)
        tl.store(state + CUT, cut)


@triton.jit
def _draw(
    logits, allowed, masked, largest, temperature, min_p, seeds, draws, masses, state, ids,
    arrivals, C: tl.constexpr,
):  # fmt: skip
    """Sum kept weights by ascending id, and find where the drawn share is reached."""
    start(C.PDL)
    part, row = tl.program_id(0), tl.program_id(1)
    heat, top = tl.load(temperature + row), tl.load(largest + row)
    if (heat == 0) | (top != top):
        return
    cut = tl.load(state + row * STATE + CUT)
    at, x = _block_of(logits, allowed, masked, min_p, row, part, top, heat, C)
    kept = tl.where(rank_of(x, at) >= cut, weight_of(x, top, heat, C.UNIT), 0)
    masses += row * C.PROGRAMS
    tl.store(masses + part, tl.sum(kept))
    if is_last(arrivals + row, C.PROGRAMS):
        each = tl.arange(0, C.WIDTH)
        mass = tl.load(masses + each, each < C.PROGRAMS, other=0, cache_modifier=".cg")
        total = tl.sum(mass)
        share = uniform(tl.load(seeds + row), tl.load(draws + row)) * total.to(tl.float64)
        target = tl.minimum(share.to(tl.int64), total - 1)
        chosen = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32))
        target -= tl.sum(tl.where(each < chosen, mass, 0))
        at, x = _block_of(logits, allowed, masked, min_p, row, chosen, top, heat, C)
        kept = tl.where(rank_of(x, at) >= cut, weight_of(x, top, heat, C.UNIT), 0)
        inside = tl.sum((tl.cumsum(kept, 0) <= target).to(tl.int32))
        tl.store(ids + row, tl.minimum(chosen * C.BLOCK + inside, C.V - 1))


def sample(*, logits: Tensor, allowed: Tensor, device: Device, **given: Any) -> list[Launch]:
    """Lower `ops.sampling.sample`.

    Draws equal the reference's up to its rounding: weights are integers of 2^-44 of the largest
    (fewer bits beyond 2^18 tokens), so sums are exact in any order.
    """
    count, vocabulary = logits.shape
    programs, bins = triton.cdiv(vocabulary, _BLOCK), BINS.value
    i32, i64, f32 = torch.int32, torch.int64, torch.float32
    sizes = {"V": vocabulary, "MASKS": allowed.shape[0], "WORDS": allowed.shape[1]}
    sizes |= {"E": len(given["edit_ids"]), "ROW": logits.stride(0)}
    sizes |= {"BLOCK": _BLOCK, "PROGRAMS": programs}
    sizes |= {"WIDTH": triton.next_power_of_2(programs), "UNIT": unit_for(vocabulary)}
    columns = {
        "largest": (1, f32),
        "state": (STATE.value, i64),
        "arrivals": (1, i32),
        "tops": (programs, f32),
        "firsts": (programs, i32),
        "counts": (bins, i32),
        "bin_masses": (bins, i64),
        "ranks": (vocabulary, i64),
        "masses": (programs, i64),
    }
    given |= {"logits": logits, "allowed": allowed}
    for name, (width, dtype) in columns.items():
        given[name] = device.scratch(f"sample_{name}", (count, width), dtype)
    launches = []
    for kernel in (_largest, _fill_bins, _cut, _draw):
        own = {name: value for name, value in given.items() if name in kernel.arg_names}
        launches.append(launch(kernel, (programs, count), device, **own, **sizes))
    return launches


def sample_greedy(**given: Any) -> list[Launch]:
    """Lower `ops.sampling.sample` for rows of temperature 0, with the first launch only."""
    return sample(**given)[:1]
