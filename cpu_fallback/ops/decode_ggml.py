"""ggml's blocks to fp32 panels: one decoder per type, see `product`.

A row is decoded in units of 16 to 128 columns, whole parts of a block, so that each scale is read
once and the codes of 16 columns are one load. The arithmetic is that of `Ggml.decode`: scale * code
is rounded, then - minimum.

`Weight.scales` is the address of the type's grid where it has one.

Source: ggml-common.h (the blocks); ggml-quants.c (dequantize_row_*).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from clocher_kernels.formats import ggml_grids
from clocher_kernels.formats.ggml_blocks import IQ4_VALUES, SIGNS
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import device
from cpu_fallback.lanes.vector import F32, I32, constant, op
from cpu_fallback.ops.product import PITCH, weight_at

_GRIDS = {
    "iq3_s": ggml_grids.IQ3_S,
    # The signs of a code lie behind the grid.
    "iq3_xxs": np.concatenate([ggml_grids.IQ3_XXS.view(np.uint8).ravel(), SIGNS]),
}
_XXS_SIGNS = ggml_grids.IQ3_XXS.size


def table_of(kind: str) -> np.ndarray | None:
    """Return the table that a type's decoder reads, alive as long as the program."""
    return _GRIDS.get(kind)


_iq4_table = op(F32)(lambda b: constant(F32, [float(value) for value in IQ4_VALUES]))
_bits = op(I32)(lambda b: constant(I32, [1 << lane for lane in range(16)]))  # 1 << lane


_half = device(lambda at: v.f16_scalar(v.read_u16(at)))


@device
def _bit(word, value):
    """Return `value` in the lanes whose bit of the word is set, else 0."""
    bits = _bits()
    return v.iselect(v.ieq(v.iand(v.isplat(word), bits), bits), v.isplat(value), v.izero())


@device
def _store(out, codes, scale):
    v.store_f32(out, v.mul(v.to_f32(codes), scale))


@device
def _store_minus(out, codes, scale, minimum):
    v.store_f32(out, v.sub(v.mul(v.to_f32(codes), scale), minimum))


@device
def _q4_1_unit(at, column, out, table):
    scale, minimum = v.splat(_half(at)), v.splat(-_half(at + 2))
    packed = v.load_u8(at + 4)
    _store_minus(out, v.iand(packed, v.isplat(15)), scale, minimum)
    _store_minus(out + 64, v.shr(packed, 4), scale, minimum)


@device
def _q5_0_unit(at, column, out, table):
    scale, packed, offset = v.splat(_half(at)), v.load_u8(at + 6), v.isplat(16)
    low = v.ior(v.iand(packed, v.isplat(15)), _bit(v.read_u16(at + 2), 16))
    high = v.ior(v.shr(packed, 4), _bit(v.read_u16(at + 4), 16))
    _store(out, v.isub(low, offset), scale)
    _store(out + 64, v.isub(high, offset), scale)


@device
def _q5_1_unit(at, column, out, table):
    scale, minimum = v.splat(_half(at)), v.splat(-_half(at + 2))
    packed = v.load_u8(at + 8)
    low = v.ior(v.iand(packed, v.isplat(15)), _bit(v.read_u16(at + 4), 16))
    high = v.ior(v.shr(packed, 4), _bit(v.read_u16(at + 6), 16))
    _store_minus(out, low, scale, minimum)
    _store_minus(out + 64, high, scale, minimum)


@device
def _iq4(at, out, scale):
    packed, table = v.load_u8(at), _iq4_table()
    v.store_f32(out, v.mul(v.lookup(table, v.iand(packed, v.isplat(15))), scale))
    v.store_f32(out + 64, v.mul(v.lookup(table, v.shr(packed, 4)), scale))


@device
def _iq4_nl_unit(at, column, out, table):
    _iq4(at + 2, out, v.splat(_half(at)))


@device
def _iq4_xs_unit(at, column, out, table):
    run = column >> 5
    low = v.read_u8(at + 4 + (run >> 1)) >> (4 * (run & 1)) & 15
    high = v.read_u16(at + 2) >> (2 * run) & 3
    scale = _half(at) * np.float32((low | high << 4) - 32)
    _iq4(at + 8 + 16 * run, out, v.splat(scale))


@device
def _six_scale(scales, run):
    if run < 4:
        return np.float32(v.read_u8(scales + run) & 63)
    return np.float32(v.read_u8(scales + run + 4) & 15 | v.read_u8(scales + run - 4) >> 6 << 4)


