"""Stored weights to fp32 panels: one decoder per format, shared by every op that reads a matrix.

A decoder (`decode_record`) gives exactly what the format's own `decode` does. f32 needs no panel
and returns the stored rows, K * 4 bytes apart. ggml's blocks have theirs in `decode_ggml`.
"""

from collections.abc import Callable

import numpy as np

from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats import Float, Fp8, Ggml, Int4, Int8, Mxfp4, Ternary
from clocher_kernels.quant_tensor import QuantTensor
from cpu_fallback.lanes.jit import Kernel, device
from cpu_fallback.lanes.late import i64
from cpu_fallback.lanes.memory import (
    load_i8,
    load_i8_n,
    load_u4,
    load_u4_n,
    load_u8,
    load_u8_n,
    load_u16,
    load_u16_n,
    read_f32,
    read_u8,
    read_u16,
    store_f32,
    store_f32_n,
)
from cpu_fallback.lanes.narrow import (
    bf16_scalar,
    e2m1_table,
    e8m0_scalar,
    f16_scalar,
    from_bf16,
    from_f16,
)
from cpu_fallback.lanes.simd import iand, isplat, isub, lookup, mul, shr, splat, to_f32
from cpu_fallback.lanes.widen import load_e4m3, load_e4m3_n, load_e5m2, load_e5m2_n
from cpu_fallback.ops.decode_ggml import GGML_DECODERS, table_of
from cpu_fallback.ops.decode_record import PITCH, Weight, weight_at

_SCALES = {"one": 0, "f32": 1, "f16": 2, "bf16": 3, "e8m0": 4}


@device
def scale_at(weight, index):
    """Return the index-th scale, fp32."""
    w = weight_at(weight)
    kind, scales = w.scale_kind, w.scales
    if kind == 0:
        return w.factor
    if kind == 1:
        return read_f32(scales + 4 * index)
    if kind == 2:
        return f16_scalar(read_u16(scales + 2 * index))
    if kind == 3:
        return bf16_scalar(read_u16(scales + 2 * index))
    return e8m0_scalar(read_u8(scales + index))


