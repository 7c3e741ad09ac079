"""Where top-k and top-p cut a row of logits, without sorting it.

Weights are integer numbers of units, so sums are exact in any order. They are summed in bins of
equal logit width; only the bins that may hold a cut are searched by token. A rank is 64 bits: the
logit's bits, order-preserving, above the inverted id; larger ones come first.
"""

import triton
import triton.language as tl

# The last bin holds weights that round to zero.
BINS = tl.constexpr(2048)
# Range of the other bins in natural logs: exp(-32) is less than half a unit of 2^-44.
_SPAN = tl.constexpr(32.0)
# Listed tokens processed together.
_LISTED = tl.constexpr(512)
KEEP_ALL = tl.constexpr(-(1 << 63))
_LARGEST_RANK = tl.constexpr((1 << 63) - 1)


def unit_for(vocabulary: int) -> float:
    """Return the units of the largest weight; the sum over all tokens fits in 62 bits."""
    return 2.0 ** min(44, 62 - vocabulary.bit_length())


@triton.jit
def load_logits(logits, row, token, V: tl.constexpr, ROW: tl.constexpr):
    """Load logits of a row; minus infinity beyond it."""
    x = tl.load(logits + row.to(tl.int64) * ROW + token, token < V, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def without_forbidden(
    x, allowed, masked, row, token, V: tl.constexpr, C: tl.constexpr, W: tl.constexpr
):
    """Set logits that the row's mask does not allow to minus infinity."""
    mask = tl.load(masked + row)
    words = allowed + (tl.minimum(mask, C) - 1).to(tl.int64) * W + token // 32
    # Rows without a mask read nothing.
    word = tl.load(words, token < tl.where(mask > 0, V, 0), other=-1)
    return tl.where((word >> (token % 32)) & 1 != 0, x, float("-inf"))


@triton.jit
def weight_of(x, largest, temperature, UNIT: tl.constexpr):
    """Return weights in units, int64."""
    exponent = (x.to(tl.float64) - largest.to(tl.float64)) / temperature.to(tl.float64)
    # Infinity minus itself would be NaN.
    exponent = tl.where(x == largest, 0.0, exponent)
    return (tl.exp(exponent) * UNIT + 0.5).to(tl.int64)


@triton.jit
def rank_of(x, token):
    """Return the ranks of tokens; both zeros are one logit."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _logit_of(rank):
    key = (rank >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


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
    ranks, count, low, high, middle, largest, temperature,
    BY_MASS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
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
        x = _logit_of(rank)
        which = bin_of(x, largest, temperature)
        inside = (at < count) & (which >= low) & (which <= high)
        first = inside & (rank >= middle)
        units = tl.where(first, weight_of(x, largest, temperature, UNIT), 0)
        weight += units
        amount += units if BY_MASS else first.to(tl.int64)
        above = tl.where(first, tl.minimum(above, rank), above)
        below = tl.where(inside & (rank < middle), tl.maximum(below, rank), below)
        begin += _LISTED
    return tl.sum(amount), tl.min(above), tl.max(below), tl.sum(weight)


@triton.jit
def find_cut(
    ranks, count, low, high, need, largest, temperature,
    BY_MASS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Find the last kept token by bisection over the listed ranks of bins low .. high.

    At least `need` tokens or units are kept. Return its rank and the weight of all kept.
    """
    _, least, _, _ = _walk(ranks, count, low, high, KEEP_ALL, largest, temperature, BY_MASS, UNIT)
    _, _, most, _ = _walk(
        ranks, count, low, high, _LARGEST_RANK, largest, temperature, BY_MASS, UNIT
    )
    while least < most:
        # The mean, rounded up; their sum could overflow.
        middle = (least | most) - ((least ^ most) >> 1)
        amount, above, below, _ = _walk(
            ranks, count, low, high, middle, largest, temperature, BY_MASS, UNIT
        )
        enough = amount >= need
        least = tl.where(enough, above, least)
        most = tl.where(enough, most, below)
    _, _, _, weight = _walk(ranks, count, low, high, least, largest, temperature, BY_MASS, UNIT)
    return least, weight
