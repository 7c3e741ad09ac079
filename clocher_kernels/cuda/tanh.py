"""The hyperbolic tangent: the instruction that GPUs have for it is good to 11 bits only."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Return tanh x of fp32 values within a few units in the last place; NaN stays NaN.

    Of |x| < 0.625 it is an odd polynomial, beyond 1 - 2 e / (1 + e) with e = e^(-2 |x|).

    Source: Cephes `tanhf`.
    """
    square = x * x
    p = square * -5.70498872745e-3 + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    near = p * square * x + x
    size = tl.abs(x)
    e = tl.exp2(size * -2.8853900817779268)
    far = 1.0 - 2.0 * e / (1.0 + e)
    return tl.where(size < 0.625, near, tl.where(x < 0, -far, far))
