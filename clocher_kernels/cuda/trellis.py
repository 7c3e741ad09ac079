"""Trellises (`formats.tcq`) in registers: words of `prepack` to levels over 64, and their products.

A word of eight nibbles has the lower four bits of as many indices: of the columns 4j .. 4j + 3 and
4j + 16 .. 4j + 19 of a unit of 32, by turns. A second one has what is above them. A level plus 64
is a byte of a table, which becomes the last bits of an fp16 number between 1024 and 2048.
"""

import numpy as np
import triton
import triton.language as tl

from clocher_kernels.cuda.codes import four_words, joined
from clocher_kernels.cuda.dots import add_halves, fma_four, load8, load_each, load_pairs, unpack
from clocher_kernels.cuda.scalar import start
from clocher_kernels.cuda.words import pair_of
from clocher_kernels.formats.tcq import LEVELS, levels

LEVEL_UNIT = tl.constexpr(64.0)
"""What decoded levels must be multiplied by."""

_TABLES = {bits: (levels(bits) + 64).astype(np.uint8) for bits in LEVELS}
_BYTES = tl.constexpr(tuple(tuple(map(int, table.view("<i8"))) for table in _TABLES.values()))
_ONES, _TWOS = tl.constexpr(0x11111111), tl.constexpr(0x33333333)


def _lookup(bits: int) -> tl.constexpr:
    """Return assembly that looks up a word of indices $4, with what is above their four bits in $5.

    It makes four pairs of levels over 64: those of the columns 0 and 1, 2 and 3, 16 and 17, 18 and
    19. A nibble above 7 finds zero in a table of 8 bytes: the sum of two is a look-up in 16.
    """
    table = [f"{word:#x}" for word in _TABLES[bits].view("<u4")]
    lines = [".reg .b32 s, f, h, m, v0, v1, v2, v3, w, up, one, less"]
    lines += ["mov.b32 up, 0x64646464", "mov.b32 one, 0x24002400", "mov.b32 less, 0xcc40cc40"]
    for half, outputs in enumerate((("$0", "$2"), ("$1", "$3"))):
        lines += [f"shr.u32 s, $4, {16 * half}", "xor.b32 f, s, 0x8888"]
        for i in range(0, len(table), 4):
            lines.append(f"prmt.b32 v{i // 4}, {table[i]}, {table[i + 1]}, s")
            if i + 2 < len(table):
                lines.append(f"prmt.b32 w, {table[i + 2]}, {table[i + 3]}, f")
                lines.append(f"lop3.b32 v{i // 4}, v{i // 4}, w, w, 0xfc")
        lines += [f"shr.u32 h, $5, {16 * half}"] if bits > 3 else []
        for bit in range(bits - 3):
            # Of each byte: the second table if the bit is set.
            lines.append(f"prmt.b32 m, {('0xff00ff00', '0xffff0000')[bit]}, 0, h")
            for i in range(0, 1 << bits - 3, 2 << bit):
                lines.append(f"lop3.b32 v{i}, m, v{i + (1 << bit)}, v{i}, 0xca")
        for output, bytes_of in zip(outputs, ("0x4240", "0x4341"), strict=True):
            lines.append(f"prmt.b32 w, v0, up, {bytes_of}")
            lines.append(f"fma.rn.f16x2 {output}, w, one, less")
    return tl.constexpr("{\n" + ";\n".join(lines) + ";\n}")


_LOOKUP2, _LOOKUP3, _LOOKUP4, _LOOKUP5 = map(_lookup, LEVELS)


@triton.jit
def _pairs(index, above, BITS: tl.constexpr):
    """Return four pairs of levels, see `_lookup`."""
    ASSEMBLY: tl.constexpr = (_LOOKUP2, _LOOKUP3, _LOOKUP4, _LOOKUP5)[BITS - 2]
    return four_words(ASSEMBLY, (index, above))


