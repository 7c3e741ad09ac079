"""Helpers of all kernels: early launch, index bounds, non-finite values, activation functions."""

import triton
import triton.language as tl

LARGEST_F16 = tl.constexpr(65504.0)


@triton.jit
def start(PDL: tl.constexpr):
    """Wait for the predecessor, release the successor; before it read only weights, tables."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def within(index, COUNT: tl.constexpr):
    """Clamp indices to 0 .. COUNT - 1 (`ops.contract`)."""
    return tl.minimum(tl.maximum(index, 0), COUNT - 1)


@triton.jit
def or_nan(x):
    """Replace infinities by NaN, fp32."""
    return tl.where(tl.abs(x) < float("inf"), x, float("nan"))


@triton.jit
def saturated(x, LARGEST: tl.constexpr):
    """Clamp fp32 values to +-LARGEST; NaN where they are not finite."""
    inside = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    return tl.where(tl.abs(x) < float("inf"), inside, float("nan"))


@triton.jit
def as_activation(x, y):
    """Convert fp32 values to y's type; fp16 saturates."""
    if y.dtype.element_ty == tl.float16:
        x = saturated(x, LARGEST_F16)
    return x.to(y.dtype.element_ty)


@triton.jit
def tanh(x):
    """Return tanh x of fp32 values, clamped to 1 beyond 7.91; NaN stays NaN.

    A quotient of polynomials, as `cpu_fallback.lanes.falling.tanh`: within 6.2 ulp plus 2 of the
    GPU's fast division; the GPU's own instruction has 11 bits only.

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


@triton.jit
def activate(x, ACT: tl.constexpr, CAP: tl.constexpr = 1.0):
    """Return an activation (`ops.activations`) of fp32 values; NaN stays NaN."""
    if ACT == "relu2":
        x = tl.where(x < 0, 0.0, x)  # a maximum would lose NaN
        return x * x
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # x (1 + tanh u) / 2 is x / (1 + e^-2u).
        twice = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        e = tl.exp(-tl.abs(twice))
        return x * tl.where(twice < 0, e, 1.0) / (1.0 + e)
    elif ACT == "tanh":
        return CAP * tanh(x / CAP)
    elif ACT == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return x / (1.0 + tl.exp(-x))
