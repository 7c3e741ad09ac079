"""Norms and row gathers."""

import numpy as np

from clocher_kernels.errors import ShapeError
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device, i64, void
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.bind import BoundCall, share, within
from cpu_fallback.ops.epilogue import or_nan
from cpu_fallback.ops.product import copy_f32
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


@executes("rms_norm", per_row=int)
def rms_norm(a, rank, size, scratch):
    """Normalise groups of D values, `per_row` in a row; each thread has a range of groups."""
    d = a.D
    first, last = share(a.M * a.per_row, rank, size)
    for group in range(first, last):
        at = 4 * group * d
        mean = _square_sum(a.x + at, d) / np.float32(d) + a.eps
        # Squares that overflow must not become zeros: infinity minus itself is NaN.
        inverse = v.div(v.splat(np.float32(1)), v.sqrt(v.splat(mean + (mean - mean))))
        residual = a.residual
        if residual:
            residual += at
        _scale(a.x + at, inverse, a.weight, residual, a.y + at, d)


@device
def _scale(x, factor, weight, residual, y, d):
    """Write x * factor * weight + residual, without one if that is 0."""
    for i in range(0, d, 16):
        at, n = 4 * i, d - i
        normal, by = v.mul(v.load_up_to(x + at, n), factor), v.load_up_to(weight + at, n)
        if residual:
            v.store_up_to(y + at, v.fma(normal, by, v.load_up_to(residual + at, n)), n)
        else:
            v.store_up_to(y + at, v.mul(normal, by), n)


@executes("gather_rows")
def gather_rows(a, rank, size, scratch):
    """Copy rows; each thread has a range of them."""
    first, last = share(a.R, rank, size)
    for r in range(first, last):
        row = within(v.read_i32(a.rows + 4 * r), a.M)
        copy_f32(a.x + 4 * row * a.K, a.y + 4 * r * a.K, a.K)


def parts(call: BoundCall, param: str, width: int) -> int:
    """Return how many vectors of `width` values make up a row of a buffer. Raises ShapeError."""
    row = call.array(param).shape[1]
    if row % width:
        raise ShapeError(
            f"{call.spec.name}: a row of {param!r} has {row} values, not a multiple of {width}"
        )
    return row // width


@executes("rope", per_row=int)
def rope(a, rank, size, scratch):
    """Rotate the halves of heads in place, `per_row`; each thread has a range of (token, head).

    Infinity becomes NaN: as a score it could hide a key, or the query.
    """
    heads, half = a.per_row, a.P
    head = max(a.head, 2 * half)
    first, last = share(a.M * heads, rank, size)
    for unit in range(first, last):
        position = within(v.read_i32(a.positions + 4 * (unit // heads)), a.C)
        cos, sin = a.cos + 4 * position * half, a.sin + 4 * position * half
        low = a.x + 4 * unit * head
        high = low + 4 * half
        for i in range(0, half, 16):
            at, n = 4 * i, half - i
            x, y = or_nan(v.load_up_to(low + at, n)), or_nan(v.load_up_to(high + at, n))
            c, s = v.load_up_to(cos + at, n), v.load_up_to(sin + at, n)
            v.store_up_to(low + at, v.fma(x, c, v.neg(v.mul(y, s))), n)
            v.store_up_to(high + at, v.fma(y, c, v.mul(x, s)), n)


@executes("join_heads", head=int, left=int, apart=int)
def join_heads(a, rank, size, scratch):
    """Copy the parts of heads; each thread has a range of (token, head).

    `left`: values that a head of `head` has of the first part; `apart`: from one head of that to
    the next, 0 if all share one.
    """
    heads, left, right = a.heads, a.left, a.head - a.left
    first, last = share(a.M * heads, rank, size)
    for unit in range(first, last):
        y = a.y + 4 * unit * a.head
        copy_f32(a.first + 4 * (unit // heads * a.F + unit % heads * a.apart), y, left)
        if a.second:
            copy_f32(a.second + 4 * unit * right, y + 4 * left, right)
        else:
            for i in range(0, right, 16):
                v.store_up_to(y + 4 * (left + i), v.zero(), right - i)


@v.op(void, i64, i64)
def _turn(b, x, y):
    """Rotate 64 values: stages from neighbours outwards, as the reference adds them."""
    parts = [v.emit_load(b, v.F32.llvm, v.behind(b, x, 64 * i)) for i in range(4)]
    for half in (1, 2, 4, 8):
        other = [lane ^ half for lane in range(v.LANES)]
        signs = v.constant(v.F32, [-1.0 if lane & half else 1.0 for lane in range(v.LANES)])
        parts = [b.fadd(v.pick(b, part, other), b.fmul(part, signs)) for part in parts]
    for half in (1, 2):
        parts = [
            b.fsub(parts[i ^ half], part) if i & half else b.fadd(part, parts[i ^ half])
            for i, part in enumerate(parts)
        ]
    for i, part in enumerate(parts):
        v.emit_store(b, b.fmul(part, v.constant(v.F32, 0.125)), v.behind(b, y, 64 * i))


@executes("hadamard")
def hadamard(a, rank, size, scratch):
    """Rotate blocks of 64 columns; each thread has a range of them."""
    first, last = share(a.M * a.A * (a.K >> 6), rank, size)
    for block in range(first, last):
        _turn(a.x + 256 * block, a.y + 256 * block)


def _hadamard(call: BoundCall) -> list[Launch]:
    if call.attr("size") != 64 or call.dim("K") % 64:
        raise ShapeError(
            f"hadamard: blocks of {call.attr('size')} in {call.dim('K')} columns; expected 64 in a "
            "multiple of them"
        )
    return [call.launch(hadamard)]


def _rope(call: BoundCall) -> list[Launch]:
    rotated, head = 2 * call.dim("P"), int(call.attr("head"))
    if head and head < rotated:
        raise ShapeError(f"rope: a head has {head} values; its tables rotate {rotated}")
    return [call.launch(rope, (parts(call, "x", head or rotated),))]


def _join_heads(call: BoundCall) -> list[Launch]:
    heads, first = int(call.attr("heads")), call.dim("F")
    if heads < 1:
        raise ShapeError(f"join_heads: {heads} heads; expected at least one")
    head = parts(call, "y", heads)
    if not call.has("second"):
        apart = parts(call, "first", heads)
        return [call.launch(join_heads, (head, min(head, apart), apart))]
    left = head - parts(call, "second", heads)
    if left < 0 or first not in (left, heads * left):
        raise ShapeError(
            f"join_heads: a row of 'first' has {first} values; expected {left}, or that for each "
            f"of {heads} heads"
        )
    return [call.launch(join_heads, (head, left, 0 if first == left else left))]


LOWER = {
    "rms_norm": lambda call: [call.launch(rms_norm, (parts(call, "x", call.dim("D")),))],
    "gather_rows": gather_rows,
    "hadamard": _hadamard,
    "rope": _rope,
    "join_heads": _join_heads,
}
