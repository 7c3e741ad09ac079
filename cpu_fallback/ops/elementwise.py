"""Norms, rotary embedding, gated activations, row gathers, and the router of the experts."""

from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import ShapeError, UnsupportedOp
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.memory import (
    load_f32,
    load_f32_n,
    read_f32,
    read_i32,
    store_f32,
    store_f32_n,
    write_f32,
    write_i32,
)
from cpu_fallback.lanes.record import executes
from cpu_fallback.lanes.simd import (
    add,
    div,
    exp,
    fma,
    hsum,
    lane,
    maximum,
    mul,
    neg,
    splat,
    sqrt,
    sub,
    zero,
)
from cpu_fallback.ops.bind import BoundCall, share, within
from cpu_fallback.ops.linear import copy_f32
from cpu_fallback.team.tape import Launch


@device
def _square_sum(x, d):
    """Sum squares: four accumulators of 16 lanes in turn, then a fixed tree."""
    a, b, c, e = zero(), zero(), zero(), zero()
    for i in range(0, d - 63, 64):
        p, q = load_f32(x + 4 * i), load_f32(x + 4 * i + 64)
        r, s = load_f32(x + 4 * i + 128), load_f32(x + 4 * i + 192)
        a, b, c, e = fma(p, p, a), fma(q, q, b), fma(r, r, c), fma(s, s, e)
    i = d & -64
    while i + 16 <= d:
        p = load_f32(x + 4 * i)
        a = fma(p, p, a)
        i += 16
    if i < d:
        p = load_f32_n(x + 4 * i, d - i)
        b = fma(p, p, b)
    return hsum(add(add(a, b), add(c, e)))


@device
def _or_nan(x):
    """Return x, NaN where it is infinite."""
    return fma(x, zero(), x)


class Vectors(NamedTuple):
    """How many vectors make up a row."""

    per_row: int


@executes("rms_norm", Vectors)
def rms_norm(a, rank, size, scratch):
    """Normalise groups of D values; each thread has a range of groups."""
    d, weight = a.D, a.weight
    first, last = share(a.M * a.per_row, rank, size)
    for group in range(first, last):
        x, y = a.x + 4 * group * d, a.y + 4 * group * d
        mean = _square_sum(x, d) / np.float32(d) + a.eps
        # Squares that overflow must not become zeros: infinity minus itself is NaN.
        inverse = div(splat(np.float32(1)), sqrt(splat(mean + (mean - mean))))
        for i in range(0, d - 15, 16):
            normal = mul(load_f32(x + 4 * i), inverse)
            store_f32(y + 4 * i, mul(normal, load_f32(weight + 4 * i)))
        i = d & -16
        if i < d:
            normal = mul(load_f32_n(x + 4 * i, d - i), inverse)
            store_f32_n(y + 4 * i, mul(normal, load_f32_n(weight + 4 * i, d - i)), d - i)


