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
from typing import Any

import numpy as np

from clocher_kernels.dtypes import LARGEST, STORAGE
from clocher_kernels.errors import ShapeError
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.language import WIDEN, loads_of
from cpu_fallback.lanes.record import executes
from cpu_fallback.ops.bind import BoundCall, share
from cpu_fallback.ops.quantize import largest_of
from cpu_fallback.team.tape import Launch


class KvDtype:
    """The kernels that write and read lines of a KV dtype."""

    def __init__(self, name: str, write: Callable[..., Any], read: Callable[..., Any]) -> None:
        self.writer = Kernel(write, name=f"kv.write_{name}")
        self.reader = Kernel(read, name=f"kv.read_{name}")


padded = device(lambda d: (d + 15) & -16)  # Round up to whole vectors


write_line = v.caller(5)  # (writer, source, plane, scales, line, d)
read_lines = v.caller(5)  # (reader, plane, lines, count, d, panel)


def _floats(name: str, encode: Any, put: Any, put_n: Any) -> KvDtype:
    """Return the kernels of a KV dtype without scales."""
    item, get = WIDEN[name].bits // 8, v.loads_up_to(*loads_of(name))
    store = v.stores_up_to(put, put_n)
    code = device(lambda x: x)
    if encode is not None:
        largest = np.float32(LARGEST[name])

        @device
        def code(x):
            # Within the largest value; NaN where it is not finite.
            near = v.minimum(v.maximum(x, v.splat(-largest)), v.splat(largest))
            return encode(v.fma(x, v.zero(), near))

    def write(source, plane, scales, line, d):
        target = plane + item * line * d
        for i in range(0, d, 16):
            store(target + item * i, code(v.load_up_to(source + 4 * i, d - i)), d - i)

    def read(plane, lines, count, d, panel):
        pitch = 4 * padded(d)
        for r in range(count):
            source, target = plane + item * v.read_i64(lines + 8 * r) * d, panel + r * pitch
            for i in range(0, d, 16):
                v.store_f32(target + 4 * i, get(source + item * i, d - i))

    return KvDtype(name, write, read)


@device
def _code(x, step):
    least, most = v.splat(np.float32(-127)), v.splat(np.float32(127))
    return v.to_i32(v.minimum(v.maximum(v.rint(v.div(x, step)), least), most))


def _write_i8(source, plane, scales, line, d):
    top, odd = largest_of(source, d, np.float32(0))
    scale = np.float32(1)
    if top > np.float32(0):
        scale = top / np.float32(127)
    v.write_f32(scales + 4 * line, scale + odd)
    step, target = v.splat(scale), plane + line * d
    for i in range(0, d, 16):
        v.store_u8_up_to(target + i, _code(v.load_up_to(source + 4 * i, d - i), step), d - i)


def _read_i8(plane, lines, count, d, panel):
    pitch = (d + 31) & -32
    for r in range(count):
        source, target = plane + v.read_i64(lines + 8 * r) * d, panel + r * pitch
        for i in range(0, d - 15, 16):
            v.store_u8(target + i, v.load_u8(source + i))
        i = d & -16
        if i < d:
            v.store_u8(target + i, v.load_u8_n(source + i, d - i))


KV_DTYPES = {
    "f32": _floats("f32", None, v.store_f32, v.store_f32_n),
    "bf16": _floats("bf16", v.to_bf16, v.store_u16, v.store_u16_n),
    "f16": _floats("f16", v.to_f16, v.store_u16, v.store_u16_n),
    "e4m3": _floats("e4m3", v.to_e4m3, v.store_u8, v.store_u8_n),
    "e5m2": _floats("e5m2", v.to_e5m2, v.store_u8, v.store_u8_n),
    "i8": KvDtype("i8", _write_i8, _read_i8),
}
"""KV dtype -> kernels."""


@device
def page_of(pages, blocks, size, slot, cell):
    """Return the page of a cell. pages is int32 [slots, blocks]; a page has `size` cells."""
    return v.read_i32(pages + 4 * (slot * blocks + cell // size))


# Return the line of a cell of a page.
line_of = device(lambda page, heads, size, head, cell: (page * heads + head) * size + cell % size)


@executes("kv_append", writer=int)
def kv_append(a, rank, size, scratch):
    """Write keys and values into the cache; each thread has a range of (token, head).

    `writer` writes lines of the cache's dtype.
    """
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
    cell, tree = v.read_i32(a.positions + 4 * t), v.read_i64(a.ancestors + 8 * t)
    if tree:
        cell = v.read_i32(a.ends + 4 * t) + v.highest_bit(tree)
    slot = v.read_i32(a.slots + 4 * t)
    if slot < 0 or slot >= a.S or cell < 0 or cell >= a.B * a.T:
        return -1
    page = page_of(a.pages, a.B, a.T, slot, cell)
    if page < 0 or page >= a.P:
        return -1
    return line_of(page, a.H, a.T, head, cell)


def kv_of(call: BoundCall) -> KvDtype:
    """Return the KV dtype of a call whose planes are of it. Raises UnsupportedOp, ShapeError."""
    op, name = call.spec.name, str(call.attr("cache_dtype"))
    found = call.choice("cache_dtype", KV_DTYPES)
    for plane in "kv":
        if not call.has(f"{plane}_cache"):
            continue
        stored, scale = call.array(f"{plane}_cache").dtype, f"{plane}_scale"
        if stored != STORAGE[name]:
            raise ShapeError(
                f"{op}: '{plane}_cache' is {stored}; cache_dtype={name!r} is stored as "
                f"{STORAGE[name]}"
            )
        if call.has(scale) != (name == "i8"):
            raise ShapeError(
                f"{op}: {scale!r} is {'there' if call.has(scale) else 'missing'}; "
                "cache_dtype='i8' has scales, the others have none"
            )
    return found


def query_heads(call: BoundCall, d: int) -> int:
    """Return how many query heads of D values share a key/value head. Raises ShapeError."""
    heads, width = call.dim("H"), call.dim("F")
    if not width or width % (heads * d):
        raise ShapeError(
            f"{call.spec.name}: 'q' has {width} columns; expected a multiple of {heads} key/value "
            f"heads x {d}"
        )
    return width // (heads * d)


def _kv_append(call: BoundCall) -> list[Launch]:
    heads, d = call.dim("H"), call.dim("D")
    if call.dim("F") != heads * d:
        raise ShapeError(f"kv_append: 'k' has {call.dim('F')} columns; expected {heads} x {d}")
    return [call.launch(kv_append, (kv_of(call).writer,))]


LOWER = {"kv_append": _kv_append}
