"""Weights and activations as operands of `mma`, 16 rows by 8 tokens: loaded, decoded, multiplied.

A warp takes a chunk of columns. For it each lane loads one vector, number `lane % 4` of the chunk,
of up to 16 bytes of

    weights      of row `lane / 4`, and of the rows 8, 16, ... further down,

and the same columns of

    activations  of token `lane / 4`, and of the tokens 8, 16, ... further on.

`mma` wants these rows and tokens in these lanes, and which columns it takes together does not
matter if both operands agree (`operand`). So nothing passes through shared memory or another lane.
"""

import triton
import triton.language as tl

from clocher_kernels.cuda.codes import four_words, joined, pairs, to_scale
from clocher_kernels.cuda.dots import element
from clocher_kernels.cuda.scalar import paired
from clocher_kernels.cuda.words import bf16_pairs, pair_of, word_pairs, zero_pairs

# A word of ternary codes 0..2 -> four words of digits, elements 4g .. 4g + 3 in word g. No byte
# borrows from the next: 0x80 | code is at least 0x80.
_TERNARY = tl.constexpr("""{
.reg .b32 c;
lop3.b32 c, $4, 0x03030303, 0x80808080, 0xea;
sub.u32 c, c, 0x01010101;
xor.b32 $0, c, 0x80808080;
shr.u32 c, $4, 2;
lop3.b32 c, c, 0x03030303, 0x80808080, 0xea;
sub.u32 c, c, 0x01010101;
xor.b32 $1, c, 0x80808080;
shr.u32 c, $4, 4;
lop3.b32 c, c, 0x03030303, 0x80808080, 0xea;
sub.u32 c, c, 0x01010101;
xor.b32 $2, c, 0x80808080;
shr.u32 c, $4, 6;
lop3.b32 c, c, 0x03030303, 0x80808080, 0xea;
sub.u32 c, c, 0x01010101;
xor.b32 $3, c, 0x80808080;
}""")


@triton.jit
def _joined(parts, COUNT: tl.constexpr):
    """Join COUNT (2^n) tensors [A, B] to [A, B, COUNT], in order."""
    return joined(parts, COUNT).reshape(parts[0].shape[0], parts[0].shape[1], COUNT)


