"""Trellises to fp32 panels: a decoder of each number of bits, see `product` and `Tcq`.

The arithmetic is that of `Tcq.decode`: row * scale, times the level.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from clocher_kernels.formats.tcq import GROUP, STRIP, UNIT, levels
from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.jit import Kernel, i64
from cpu_fallback.ops.product import PITCH, weight_at

_LINE = 4 * STRIP
_MASK = ir.VectorType(v.INT1, v.LANES)


def _sixteen(b: Any, bits: int, first: int, unit: Any, row: Any) -> Any:
    """Emit the levels of columns first .. first + 15 of a row of a unit at an address, fp32."""
    places = [(column % 4 * 8, (first + column) // 4) for column in range(v.LANES)]

    def numbers(line: int, width: int) -> Any:
        """Emit a number of one or two bits of each column."""
        parts = [_dword(b, unit, row, line + i) for i in range(width)]
        if width == 2:
            odd = v.constant(_MASK, [j % 2 for _, j in places])
            parts = [b.select(odd, parts[1], parts[0])]
        shift = v.constant(v.I32, [at + j // width * width for at, j in places])
        return b.and_(b.lshr(parts[0], shift), v.constant(v.I32, (1 << width) - 1))

    def bit(lag: int) -> Any:
        """Emit the bit of each column's row that is `lag` before."""
        other = b.and_(b.sub(row, v.number(lag)), v.number(STRIP - 1))
        wraps = b.icmp_signed("<", row, v.number(lag))
        word = _dword(b, unit, other, 0)
        word = b.select(wraps, b.shl(word, v.constant(v.I32, 1)), word)
        shift = v.constant(v.I32, [at + j for at, j in places])
        return b.and_(b.lshr(word, shift), v.constant(v.I32, 1))

    z1 = b.xor(bit(0), b.xor(bit(1), bit(3)))
    index = b.or_(bit(2), b.shl(z1, v.constant(v.I32, 1)))
    low = numbers(1, min(bits - 1, 2))
    index = b.or_(index, b.shl(low, v.constant(v.I32, 2)))
    table = [float(level) for level in levels(bits)]
    table += [0.0] * (-len(table) % v.LANES)
    found = [
        v.emit_lookup(b, v.constant(v.F32, table[at : at + v.LANES]), index)
        for at in range(0, len(table), v.LANES)
    ]
    if bits > 3:
        high = numbers(3, bits - 3)
        for i, part in enumerate(found[1:], 1):
            here = b.icmp_unsigned(">=", high, v.constant(v.I32, i))
            found[0] = b.select(here, part, found[0])
    return found[0]


def _dword(b: Any, unit: Any, row: Any, line: int) -> Any:
    """Emit the dword of a row in a line of a unit in every lane."""
    at = v.behind(b, v.emit_at(b, unit, row, 4), _LINE * line)
    return v.emit_everywhere(b, v.I32, at)


@cache
def decoder_of(bits: int) -> Kernel:
    """Return the decoder of weights of so many bits, by units of 32 columns."""
    size = bits * _LINE

    def half(first: int) -> Any:
        @v.op(v.F32, i64, i64)
        def columns(b, unit, row):
            return _sixteen(b, bits, first, unit, row)

        return columns

    low, high = half(0), half(v.LANES)

    def decoder(weight, expert, row, count, k0, k1, panel):
        w = weight_at(weight)
        strips = (w.n + STRIP - 1) // STRIP
        for r in range(row, row + count):
            strip = w.codes + (expert * strips + r // STRIP) * w.stride
            index = expert * w.n + r
            out = panel + (r - row) * PITCH - 4 * k0
            own = v.from_bf16(v.isplat(v.read_u16(w.zeros + 2 * index)))
            for k in range(k0, k1, UNIT):
                scale = v.read_u8(w.scales + index * w.wide + k // GROUP)
                step = v.mul(own, v.splat(np.float32(scale)))
                unit = strip + k // UNIT * size
                v.store_f32(out + 4 * k, v.mul(step, low(unit, r % STRIP)))
                v.store_f32(out + 4 * k + 64, v.mul(step, high(unit, r % STRIP)))
        return panel

    return Kernel(decoder, i64, f"decode.tcq{bits}")
