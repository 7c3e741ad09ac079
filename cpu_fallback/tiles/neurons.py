"""Ternary matrices as lines of neurons, of which any may be left out.

Tiles interleave 16 rows, so a line of them is needed as soon as one of the rows is. Here each
neuron has whole lines of 64 bytes of its own: a row of the up projection, or a column of the down
projection. A line has 256 digits of two bits, digit + 1:

    a row      line c, byte 4 l + i, bits 2p, 2p + 1: column 256 c + 16 l + 4 p + i
    a column   line c, byte 16 l + 4 v + d, bits 2p, 2p + 1: row 256 c + 64 v + 16 p + 4 l + d

l and v are 0 .. 15 and 0 .. 3 in turn, i, p and d 0 .. 3. So a row's line times four registers of
activations needs no shuffle, and the lines of four columns, interleaved byte by byte, are dwords of
four neurons of one row each, in an order in which sums are stored as they are. What lies behind the
last column or row is zero.
"""

import ctypes
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from llvmlite import ir

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import Ternary
from clocher_kernels.guards import refuse_in_window
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel
from cpu_fallback.lanes.late import i64, void
from cpu_fallback.lanes.memory import emit_load, emit_store
from cpu_fallback.lanes.record import reader, words
from cpu_fallback.lanes.vector import BYTES, INT8, INT16, INT32, op
from cpu_fallback.team.large_pages import allocate
from cpu_fallback.team.placement import usable_cpus
from cpu_fallback.tiles.layout import LINE
from cpu_fallback.tiles.tile_pack import ternary_dword

DIGITS = 256
"""Digits of a line."""
_BLOCK = 64
_CHUNK = 256

_SHORTS = ir.VectorType(INT16, 32)
_SIXTEEN = ir.VectorType(INT8, 16)


class Source(NamedTuple):
    """What is packed, and to where."""

    n: int  # rows
    k: int  # columns
    codes: int  # the stored ones
    stride: int  # bytes of a neuron
    target: int  # the lines


_source_at = reader(Source)


