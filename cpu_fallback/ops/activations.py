"""Activations of gated layers, and the bend of logits below a cap."""

import numpy as np

from clocher_kernels.errors import UnsupportedOp
from cpu_fallback.lanes.falling import exp_falling, tanh
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.memory import load_f32, load_f32_n, read_f32, store_f32, store_f32_n
from cpu_fallback.lanes.record import executes
from cpu_fallback.lanes.simd import (
    absolute,
    add,
    div,
    exp,
    fma,
    lt,
    maximum,
    mul,
    neg,
    select,
    splat,
    sub,
    zero,
)
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.team.tape import Launch

_ROOT_HALF = np.float32(0.5**0.5)
_CUBE = np.float32(0.044715)
_STEEP = np.float32(2 * (2 / np.pi) ** 0.5)


@device
def or_nan(x):
    """Return x, NaN where it is infinite."""
    return fma(x, zero(), x)


@device
def _polynomial(x, coefficients):
    """Return the value of a polynomial, its highest coefficient first."""
    y = splat(coefficients[0])
    for i in range(1, len(coefficients)):
        y = fma(y, x, splat(coefficients[i]))
    return y


@device
def silu(x):
    """Return x / (1 + e^-x); below -88.72 that is 0."""
    return div(x, add(splat(np.float32(1)), exp(neg(x))))


@device
def relu2(x):
    """Return max(x, 0)^2."""
    positive = maximum(zero(), or_nan(x))  # of minus infinity it would be zero
    return mul(positive, positive)


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
    one, z = splat(np.float32(1)), mul(absolute(x), splat(_ROOT_HALF))
    t = div(one, fma(splat(np.float32(0.5)), z, one))
    erfc = mul(mul(_polynomial(t, _ERFC), t), exp_falling(neg(mul(z, z))))
    erfc = select(lt(x, zero()), erfc, sub(splat(np.float32(2)), erfc))
    return mul(mul(x, splat(np.float32(0.5))), erfc)


@device
def gelu_tanh(x):
    """Return x (1 + tanh u) / 2, which is x / (1 + e^-2u); u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    x = or_nan(x)
    cubic = mul(x, fma(mul(x, x), splat(_CUBE), splat(np.float32(1))))
    return div(x, add(splat(np.float32(1)), exp(neg(mul(cubic, splat(_STEEP))))))


@device
def _gated(a, rank, size, act):
    """Compute y = act(gate) * up over all values at once."""
    if a.scores:
        _weighed(a, rank, size, act)
        return
    total = a.M * a.I
    gate, up, y = a.gate, a.up, a.y
    first, last = share((total + 15) // 16, rank, size)
    for unit in range(first, last):
        i, n = 64 * unit, total - 16 * unit
        if n >= 16:
            store_f32(y + i, mul(act(load_f32(gate + i)), load_f32(up + i)))
        else:
            store_f32_n(y + i, mul(act(load_f32_n(gate + i, n)), load_f32_n(up + i, n)), n)


@device
def _weighed(a, rank, size, act):
    """Compute y = act(gate) * up * sigmoid(score); each thread has a range of columns."""
    first, last = share((a.I + 15) // 16, rank, size)
    one = splat(np.float32(1))
    for t in range(a.M):
        score = or_nan(splat(read_f32(a.scores + 4 * t)))
        weight = div(one, add(one, exp(neg(score))))
        for unit in range(first, last):
            i, n = 4 * (t * a.I + 16 * unit), min(16, a.I - 16 * unit)
            hidden = mul(act(load_f32_n(a.gate + i, n)), load_f32_n(a.up + i, n))
            store_f32_n(a.y + i, mul(hidden, weight), n)


@executes("glu")
def silu_glu(a, rank, size, scratch):
    """Compute y = silu(gate) * up."""
    _gated(a, rank, size, silu)


@executes("glu")
def gelu_glu(a, rank, size, scratch):
    """Compute y = gelu(gate) * up."""
    _gated(a, rank, size, gelu)


@executes("glu")
def gelu_tanh_glu(a, rank, size, scratch):
    """Compute y = gelu_tanh(gate) * up."""
    _gated(a, rank, size, gelu_tanh)


@executes("glu")
def relu2_glu(a, rank, size, scratch):
    """Compute y = relu2(gate) * up."""
    _gated(a, rank, size, relu2)


@executes("softcap")
def softcap(a, rank, size, scratch):
    """Compute x = cap * tanh(x / cap) over all values at once."""
    total, cap = a.R * a.V, splat(a.cap)
    first, last = share((total + 15) // 16, rank, size)
    for unit in range(first, last):
        at, n = a.x + 64 * unit, total - 16 * unit
        if n >= 16:
            store_f32(at, mul(tanh(div(or_nan(load_f32(at)), cap)), cap))
        else:
            store_f32_n(at, mul(tanh(div(or_nan(load_f32_n(at, n)), cap)), cap), n)


_GLU = {"silu": silu_glu, "gelu": gelu_glu, "gelu_tanh": gelu_tanh_glu, "relu2": relu2_glu}


def _glu(call: BoundCall) -> list[Launch]:
    act = str(call.attr("act"))
    if act not in _GLU:
        raise UnsupportedOp(f"glu: no CPU kernel for act={act!r}; there are {', '.join(_GLU)}")
    return [call.launch(_GLU[act])]


LOWER = {"glu": _glu, "softcap": softcap}
