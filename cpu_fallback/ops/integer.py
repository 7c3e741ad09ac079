"""BitNet on integers: int8 activations times ternary codes, exact int32 sums."""

import numpy as np

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import Ternary
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.memory import load_f32, load_f32_n, store_u8, store_u8_n, write_f32
from cpu_fallback.lanes.record import executes
from cpu_fallback.lanes.simd import (
    absolute,
    fma,
    hmax,
    hsum,
    maximum,
    minimum,
    mul,
    rint,
    splat,
    to_i32,
    zero,
)
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.ops.quantized import Tiled, multiply_tiles, product_launch
from cpu_fallback.team.tape import Launch


@executes("quantize_act")
def quantize_act(a, rank, size, scratch):
    """Quantise each token to int8 with one scale; each thread has a range of tokens.

    The scale of a token with NaN or infinity is NaN.
    """
    k = a.K
    first, last = share(a.M, rank, size)
    for t in range(first, last):
        x, q = a.x + 4 * t * k, a.q + t * k
        largest, odd = zero(), zero()
        for i in range(0, k - 15, 16):
            values = load_f32(x + 4 * i)
            largest, odd = maximum(absolute(values), largest), fma(values, zero(), odd)
        done = k & -16
        if done < k:
            values = load_f32_n(x + 4 * done, k - done)
            largest, odd = maximum(absolute(values), largest), fma(values, zero(), odd)
        absmax = max(hmax(largest), np.float32(1e-5))
        inverse = splat(np.float32(127) / absmax)
        for i in range(0, k - 15, 16):
            store_u8(q + i, _code(load_f32(x + 4 * i), inverse))
        if done < k:
            codes = _code(load_f32_n(x + 4 * done, k - done), inverse)
            store_u8_n(q + done, codes, k - done)
        write_f32(a.scale + 4 * t, absmax / np.float32(127) + hsum(odd))


@device
def _code(x, inverse):
    low, high = splat(np.float32(-128)), splat(np.float32(127))
    return to_i32(minimum(maximum(rint(mul(x, inverse)), low), high))


@executes("linear_i8", Tiled)
def linear_i8(a, rank, size, scratch):
    """Compute y = (q codes^T) * (scale * factor) + bias + residual; exact integer sums."""
    multiply_tiles(a, rank, size, scratch)


def _linear_i8(call: BoundCall) -> list[Launch]:
    fmt = call.tensor("w").format
    if not isinstance(fmt, Ternary):
        raise UnsupportedOp(
            f"linear_i8: no CPU kernel reads the format {fmt.name}; expected ternary or "
            "ternary_inverse"
        )
    return product_launch(call, linear_i8, 0)


LOWER = {"quantize_act": quantize_act, "linear_i8": _linear_i8}
