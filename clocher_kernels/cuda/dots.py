"""Dot products of 16-byte vectors of stored weights with activations, in registers.

A lane reads one vector of a row at a time: four 32-bit words, 4 to 64 weights. Tiles are [L, BM,
R]: L lanes, BM tokens, R rows of W per lane; weights have BM = 1, activations R = 1.

Threads must get lanes, and registers the rest. Triton distributes the dimension with the most
contiguous elements first, then the others (from the first on before 3.9, from the last since).
Loads therefore claim two contiguous elements along lanes (`max_contiguous`): untrue but harmless,
as only the first dimension, with four or more, is vectorised.

4-bit weights times fp16 activations use packed arithmetic: a word becomes four pairs of exact fp16
values, summed in fp16 over 16 weights and in fp32 beyond. Eight products must stay below 65504, so
activations above about 1000 need fp32 or bf16; mxfp4 experts take any. All else uses fp32.
"""

import triton
import triton.language as tl

from clocher_kernels.cuda.codes import int4_code, mxfp4_value, one_word, ternary_digit
from clocher_kernels.cuda.words import (
    above_of,
    scale_of,
    scale_places,
    times_pair,
    word_code,
    word_pairs,
    zero_pairs,
)

_FMA_PAIRS = tl.constexpr("""{
.reg .b32 t;
fma.rn.f16x2 t, $1, $5, $9;
fma.rn.f16x2 t, $2, $6, t;
fma.rn.f16x2 t, $3, $7, t;
fma.rn.f16x2 $0, $4, $8, t;
}""")

_ADD_HALVES = tl.constexpr("""{
.reg .f16 l, h;
.reg .f32 a, b;
mov.b32 {l, h}, $1;
cvt.f32.f16 a, l;
cvt.f32.f16 b, h;
add.f32 $0, a, b;
}""")

_UNPACK = tl.constexpr("""{
.reg .f16 l, h;
mov.b32 {l, h}, $2;
cvt.f32.f16 $0, l;
cvt.f32.f16 $1, h;
}""")


@triton.jit
def split4(words):
    """Split [L, BM, R, 4] along its last dimension."""
    a, b = tl.split(words.reshape(words.shape[0], words.shape[1], words.shape[2], 2, 2))
    w0, w2 = tl.split(a)
    w1, w3 = tl.split(b)
    return w0, w1, w2, w3


@triton.jit
def _load(x, k, inside, K: tl.constexpr, COUNT: tl.constexpr):
    """Load x[k .. k + COUNT - 1], 0 beyond K: [L, BM, 1, COUNT] for k [L, 1, 1]."""
    at = k[:, :, :, None] + tl.arange(0, COUNT)[None, None, None, :]
    to = tl.max_contiguous(x[:, :, :, None] + at, (2, 1, 1, COUNT))
    return tl.load(to, (at < K) & inside[:, :, :, None], other=0.0)


@triton.jit
def load8(x, k, inside, K: tl.constexpr):
    """Load x[k .. k + 7] as 8 tiles [L, BM, 1], 16 bytes at a time."""
    if x.dtype.element_ty == tl.float32:
        return split4(_load(x, k, inside, K, 4)) + split4(_load(x, k + 4, inside, K, 4))
    else:
        t = _load(x, k, inside, K, 8)
        even, odd = tl.split(t.reshape(t.shape[0], t.shape[1], t.shape[2], 4, 2))
        x0, x2, x4, x6 = split4(even)
        x1, x3, x5, x7 = split4(odd)
        return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _pack(low, high):
    return tl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], tl.int32, True, 1
    )


@triton.jit
def unpack(pair):
    """Return the halves of pairs, fp32."""
    return tl.inline_asm_elementwise(_UNPACK, "=f,=f,r", [pair], (tl.float32, tl.float32), True, 1)