def stride_of(digits: int) -> int:
    """Return the bytes of a neuron of so many digits."""
    return -(-digits // DIGITS) * LINE


def nbytes_of(shape: tuple[int, ...], columns: bool) -> int:
    """Return the bytes of the lines of a matrix [N, K], by its columns or its rows."""
    n, k = shape
    return k * stride_of(n) if columns else n * stride_of(k)


_packed: dict[tuple[int, bool], np.ndarray] = {}


def lines_of(op_name: str, tensor: QuantTensor, columns: bool) -> np.ndarray:
    """Return the lines of a matrix, u8 [neurons, stride], packed when they are first asked for.

    They are kept as long as the tensor's codes live.

    Args:
        op_name: for errors.
        tensor: ternary.
        columns: whether a neuron is a column.

    Raises:
        UnsupportedOp: it is not ternary.
    """
    if not isinstance(tensor.format, Ternary):
        raise UnsupportedOp(
            f"{op_name}: the format {tensor.format.name}; zeros are skipped of ternary weights only"
        )
    codes = tensor.planes["codes"]
    key = id(codes), columns
    if key not in _packed:
        refuse_in_window("pack weights by neuron")
        _packed[key] = pack(tensor, columns)
        weakref.finalize(codes, _packed.pop, key, None)
    return _packed[key]


def are_packed(tensor: QuantTensor, columns: bool) -> bool:
    """Return whether the lines of a tensor are in memory."""
    return (id(tensor.planes.get("codes")), columns) in _packed


def pack(tensor: QuantTensor, columns: bool) -> np.ndarray:
    """Pack a ternary matrix."""
    n, k = tensor.shape
    neurons, stride = (k, stride_of(n)) if columns else (n, stride_of(k))
    lines = allocate(neurons * stride)
    codes = tensor.planes["codes"]
    source = Source(n, k, codes.ctypes.data, stride, lines.ctypes.data)
    form = np.array(list(words(source)), np.int64)
    kernel = _pack_columns if columns else _pack_rows
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(kernel.address)

    def part(first: int) -> None:
        room = np.empty(2 * _BLOCK * _BLOCK, np.uint8)
        call(form.ctypes.data, first, min(first + _CHUNK, neurons), room.ctypes.data)

    with ThreadPoolExecutor(usable_cpus()) as pool:
        list(pool.map(part, range(0, neurons, _CHUNK)))
    return lines.reshape(neurons, stride)


def _rows(form, begin, stop, room):
    """Pack rows begin .. stop-1."""
    f = _source_at(form)
    k, packed = f.k, f.n >> 2
    for row in range(begin, stop):
        line, shift = f.codes + row % packed * k, 2 * (row // packed)
        for i in range((k + 15) >> 4):
            v.write_i32(f.target + row * f.stride + 4 * i, ternary_dword(line, k, i, shift))


def _columns(form, begin, stop, room):
    """Pack columns begin .. stop-1, 64 at a time: `room` has their bytes [64, 64], then lines."""
    f = _source_at(form)
    n, k, packed = f.n, f.k, f.n >> 2
    for first in range(begin, stop, 64):
        # The last columns are packed with some before them, if there are, for whole loads.
        start = max(min(first, k - 64), 0)
        count = min(64, k - start)
        for c in range(f.stride >> 6):
            for place in range(64):
                row = 256 * c + (place >> 2 & 3) * 64 + (place >> 4) * 4 + (place & 3)
                clear_bytes(room + 64 * place)
                for p in range(4):
                    if row < n:
                        at = f.codes + row % packed * k + start
                        source = at
                        if count < 64:
                            source = room + 4096
                            for i in range(count):
                                copy_byte(at + i, source + i)
                        merge_digits(source, room + 64 * place, 2 * (row // packed), 2 * p)
                    row += 16
            for left in range(0, 64, 16):
                for top in range(0, 64, 16):
                    transpose(room + 64 * top + left, room + 4096 + 64 * left + top)
            for i in range(count):
                target = f.target + (start + i) * f.stride + 64 * c
                copy_line(room + 4096 + 64 * i, target)


@op(void, i64, i64)
def copy_byte(b, source, target):
    """Copy a byte."""
    emit_store(b, emit_load(b, INT8, source), target)


@op(void, i64, i64)
def copy_line(b, source, target):
    """Copy 64 bytes."""
    emit_store(b, emit_load(b, BYTES.llvm, source), target)


@op(void, i64)
def clear_bytes(b, target):
    """Write 64 zeros."""
    emit_store(b, ir.Constant(BYTES.llvm, None), target)


@op(void, i64, i64, i64, i64)
def merge_digits(b, source, target, shift, place):
    """Add two bits of each of 64 bytes, from bit `shift` on, to those at a target from `place`."""
    shorts = b.bitcast(emit_load(b, BYTES.llvm, source), _SHORTS)
    short = INT16
    digits = b.and_(
        b.lshr(shorts, _spread(b, b.trunc(shift, short))), ir.Constant(_SHORTS, [0x0303] * 32)
    )
    digits = b.bitcast(b.shl(digits, _spread(b, b.trunc(place, short))), BYTES.llvm)
    emit_store(b, b.or_(emit_load(b, BYTES.llvm, target), digits), target)


def _spread(b, value):
    one = b.insert_element(ir.Constant(_SHORTS, ir.Undefined), value, ir.Constant(INT32, 0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT32, 32), None))


@op(void, i64, i64)
def transpose(b, source, target):
    """Transpose 16 x 16 bytes, in rows of 64."""
    rows = [
        emit_load(b, _SIXTEEN, b.add(source, ir.Constant(source.type, 64 * i))) for i in range(16)
    ]
    for _ in range(4):
        rows = [_zipped(b, rows[i], rows[i + 8], half) for i in range(8) for half in (0, 8)]
    for i, row in enumerate(rows):
        emit_store(b, row, b.add(target, ir.Constant(target.type, 64 * i)))


def _zipped(b, first, second, start):
    order = [lane for i in range(start, start + 8) for lane in (i, 16 + i)]
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(INT32, 16), order))


_pack_rows = Kernel(_rows)
_pack_columns = Kernel(_columns)
