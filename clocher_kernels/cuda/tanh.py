"""The hyperbolic tangent: the instruction that GPUs have for it is good to 11 bits only."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Return tanh x of fp32 values, clamped to 1 beyond 7.91; NaN stays NaN.

    It is `cpu_fallback.lanes.maths.tanh`: one quotient of polynomials, within 6.2 units in the
    last place, and the 2 of a GPU's fast division.

    Source: the coefficients of Eigen's `ptanh_float`, by rminimax (Filip 2018).
    """
    x = tl.where(x > 7.9073896408, 7.9073896408, tl.where(x < -7.9073896408, -7.9073896408, x))
    square = x * x
    p = square * 1.394553628e-8 + 2.102733560e-5
    p = p * square + 3.520756727e-3
    p = p * square + 1.340216100e-1
    q = square * 8.015776984e-7 + 3.326951409e-4
    q = q * square + 2.597254514e-2
    q = q * square + 4.673548340e-1
    return (x * square * p + x) / (q * square + 1.0)
