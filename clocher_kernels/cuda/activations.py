"""Activations (`ops.activations.activate`), of fp32 values."""

import triton
import triton.language as tl

from clocher_kernels.cuda.tanh import tanh


@triton.jit
def activate(x, ACT: tl.constexpr, CAP: tl.constexpr = 1.0):
    """Return an activation of values that are NaN where they are not finite; NaN stays NaN."""
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
