"""Panels: int8 activations of a few tokens, in the order in which tiles use them.

The panel of T tokens is three runs, one after the other:

    codes   i8 [units, T, 32]    columns of a unit in the order of the tile's operands, zero-padded;
                                 of wide products int16, columns 0, 2, 1, 3 of each four; for AMX
                                 [twos of units, T, 64]
    starts  i32 [blocks, T]      what a dot product over a block begins with, to take the bias off;
                                 if it is `is_number`, plus `NUMBER`; of weights with minima the
                                 sums of the activations, fp32
    scales  f32 [groups, T]      activation scales, times the weight's own factor

A block is what is summed in int32: the shorter of weight block and activation group. For tiles of a
`BlockLayout` a block is a unit, and instead of starts there are the sums of its first 16 columns
(low half) and of the others (high half), int16; or, `units_per_sum`, two units and their sums.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from cpu_fallback.lanes import language as v
from cpu_fallback.lanes.isa import CURRENT
from cpu_fallback.lanes.jit import device, i64, void
from cpu_fallback.lanes.record import reader
from cpu_fallback.tiles.byte_dots import NUMBER, is_number, is_wide
from cpu_fallback.tiles.layout import BIAS, UNIT, BlockLayout, Layout
from cpu_fallback.tiles.multiply import madd_bytes, madd_shorts
from cpu_fallback.tiles.operands import units_per_sum

TOKENS = 16
BEHIND = 1024 if CURRENT.amx else 128
"""Bytes behind a panel that must be there to be read: kernels may have no code for its width."""

_UNIT = ir.VectorType(v.INT8, UNIT)


class Form(NamedTuple):
    """How panels are filled for a weight."""

    paired: int  # whether even columns of each 8 come before odd ones
    wide: int  # whether codes are stored as int16, even ones of each four before odd ones
    halves: int  # whether the sums of 16 columns take the place of starts, 2: those of 32
    bias: int  # of the codes, -1 if it is taken off by other means
    real: int  # whether starts are fp32
    first: int  # what starts are counted from
    units: int  # per block, 0 for all
    group: int  # columns per activation scale, 0 for all
    factor: float  # the weight's, multiplied into the activation scales


form_at = reader(Form)  # Read the record at an address


def _sum(b: Any, codes: Any) -> Any:
    """Emit the sum of codes, int32."""
    if not CURRENT.avx2:
        wide = b.sext(codes, ir.VectorType(v.INT16, codes.type.count))
        total = v.call(b, f"llvm.vector.reduce.add.v{codes.type.count}i16", v.INT16, wide)
        return b.sext(total, v.INT32)
    ones = ir.Constant(codes.type, [1] * codes.type.count)
    pairs = madd_bytes(b, ones, codes)
    fours = madd_shorts(b, pairs, ir.Constant(pairs.type, [1] * pairs.type.count))
    return v.call(b, f"llvm.vector.reduce.add.v{fours.type.count}i32", v.INT32, fours)


@v.op(i64, i64, i64, i64, i64)
def move_unit(b, source, target, paired, wide):
    """Copy 32 codes as `Form` says of `paired` and `wide`; return their sum."""
    return _move(b, v.emit_load(b, _UNIT, source), target, paired, wide)


@v.op(i64, i64, i64, i64, i64, i64)
def move_tail(b, source, count, target, paired, wide):
    """Copy the first `count` of 32 codes and zeros after them; return their sum."""
    return _move(b, v.emit_load_n(b, _UNIT, source, count), target, paired, wide)


def _move(b: Any, codes: Any, target: Any, paired: Any, wide: Any) -> Any:
    order = [8 * g + 2 * i + odd for g in range(UNIT // 8) for odd in (0, 1) for i in range(4)]
    apart = v.pick(b, codes, order)
    with b.if_else(b.trunc(wide, v.INT1)) as (then, otherwise):
        with then:
            order = [4 * g + i for g in range(UNIT // 4) for i in (0, 2, 1, 3)]
            shorts = b.sext(v.pick(b, codes, order), ir.VectorType(v.INT16, UNIT))
            v.emit_store(b, shorts, target)
        with otherwise:
            v.emit_store(b, b.select(b.trunc(paired, v.INT1), apart, codes), target)
    return b.sext(_sum(b, codes), v.INT64)


@v.op(i64, i64, i64)
def move_halves(b, source, target):
    """Copy 32 codes; return the sums of their halves as two int16."""
    codes = v.emit_load(b, _UNIT, source)
    v.emit_store(b, codes, target)
    low, high = (_sum(b, v.pick(b, codes, range(at, at + 16))) for at in (0, 16))
    low = b.and_(low, ir.Constant(v.INT32, 0xFFFF))
    return b.zext(b.or_(low, b.shl(high, ir.Constant(v.INT32, 16))), v.INT64)


@v.op(void, i64)
def zero_unit(b, target):
    """Write 32 zeros."""
    v.emit_store(b, ir.Constant(_UNIT, None), target)


def form_of(layout: Layout | BlockLayout, group: int, factor: float) -> Form:
    """Return the form of the panels of a product with tiles of a layout.

    `group`: columns per activation scale, 0 for one per token; `factor`: multiplies these.
    """
    if isinstance(layout, BlockLayout):
        units = units_per_sum(layout, group)
        return Form(0, 0, units, -1, 0, 0, units, group, float(factor))
    periods = [p // UNIT for p in (layout.block, group) if p]
    bias = {"": BIAS[layout.code], "zeros": 1, "minima": -1}[layout.offset]
    paired = int(layout.code in ("int4", "fp4"))
    wide = int(is_wide(layout.code))
    first = 0 if layout.offset or not is_number(layout, group) else NUMBER
    real = int(layout.offset == "minima")
    units = min(periods, default=0)
    return Form(paired, wide, 0, bias, real, first, units, group, float(factor))


def panel_bytes(layout: Layout | BlockLayout, group: int, k: int) -> int:
    """Return the bytes of a panel per token."""
    units = -(-k // UNIT)
    units += units % 2 * CURRENT.amx
    many = isinstance(layout, BlockLayout)
    block = units_per_sum(layout, group) * UNIT if many else layout.block
    periods = [p for p in (block, group) if p]
    blocks = -(-k // min(periods)) if periods else 1
    groups = -(-k // group) if group else 1
    wide = isinstance(layout, Layout) and is_wide(layout.code)
    return (UNIT << wide) * units + 4 * (blocks + groups)


@device
def width(tokens):
    """Return how many tokens the panel has that holds this many: 1, 2, 3, 4, 6, 8 or 16."""
    if tokens > 8:
        return 16
    if tokens > 4:
        return (tokens + 1) & -2
    return tokens


@device
def fill_token(form, q, scale, k, panel, t, tokens, twos):
    """Write token t of a panel of `tokens`: codes i8 [K] at `q`, scales fp32 at `scale`.

    `twos`, 0 or 1: whether two units of a token lie side by side.
    """
    f = form_at(form)
    paired, wide, halves, bias = f.paired, f.wide, f.halves, f.bias
    real, first, per_block, group = f.real, f.first, f.units, f.group
    nbytes = 32 << wide
    units = (k + 31) >> 5
    if per_block == 0:
        per_block = units
    blocks = (units + per_block - 1) // per_block
    code = panel + (nbytes << twos) * t
    ahead = (nbytes << twos) * tokens - twos * nbytes  # from the second unit of two to the next
    start = panel + nbytes * tokens * (units + (units & twos)) + 4 * t
    scales = start + 4 * tokens * blocks
    total = 0
    left = per_block
    for u in range(units):
        if halves == 1:
            total = move_halves(q + 32 * u, code)
        elif halves:
            total = (total & 0xFFFF) | move_unit(q + 32 * u, code, 0, 0) << (16 * (u & 1))
        elif 32 * u + 32 <= k:
            total += move_unit(q + 32 * u, code, paired, wide)
        else:
            total += move_tail(q + 32 * u, k - 32 * u, code, paired, wide)
        if twos > u & 1:
            code += nbytes
        else:
            code += ahead
        left -= 1
        if left == 0 or u == units - 1:
            if real:
                v.write_f32(start, np.float32(total))
            else:
                v.write_i32(start, first - bias * total)
            start += 4 * tokens
            total = 0
            left = per_block
    if units & twos:
        zero_unit(code)
    groups = 1
    if group:
        groups = (k + group - 1) // group
    for g in range(groups):
        v.write_f32(scales + 4 * tokens * g, v.read_f32(scale + 4 * g) * f.factor)
