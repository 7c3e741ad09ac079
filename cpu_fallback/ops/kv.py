"""The paged KV cache: where a cell lies, and how each KV dtype is written and read.

A line is the D values of one (page, head, cell), numbered as the planes [P, H, T, D] and [P, H, T]
lie in memory. A KV dtype is a pair of kernels that others call by address:

    writer(source, plane, scales, line, d)                  fp32 values -> one line; bf16, fp16
                                                            and fp8 saturate, and what is not
                                                            finite becomes NaN (i8: its scale)
    reader(plane, lines, count, d, panel)                   lines -> fp32 rows, without scales

A reader fills rows that are `padded(d)` values apart; what is beyond d is zero. That of i8 copies
the bytes, to rows that are whole chunks of 32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from clocher_kernels.dtypes import LARGEST, STORAGE
from clocher_kernels.errors import ShapeError, UnsupportedOp
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.late import i64, void
from cpu_fallback.lanes.maths import highest_bit
from cpu_fallback.lanes.memory import (
    load_f32,
    load_f32_n,
    load_u8,
    load_u8_n,
    load_u16,
    load_u16_n,
    read_i32,
    read_i64,
    store_f32,
    store_f32_n,
    store_u8,
    store_u8_n,
    store_u16,
    store_u16_n,
    write_f32,
)
from cpu_fallback.lanes.narrow import (
    from_bf16,
    from_e4m3,
    from_e5m2,
    from_f16,
    to_bf16,
    to_e4m3,
    to_e5m2,
    to_f16,
)
from cpu_fallback.lanes.record import executes
from cpu_fallback.lanes.simd import (
    absolute,
    div,
    fma,
    hmax,
    hsum,
    maximum,
    minimum,
    rint,
    splat,
    to_i32,
    zero,
)
from cpu_fallback.lanes.vector import op
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.team.tape import Launch

_I64, _VOID = ir.IntType(64), ir.VoidType()
_LARGEST_BF16, _LARGEST_F16 = np.float32(LARGEST["bf16"]), np.float32(LARGEST["f16"])
_LARGEST_E4M3, _LARGEST_E5M2 = np.float32(LARGEST["e4m3"]), np.float32(LARGEST["e5m2"])


@device
def padded(d):
    """Round up to whole vectors."""
    return (d + 15) & -16


@op(void, i64, i64, i64, i64, i64, i64)
def write_line(b, writer, source, plane, scales, line, d):
    """Call a writer."""
    kind = ir.FunctionType(_VOID, [_I64] * 5)
    b.call(b.inttoptr(writer, kind.as_pointer()), [source, plane, scales, line, d])


@op(void, i64, i64, i64, i64, i64, i64)
def read_lines(b, reader, plane, lines, count, d, panel):
    """Call a reader."""
    kind = ir.FunctionType(_VOID, [_I64] * 5)
    b.call(b.inttoptr(reader, kind.as_pointer()), [plane, lines, count, d, panel])


@device
def _write(source, target, d, item, put, put_n):
    for i in range(0, d - 15, 16):
        put(target + item * i, load_f32(source + 4 * i))
    i = d & -16
    if i < d:
        put_n(target + item * i, load_f32_n(source + 4 * i, d - i), d - i)


@device
def _read(plane, lines, count, d, panel, item, get, get_n):
    pitch = 4 * padded(d)
    for r in range(count):
        source, target = plane + item * read_i64(lines + 8 * r) * d, panel + r * pitch
        i = np.int64(0)
        while i + 64 <= d:
            at, to = source + item * i, target + 4 * i
            a, b = get(at), get(at + 16 * item)
            c, e = get(at + 32 * item), get(at + 48 * item)
            store_f32(to, a)
            store_f32(to + 64, b)
            store_f32(to + 128, c)
            store_f32(to + 192, e)
            i += 64
        while i < d:
            n = min(16, d - i)
            store_f32(target + 4 * i, get_n(source + item * i, n))
            i += 16


def _write_f32(source, plane, scales, line, d):
    _write(source, plane + 4 * line * d, d, 4, store_f32, store_f32_n)


def _read_f32(plane, lines, count, d, panel):
    _read(plane, lines, count, d, panel, 4, load_f32, load_f32_n)


@device
def _saturated(x, largest):
    """Return x within the largest value of a type, NaN where it is not finite."""
    return fma(x, zero(), minimum(maximum(x, splat(-largest)), splat(largest)))


@device
def _put_bf16(address, x):
    store_u16(address, to_bf16(_saturated(x, _LARGEST_BF16)))


@device
def _put_bf16_n(address, x, n):
    store_u16_n(address, to_bf16(_saturated(x, _LARGEST_BF16)), n)


@device
def _get_bf16(address):
    return from_bf16(load_u16(address))


@device
def _get_bf16_n(address, n):
    return from_bf16(load_u16_n(address, n))


def _write_bf16(source, plane, scales, line, d):
    _write(source, plane + 2 * line * d, d, 2, _put_bf16, _put_bf16_n)


def _read_bf16(plane, lines, count, d, panel):
    _read(plane, lines, count, d, panel, 2, _get_bf16, _get_bf16_n)


@device
def _put_f16(address, x):
    store_u16(address, to_f16(_saturated(x, _LARGEST_F16)))


@device
def _put_f16_n(address, x, n):
    store_u16_n(address, to_f16(_saturated(x, _LARGEST_F16)), n)


@device
def _get_f16(address):
    return from_f16(load_u16(address))


@device
def _get_f16_n(address, n):
    return from_f16(load_u16_n(address, n))


def _write_f16(source, plane, scales, line, d):
    _write(source, plane + 2 * line * d, d, 2, _put_f16, _put_f16_n)


def _read_f16(plane, lines, count, d, panel):
    _read(plane, lines, count, d, panel, 2, _get_f16, _get_f16_n)


@device
def _put_e4m3(address, x):
    store_u8(address, to_e4m3(_saturated(x, _LARGEST_E4M3)))


@device
def _put_e4m3_n(address, x, n):
    store_u8_n(address, to_e4m3(_saturated(x, _LARGEST_E4M3)), n)


@device
def _get_e4m3(address):
    return from_e4m3(load_u8(address))


@device
def _get_e4m3_n(address, n):
    return from_e4m3(load_u8_n(address, n))


def _write_e4m3(source, plane, scales, line, d):
    _write(source, plane + line * d, d, 1, _put_e4m3, _put_e4m3_n)


def _read_e4m3(plane, lines, count, d, panel):
    _read(plane, lines, count, d, panel, 1, _get_e4m3, _get_e4m3_n)


@device
def _put_e5m2(address, x):
    store_u8(address, to_e5m2(_saturated(x, _LARGEST_E5M2)))


@device
def _put_e5m2_n(address, x, n):
    store_u8_n(address, to_e5m2(_saturated(x, _LARGEST_E5M2)), n)


@device
def _get_e5m2(address):
    return from_e5m2(load_u8(address))


@device
def _get_e5m2_n(address, n):
    return from_e5m2(load_u8_n(address, n))


def _write_e5m2(source, plane, scales, line, d):
    _write(source, plane + line * d, d, 1, _put_e5m2, _put_e5m2_n)


def _read_e5m2(plane, lines, count, d, panel):
    _read(plane, lines, count, d, panel, 1, _get_e5m2, _get_e5m2_n)


@device
def _code(x, step):
    least, most = splat(np.float32(-127)), splat(np.float32(127))
    return to_i32(minimum(maximum(rint(div(x, step)), least), most))


def _write_i8(source, plane, scales, line, d):
    largest, odd, tail = zero(), zero(), d & -16
    for i in range(0, tail, 16):
        x = load_f32(source + 4 * i)
        largest, odd = maximum(absolute(x), largest), fma(x, zero(), odd)
    if tail < d:
        x = load_f32_n(source + 4 * tail, d - tail)
        largest, odd = maximum(absolute(x), largest), fma(x, zero(), odd)
    scale = np.float32(1)
    if hmax(largest) > np.float32(0):
        scale = hmax(largest) / np.float32(127)
    write_f32(scales + 4 * line, scale + hsum(odd))
    step, target = splat(scale), plane + line * d
    for i in range(0, tail, 16):
        store_u8(target + i, _code(load_f32(source + 4 * i), step))
    if tail < d:
        store_u8_n(target + tail, _code(load_f32_n(source + 4 * tail, d - tail), step), d - tail)


def _read_i8(plane, lines, count, d, panel):
    pitch = (d + 31) & -32
    for r in range(count):
        source, target = plane + read_i64(lines + 8 * r) * d, panel + r * pitch
        for i in range(0, d - 15, 16):
            store_u8(target + i, load_u8(source + i))
        i = d & -16
        if i < d:
            store_u8(target + i, load_u8_n(source + i, d - i))


@dataclass(frozen=True, slots=True)
class KvDtype:
    """How lines of a KV dtype are written and read."""

    writer: Kernel
    reader: Kernel


def _dtype(write: Callable[..., Any], read: Callable[..., Any]) -> KvDtype:
    return KvDtype(Kernel(write), Kernel(read))


KV_DTYPES = {
    "f32": _dtype(_write_f32, _read_f32),
    "bf16": _dtype(_write_bf16, _read_bf16),
    "f16": _dtype(_write_f16, _read_f16),
    "e4m3": _dtype(_write_e4m3, _read_e4m3),
    "e5m2": _dtype(_write_e5m2, _read_e5m2),
    "i8": _dtype(_write_i8, _read_i8),
}
"""KV dtype -> kernels."""


@device
def page_of(pages, blocks, size, slot, cell):
    """Return the page of a cell. pages is int32 [slots, blocks]; a page has `size` cells."""
    return read_i32(pages + 4 * (slot * blocks + cell // size))


@device
def line_of(page, heads, size, head, cell):
    """Return the line of a cell of a page."""
    return (page * heads + head) * size + cell % size


class Writer(NamedTuple):
    """What writes lines of the cache's dtype."""

    writer: int


