"""What follows the sums of a product: y = activation(sum + lora + bias) * times + residual.

Kernels of products differ in how they come to sums; all of them hand a tile of sums over to
`finish`, the only place that knows what is done with them.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from clocher_kernels.errors import ShapeError
from clocher_kernels.ops.elementwise import check_activation
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import Kernel, device, i64, void
from cpu_fallback.ops.bind import BoundCall
from cpu_fallback.ops.product import ROWS
from cpu_fallback.team.large_pages import Kept

_ROOT_HALF = np.float32(0.5**0.5)
_CUBE = np.float32(0.044715)
_STEEP = np.float32(2 * (2 / np.pi) ** 0.5)


or_nan = device(lambda x: v.fma(x, v.zero(), x))  # Return x, NaN where it is infinite


# Activations take a vector, and a vector of caps.
# Return x / (1 + e^-x); below -88.72 that is 0.
silu = device(lambda x, cap: v.div(x, v.add(v.splat(np.float32(1)), v.exp(v.neg(x)))))


@device
def relu2(x, cap):
    """Return max(x, 0)^2."""
    positive = v.maximum(v.zero(), or_nan(x))  # of minus infinity it would be zero
    return v.mul(positive, positive)


# erfc(z) e^(z^2) / t as a polynomial in t = 1 / (1 + z / 2), z in 0 .. 9.3: least relative error.
_ERFC = (
    *("-0x1.e1aebap-5", "0x1.220cfap-2", "-0x1.f01314p-2", "0x1.197f56p-2", "-0x1.903c7ap-6"),
    *("0x1.9d2ee2p-3", "0x1.f25dcap-3", "0x1.211e46p-2", "0x1.20dbc4p-2"),
)
_erfc = v.op(v.F32, v.F32)(lambda b, t: v.emit_polynomial(b, t, *_ERFC))


@device
def gelu(x, cap):
    """Return x Phi(x) within 1e-6 of itself above x = -5, and 1e-5 of itself below.

    Phi is erfc / 2 of the distance on the side where that is small, so nothing cancels.
    """
    x = or_nan(x)
    one, z = v.splat(np.float32(1)), v.mul(v.absolute(x), v.splat(_ROOT_HALF))
    t = v.div(one, v.fma(v.splat(np.float32(0.5)), z, one))
    erfc = v.mul(v.mul(_erfc(t), t), v.exp_falling(v.neg(v.mul(z, z))))
    erfc = v.select(v.lt(x, v.zero()), erfc, v.sub(v.splat(np.float32(2)), erfc))
    return v.mul(v.mul(x, v.splat(np.float32(0.5))), erfc)


@device
def gelu_tanh(x, cap):
    """Return x (1 + tanh u) / 2, which is x / (1 + e^-2u); u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    x = or_nan(x)
    cubic = v.mul(x, v.fma(v.mul(x, x), v.splat(_CUBE), v.splat(np.float32(1))))
    return v.div(x, v.add(v.splat(np.float32(1)), v.exp(v.neg(v.mul(cubic, v.splat(_STEEP))))))


@device
def sigmoid(x, cap):
    """Return 1 / (1 + e^-x)."""
    one = v.splat(np.float32(1))
    return v.div(one, v.add(one, v.exp(v.neg(or_nan(x)))))


# Return cap * tanh(x / cap).
capped = device(lambda x, cap: v.mul(v.tanh(v.div(or_nan(x), cap)), cap))


ACTIVATIONS = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu2": relu2}
ACTIVATIONS |= {"sigmoid": sigmoid, "tanh": capped}


def _kernel(name: str, function: Any) -> Kernel:
    """Return the kernel of an activation: (address of fp32, how many of them, bits of the cap)."""

    def activate(at, count, cap):
        limit = v.bits_f32(v.isplat(cap))
        for i in range(0, 4 * count, 64):
            v.store_f32(at + i, function(v.load_f32(at + i), limit))

    return Kernel(activate, name=f"activation.{name}")


_KERNELS = {name: _kernel(name, function) for name, function in ACTIVATIONS.items()}


_activate = v.caller(3)  # (kernel, address, how many, bits of the cap)


@device
def expect(a, token, tokens, row):
    """Ask for what `finish` will read; it lies rows apart, where no core looks ahead by itself."""
    if a.lora_x and a.M < v.LANES:
        for at in range(0, 64 * a.L, 64):
            v.prefetch(a.lora_tiles + 4 * row * a.L + at)
    for t in range(token, token + tokens):
        at = 4 * (t * a.N + row)
        if a.times and a.F == a.N:
            v.prefetch(a.times + at)
        if a.residual:
            v.prefetch(a.residual + at)