@triton.jit
def _level(index, BITS: tl.constexpr):
    """Return the levels of indices over 64, fp32."""
    word = tl.zeros_like(index).to(tl.int64)
    for i in tl.static_range((2 << BITS) // 8):
        word = tl.where(index // 8 == i, _BYTES[BITS - 2][i], word)
    return ((word >> (index % 8 * 8)) & 255).to(tl.float32) * 0.015625 - 1.0


@triton.jit
def _eight(index, above, BITS: tl.constexpr, HALVES: tl.constexpr, ASM: tl.constexpr):
    """Return the eight levels of words of indices, in order, fp32; fp16 if HALVES and ASM."""
    v = ()
    if ASM:
        pairs = _pairs(index, above, BITS)
        for p in tl.static_range(4):
            low, high = pair_of(pairs[p], tl.float16) if HALVES else unpack(pairs[p])
            v = v + (low, high)
    else:
        for j in tl.static_range(8):
            at: tl.constexpr = j % 4 * 8 + j // 4 * 4
            number = (index >> at) & 15
            if BITS > 3:
                number += ((above >> at) & 3) << 4
            v = v + (_level(number, BITS),)
    return v


@triton.jit
def _indices(words, J: tl.constexpr, BITS: tl.constexpr):
    """Return words of indices J and what is above; `words` are z0, z1 and the lines of m."""
    index = ((words[0] >> J) & _ONES) | (((words[1] >> J) & _ONES) << 1)
    if BITS == 2:
        index |= ((words[2] >> J) & _ONES) << 2
    else:
        index |= ((words[2 + J % 2] >> J // 2 * 2) & _TWOS) << 2
    above = index
    if BITS == 4:
        above = (words[4] >> J) & _ONES
    elif BITS == 5:
        above = (words[4 + J % 2] >> J // 2 * 2) & _TWOS
    return index, above


@triton.jit
def _begin(w, row, LINE: tl.constexpr, STRIDE: tl.constexpr):
    """Return where a row's words begin: the bits of the row, of the three before, and the lines.

    Before the first rows of a strip of 16 come its last ones.
    """
    if LINE < 4:
        return w + ((row & -16) | ((row - LINE) & 15)) * STRIDE
    else:
        return w + row * STRIDE + 2 * (LINE - 3)


@triton.jit
def _chosen(held, row):
    """Return z0, z1 and the lines of m of the words of `_begin`."""
    own = row & 15  # of the strip; rows before it are those of the column before
    z0 = held[2] << (own < 2).to(tl.int32)
    z1 = held[0] ^ (held[1] << (own < 1).to(tl.int32)) ^ (held[3] << (own < 3).to(tl.int32))
    words = (z0, z1)
    for i in tl.static_range(4, len(held)):
        words = words + (held[i],)
    return words


@triton.jit
def _load(w, row, v, C: tl.constexpr):
    """Load the words of vectors v of rows, [L, 1, R, 2] each; the last one repeats."""
    at = tl.minimum(v, C.K // 64 - 1)[:, :, :, None] * (2 * C.BITS)
    at += tl.arange(0, 2)[None, None, None, :]
    held = ()
    for line in tl.static_range(C.BITS + 3):
        to = _begin(w, row, line, C.STRIDE)[:, :, :, None] + at
        to = tl.max_contiguous(to, (2, 1, 1, 2))
        held = held + (tl.load(to, eviction_policy="evict_first"),)
    return held


@triton.jit
def trellis_rows(
    x, tokens, row, w, scales, C: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr
):
    """Multiply rows of trellises by tokens, without the numbers of rows: see `stream_rows`."""
    V: tl.constexpr = C.K // 64
    lane = (tl.arange(0, row.shape[0]) % C.BV)[:, None, None]
    total = tl.zeros((row.shape[0], tokens.shape[1], row.shape[2]), tl.float32)
    ahead = _load(w, row, lane, C)
    start(PDL, EARLY)
    for first in range(0, V, C.BV):
        v = first + lane
        held = ahead
        if V > C.BV:
            ahead = _load(w, row, v + C.BV, C)
        scale = load_each(scales + row * V + v, v < V).to(tl.float32)
        words = _chosen(held, row[:, :, :, None])
        total += _vector_dot(x, tokens, v * 64, words, C) * scale
    return total * LEVEL_UNIT


@triton.jit
def _vector_dot(x, tokens, k, words, C: tl.constexpr):
    """Multiply vectors of 64 columns from k on by each token's activations: fp32 [L, BM, R]."""
    units = ()
    for i in tl.static_range(C.BITS + 1):
        units = units + tl.split(words[i])
    total = tl.zeros((1, 1, 1), tl.float32)
    for u in tl.static_range(2):
        own = ()
        for i in tl.static_range(C.BITS + 1):
            own = own + (units[2 * i + u],)
        for i in tl.static_range(2):
            at = k + (32 * u + 8 * i)
            if C.PAIRS != "":
                xs = load_pairs(x, at, tokens, C.K) + load_pairs(x, at + 16, tokens, C.K)
                sums = tl.zeros((1, 1, 1), tl.int32)
                for j in tl.static_range(2):
                    index, above = _indices(own, 2 * i + j, C.BITS)
                    four = (xs[2 * j], xs[2 * j + 1], xs[4 + 2 * j], xs[5 + 2 * j])
                    sums = fma_four(_pairs(index, above, C.BITS), four, sums)
                total += add_halves(sums)
            else:
                xs = load8(x, at, tokens, C.K) + load8(x, at + 16, tokens, C.K)
                for j in tl.static_range(2):
                    index, above = _indices(own, 2 * i + j, C.BITS)
                    values = _eight(index, above, C.BITS, False, C.ASM)
                    for e in tl.static_range(8):
                        total += xs[e // 4 * 8 + j * 4 + e % 4].to(tl.float32) * values[e]
    return total


@triton.jit
def trellis_tile(w, scales, row, k0, C: tl.constexpr):
    """Decode BK columns of rows [BN] from k0 on: [BN, BK], with the scales of groups."""
    UNITS: tl.constexpr = C.BK // 32
    row = row.to(tl.int64)[:, None]
    unit = (k0 // 32 + tl.arange(0, UNITS))[None, :]
    at = unit // 2 * (2 * C.BITS) + unit % 2
    held = ()
    for line in tl.static_range(C.BITS + 3):
        held = held + (tl.load(_begin(w, row, line, C.STRIDE) + at),)
    words = _chosen(held, row)
    lower, upper = (), ()
    for j in tl.static_range(4):
        index, above = _indices(words, j, C.BITS)
        v = _eight(index, above, C.BITS, True, C.ASM)
        lower, upper = lower + (v[0], v[1], v[2], v[3]), upper + (v[4], v[5], v[6], v[7])
    values = joined(lower + upper, 32).reshape(row.shape[0], UNITS, 32).to(C.OPERAND)
    scale = tl.load(scales + row * (C.K // 64) + unit // 2).to(tl.float32).to(C.OPERAND)
    return (values * scale[:, :, None]).reshape(row.shape[0], C.BK)


@triton.jit
def trellis_at(w, scales, row, column, inside, C: tl.constexpr):
    """Return single weights of a row without its number, times `LEVEL_UNIT` below, fp32."""
    unit, byte, j = column // 32, column % 4 * 8, column % 32 // 4
    at = unit // 2 * (2 * C.BITS) + unit % 2
    bits = ()
    for lag in tl.static_range(4):
        word = tl.load(_begin(w, row, lag, C.STRIDE) + at, inside, other=0)
        bits = bits + (word,)
    z = _chosen(bits, row)
    own = w + row * C.STRIDE + at
    index = ((z[0] >> (byte + j)) & 1) | (((z[1] >> (byte + j)) & 1) << 1)
    for line in tl.static_range(1, C.BITS, 2):
        if line == C.BITS - 1:
            index |= ((tl.load(own + 2 * line, inside, other=0) >> (byte + j)) & 1) << (line + 1)
        else:
            word = tl.load(own + 2 * (line + j % 2), inside, other=0)
            index |= ((word >> (byte + j // 2 * 2)) & 3) << (line + 1)
    scale = tl.load(scales + row * (C.K // 64) + column // 64, inside, other=0)
    return _level(index, C.BITS) * scale.to(tl.float32)