@device
def first_scale(weight, expert, row):
    """Return the index of the scale of a row's first element."""
    w = weight_at(weight)
    return (expert * w.high + row // w.tall) * w.wide


@device
def _zero(weight, index):
    zeros = weight_at(weight).zeros
    if zeros == 0:
        return 8
    return read_u8(zeros + index)


@device
def _spread(weight, expert, row, count, k0, k1, panel, load, load_n):
    """Decode by runs of columns that share a scale: load(line, column, zero) * scale."""
    w = weight_at(weight)
    group = w.group
    for r in range(row, row + count):
        line = w.codes + (expert * w.n + r) * w.stride
        out = panel + (r - row) * PITCH - 4 * k0
        index = (expert * w.high + r // w.tall) * w.wide + k0 // group
        k, end = k0, k0 - k0 % group
        while k < k1:
            end = min(end + group, k1)
            scale = splat(scale_at(weight, index))
            zero = isplat(_zero(weight, index))
            index += 1
            while k + 16 <= end:
                store_f32(out + 4 * k, mul(load(line, k, zero), scale))
                k += 16
            if k < end:
                store_f32_n(out + 4 * k, mul(load_n(line, k, zero, end - k), scale), end - k)
                k = end
    return panel


def _f32(weight, expert, row, count, k0, k1, panel):
    w = weight_at(weight)
    return w.codes + 4 * ((expert * w.n + row) * w.k + k0)


@device
def _load_bf16(line, k, zero):
    return from_bf16(load_u16(line + 2 * k))


@device
def _load_bf16_n(line, k, zero, n):
    return from_bf16(load_u16_n(line + 2 * k, n))


def _bf16(weight, expert, row, count, k0, k1, panel):
    return _spread(weight, expert, row, count, k0, k1, panel, _load_bf16, _load_bf16_n)


@device
def _load_f16(line, k, zero):
    return from_f16(load_u16(line + 2 * k))


@device
def _load_f16_n(line, k, zero, n):
    return from_f16(load_u16_n(line + 2 * k, n))


def _f16(weight, expert, row, count, k0, k1, panel):
    return _spread(weight, expert, row, count, k0, k1, panel, _load_f16, _load_f16_n)


@device
def _load_int8(line, k, zero):
    return to_f32(load_i8(line + k))


@device
def _load_int8_n(line, k, zero, n):
    return to_f32(load_i8_n(line + k, n))


def _int8(weight, expert, row, count, k0, k1, panel):
    return _spread(weight, expert, row, count, k0, k1, panel, _load_int8, _load_int8_n)


@device
def _load_int4(line, k, zero):
    return to_f32(isub(load_u4(line + (k >> 1)), zero))


@device
def _load_int4_n(line, k, zero, n):
    return to_f32(isub(load_u4_n(line + (k >> 1), n), zero))


def _int4(weight, expert, row, count, k0, k1, panel):
    return _spread(weight, expert, row, count, k0, k1, panel, _load_int4, _load_int4_n)


@device
def _load_e4m3(line, k, zero):
    return load_e4m3(line + k)


@device
def _load_e4m3_n(line, k, zero, n):
    return load_e4m3_n(line + k, n)


def _e4m3(weight, expert, row, count, k0, k1, panel):
    return _spread(weight, expert, row, count, k0, k1, panel, _load_e4m3, _load_e4m3_n)


@device
def _load_e5m2(line, k, zero):
    return load_e5m2(line + k)


@device
def _load_e5m2_n(line, k, zero, n):
    return load_e5m2_n(line + k, n)


def _e5m2(weight, expert, row, count, k0, k1, panel):
    return _spread(weight, expert, row, count, k0, k1, panel, _load_e5m2, _load_e5m2_n)


@device
def _load_mxfp4(line, k, zero):
    return lookup(e2m1_table(), load_u4(line + (k >> 1)))


@device
def _load_mxfp4_n(line, k, zero, n):
    return lookup(e2m1_table(), load_u4_n(line + (k >> 1), n))


def _mxfp4(weight, expert, row, count, k0, k1, panel):
    return _spread(weight, expert, row, count, k0, k1, panel, _load_mxfp4, _load_mxfp4_n)


def _ternary(weight, expert, row, count, k0, k1, panel):
    w = weight_at(weight)
    packed = w.n >> 2
    scale = splat(scale_at(weight, 0))
    one, three = isplat(1), isplat(3)
    for r in range(row, row + count):
        line = w.codes + r % packed * w.stride
        shift = 2 * (r // packed)
        out = panel + (r - row) * PITCH - 4 * k0
        k = k0
        while k + 16 <= k1:
            digit = isub(iand(shr(load_u8(line + k), shift), three), one)
            store_f32(out + 4 * k, mul(to_f32(digit), scale))
            k += 16
        if k < k1:
            digit = isub(iand(shr(load_u8_n(line + k, k1 - k), shift), three), one)
            store_f32_n(out + 4 * k, mul(to_f32(digit), scale), k1 - k)
    return panel


def _decoder(function: Callable[..., int]) -> Kernel:
    return Kernel(function, i64)


DECODERS = {
    "f32": _decoder(_f32),
    "bf16": _decoder(_bf16),
    "f16": _decoder(_f16),
    "int8": _decoder(_int8),
    "int4": _decoder(_int4),
    "e4m3": _decoder(_e4m3),
    "e5m2": _decoder(_e5m2),
    "mxfp4": _decoder(_mxfp4),
    "ternary": _decoder(_ternary),
    **{kind: _decoder(function) for kind, function in GGML_DECODERS.items()},
}
"""Stored kind of code -> decoder."""


def weight_record(op_name: str, tensor: QuantTensor) -> Weight:
    """Return the record of a weight, as far as decoders read it.

    Raises:
        UnsupportedOp: there is no decoder for its format.
    """
    fmt, planes = tensor.format, tensor.planes
    *_, n, k = tensor.shape
    match fmt:
        case Float(name=kind):
            return plain(kind, planes["data"], n, k)
        case Ternary():
            return plain("ternary", planes["codes"], n, k, fmt.multiplier(planes))
        case Ggml(kind=kind):
            blocks = planes["blocks"]
            table = table_of(kind)
            return plain(kind, blocks, n, k)._replace(
                stride=blocks.shape[-1], scales=0 if table is None else _address(table)
            )
        case Int8(group=scope, scale_dtype=scale):
            kind, codes = "int8", planes["codes"]
        case Int4(group=scope, scale_dtype=scale):
            kind, codes = "int4", planes["codes"]
        case Fp8(code_dtype=kind, scope=scope, scale_dtype=scale):
            codes = planes["codes"]
        case Mxfp4():
            kind, codes, scope, scale = "mxfp4", planes["blocks"], 32, "e8m0"
        case _:
            raise UnsupportedOp(
                f"{op_name}: no CPU kernel reads the format {fmt.name}; there are decoders for "
                f"{', '.join(DECODERS)}"
            )
    group, tall = {"tensor": (k, n), "row": (k, 1), "g128": (128, 1), "b128": (128, 128)}.get(
        scope, (scope, 1)
    )
    stride = -(-k // 2) if kind in ("int4", "mxfp4") else k
    zeros = _address(planes["zeros"]) if "zeros" in planes else 0
    return Weight(
        decoder=DECODERS[kind],
        pitch=PITCH,
        n=n,
        k=k,
        codes=_address(codes),
        scales=_address(planes["scales"]),
        zeros=zeros,
        stride=stride,
        scale_kind=_SCALES[scale],
        group=group,
        tall=tall,
        wide=-(-k // group),
        high=-(-n // tall),
        factor=0.0,
    )


def plain(kind: str, codes: np.ndarray, n: int, k: int, multiplier: float = 1.0) -> Weight:
    """Return the record of a weight without a plane of scales.

    Args:
        kind: name of its decoder.
        codes: the stored array.
        n: rows.
        k: columns.
        multiplier: what every decoded value is multiplied by; f32 ignores it.
    """
    return Weight(
        decoder=DECODERS[kind],
        pitch=4 * k if kind == "f32" else PITCH,
        n=n,
        k=k,
        codes=_address(codes),
        scales=0,
        zeros=0,
        stride=k * codes.itemsize,
        scale_kind=_SCALES["one"],
        group=k,
        tall=n,
        wide=1,
        high=1,
        factor=float(multiplier),
    )


def _address(array: np.ndarray) -> int:
    return int(array.ctypes.data)
