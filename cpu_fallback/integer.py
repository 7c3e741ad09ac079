"""BitNet on integers: int8 activations times ternary codes as they are stored, exact int32 sums."""

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import Ternary
from cpu_fallback.bind import BoundCall, bits, counted, share
from cpu_fallback.isa import CURRENT
from cpu_fallback.jit import device, kernel
from cpu_fallback.memory import (
    field,
    field_f32,
    load_bytes,
    load_bytes_n,
    load_f32,
    load_f32_n,
    read_f32,
    read_i64,
    store_u8,
    store_u8_n,
    write_f32,
    write_i64,
)
from cpu_fallback.simd import (
    absolute,
    hmax,
    ihsum,
    izero,
    maximum,
    minimum,
    mul,
    rint,
    splat,
    to_i32,
    zero,
)
from cpu_fallback.tape import Launch
from cpu_fallback.vector import BYTES, I32, call, constant, i64, op, pick

_TOKENS = 64

_I8, _I16, _I32 = (ir.IntType(bits) for bits in (8, 16, 32))


@op(BYTES)
def ones(b):
    """Return 64 bytes of 1."""
    return constant(BYTES, 1)


@op(BYTES, BYTES, i64)
def digits(b, codes, index):
    """Return bits 2 index and 2 index + 1 of each byte; index must be a constant 0 .. 3."""
    shift = b.shl(b.trunc(index, _I8), ir.Constant(_I8, 1))
    first = b.insert_element(ir.Constant(BYTES.llvm, ir.Undefined), shift, ir.Constant(_I32, 0))
    return b.and_(b.lshr(codes, pick(b, first, [0] * 64)), constant(BYTES, 3))


@op(I32, I32, BYTES, BYTES)
def dot_bytes(b, acc, unsigned, signed):
    """Add products of unsigned bytes, at most 127, with signed ones to int32 lanes, exactly.

    Which product goes to which lane depends on the ISA; the sum of the lanes does not.
    """
    if CURRENT.avx512:
        name = "llvm.x86.avx512.vpdpbusd.512"
        if llvm.llvm_version_info[0] < 21:
            unsigned, signed = b.bitcast(unsigned, I32.llvm), b.bitcast(signed, I32.llvm)
        return call(b, name, I32.llvm, acc, unsigned, signed)
    if CURRENT.avx2:
        sums = [_pairs_avx2(b, unsigned, signed, start) for start in (0, 32)]
        lanes = ir.Constant(ir.VectorType(_I32, 16), list(range(16)))
        return b.add(acc, b.shuffle_vector(sums[0], sums[1], lanes))
    wide = ir.VectorType(_I16, 64)
    products = b.mul(b.zext(unsigned, wide), b.sext(signed, wide))
    for start in range(0, 64, 16):
        acc = b.add(acc, b.sext(pick(b, products, list(range(start, start + 16))), I32.llvm))
    return acc


def _pairs_avx2(b: Any, unsigned: Any, signed: Any, start: int) -> Any:
    lanes = list(range(start, start + 32))
    shorts = ir.VectorType(_I16, 16)
    pairs = call(
        b, "llvm.x86.avx2.pmadd.ub.sw", shorts, pick(b, unsigned, lanes), pick(b, signed, lanes)
    )
    one = ir.Constant(shorts, [1] * 16)
    return call(b, "llvm.x86.avx2.pmadd.wd", ir.VectorType(_I32, 8), pairs, one)


@kernel
def quantize_act(rec, ctl, rank, size, scratch):
    """Quantise each token to int8 with one scale; each thread has a range of tokens.

    Fields: M, K, x, q, scale.
    """
    m, k = counted(ctl, field(rec, 0)), field(rec, 1)
    first, last = share(m, rank, size)
    for t in range(first, last):
        x, q = field(rec, 2) + 4 * t * k, field(rec, 3) + t * k
        largest = zero()
        for i in range(0, k - 15, 16):
            largest = maximum(absolute(load_f32(x + 4 * i)), largest)
        done = k & -16
        if done < k:
            largest = maximum(absolute(load_f32_n(x + 4 * done, k - done)), largest)
        absmax = max(hmax(largest), np.float32(1e-5))
        inverse = splat(np.float32(127) / absmax)
        for i in range(0, k - 15, 16):
            store_u8(q + i, _code(load_f32(x + 4 * i), inverse))
        if done < k:
            codes = _code(load_f32_n(x + 4 * done, k - done), inverse)
            store_u8_n(q + done, codes, k - done)
        write_f32(field(rec, 4) + 4 * t, absmax / np.float32(127))


