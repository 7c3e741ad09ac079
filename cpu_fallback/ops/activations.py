"""Activations of vectors (`clocher_kernels.ops.activations`)."""

from typing import Any

import numpy as np

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device

_ROOT_HALF = np.float32(0.5**0.5)
_CUBE = np.float32(0.044715)
_STEEP = np.float32(2 * (2 / np.pi) ** 0.5)


or_nan = device(lambda x: v.fma(x, v.zero(), x))  # Return x, NaN where it is infinite


@device
def _polynomial(x, coefficients):
    """Return the value of a polynomial, its highest coefficient first."""
    y = v.splat(coefficients[0])
    for i in range(1, len(coefficients)):
        y = v.fma(y, x, v.splat(coefficients[i]))
    return y


# Return x / (1 + e^-x); below -88.72 that is 0.
silu = device(lambda x: v.div(x, v.add(v.splat(np.float32(1)), v.exp(v.neg(x)))))


@device
def relu2(x):
    """Return max(x, 0)^2."""
    positive = v.maximum(v.zero(), or_nan(x))  # of minus infinity it would be zero
    return v.mul(positive, positive)


# erfc(z) e^(z^2) / t as a polynomial in t = 1 / (1 + z / 2), z in 0 .. 9.3: least relative error.
_ERFC = tuple(
    np.float32(float.fromhex(c))
    for c in (
        "-0x1.e1aebap-5",
        "0x1.220cfap-2",
        "-0x1.f01314p-2",
        "0x1.197f56p-2",
        "-0x1.903c7ap-6",
        "0x1.9d2ee2p-3",
        "0x1.f25dcap-3",
        "0x1.211e46p-2",
        "0x1.20dbc4p-2",
    )
)


@device
def gelu(x):
    """Return x Phi(x) within 1e-6 of itself above x = -5, and 1e-5 of itself below.

    Phi is erfc / 2 of the distance on the side where that is small, so nothing cancels.
    """
    x = or_nan(x)
    one, z = v.splat(np.float32(1)), v.mul(v.absolute(x), v.splat(_ROOT_HALF))
    t = v.div(one, v.fma(v.splat(np.float32(0.5)), z, one))
    erfc = v.mul(v.mul(_polynomial(t, _ERFC), t), v.exp_falling(v.neg(v.mul(z, z))))
    erfc = v.select(v.lt(x, v.zero()), erfc, v.sub(v.splat(np.float32(2)), erfc))
    return v.mul(v.mul(x, v.splat(np.float32(0.5))), erfc)


@device
def gelu_tanh(x):
    """Return x (1 + tanh u) / 2, which is x / (1 + e^-2u); u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    x = or_nan(x)
    cubic = v.mul(x, v.fma(v.mul(x, x), v.splat(_CUBE), v.splat(np.float32(1))))
    return v.div(x, v.add(v.splat(np.float32(1)), v.exp(v.neg(v.mul(cubic, v.splat(_STEEP))))))


@device
def sigmoid(x):
    """Return 1 / (1 + e^-x)."""
    one = v.splat(np.float32(1))
    return v.div(one, v.add(one, v.exp(v.neg(or_nan(x)))))


# Return cap * tanh(x / cap).
capped = device(lambda x, cap: v.mul(v.tanh(v.div(or_nan(x), cap)), cap))


def _capless(act: Any) -> Any:
    return device(lambda x, cap: act(x))


_CAPLESS = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
    "sigmoid": sigmoid,
}
ACTIVATIONS = {**{name: _capless(act) for name, act in _CAPLESS.items()}, "tanh": capped}
"""Name of an activation -> function of a vector, and of a vector of caps."""