@executes("kv_append", Writer)
def kv_append(a, rank, size, scratch):
    """Write keys and values into the cache; each thread has a range of (token, head)."""
    heads, d = a.H, a.D
    first, last = share(a.M * heads, rank, size)
    for unit in range(first, last):
        t, head = unit // heads, unit % heads
        line = own_line(a, t, head)
        if line >= 0:
            source = 4 * unit * d
            write_line(a.writer, a.k + source, a.k_cache, a.k_scale, line, d)
            write_line(a.writer, a.v + source, a.v_cache, a.v_scale, line, d)


@device
def own_line(a, t, head):
    """Return the line of a token's own cell, -1 if it has none."""
    cell, tree = read_i32(a.positions + 4 * t), read_i64(a.ancestors + 8 * t)
    if tree:
        cell = read_i32(a.ends + 4 * t) + highest_bit(tree)
    slot = read_i32(a.slots + 4 * t)
    if slot < 0 or slot >= a.S or cell < 0 or cell >= a.B * a.T:
        return -1
    page = page_of(a.pages, a.B, a.T, slot, cell)
    if page < 0 or page >= a.P:
        return -1
    return line_of(page, a.H, a.T, head, cell)


def kv_dtype(call: BoundCall) -> KvDtype:
    """Return the KV dtype of a call, after checking that its planes are of it.

    Raises:
        UnsupportedOp: no such KV dtype.
        ShapeError: the planes are of another dtype, or scales are missing or one too many.
    """
    name = str(call.attr("kv_dtype"))
    if name not in KV_DTYPES:
        raise UnsupportedOp(
            f"{call.spec.name}: no CPU kernel for kv_dtype={name!r}; there are "
            f"{', '.join(KV_DTYPES)}"
        )
    planes = [plane for plane in "kv" if call.has(f"{plane}_cache")]
    for param in (f"{plane}_cache" for plane in planes):
        if call.array(param).dtype != STORAGE[name]:
            raise ShapeError(
                f"{call.spec.name}: {param!r} is {call.array(param).dtype}; kv_dtype={name!r} is "
                f"stored as {STORAGE[name]}"
            )
    for param in (f"{plane}_scale" for plane in planes):
        if call.has(param) != (name == "i8"):
            raise ShapeError(
                f"{call.spec.name}: {param!r} is {'there' if call.has(param) else 'missing'}; "
                "kv_dtype='i8' has scales, the others have none"
            )
    return KV_DTYPES[name]


def _kv_append(call: BoundCall) -> list[Launch]:
    heads, d = call.dim("H"), call.dim("D")
    if call.dim("F") != heads * d:
        raise ShapeError(f"kv_append: 'k' has {call.dim('F')} columns; expected {heads} x {d}")
    return [call.launch(kv_append, Writer(kv_dtype(call).writer))]


LOWER = {"kv_append": _kv_append}
