"""Rotary embedding, and heads that are joined or get another size."""

from typing import NamedTuple

from clocher_kernels.errors import ShapeError
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.activations import or_nan
from cpu_fallback.ops.bind import BoundCall, share, within
from cpu_fallback.ops.elementwise import Vectors, parts
from cpu_fallback.ops.linear import copy_f32
from cpu_fallback.team.tape import Launch


@executes("rope", Vectors)
def rope(a, rank, size, scratch):
    """Rotate the halves of heads in place; each thread has a range of (token, head).

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
        for i in range(0, half - 15, 16):
            x, y = or_nan(v.load_f32(low + 4 * i)), or_nan(v.load_f32(high + 4 * i))
            c, s = v.load_f32(cos + 4 * i), v.load_f32(sin + 4 * i)
            v.store_f32(low + 4 * i, v.fma(x, c, v.neg(v.mul(y, s))))
            v.store_f32(high + 4 * i, v.fma(y, c, v.mul(x, s)))
        i = half & -16
        n = half - i
        if n:
            x, y = or_nan(v.load_f32_n(low + 4 * i, n)), or_nan(v.load_f32_n(high + 4 * i, n))
            c, s = v.load_f32_n(cos + 4 * i, n), v.load_f32_n(sin + 4 * i, n)
            v.store_f32_n(low + 4 * i, v.fma(x, c, v.neg(v.mul(y, s))), n)
            v.store_f32_n(high + 4 * i, v.fma(y, c, v.mul(x, s)), n)


class Joined(NamedTuple):
    """Sizes of `join_heads`, in values."""

    left: int  # of a head of the first part
    right: int  # of a head of the second
    apart: int  # from one head of the first part to the next, 0 if all share one


@executes("join_heads", Joined)
def join_heads(a, rank, size, scratch):
    """Copy the parts of heads; each thread has a range of (token, head)."""
    heads, left, right = a.heads, a.left, a.right
    first, last = share(a.M * heads, rank, size)
    for unit in range(first, last):
        x = a.first + 4 * (unit // heads * a.F + unit % heads * a.apart)
        y = a.y + 4 * unit * (left + right)
        copy_f32(x, y, left)
        copy_f32(a.second + 4 * unit * right, y + 4 * left, right)


@executes("resize_heads")
def resize_heads(a, rank, size, scratch):
    """Copy what both heads have room for; each thread has a range of (token, head)."""
    heads = a.heads
    old, new = a.F // heads, a.G // heads
    first, last = share(a.M * heads, rank, size)
    for unit in range(first, last):
        y, kept = a.y + 4 * unit * new, min(old, new)
        copy_f32(a.x + 4 * unit * old, y, kept)
        _clear(y + 4 * kept, new - kept)


@device
def _clear(y, count):
    for i in range(0, count, 16):
        v.store_f32_n(y + 4 * i, v.zero(), min(16, count - i))


def _rope(call: BoundCall) -> list[Launch]:
    rotated, head = 2 * call.dim("P"), int(call.attr("head"))
    if head and head < rotated:
        raise ShapeError(f"rope: a head has {head} values; its tables rotate {rotated}")
    return [call.launch(rope, Vectors(parts(call, "x", head or rotated)))]


def _heads(call: BoundCall) -> int:
    """Return the attribute `heads`."""
    heads = int(call.attr("heads"))
    if heads < 1:
        raise ShapeError(f"{call.spec.name}: {heads} heads; expected at least one")
    return heads


def _join_heads(call: BoundCall) -> list[Launch]:
    heads = _heads(call)
    right = parts(call, "second", heads)
    left, first = parts(call, "y", heads) - right, call.dim("F")
    if left < 0 or first not in (left, heads * left):
        raise ShapeError(
            f"join_heads: a row of 'first' has {first} values; expected {left}, or that for each "
            f"of {heads} heads"
        )
    return [call.launch(join_heads, Joined(left, right, 0 if first == left else left))]


def _resize_heads(call: BoundCall) -> list[Launch]:
    heads = _heads(call)
    for param in ("x", "y"):
        parts(call, param, heads)
    return [call.launch(resize_heads)]


LOWER = {"rope": _rope, "join_heads": _join_heads, "resize_heads": _resize_heads}