@triton.jit
def load_pairs(x, k, inside, K: tl.constexpr):
    """Load x[k .. k + 7] in fp16 as four pairs."""
    xs = load8(x, k, inside, K)
    return _pack(xs[0], xs[1]), _pack(xs[2], xs[3]), _pack(xs[4], xs[5]), _pack(xs[6], xs[7])


@triton.jit
def _fma_word(xs, words, C: tl.constexpr, zero, sums, FORMAT: tl.constexpr, HALF: tl.constexpr):
    """Add word C times four pairs of activations, as small as `word_pairs`; mxfp4, too, or HALF."""
    low, high = zero_pairs(zero)
    p0, p1, p2, p3 = word_pairs(words[C], above_of(words, C, FORMAT), low, high, FORMAT)
    if FORMAT == "mxfp4" and HALF:
        up = tl.full((1, 1, 1), 0x70007000, tl.int32)
        p0, p1 = times_pair(p0, up), times_pair(p1, up)
        p2, p3 = times_pair(p2, up), times_pair(p3, up)
    return fma_four((p0, p1, p2, p3), xs, sums)


@triton.jit
def fma_four(ps, xs, sums):
    """Add the products of four pairs of weights and four of activations to a pair of sums."""
    return one_word(_FMA_PAIRS, ps + xs + (sums,))


@triton.jit
def _mxfp4_block(x, tokens, k, words, zero, K: tl.constexpr):
    """Multiply blocks of 32 unscaled weights by fp16 activations, in pairs.

    Weights are 2^14 times too small. If all activations of a block are below 2 they are scaled up,
    exactly; else the block's sum is, with an error small beside the largest activation. No fp16
    activation overflows or is lost beside larger ones.
    """
    xs = load_pairs(x, k, tokens, K)
    for c in tl.static_range(1, 4):
        xs = xs + load_pairs(x, k + 8 * c, tokens, K)
    bits = xs[0]
    for i in tl.static_range(1, 16):
        bits |= xs[i]
    # The upper bit of an exponent.
    large = (bits & 0x40004000) != 0
    up = tl.where(large, 0x3C003C00, 0x74007400)
    chains = ()
    sums = tl.zeros((1, 1, 1), tl.int32)
    for c in tl.static_range(0, 4):
        four = ()
        for i in tl.static_range(0, 4):
            four = four + (times_pair(xs[c * 4 + i], up),)
        sums = _fma_word(four, words, c, zero, sums, "mxfp4", False)
        if c % 2 == 1:
            chains = chains + (sums,)
            sums = tl.zeros((1, 1, 1), tl.int32)
    return add_halves(_add_pairs(chains[0], chains[1])) * tl.where(large, 16384.0, 1.0)


@triton.jit
def _add_pairs(a, b):
    return one_word("add.f16x2 $0, $1, $2;", (a, b))


@triton.jit
def add_halves(pair):
    """Return the sums of the halves of pairs, fp32."""
    return tl.inline_asm_elementwise(_ADD_HALVES, "=f,r", [pair], tl.float32, True, 1)


