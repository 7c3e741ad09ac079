"""Matrix products of any format, and embedding rows."""

from cpu_fallback import decode
from cpu_fallback.bind import BoundCall, counted, share, within
from cpu_fallback.decode import ROWS
from cpu_fallback.jit import device, kernel
from cpu_fallback.memory import (
    field,
    load_f32,
    load_f32_n,
    read_f32,
    read_i32,
    store_f32,
    store_f32_n,
    write_f32,
    write_i64,
)
from cpu_fallback.product import SCRATCH, SUMS, TOKENS, XS, multiply
from cpu_fallback.stream import weight_fields
from cpu_fallback.tape import Launch

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


@kernel
def linear(rec, ctl, rank, size, scratch):
    """Compute y = x W^T + bias + residual; each thread has a contiguous range of output rows.

    Fields: M, N, K, x, y, bias, residual, product, weight.
    """
    m, n, k = counted(ctl, field(rec, 0)), field(rec, 1), field(rec, 2)
    x, y = field(rec, 3), field(rec, 4)
    bias, residual = field(rec, 5), field(rec, 6)
    multiplier, weight = field(rec, 7), rec + 64
    first, last = share((n + ROWS - 1) // ROWS, rank, size)
    for unit in range(first, last):
        row = unit * ROWS
        count = min(ROWS, n - row)
        for start in range(0, m, TOKENS):
            tokens = min(TOKENS, m - start)
            for t in range(tokens):
                write_i64(scratch + XS + 8 * t, x + 4 * (start + t) * k)
            multiply(multiplier, weight, 0, row, count, tokens, scratch)
            for t in range(tokens):
                for r in range(count):
                    total = read_f32(scratch + SUMS + 4 * (t * ROWS + r))
                    at = 4 * ((start + t) * n + row + r)
                    if bias:
                        total += read_f32(bias + 4 * (row + r))
                    if residual:
                        total += read_f32(residual + at)
                    write_f32(y + at, total)


@kernel
def embed(rec, ctl, rank, size, scratch):
    """Decode the rows of a table that the ids name; each thread has a range of tokens.

    Fields: M, K, ids, y, weight.
    """
    m, k = counted(ctl, field(rec, 0)), field(rec, 1)
    ids, y, weight = field(rec, 2), field(rec, 3), rec + 32
    first, last = share(m, rank, size)
    for t in range(first, last):
        out = y + 4 * t * k
        token = within(read_i32(ids + 4 * t), field(weight, decode.N))
        row = decode.decode(weight, 0, token, 1, 0, k, out)
        if row != out:
            copy_f32(row, out, k)


def _linear(call: BoundCall) -> list[Launch]:
    fields = [
        call.count("x"),
        call.dim("N"),
        call.dim("K"),
        call.address("x"),
        call.address("y"),
        call.address("bias"),
        call.address("residual"),
        *weight_fields("linear", call.tensor("w"), call.hints),
    ]
    shares = _SHARES if call.dim("N") * call.dim("K") >= _LARGE else 1
    return [call.launch(linear, fields, SCRATCH, shares)]


def _embed(call: BoundCall) -> list[Launch]:
    table = decode.fields("embed", call.tensor("table"))
    fields = [call.count("ids"), call.dim("K"), call.address("ids"), call.address("y"), *table]
    return [call.launch(embed, fields)]


LOWER = {"linear": _linear, "embed": _embed}