@device
def _six_minimum(scales, run):
    if run < 4:
        return np.float32(v.read_u8(scales + run + 4) & 63)
    return np.float32(v.read_u8(scales + run + 4) >> 4 | v.read_u8(scales + run) >> 6 << 4)


@device
def _q4_k_unit(at, column, out, table):
    d, dmin, scales, run = _half(at), _half(at + 2), at + 4, column >> 5
    s0, m0 = v.splat(d * _six_scale(scales, run)), v.splat(dmin * _six_minimum(scales, run))
    s1, m1 = v.splat(d * _six_scale(scales, run + 1)), v.splat(dmin * _six_minimum(scales, run + 1))
    for part in range(2):
        packed = v.load_u8(at + 16 + (column >> 1) + 16 * part)
        _store_minus(out + 64 * part, v.iand(packed, v.isplat(15)), s0, m0)
        _store_minus(out + 128 + 64 * part, v.shr(packed, 4), s1, m1)


@device
def _q5_k_unit(at, column, out, table):
    d, dmin, scales, run = _half(at), _half(at + 2), at + 4, column >> 5
    s0, m0 = v.splat(d * _six_scale(scales, run)), v.splat(dmin * _six_minimum(scales, run))
    s1, m1 = v.splat(d * _six_scale(scales, run + 1)), v.splat(dmin * _six_minimum(scales, run + 1))
    one = v.isplat(1)
    for part in range(2):
        packed = v.load_u8(at + 48 + (column >> 1) + 16 * part)
        high = v.shr(v.load_u8(at + 16 + 16 * part), run)
        low = v.ior(v.iand(packed, v.isplat(15)), v.shl(v.iand(high, one), 4))
        _store_minus(out + 64 * part, low, s0, m0)
        top = v.ior(v.shr(packed, 4), v.shl(v.iand(v.shr(high, 1), one), 4))
        _store_minus(out + 128 + 64 * part, top, s1, m1)


@device
def _q6_k_unit(at, column, out, table):
    """Decode half a block: 64 bytes of low bits, 32 of high ones, 8 scales."""
    d = _half(at + 208)
    low, high, scales = at + (column >> 1), at + 128 + (column >> 2), at + 192 + (column >> 4)
    fifteen, three, offset = v.isplat(15), v.isplat(3), v.isplat(32)
    for part in range(2):
        tops = v.load_u8(high + 16 * part)
        for quarter in range(4):
            packed = v.load_u8(low + 32 * (quarter & 1) + 16 * part)
            codes = v.iand(v.shr(packed, 4 * (quarter >> 1)), fifteen)
            codes = v.ior(codes, v.shl(v.iand(v.shr(tops, 2 * quarter), three), 4))
            scale = v.splat(d * np.float32(v.read_i8(scales + 2 * quarter + part)))
            _store(out + 128 * quarter + 64 * part, v.isub(codes, offset), scale)