@executes("rope", Vectors)
def rope(a, rank, size, scratch):
    """Rotate the halves of heads in place; each thread has a range of (token, head).

    Infinity becomes NaN: as a score it could hide a key, or the query.
    """
    heads, half = a.per_row, a.P
    first, last = share(a.M * heads, rank, size)
    for unit in range(first, last):
        position = within(read_i32(a.positions + 4 * (unit // heads)), a.C)
        cos, sin = a.cos + 4 * position * half, a.sin + 4 * position * half
        low = a.x + 8 * unit * half
        high = low + 4 * half
        for i in range(0, half - 15, 16):
            x, y = _or_nan(load_f32(low + 4 * i)), _or_nan(load_f32(high + 4 * i))
            c, s = load_f32(cos + 4 * i), load_f32(sin + 4 * i)
            store_f32(low + 4 * i, fma(x, c, neg(mul(y, s))))
            store_f32(high + 4 * i, fma(y, c, mul(x, s)))
        i = half & -16
        n = half - i
        if n:
            x, y = _or_nan(load_f32_n(low + 4 * i, n)), _or_nan(load_f32_n(high + 4 * i, n))
            c, s = load_f32_n(cos + 4 * i, n), load_f32_n(sin + 4 * i, n)
            store_f32_n(low + 4 * i, fma(x, c, neg(mul(y, s))), n)
            store_f32_n(high + 4 * i, fma(y, c, mul(x, s)), n)


@device
def _silu(x):
    return div(x, add(splat(np.float32(1)), exp(neg(x))))


@device
def _relu2(x):
    positive = maximum(zero(), _or_nan(x))  # of minus infinity it would be zero
    return mul(positive, positive)


@device
def _gated(a, rank, size, act):
    """Compute y = act(gate) * up over all values at once."""
    total = a.M * a.I
    gate, up, y = a.gate, a.up, a.y
    first, last = share((total + 15) // 16, rank, size)
    for unit in range(first, last):
        i, n = 64 * unit, total - 16 * unit
        if n >= 16:
            store_f32(y + i, mul(act(load_f32(gate + i)), load_f32(up + i)))
        else:
            store_f32_n(y + i, mul(act(load_f32_n(gate + i, n)), load_f32_n(up + i, n)), n)


@executes("glu")
def silu(a, rank, size, scratch):
    """Compute y = gate / (1 + e^-gate) * up; below a gate of -88.72 that is 0."""
    _gated(a, rank, size, _silu)


@executes("glu")
def relu2(a, rank, size, scratch):
    """Compute y = max(gate, 0)^2 * up."""
    _gated(a, rank, size, _relu2)


@executes("gather_rows")
def gather_rows(a, rank, size, scratch):
    """Copy rows; each thread has a range of them."""
    first, last = share(a.R, rank, size)
    for r in range(first, last):
        row = within(read_i32(a.rows + 4 * r), a.M)
        copy_f32(a.x + 4 * row * a.K, a.y + 4 * r * a.K, a.K)


@device
def _next_largest(x, count, value, index):
    """Return the index of the largest value that ranks after (value, index), 0 if there is none.

    Equal values rank by ascending index.
    """
    best, found = np.float32(0), 0
    any_yet = False
    for i in range(count):
        v = read_f32(x + 4 * i)
        after = v < value or (v == value and i > index)
        if after and (v > best or not any_yet):
            best, found, any_yet = v, i, True
    return found


@executes("topk_softmax")
def topk_softmax(a, rank, size, scratch):
    """Choose the A largest of E logits and softmax over them; each thread has a range of tokens.

    Logits that are NaN are not chosen; if too few others are left, expert 0 is chosen again. All
    weights are then NaN.
    """
    first, last = share(a.M, rank, size)
    for t in range(first, last):
        logits, ids = a.logits + 4 * t * a.E, a.ids + 4 * t * a.A
        weights = a.weights + 4 * t * a.A
        value, index = np.float32(np.inf), -1
        top, total = np.float32(0), np.float32(0)
        for i in range(a.A):
            index = _next_largest(logits, a.E, value, index)
            value = read_f32(logits + 4 * index)
            if i == 0:
                top = value
            weight = lane(exp(sub(splat(value), splat(top))), 0)
            total += weight
            write_i32(ids + 4 * i, index)
            write_f32(weights + 4 * i, weight)
        for i in range(a.E):
            logit = read_f32(logits + 4 * i)
            if logit != logit:
                total = logit
        for i in range(a.A):
            write_f32(weights + 4 * i, read_f32(weights + 4 * i) / total)


def parts(call: BoundCall, param: str, width: int) -> int:
    """Return how many vectors of `width` values make up a row of a buffer.

    Raises:
        ShapeError: the row is not a whole number of them.
    """
    row = call.array(param).shape[1]
    if row % width:
        raise ShapeError(
            f"{call.spec.name}: a row of {param!r} has {row} values, not a multiple of {width}"
        )
    return row // width


def _rms_norm(call: BoundCall) -> list[Launch]:
    return [call.launch(rms_norm, Vectors(parts(call, "x", call.dim("D"))))]


def _rope(call: BoundCall) -> list[Launch]:
    return [call.launch(rope, Vectors(parts(call, "x", 2 * call.dim("P"))))]


def _glu(call: BoundCall) -> list[Launch]:
    acts = {"silu": silu, "relu2": relu2}
    act = str(call.attr("act"))
    if act not in acts:
        raise UnsupportedOp(f"glu: no CPU kernel for act={act!r}; there are {', '.join(acts)}")
    return [call.launch(acts[act])]


def _topk_softmax(call: BoundCall) -> list[Launch]:
    if call.dim("A") > call.dim("E"):
        raise ShapeError(
            f"topk_softmax: {call.dim('A')} experts of {call.dim('E')} are to be chosen"
        )
    return [call.launch(topk_softmax)]


LOWER = {
    "rms_norm": _rms_norm,
    "rope": _rope,
    "glu": _glu,
    "gather_rows": gather_rows,
    "topk_softmax": _topk_softmax,
}