@triton.jit
def decoded(
    word, zero, WEIGHTS: tl.constexpr, CODE: tl.constexpr, OPERAND: tl.constexpr, ASM: tl.constexpr
):
    """Decode words [L, E] to weights [L, WEIGHTS E], not scaled."""
    HALVES: tl.constexpr = ASM and tl.float16 == OPERAND
    v = ()
    if ASM and (CODE == "bf16" or CODE == "f16"):
        v = pair_of(word, OPERAND)
    elif (HALVES and CODE != "ternary" and CODE != "e5m2") or (ASM and CODE == "int4"):
        if tl.bfloat16 == OPERAND:
            parts = bf16_pairs(word, zero, tl.full((1, 1), 1.0, OPERAND))
        elif CODE == "int4" or CODE == "mxfp4":
            low, high = zero_pairs(zero)
            parts = word_pairs(word, word, low, high, CODE)
        else:
            parts = pairs(word, CODE, ASM)
        for p in tl.static_range(WEIGHTS // 2):
            even, odd = pair_of(parts[p], OPERAND)
            v = v + (even, odd)
    elif ASM and CODE == "ternary":
        four = four_words(_TERNARY, (word,))
        for j in tl.static_range(16):
            v = v + ((four[j // 4] >> j % 4 * 8).to(tl.int8).to(OPERAND),)
    else:
        for j in tl.static_range(WEIGHTS):
            v = v + (element((word,), j, zero, CODE).to(OPERAND),)
    return _joined(v, WEIGHTS).reshape(word.shape[0], word.shape[1] * WEIGHTS)


@triton.jit
def operand(parts, COUNT: tl.constexpr, WARPS: tl.constexpr, NEAR: tl.constexpr):
    """Return COUNT tensors [L, OWN] as [WARPS, 8 COUNT, 4 OWN], in `mma`'s order of columns.

    NEAR columns of a lane come in a row, then those of the next lane.
    """
    OWN: tl.constexpr = parts[0].shape[1]
    t = _joined(parts, COUNT)
    # Of kWidth = NEAR columns and the next ones `mma` takes a pair each: make these neighbours, as
    # loads have put them, so that the same columns meet in an `mma` whatever NEAR is.
    PAIR: tl.constexpr = 32 // t.dtype.primitive_bitwidth
    PAIRS: tl.constexpr = NEAR // PAIR
    if PAIRS > 1 and OWN % (2 * NEAR) == 0:
        t = t.reshape(32 * WARPS, OWN // (2 * NEAR), PAIRS, 2, PAIR, COUNT)
        t = t.permute(0, 1, 3, 2, 4, 5)
    t = t.reshape(WARPS, 8, 4, OWN // NEAR, NEAR, COUNT)
    return t.permute(0, 5, 1, 3, 2, 4).reshape(WARPS, 8 * COUNT, 4 * OWN)


@triton.jit
def _scaled(part, scale, COUNT: tl.constexpr):
    """Multiply sums [WARPS, 8 COUNT, BM] by the scales that lanes loaded, COUNT times [L, 1]."""
    WARPS: tl.constexpr = part.shape[0]
    BM: tl.constexpr = part.shape[2]
    s = _joined(scale, COUNT).reshape(WARPS, 8, 4, COUNT).permute(0, 3, 1, 2)
    s = s.reshape(WARPS, 8 * COUNT, 1, 4, 1)
    s = tl.broadcast_to(s, WARPS, 8 * COUNT, BM // 8, 4, 2)
    return part * s.reshape(WARPS, 8 * COUNT, BM)


@triton.jit
def _row(n0, lane, C: tl.constexpr, g: tl.constexpr):
    """Return row g of each lane. Rows beyond the last one repeat it and are not stored."""
    if C.N % C.BN == 0:
        return paired(n0 + lane // 4 % 8, C.HALF) + (4 * g if C.HALF > 0 else 8 * g)
    else:
        return paired(tl.minimum(n0 + lane // 4 % 8 + 8 * g, C.N - 1), C.HALF)


@triton.jit
def _eight(n0, lane, row, C: tl.constexpr, g: tl.constexpr):
    """Return the brick row of each lane's row g, and which of the eight it is."""
    if C.N % C.BN == 0 and C.HALF == 0:
        return n0 // 8 + g, lane // 4 % 8
    else:
        return row // 8, (row % 8).to(tl.int32)


@triton.jit
def fixed_zeros(zeros, n0, C: tl.constexpr):
    """Return the zero points of lanes' rows, BN / 8 times; 8 if there are none, or groups have."""
    lane = tl.arange(0, 32 * C.WARPS)
    fixed = ()
    for g in tl.static_range(C.BN // 8):
        if zeros is not None and C.SPAN == 0:
            fixed = fixed + (tl.load(zeros + _row(n0, lane, C, g))[:, None],)
        else:
            fixed = fixed + (tl.full((1, 1), 8, tl.int32),)
    return fixed


@triton.jit
def load_weights(w, scales, zeros, n0, turn, end, C: tl.constexpr):
    """Load each lane's weights [L, E], scales and zero points [L, 1], for BN / 8 rows each."""
    lane = tl.arange(0, 32 * C.WARPS)
    chunk = turn * C.WARPS + lane // 32
    # Beyond the last vector, where x is 0, it is repeated: loads need no mask.
    if C.BRICK > 0:
        chunk = tl.minimum(chunk, (end + (4 * C.OWN - 1)) // (4 * C.OWN) - 1)
        at = ((chunk * 32 + lane % 4) * C.E)[:, None] + tl.arange(0, C.E)[None, :]
    else:
        vector = tl.minimum(chunk * 4 + lane % 4, (end + (C.OWN - 1)) // C.OWN - 1)
        at = (vector * C.E)[:, None] + tl.arange(0, C.E)[None, :]
    GROUPS: tl.constexpr = (C.K + C.SPAN - 1) // C.SPAN if C.SPAN > 0 else 1
    held, scale, zero = (), (), ()
    for g in tl.static_range(C.BN // 8):
        row = _row(n0.to(tl.int64), lane, C, g)  # one address for all
        if C.BRICK > 0:
            eight, own = _eight(n0.to(tl.int64), lane, row, C, g)
            to = w + (eight * (C.STRIDE * 8) + own * (4 * C.E))[:, None] + at
        else:
            to = w + row[:, None] * C.STRIDE + at
        held = held + (tl.load(to, eviction_policy="evict_first"),)
        if C.SPAN > 0:
            group = tl.minimum(chunk * 4 * C.OWN // C.SPAN, GROUPS - 1)
            if C.BRICK > 0:
                group = (eight * GROUPS + group) * 8 + own
            else:
                group = row // C.SCALE_ROWS * GROUPS + group
            scale = scale + (tl.load(scales + group)[:, None],)
            if zeros is not None:
                zero = zero + (tl.load(zeros + group)[:, None],)
    return held, scale, zero


@triton.jit
def load_tokens(x, turn, end, C: tl.constexpr):
    """Load each lane's activations [L, OWN] of BM / 8 tokens: 0 from `end` on."""
    XE: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    STEP: tl.constexpr = 4 * C.OWN * C.WARPS
    # Without a turn beyond the last column. Tokens beyond the last one repeat it.
    WHOLE: tl.constexpr = C.K % (STEP * C.PARTS * C.TURNS) == 0
    lane = tl.arange(0, 32 * C.WARPS)
    k = ((turn * C.WARPS + lane // 32) * 4 + lane % 4) * C.OWN
    out = ()
    for t in tl.static_range(C.BM // 8):
        m = tl.minimum(lane // 4 % 8 + 8 * t, C.M - 1)
        parts = ()
        for i in tl.static_range(C.OWN // XE):
            column = (k + i * XE)[:, None] + tl.arange(0, XE)[None, :]
            to = x + (m * C.K)[:, None] + column
            if WHOLE:
                parts = parts + (tl.load(to),)
            else:
                parts = parts + (tl.load(to, column < end, other=0),)
        own = _joined(parts, C.OWN // XE).permute(0, 2, 1)
        out = out + (own.reshape(32 * C.WARPS, C.OWN),)
    return out


@triton.jit
def multiply(total, loaded, xs, fixed, C: tl.constexpr):
    """Add a turn's products to the warps' sums [WARPS, BN, BM]."""
    held, scale, zero = loaded
    rows = ()
    for g in tl.static_range(C.BN // 8):
        own = (zero[g] if len(zero) > 0 else fixed[g]).to(tl.int32)
        rows = rows + (decoded(held[g], own, C.PER, C.CODE, C.OPERAND, C.ASM),)
    wt = operand(rows, C.BN // 8, C.WARPS, C.NEAR)
    part = tl.zeros_like(total) if C.SPAN > 0 else total
    left = xs
    for _term in tl.static_range(C.TERMS):
        # bf16 times what is left of x, three times at most, is exact to fp32's last bits.
        now, rest = (), ()
        for t in tl.static_range(C.BM // 8):
            if C.TERMS > 1:
                wide = left[t].to(tl.float32)
                upper = (wide.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
                now = now + (upper.to(C.OPERAND),)
                rest = rest + (wide - upper,)
            else:
                now = now + (left[t].to(C.OPERAND),)
        left = rest
        xt = operand(now, C.BM // 8, C.WARPS, C.NEAR).permute(0, 2, 1)
        part = tl.dot(wt, xt, part, input_precision="ieee", out_dtype=total.dtype)
    if C.SPAN > 0:
        factor = ()
        for g in tl.static_range(C.BN // 8):
            factor = factor + (to_scale(scale[g], C.CODE),)
        part = total + _scaled(part, factor, C.BN // 8)
    return part
