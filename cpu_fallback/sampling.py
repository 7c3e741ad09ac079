"""Choose the next tokens, and step the token inputs on."""

import numpy as np
from llvmlite import ir

from cpu_fallback.bind import BoundCall, counted, share
from cpu_fallback.jit import device, kernel
from cpu_fallback.maths import lowest_bit
from cpu_fallback.memory import (
    field,
    load_f32,
    load_f32_n,
    read_f32,
    read_i32,
    write_i32,
)
from cpu_fallback.simd import (
    MASK,
    eq,
    first,
    hmax,
    i64,
    maximum,
    op,
    select,
    splat,
)
from cpu_fallback.tape import Launch

_I16, _I64 = ir.IntType(16), ir.IntType(64)
LOWEST = np.float32(-np.inf)


@op(i64, MASK)
def mask_bits(b, mask):
    """Return the lanes of a mask as bits."""
    return b.zext(b.bitcast(mask, _I16), _I64)


@device
def _largest(row, v):
    """Return the largest of v values; NaN is passed over."""
    lowest = splat(LOWEST)
    a, b, c, d = lowest, lowest, lowest, lowest
    for i in range(0, v - 63, 64):
        at = row + 4 * i
        a, b = maximum(load_f32(at), a), maximum(load_f32(at + 64), b)
        c, d = maximum(load_f32(at + 128), c), maximum(load_f32(at + 192), d)
    i = v & -64
    while i < v:
        n = min(16, v - i)
        a = maximum(select(first(n), load_f32_n(row + 4 * i, n), lowest), a)
        i += 16
    return hmax(maximum(maximum(a, b), maximum(c, d)))


@device
def _greedy(row, v):
    """Return the index of the first largest value."""
    top = splat(_largest(row, v))
    for i in range(0, v - 15, 16):
        found = mask_bits(eq(load_f32(row + 4 * i), top))
        if found:
            return i + lowest_bit(found)
    for i in range(v & -16, v):
        if read_f32(row + 4 * i) == _lane(top):
            return i
    return 0
