"""Matrix products of any format, and embedding rows."""

from typing import NamedTuple

from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.memory import (
    load_f32,
    load_f32_n,
    read_f32,
    read_i32,
    store_f32,
    store_f32_n,
    write_f32,
    write_i64,
)
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops import decode
from cpu_fallback.ops.bind import BoundCall, share, within
from cpu_fallback.ops.decode import ROWS, Weight, weight_record
from cpu_fallback.ops.product import SCRATCH, SUMS, TOKENS, XS, multiply
from cpu_fallback.ops.stream import Stored, stored
from cpu_fallback.team.tape import Launch

_SHARES = 8
_LARGE = 1 << 18
"""Weights from which a product takes longer than it takes threads to share it."""


@device
def copy_f32(source, target, count):
    """Copy fp32 values."""
    i = 0
    while i + 16 <= count:
        store_f32(target + 4 * i, load_f32(source + 4 * i))
        i += 16
    if i < count:
        store_f32_n(target + 4 * i, load_f32_n(source + 4 * i, count - i), count - i)


@executes("linear", Stored)
def linear(a, rank, size, scratch):
    """Compute y = x W^T + bias + residual; each thread has a contiguous range of output rows."""
    m, n, k = a.M, a.N, a.K
    x, y, bias, residual = a.x, a.y, a.bias, a.residual
    first, last = share((n + ROWS - 1) // ROWS, rank, size)
    for unit in range(first, last):
        row = unit * ROWS
        count = min(ROWS, n - row)
        for start in range(0, m, TOKENS):
            tokens = min(TOKENS, m - start)
            for t in range(tokens):
                write_i64(scratch + XS + 8 * t, x + 4 * (start + t) * k)
            multiply(a.product, a.weight, 0, row, count, tokens, scratch)
            for t in range(tokens):
                for r in range(count):
                    total = read_f32(scratch + SUMS + 4 * (t * ROWS + r))
                    at = 4 * ((start + t) * n + row + r)
                    if bias:
                        total += read_f32(bias + 4 * (row + r))
                    if residual:
                        total += read_f32(residual + at)
                    write_f32(y + at, total)


class Table(NamedTuple):
    """The table of `embed`."""

    weight: Weight


@executes("embed", Table)
def embed(a, rank, size, scratch):
    """Decode the rows of a table that the ids name; each thread has a range of tokens."""
    first, last = share(a.M, rank, size)
    for t in range(first, last):
        out = a.y + 4 * t * a.K
        token = within(read_i32(a.ids + 4 * t), a.V)
        row = decode.decode(a.weight, 0, token, 1, 0, a.K, out)
        if row != out:
            copy_f32(row, out, a.K)


def _linear(call: BoundCall) -> list[Launch]:
    shares = _SHARES if call.dim("N") * call.dim("K") >= _LARGE else 1
    return [call.launch(linear, stored(call), SCRATCH, shares)]


def _embed(call: BoundCall) -> list[Launch]:
    return [call.launch(embed, Table(weight_record("embed", call.tensor("table"))))]


LOWER = {"linear": _linear, "embed": _embed}
