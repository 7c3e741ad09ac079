"""Norms and row gathers."""

from typing import NamedTuple

import numpy as np

from clocher_kernels.errors import ShapeError
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.bind import BoundCall, share, within
from cpu_fallback.ops.linear import copy_f32
from cpu_fallback.team.tape import Launch


@device
def _square_sum(x, d):
    """Sum squares: four accumulators of 16 lanes in turn, then a fixed tree."""
    a, b, c, e = v.zero(), v.zero(), v.zero(), v.zero()
    for i in range(0, d - 63, 64):
        p, q = v.load_f32(x + 4 * i), v.load_f32(x + 4 * i + 64)
        r, s = v.load_f32(x + 4 * i + 128), v.load_f32(x + 4 * i + 192)
        a, b, c, e = v.fma(p, p, a), v.fma(q, q, b), v.fma(r, r, c), v.fma(s, s, e)
    i = d & -64
    while i + 16 <= d:
        p = v.load_f32(x + 4 * i)
        a = v.fma(p, p, a)
        i += 16
    if i < d:
        p = v.load_f32_n(x + 4 * i, d - i)
        b = v.fma(p, p, b)
    return v.hsum(v.add(v.add(a, b), v.add(c, e)))


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
        inverse = v.div(v.splat(np.float32(1)), v.sqrt(v.splat(mean + (mean - mean))))
        if a.residual:
            _scale_onto(a.x + at, inverse, a.weight, a.residual + at, a.y + at, d)
        else:
            _scale(a.x + at, inverse, a.weight, a.y + at, d)


@device
def _scale(x, factor, weight, y, d):
    for i in range(0, d - 15, 16):
        normal = v.mul(v.load_f32(x + 4 * i), factor)
        v.store_f32(y + 4 * i, v.mul(normal, v.load_f32(weight + 4 * i)))
    i = d & -16
    if i < d:
        normal = v.mul(v.load_f32_n(x + 4 * i, d - i), factor)
        v.store_f32_n(y + 4 * i, v.mul(normal, v.load_f32_n(weight + 4 * i, d - i)), d - i)


@device
def _scale_onto(x, factor, weight, residual, y, d):
    """Write x * factor * weight + residual."""
    for i in range(0, d - 15, 16):
        normal = v.mul(v.load_f32(x + 4 * i), factor)
        total = v.fma(normal, v.load_f32(weight + 4 * i), v.load_f32(residual + 4 * i))
        v.store_f32(y + 4 * i, total)
    i = d & -16
    n = d - i
    if n:
        normal = v.mul(v.load_f32_n(x + 4 * i, n), factor)
        total = v.fma(normal, v.load_f32_n(weight + 4 * i, n), v.load_f32_n(residual + 4 * i, n))
        v.store_f32_n(y + 4 * i, total, n)


@executes("gather_rows")
def gather_rows(a, rank, size, scratch):
    """Copy rows; each thread has a range of them."""
    first, last = share(a.R, rank, size)
    for r in range(first, last):
        row = within(v.read_i32(a.rows + 4 * r), a.M)
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
