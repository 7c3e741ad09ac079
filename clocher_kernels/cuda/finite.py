"""What is not finite stays so: no store and no comparison may make a number of it."""

import triton
import triton.language as tl

LARGEST_F16 = tl.constexpr(65504.0)


@triton.jit
def or_nan(x):
    """Return fp32 values, NaN where they are infinite."""
    return tl.where(tl.abs(x) < float("inf"), x, float("nan"))


@triton.jit
def saturated(x, LARGEST: tl.constexpr):
    """Return fp32 values within +-LARGEST, NaN where they are not finite."""
    inside = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    return tl.where(tl.abs(x) < float("inf"), inside, float("nan"))


@triton.jit
def as_activation(x, y):
    """Return fp32 values as elements of y; what fp16 cannot hold becomes its largest value."""
    if y.dtype.element_ty == tl.float16:
        x = saturated(x, LARGEST_F16)
    return x.to(y.dtype.element_ty)
