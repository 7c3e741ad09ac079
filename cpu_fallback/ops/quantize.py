"""Quantise activations to int8, a group of columns at a time."""

import numpy as np

from clocher_kernels.errors import ShapeError
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.memory import load_f32, load_f32_n, store_u8, store_u8_n, write_f32
from cpu_fallback.lanes.record import executes
from cpu_fallback.lanes.simd import (
    absolute,
    fma,
    hmax,
    hsum,
    maximum,
    minimum,
    mul,
    rint,
    splat,
    to_i32,
    zero,
)
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.team.tape import Launch


@executes("quantize")
def quantize(a, rank, size, scratch):
    """Quantise runs of columns to int8; each thread has a range of tokens.

    A group of 0 columns is the whole row.
    """
    first, last = share(a.M, rank, size)
    k, lowest = a.K, splat(np.float32(a.lowest))
    for row in range(first * a.A, last * a.A):
        for g in range(a.B):
            start = g * a.group
            count = k
            if a.group:
                count = min(a.group, k - start)
            x, q = a.x + 4 * (row * k + start), a.q + row * k + start
            write_f32(a.scale + 4 * (row * a.B + g), _quantize(x, q, count, a.floor, lowest))


@device
def _quantize(x, q, count, floor, lowest):
    """Quantise a group and return its scale, NaN if a value is NaN or infinite."""
    largest, odd = zero(), zero()
    whole = count & -16
    for i in range(0, whole, 16):
        values = load_f32(x + 4 * i)
        largest, odd = maximum(absolute(values), largest), fma(values, zero(), odd)
    if whole < count:
        values = load_f32_n(x + 4 * whole, count - whole)
        largest, odd = maximum(absolute(values), largest), fma(values, zero(), odd)
    absmax = max(hmax(largest), floor)
    inverse = splat(np.float32(127) / absmax)
    for i in range(0, whole, 16):
        store_u8(q + i, _code(load_f32(x + 4 * i), inverse, lowest))
    if whole < count:
        codes = _code(load_f32_n(x + 4 * whole, count - whole), inverse, lowest)
        store_u8_n(q + whole, codes, count - whole)
    return absmax / np.float32(127) + hsum(odd)


@device
def _code(x, inverse, lowest):
    high = splat(np.float32(127))
    return to_i32(rint(minimum(maximum(mul(x, inverse), lowest), high)))


def check_groups(call: BoundCall, columns: str) -> int:
    """Return the activation group of a call, columns per scale or 0.

    Args:
        call: the bound call.
        columns: the letter of a row of activations.

    Raises:
        ShapeError: the scales are not one for each group.
    """
    group, k = int(call.attr("group")), call.dim(columns)
    if group not in (0, 32, 128) or call.dim("B") != (-(-k // group) if group else 1):
        raise ShapeError(
            f"{call.spec.name}: group {group} and {call.dim('B')} scales for {k} columns; expected "
            "group 32, 128 or 0 (all) and a scale for each"
        )
    return group


def _lower(call: BoundCall) -> list[Launch]:
    check_groups(call, "K")
    return [call.launch(quantize)]


LOWER = {"quantize": _lower}
