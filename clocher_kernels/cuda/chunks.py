"""Products of a chunk: the columns of a row of W that one thread reads at once, with a token's.

The arithmetic (MATH) is "pairs": packed fp16, words of four codes; or "fp32".
"""

import triton
import triton.language as tl

from clocher_kernels.cuda.codes import fma_pairs, halves, pairs, to_f32


@triton.jit
def quarters(v, LANES: tl.constexpr):
    """Split [LANES * 4] into the first, second, third and fourth element of each lane, [LANES]."""
    even, odd = tl.split(tl.reshape(v, (LANES, 2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


@triton.jit
def weight_factors(
    row, LANES: tl.constexpr, CODE: tl.constexpr, MATH: tl.constexpr, ASM: tl.constexpr
):
    """Turn what was loaded of a row into the factors of `dot`, a tuple."""
    if MATH == "pairs":
        low, high = pairs(row, CODE, ASM)
        return quarters(low, LANES) + quarters(high, LANES)
    else:
        return (to_f32(row, CODE, ASM),)


@triton.jit
def token_factors(x, LANES: tl.constexpr, MATH: tl.constexpr):
    """Turn what was loaded of a token into the factors of `dot`, a tuple."""
    if MATH == "pairs":
        low, high = x.to(tl.int32), (x >> 32).to(tl.int32)
        return quarters(low, LANES) + quarters(high, LANES)
    else:
        return (x.to(tl.float32),)


@triton.jit
def dot(
    w, x, at: tl.constexpr,
    LANES: tl.constexpr, LANE: tl.constexpr, MATH: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Sum the products of each lane's chunk: x with the factors w[at], w[at + 1], ..."""
    if MATH == "pairs":
        # One chain of packed multiply-adds, then fp32.
        total = tl.zeros((LANES,), tl.int32)
        for i in tl.static_range(8):
            total = fma_pairs(w[at + i], x[i], total, ASM)
        low, high = halves(total)
        return low + high
    else:
        return tl.sum(tl.reshape(w[at] * x[0], (LANES, LANE)), 1)