@triton.jit
def element(words, J: tl.constexpr, zero, FORMAT: tl.constexpr):
    """Return weight J of each vector, fp32, not scaled."""
    if FORMAT == "int4":
        return (int4_code(words[J // 8], J % 8) - zero).to(tl.float32)
    elif FORMAT == "int5" or FORMAT == "int6":
        above = above_of(words, J // 8, FORMAT)
        return (word_code(words[J // 8], above, J % 8, FORMAT) - zero).to(tl.float32)
    elif FORMAT == "mxfp4":
        return mxfp4_value(words[J // 8], J % 8).to(tl.float32)
    elif FORMAT == "ternary":
        return ternary_digit(words[J // 16], J % 16).to(tl.float32)
    elif FORMAT == "int8":
        return (words[J // 4] << (24 - J % 4 * 8) >> 24).to(tl.float32)
    elif FORMAT == "e4m3" or FORMAT == "e5m2":
        bits = ((words[J // 4] >> J % 4 * 8) & 255) << 8
        if FORMAT == "e4m3":
            bits = (bits & 0x8000) | ((bits & 0x7F00) >> 1)
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return value * 256.0 if FORMAT == "e4m3" else value
    elif FORMAT == "bf16":
        upper = words[J // 2] & -65536 if J % 2 else words[J // 2] << 16
        return upper.to(tl.float32, bitcast=True)
    elif FORMAT == "f16":
        bits = words[J // 2] >> (J % 2 * 16)
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return words[J].to(tl.float32, bitcast=True)


@triton.jit
def _eight(words, C: tl.constexpr, zero, FORMAT: tl.constexpr):
    """Return the weights of word C, fp32, unscaled, as small as `word_pairs`."""
    low, high = zero_pairs(zero)
    p0, p1, p2, p3 = word_pairs(words[C], above_of(words, C, FORMAT), low, high, FORMAT)
    v0, v1 = unpack(p0)
    v2, v3 = unpack(p1)
    v4, v5 = unpack(p2)
    v6, v7 = unpack(p3)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def load_each(at, inside):
    """Load single elements [L, 1, R], 0 where not `inside`; one dimension fixes Triton's layout."""
    L: tl.constexpr = at.shape[0]
    R: tl.constexpr = at.shape[2]
    at = at.permute(2, 1, 0).reshape(L * R)
    inside = tl.broadcast_to(inside, L, 1, R).permute(2, 1, 0).reshape(L * R)
    return tl.load(at, inside, other=0).reshape(R, 1, L).permute(2, 1, 0)


@triton.jit
def _group(scales, zeros, zero, k, C: tl.constexpr):
    """Return the scale, what is added (`scale_of`) and the zero point of column k of each row."""
    inside = k < C.K
    at, head_at = scale_places(scales, k, C.SPAN)
    own = load_each(at, inside)
    head = own
    if own.dtype == tl.int8 or own.dtype == tl.int16:
        head = load_each(head_at, inside)
    if zeros is not None:
        zero = load_each(zeros + k // C.SPAN, inside).to(tl.int32)
    scale, added = scale_of(own, head, C.CODE)
    return scale, added, zero


@triton.jit
def vector_dot(x, tokens, k, words, scales, zeros, zero, C: tl.constexpr):
    """Multiply a vector of weights of each row by each token's activations: fp32 [L, BM, R].

    With PAIRS "words" and mxfp4 it is half of the product. Words may be followed by what `above_of`
    finds there.

    Args:
        x: pointers to the tokens' activations [1, BM, 1].
        tokens: valid tokens [1, BM, 1].
        k: the vectors' first columns [L, 1, 1].
        words: the vectors, four words [L, 1, R] and more; any values beyond K.
        scales: pointers to the rows' scales [L, 1, R]; unused if SPAN is 0.
        zeros: pointers to zero points; None if all groups have `zero`.
        zero: the zero point of each row's codes, [L, 1, R] or [1, 1, 1].

    Constants:
        SPAN: columns that share a scale, even; 0 leaves the scale to the caller.
        CODE: "int4" to "int6", "mxfp4", "ternary", "int8", "bf16", "f16" or "f32".
        WEIGHTS: weights of a vector.
        PAIRS: packed arithmetic, see `Stored.pairs`: "words", "blocks" (mxfp4) or "" for none;
            needs 4-bit weights, fp16 activations and groups of whole words.
    """
    # Weights that surely share a scale: a vector, else 16 or eight columns, else two.
    VECTOR: tl.constexpr = C.SPAN % C.WEIGHTS == 0
    EIGHT: tl.constexpr = not VECTOR and C.SPAN % 8 == 0
    STEP: tl.constexpr = 8 if C.WEIGHTS > 8 else C.WEIGHTS
    ABOVE: tl.constexpr = C.CODE == "int5" or C.CODE == "int6"
    PACKED: tl.constexpr = ABOVE or C.CODE == "int4" or C.CODE == "mxfp4"
    scale = tl.full((1, 1, 1), 1.0, tl.float32)
    if VECTOR and C.SPAN > 0:
        scale, added, zero = _group(scales, zeros, zero, k, C)
    if C.SPAN > 0:
        HELD: tl.constexpr = scales.dtype.element_ty
        MINIMA: tl.constexpr = HELD == tl.int16 or HELD == tl.int32  # noqa: SIM300
    else:
        MINIMA: tl.constexpr = False
    if C.PAIRS == "blocks":
        return _mxfp4_block(x, tokens, k, words, zero, C.K) * scale
    total = tl.zeros((1, 1, 1), tl.float32)
    sums = tl.zeros((1, 1, 1), tl.int32)
    chain = sums
    alone = total  # the sum of activations, which minima meet
    for c in tl.static_range(0, C.WEIGHTS // STEP):
        at = k + c * STEP
        if EIGHT and (C.SPAN != 16 or c % 2 == 0):
            scale, added, zero = _group(scales, zeros, zero, at, C)
        if C.PAIRS != "":
            xs = load_pairs(x, at, tokens, C.K)
            sums = _fma_word(xs, words, c, zero, sums, C.CODE, True)
            if MINIMA:
                four = _add_pairs(_add_pairs(xs[0], xs[1]), _add_pairs(xs[2], xs[3]))
                alone += add_halves(four)
            if EIGHT and C.SPAN != 16:
                total += add_halves(sums) * scale
                sums = tl.zeros((1, 1, 1), tl.int32)
            elif C.CODE == "mxfp4" and c == 1:
                chain = sums
                sums = tl.zeros((1, 1, 1), tl.int32)
            elif c % 2 == 1:
                if C.CODE == "mxfp4":
                    sums = _add_pairs(chain, sums)
                part = add_halves(sums)
                total += part * scale if EIGHT else part
                sums = tl.zeros((1, 1, 1), tl.int32)
        elif not VECTOR and not EIGHT:
            xs = load8(x, at, tokens, C.K)
            for j in tl.static_range(0, STEP, 2):
                scale, added, zero = _group(scales, zeros, zero, at + j, C)
                even = xs[j].to(tl.float32) * element(words, c * STEP + j, zero, C.CODE)
                odd = xs[j + 1].to(tl.float32) * element(words, c * STEP + j + 1, zero, C.CODE)
                total += (even + odd) * scale
        else:
            xs = load8(x, at, tokens, C.K)
            part = tl.zeros((1, 1, 1), tl.float32)
            if C.ASM and PACKED:
                values = _eight(words, c, zero, C.CODE)
                for j in tl.static_range(0, STEP):
                    part += xs[j].to(tl.float32) * values[j]
            else:
                for j in tl.static_range(0, STEP):
                    value = element(words, c * STEP + j, zero, C.CODE)
                    part += xs[j].to(tl.float32) * value
            if MINIMA:
                for j in tl.static_range(0, STEP):
                    alone += xs[j].to(tl.float32)
            if EIGHT:
                part *= scale
            total += part
    if C.ASM and C.CODE == "mxfp4" and C.PAIRS == "":
        total *= 16384.0
    if C.ASM and ABOVE:
        total *= 2.0 if C.CODE == "int5" else 4.0
    if VECTOR and C.SPAN > 0:
        total *= scale
    if MINIMA:
        total += alone * added
    return total


@triton.jit
def await_products(turn, WGMMA: tl.constexpr):
    """Wait for a turn's products before the next one decodes weights.

    `wgmma` reads decoded weights from registers while it runs. Triton 3.6 lets the next turn begin
    with products in flight, and gives their registers to what it computes first (seen in machine
    code, and as wrong sums of a few elements on an H200).
    """
    if WGMMA:
        tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.b32 $0, $1;", "=r,r", [turn], tl.int32, False, 1
        )