@device
def finish(a, sums, pitch, token, tokens, row, count):
    """Write `count` rows, up to 16, of some tokens.

    `sums` are fp32 [tokens, pitch], and as much behind them as a vector needs to be whole; changed.
    `a` are the arguments of `linear`, or of an op that ends like it.
    """
    bias = a.bias
    if a.activate:
        if bias:
            for t in range(tokens):
                at = sums + 4 * pitch * t
                value = v.add(v.load_up_to(at, count), v.load_up_to(bias + 4 * row, count))
                v.store_f32_n(at, value, count)
            bias = bias - bias
        _activate(a.activate, sums, pitch * tokens, v.bits_of(a.cap))
    for t in range(tokens):
        value = v.load_up_to(sums + 4 * pitch * t, count)
        at = 4 * ((token + t) * a.N + row)
        if bias:
            value = v.add(value, v.load_up_to(bias + 4 * row, count))
        if a.times:
            if a.F == a.N:
                value = v.mul(value, v.load_up_to(a.times + at, count))
            else:
                value = v.mul(value, v.splat(v.read_f32(a.times + 4 * (token + t))))
        if a.residual:
            value = v.add(value, v.load_up_to(a.residual + at, count))
        v.store_up_to(a.y + at, value, count)


_TOGETHER = 16 if CURRENT.avx512 else 4
"""Tokens whose sums with an adapter are in registers together."""
_turned: tuple[Kept[np.ndarray], Kept[np.ndarray]] = Kept(), Kept()


def lora_tiles(call: BoundCall, rows: int) -> int:
    """Return the address of `lora_b` of a call in tiles [N / rows, L, rows]; 0 without adapters.

    Lanes are rows: K of the product is a rank, too short to be summed across lanes.
    """
    if not call.has("lora_b"):
        return 0
    b = call.array("lora_b")

    def make() -> np.ndarray:
        whole = np.pad(b, ((0, -len(b) % rows), (0, 0)))
        return np.ascontiguousarray(whole.reshape(-1, rows, b.shape[1]).transpose(0, 2, 1))

    return int(_turned[rows == v.LANES].of(b, "pack an adapter", make).ctypes.data)


def _lora_tile(tokens: int, rows: int) -> Any:
    """Return an intrinsic that adds x w to sums; x [tokens, rank], w [rank, rows]."""
    kind = ir.VectorType(v.FLOAT, rows)

    def tile(b, sums, x, w, rank):
        places = [v.behind(b, sums, 4 * rows * t) for t in range(tokens)]
        slots = v.variables(b, (v.emit_load(b, kind, place) for place in places))
        with v.loop(b, 0, rank, 1) as (i, _):
            column = v.emit_load(b, kind, v.emit_at(b, w, i, 4 * rows))
            for t, slot in enumerate(slots):
                at = v.emit_at(b, x, v.emit_at(b, i, rank, t), 4)
                value = v.spread(b, kind, v.emit_load(b, v.FLOAT, at))
                b.store(v.emit_fma(b, column, value, b.load(slot)), slot)
        for slot, place in zip(slots, places, strict=True):
            v.emit_store(b, b.load(slot), place)

    return v.op(void, *[i64] * 4)(tile)


def _lora(rows: int) -> Any:
    """Return the device that adds what adapters do to sums [tokens, rows]."""
    many, one = _lora_tile(_TOGETHER, rows), _lora_tile(1, rows)

    @device
    def add(a, sums, token, tokens, row):
        w, t = a.lora_tiles + 4 * row * a.L, np.int64(0)
        while t < tokens:
            x, at = a.lora_x + 4 * (token + t) * a.L, sums + 4 * rows * t
            if t + _TOGETHER <= tokens:
                many(at, x, w, a.L)
                t += _TOGETHER
            else:
                one(at, x, w, a.L)
                t += 1

    return add


add_lora, _add_lora_16 = _lora(ROWS), _lora(v.LANES)


@device
def write_rows(a, sums, token, tokens, row):
    """Write up to 16 rows of some tokens, whose sums are [tokens, 16]."""
    if a.lora_x:
        _add_lora_16(a, sums, token, tokens, row)
    finish(a, sums, 16, token, tokens, row, min(16, a.N - row))


def activation_of(call: BoundCall) -> int | Kernel:
    """Return the kernel of a call's activation, 0 for none. Raises UnsupportedOp, ShapeError."""
    if call.has("times") and call.dim("F") not in (1, call.dim("N")):
        raise ShapeError(
            f"{call.spec.name}: 'times' has {call.dim('F')} values for a token; expected "
            f"{call.dim('N')}, one for each row of the weight, or 1"
        )
    name = str(call.attr("activation"))
    if name == "none":
        return 0
    check_activation(call.spec.name, name)
    return _KERNELS[name]