@device
def _q3_k_unit(at, column, out, table):
    d, scales = _half(at + 108), at + 96
    one, three, four = v.isplat(1), v.isplat(3), v.isplat(4)
    for part in range(2):
        low = v.load_u8(at + 32 + (column >> 2) + 16 * part)
        high = v.load_u8(at + 16 * part)
        for quarter in range(4):
            run = (column >> 4) + 2 * quarter + part
            six = v.read_u8(scales + run % 8) >> (run // 8 * 4) & 15
            six |= (v.read_u8(scales + 8 + run % 4) >> (run // 4 * 2) & 3) << 4
            bit = v.iand(v.shr(high, (column >> 5) + quarter), one)
            codes = v.ior(v.iand(v.shr(low, 2 * quarter), three), v.shl(bit, 2))
            scale = v.splat(d * np.float32(six - 32))
            _store(out + 128 * quarter + 64 * part, v.isub(codes, four), scale)


@device
def _q2_k_unit(at, column, out, table):
    d, dmin, three = _half(at + 80), _half(at + 82), v.isplat(3)
    for part in range(2):
        packed = v.load_u8(at + 16 + (column >> 2) + 16 * part)
        for quarter in range(4):
            pair = v.read_u8(at + (column >> 4) + 2 * quarter + part)
            scale = v.splat(d * np.float32(pair & 15))
            minimum = v.splat(dmin * np.float32(pair >> 4))
            codes = v.iand(v.shr(packed, 2 * quarter), three)
            _store_minus(out + 128 * quarter + 64 * part, codes, scale, minimum)


@device
def _four(out, grid, signs, scale):
    """Write four signed magnitudes of a grid; the signs are the low bits."""
    for i in range(4):
        magnitude = np.float32(v.read_i8(grid + i))
        value = -magnitude if signs >> i & 1 else magnitude
        v.write_f32(out + 4 * i, scale * value)


@device
def _iq3_s_unit(at, column, out, table):
    run = column >> 5
    scale = v.read_u8(at + 106 + (run >> 1)) >> (4 * (run & 1)) & 15
    step = _half(at) * np.float32(1 + 2 * scale)
    high = v.read_u8(at + 66 + run)
    for i in range(8):
        index = v.read_u8(at + 2 + 8 * run + i) | (high >> i & 1) << 8
        signs = v.read_u8(at + 74 + 4 * run + (i >> 1)) >> (4 * (i & 1))
        _four(out + 16 * i, table + 4 * index, signs, step)


@device
def _iq3_xxs_unit(at, column, out, table):
    run = column >> 5
    word = v.read_u16(at + 66 + 4 * run) | v.read_u16(at + 68 + 4 * run) << 16
    step = _half(at) * (np.float32(word >> 28) + np.float32(0.5)) * np.float32(0.5)
    for i in range(8):
        index = v.read_u8(at + 2 + 8 * run + i)
        code = word >> (7 * (i >> 1)) & 127
        signs = v.read_u8(table + _XXS_SIGNS + code) >> (4 * (i & 1))
        _four(out + 16 * i, table + 4 * index, signs, step)


@device
def _power(digit):
    power = 1
    for _ in range(digit):
        power *= 3
    return power


@device
def _tq1_0_unit(at, column, out, table):
    """Decode 16 columns of a block: five digits of 32 bytes, five of 16, four of the last 4.

    A byte is a fraction of 256 in base three, so the next digit is the whole part of three times
    what is left of it.
    """
    d = _half(at + 52)
    if column < 240:
        digit, byte = column >> 5, column & 16
        if column >= 160:
            digit, byte = (column - 160) >> 4, 32
        left = v.iand(v.imul(v.load_u8(at + byte), v.isplat(_power(digit))), v.isplat(255))
        _store(out, v.isub(v.shr(v.imul(left, v.isplat(3)), 8), v.isplat(1)), v.splat(d))
    else:
        for i in range(16):
            left = v.read_u8(at + 48 + (i & 3)) * _power(i >> 2) & 255
            v.write_f32(out + 4 * i, d * np.float32((left * 3 >> 8) - 1))


def _decoder(unit: Any, block: int, nbytes: int, width: int) -> Callable[..., int]:
    """Return a decoder by units of `width` columns."""

    def decoder(weight, expert, row, count, k0, k1, panel):
        w = weight_at(weight)
        for r in range(row, row + count):
            line = w.codes + (expert * w.n + r) * w.stride
            out = panel + (r - row) * PITCH - 4 * k0
            for k in range(k0, k1, width):
                unit(line + k // block * nbytes, k % block, out + 4 * k, w.scales)
        return panel

    return decoder


GGML_DECODERS: dict[str, Callable[..., int]] = {
    "q4_1": _decoder(_q4_1_unit, 32, 20, 32),
    "q5_0": _decoder(_q5_0_unit, 32, 22, 32),
    "q5_1": _decoder(_q5_1_unit, 32, 24, 32),
    "iq4_nl": _decoder(_iq4_nl_unit, 32, 18, 32),
    "iq4_xs": _decoder(_iq4_xs_unit, 256, 136, 32),
    "q4_k": _decoder(_q4_k_unit, 256, 144, 64),
    "q5_k": _decoder(_q5_k_unit, 256, 176, 64),
    "q6_k": _decoder(_q6_k_unit, 256, 210, 128),
    "q3_k": _decoder(_q3_k_unit, 256, 110, 128),
    "q2_k": _decoder(_q2_k_unit, 256, 84, 128),
    "iq3_s": _decoder(_iq3_s_unit, 256, 110, 32),
    "iq3_xxs": _decoder(_iq3_xxs_unit, 256, 98, 32),
    "tq1_0": _decoder(_tq1_0_unit, 256, 54, 16),
}
"""Type -> decoder."""
