"""Quantise activations, a group of columns at a time: to codes, or to rounded fp32 values.

And `drop_small`, which sets small ones to zero.
"""

from typing import Any

import numpy as np

from clocher_kernels.dtypes import LARGEST
from clocher_kernels.errors import ShapeError
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.team.tape import Launch


@executes("quantize")
def quantize(a, rank, size, scratch):
    """Quantise runs of columns to int8; each thread has a range of tokens.

    A group of 0 columns is the whole row.
    """
    first, last = share(a.M, rank, size)
    k, lowest = a.K, v.splat(np.float32(a.lowest))
    for row in range(first * a.A, last * a.A):
        for g in range(a.B):
            start = g * a.group
            count = k
            if a.group:
                count = min(a.group, k - start)
            x, q = a.x + 4 * (row * k + start), a.q + row * k + start
            v.write_f32(a.scale + 4 * (row * a.B + g), _quantize(x, q, count, a.floor, lowest))


@device
def _quantize(x, q, count, floor, lowest):
    """Quantise a group and return its scale, NaN if a value is NaN or infinite."""
    absmax, odd = largest_of(x, count, floor)
    inverse = v.splat(np.float32(127) / absmax)
    for i in range(0, count, 16):
        codes = _code(v.load_up_to(x + 4 * i, count - i), inverse, lowest)
        v.store_u8_up_to(q + i, codes, count - i)
    return absmax / np.float32(127) + odd


@device
def largest_of(x, count, floor):
    """Return the largest magnitude, at least `floor`, and 0, or NaN if a value is not finite."""
    largest, odd = v.zero(), v.zero()
    for i in range(0, count, 16):
        values = v.load_up_to(x + 4 * i, count - i)
        largest, odd = v.maximum(v.absolute(values), largest), v.fma(values, v.zero(), odd)
    return max(v.hmax(largest), floor), v.hsum(odd)


@device
def _code(x, inverse, lowest):
    high = v.splat(np.float32(127))
    return v.to_i32(v.rint(v.minimum(v.maximum(v.mul(x, inverse), lowest), high)))


def _near(encode: Any, decode: Any, largest: float) -> Any:
    """Return how values are rounded to a type without a scale."""
    most = np.float32(largest)

    @device
    def near(x, inverse, scale):
        bound = v.splat(most)
        rounded = decode(encode(v.minimum(v.maximum(x, v.neg(bound)), bound)))
        return v.fma(x, v.zero(), rounded)

    return near


@device
def _as_e4m3(x, inverse, scale):
    return v.mul(v.from_e4m3(v.to_e4m3(v.mul(x, inverse))), scale)


@device
def _as_i8(x, inverse, scale):
    return v.mul(v.to_f32(_code(x, inverse, v.splat(np.float32(-127)))), scale)


def _kernel(name: str, convert: Any, largest: float) -> Kernel:
    """Return the kernel that rounds to a type; `largest` is its largest code, 0 without scales."""
    most, scaled = np.float32(largest), largest > 0

    def fake(a, rank, size, scratch):
        """Write rounded values; each thread has a range of tokens."""
        first, last = share(a.M, rank, size)
        k = a.K
        group = a.group if a.group and scaled else k
        inverse, scale = v.zero(), v.zero()
        for row in range(first * a.A, last * a.A):
            start = 0
            while start < k:
                x, y = a.x + 4 * (row * k + start), a.y + 4 * (row * k + start)
                count = min(group, k - start)
                if scaled:
                    absmax, odd = largest_of(x, count, a.floor)
                    inverse, scale = v.splat(most / absmax), v.splat(absmax / most + odd)
                for i in range(0, count, 16):
                    at, n = 4 * i, count - i
                    v.store_up_to(y + at, convert(v.load_up_to(x + at, n), inverse, scale), n)
                start += group

    fake.__name__ = f"fake_{name}"
    return executes("fake_quantize")(fake)


_FAKE = {
    "bf16": _kernel("bf16", _near(v.to_bf16, v.from_bf16, LARGEST["bf16"]), 0),
    "f16": _kernel("f16", _near(v.to_f16, v.from_f16, LARGEST["f16"]), 0),
    "e4m3": _kernel("e4m3", _as_e4m3, LARGEST["e4m3"]),
    "i8": _kernel("i8", _as_i8, 127),
}


def check_groups(call: BoundCall, columns: str) -> int:
    """Return the activation group of a call, columns per scale or 0. Raises ShapeError.

    `columns`: the letter of a row.
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


@device
def _below(x, k, limit):
    """Return how many magnitudes have bits below a limit."""
    found, bound, one = v.izero(), v.isplat(limit), v.isplat(1)
    for i in range(0, k, 16):
        n = min(16, k - i)
        bits = v.bits_i32(v.absolute(v.load_f32_n(x + 4 * i, n)))
        found = v.iadd(found, v.iselect(v.ilt(bits, bound), one, v.izero()))
    return v.ihsum(found) - (-(-k // 16) * 16 - k) * (limit > 0)


@device
def _kept(x, k, most, least):
    """Return how many channels of a token are kept."""
    total, squares = v.zero(), v.zero()
    for i in range(0, k, 16):
        size = v.absolute(v.load_f32_n(x + 4 * i, min(16, k - i)))
        total, squares = v.add(total, size), v.add(squares, v.mul(size, size))
    sum_of = v.hsum(total)
    width = np.float32(k)
    bottom = width * v.hsum(squares)
    even = np.float32(1)
    if bottom > np.float32(0):
        even = sum_of * sum_of / bottom
    if not even <= np.float32(1):
        even = np.float32(1)
    wanted = (least + (most - least) * even) * width
    count = int(wanted)
    if np.float32(count) < wanted:
        count += 1
    return max(1, min(count, k))


@device
def _limit(x, k, count):
    limit = 0
    for place in range(30, -1, -1):
        higher = limit + (1 << place)
        if k - _below(x, k, higher) >= count:
            limit = higher
    return limit


@executes("drop_small")
def drop_small(a, rank, size, scratch):
    """Copy a token but for what is small; each thread has a range of tokens."""
    first, last = share(a.M, rank, size)
    k = a.K
    for t in range(first, last):
        x, y = a.x + 4 * t * k, a.y + 4 * t * k
        if a.threshold:  # the bits of magnitudes have their order
            limit = v.read_i32(a.threshold)
        else:
            limit = _limit(x, k, _kept(x, k, a.most, a.least))
        low = v.isplat(limit)
        for i in range(0, k, 16):
            n = min(16, k - i)
            values = v.load_f32_n(x + 4 * i, n)
            small = v.ilt(v.bits_i32(v.absolute(values)), low)
            v.store_f32_n(y + 4 * i, v.select(small, v.zero(), values), n)


LOWER = {
    "quantize": _lower,
    "fake_quantize": lambda call: [call.launch(call.choice("dtype", _FAKE))],
    "drop_small": drop_small,
}