@device
def _code(x, inverse):
    low, high = splat(np.float32(-128)), splat(np.float32(127))
    return to_i32(minimum(maximum(rint(mul(x, inverse)), low), high))


@device
def _total(q, k):
    acc = izero()
    for i in range(0, k - 63, 64):
        acc = dot_bytes(acc, ones(), load_bytes(q + i))
    done = k & -64
    if done < k:
        acc = dot_bytes(acc, ones(), load_bytes_n(q + done, k - done))
    return ihsum(acc)


@kernel
def linear_i8(rec, ctl, rank, size, scratch):
    """Compute y = (q codes^T) * (scale * factor) + bias + residual, exactly up to the epilogue.

    Each thread has a range of packed rows; packed row r holds output rows r + i * N/4. The stored
    codes are digit + 1, so the sum of q is taken off each dot product.

    Fields: M, N, K, q, scale, codes, factor, y, bias, residual.
    """
    m, n, k = counted(ctl, field(rec, 0)), field(rec, 1), field(rec, 2)
    packed = n >> 2
    first, last = share(packed, rank, size)
    for start in range(0, m, _TOKENS):
        tokens = min(_TOKENS, m - start)
        for t in range(tokens):
            write_i64(scratch + 8 * t, _total(field(rec, 3) + (start + t) * k, k))
        for r in range(first, last):
            for t in range(tokens):
                offset = read_i64(scratch + 8 * t)
                _packed_row(rec, r, packed, start + t, n, k, offset)


@device
def _packed_row(rec, r, packed, t, n, k, offset):
    """Multiply the four digits of a packed row by one token."""
    q, codes = field(rec, 3) + t * k, field(rec, 5) + r * k
    a, b, c, d = izero(), izero(), izero(), izero()
    for i in range(0, k - 63, 64):
        x, w = load_bytes(q + i), load_bytes(codes + i)
        a = dot_bytes(a, digits(w, 0), x)
        b = dot_bytes(b, digits(w, 1), x)
        c = dot_bytes(c, digits(w, 2), x)
        d = dot_bytes(d, digits(w, 3), x)
    done = k & -64
    if done < k:
        x, w = load_bytes_n(q + done, k - done), load_bytes_n(codes + done, k - done)
        a = dot_bytes(a, digits(w, 0), x)
        b = dot_bytes(b, digits(w, 1), x)
        c = dot_bytes(c, digits(w, 2), x)
        d = dot_bytes(d, digits(w, 3), x)
    factor = read_f32(field(rec, 4) + 4 * t) * field_f32(rec, 6)
    _finish(rec, r, t, n, ihsum(a) - offset, factor)
    _finish(rec, r + packed, t, n, ihsum(b) - offset, factor)
    _finish(rec, r + 2 * packed, t, n, ihsum(c) - offset, factor)
    _finish(rec, r + 3 * packed, t, n, ihsum(d) - offset, factor)


@device
def _finish(rec, row, t, n, total, factor):
    y, bias, residual = field(rec, 7), field(rec, 8), field(rec, 9)
    at = 4 * (t * n + row)
    value = np.float32(total) * factor
    if bias:
        value += read_f32(bias + 4 * row)
    if residual:
        value += read_f32(residual + at)
    write_f32(y + at, value)


def _quantize_act(call: BoundCall) -> list[Launch]:
    arrays = [call.address(name) for name in ("x", "q", "scale")]
    return [call.launch(quantize_act, [call.count("x"), call.dim("K"), *arrays])]


def _linear_i8(call: BoundCall) -> list[Launch]:
    weight = call.tensor("w")
    if not isinstance(weight.format, Ternary):
        raise UnsupportedOp(
            f"linear_i8: no CPU kernel reads the format {weight.format.name}; expected ternary or "
            "ternary_inverse"
        )
    fields = [
        call.count("q"),
        call.dim("N"),
        call.dim("K"),
        call.address("q"),
        call.address("scale"),
        int(weight.planes["codes"].ctypes.data),
        bits(weight.format.multiplier(weight.planes)),
        call.address("y"),
        call.address("bias"),
        call.address("residual"),
    ]
    return [call.launch(linear_i8, fields, 8 * _TOKENS)]


LOWER = {"quantize_act": _quantize_act, "linear_i8": _linear_i8}
