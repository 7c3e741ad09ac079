"""Norms and row gathers."""

from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import ShapeError
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.memory import load_f32, load_f32_n, read_i32, store_f32, store_f32_n
from cpu_fallback.lanes.record import executes
from cpu_fallback.lanes.simd import add, div, fma, hsum, mul, splat, sqrt, zero
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


class Vectors(NamedTuple):
    """How many vectors make up a row."""

    per_row: int


@executes("rms_norm", Vectors)
def rms_norm(a, rank, size, scratch):
    """Normalise groups of D values; each thread has a range of groups."""
    d = a.D
    first, last = share(a.M * a.per_row, rank, size)
    for group in range(first, last):
        at = 4 * group * d
        mean = _square_sum(a.x + at, d) / np.float32(d) + a.eps
        # Squares that overflow must not become zeros: infinity minus itself is NaN.
        inverse = div(splat(np.float32(1)), sqrt(splat(mean + (mean - mean))))
        if a.residual:
            _scale_onto(a.x + at, inverse, a.weight, a.residual + at, a.y + at, d)
        else:
            _scale(a.x + at, inverse, a.weight, a.y + at, d)


@device
def _scale(x, factor, weight, y, d):
    """Write x * factor * weight."""
    for i in range(0, d - 15, 16):
        normal = mul(load_f32(x + 4 * i), factor)
        store_f32(y + 4 * i, mul(normal, load_f32(weight + 4 * i)))
    i = d & -16
    if i < d:
        normal = mul(load_f32_n(x + 4 * i, d - i), factor)
        store_f32_n(y + 4 * i, mul(normal, load_f32_n(weight + 4 * i, d - i)), d - i)


@device
def _scale_onto(x, factor, weight, residual, y, d):
    """Write x * factor * weight + residual."""
    for i in range(0, d - 15, 16):
        normal = mul(load_f32(x + 4 * i), factor)
        total = fma(normal, load_f32(weight + 4 * i), load_f32(residual + 4 * i))
        store_f32(y + 4 * i, total)
    i = d & -16
    n = d - i
    if n:
        normal = mul(load_f32_n(x + 4 * i, n), factor)
        total = fma(normal, load_f32_n(weight + 4 * i, n), load_f32_n(residual + 4 * i, n))
        store_f32_n(y + 4 * i, total, n)


@executes("gather_rows")
def gather_rows(a, rank, size, scratch):
    """Copy rows; each thread has a range of them."""
    first, last = share(a.R, rank, size)
    for r in range(first, last):
        row = within(read_i32(a.rows + 4 * r), a.M)
        copy_f32(a.x + 4 * row * a.K, a.y + 4 * r * a.K, a.K)


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


LOWER = {"rms_norm": _rms_norm, "gather_rows": gather_rows}
