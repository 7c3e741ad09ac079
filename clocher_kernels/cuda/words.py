"""Words of 4 to 6-bit weights as pairs of fp16, and the scales of ggml's blocks (see `prepack`)."""

import struct

import triton
import triton.language as tl

from clocher_kernels.cuda.codes import (
    fma_pairs,
    four_words,
    halves,
    in_order,
    int4_code,
    one_word,
    to_scale,
)

# A word of int4 -> four pairs of code - zero. A nibble becomes the last bits of an fp16 number
# between 1024 and 2048: 1024 + code in bits 3..0, 1024 + 16 code in bits 7..4.
# $5 = 1024 + zero, $6 = -(64 + zero), in both halves.
_INT4_PAIRS = tl.constexpr("""{
.reg .b32 u, a, b, c, d, s;
mov.b32 s, 0x2c002c00;
shr.u32 u, $4, 8;
lop3.b32 a, $4, 0x000f000f, 0x64006400, 0xea;
lop3.b32 b, $4, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 c, u, 0x000f000f, 0x64006400, 0xea;
lop3.b32 d, u, 0x00f000f0, 0x64006400, 0xea;
sub.f16x2 $0, a, $5;
fma.rn.f16x2 $1, b, s, $6;
sub.f16x2 $2, c, $5;
fma.rn.f16x2 $3, d, s, $6;
}""")

# A word of mxfp4 -> four pairs, 2^14 times too small: three bits of magnitude in bits 11..9 and the
# sign in bit 15 of an fp16 number. 0.5 becomes a subnormal one.
_MXFP4_PAIRS = tl.constexpr("""{
.reg .b32 t, u, v;
and.b32 $0, $4, 0x8e008e00;
shl.b32 t, $4, 8;
and.b32 $1, t, 0x8e008e00;
shr.u32 t, $4, 3;
shl.b32 u, $4, 7;
lop3.b32 v, t, u, 0x0e0e0e0e, 0xe4;
and.b32 $2, v, 0x8e008e00;
shl.b32 t, v, 8;
and.b32 $3, t, 0x8e008e00;
}""")


def _with_above(bits: int) -> tl.constexpr:
    """Return assembly for a word $4 and the bits above its codes, in the nibbles of $5.

    It makes four pairs of (code - middle) / 2^bits, which are as small as int4's.
    """
    low, high = (sum((1 << bits) - 1 << at + half for half in (0, 16)) for at in (4, 8))
    numbers = (1, 1 / 16, -(1024 + (8 << bits)), -(64 + (8 << bits)))
    stored = (struct.pack("<e", number / (1 << bits)) * 2 for number in numbers)
    one, part, less, less_high = (f"{int.from_bytes(two, 'little'):#x}" for two in stored)
    return tl.constexpr(f"""{{
.reg .b32 u, v, t, a, b, c, d, s, z, r, y;
mov.b32 s, {one};
mov.b32 z, {less};
mov.b32 r, {part};
mov.b32 y, {less_high};
shr.u32 u, $4, 8;
shl.b32 v, $5, 4;
shr.u32 t, $5, 4;
lop3.b32 a, $4, 0x000f000f, 0x64006400, 0xea;
lop3.b32 b, $4, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 c, u, 0x000f000f, 0x64006400, 0xea;
lop3.b32 d, u, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 a, v, {low:#x}, a, 0xea;
lop3.b32 b, v, {high:#x}, b, 0xea;
lop3.b32 c, t, {low:#x}, c, 0xea;
lop3.b32 d, t, {high:#x}, d, 0xea;
fma.rn.f16x2 $0, a, s, z;
fma.rn.f16x2 $1, b, r, y;
fma.rn.f16x2 $2, c, s, z;
fma.rn.f16x2 $3, d, r, y;
}}""")


_INT5_PAIRS, _INT6_PAIRS = _with_above(1), _with_above(2)

# A word of int4 -> four pairs of (code - zero) * scale in bf16. A nibble becomes the last bits of a
# number between 128 and 256. $5 = -(128 + zero), $6 = scale, in both halves.
_INT4_BF16 = tl.constexpr("""{
.reg .b32 a, b, c, d, u, v, w, o, z;
mov.b32 o, 0x3f803f80;
mov.b32 z, 0x80008000;
shr.u32 u, $4, 4;
shr.u32 v, $4, 8;
shr.u32 w, $4, 12;
lop3.b32 a, $4, 0x000f000f, 0x43004300, 0xea;
lop3.b32 b, u, 0x000f000f, 0x43004300, 0xea;
lop3.b32 c, v, 0x000f000f, 0x43004300, 0xea;
lop3.b32 d, w, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 a, a, o, $5;
fma.rn.bf16x2 b, b, o, $5;
fma.rn.bf16x2 c, c, o, $5;
fma.rn.bf16x2 d, d, o, $5;
fma.rn.bf16x2 $0, a, $6, z;
fma.rn.bf16x2 $1, b, $6, z;
fma.rn.bf16x2 $2, c, $6, z;
fma.rn.bf16x2 $3, d, $6, z;
}""")


@triton.jit
def word_pairs(w, above, low, high, FORMAT: tl.constexpr):
    """Return the four pairs of words: mxfp4's 2^14 times too small, of int5 and int6 2 and 4 times.

    `above` has the bits above four of int5 and int6, see `above_of`.
    """
    if FORMAT == "int4":
        return four_words(_INT4_PAIRS, (w, low, high))
    elif FORMAT == "int5":
        return four_words(_INT5_PAIRS, (w, above))
    elif FORMAT == "int6":
        return four_words(_INT6_PAIRS, (w, above))
    else:
        return four_words(_MXFP4_PAIRS, (w,))


@triton.jit
def zero_pairs(zero):
    """Return the pairs 1024 + zero and -(64 + zero) of zero points 0..15."""
    return zero * 0x00010001 + 0x64006400, zero * 0x00100010 - 0x2BFF2C00


@triton.jit
def times_pair(pair, factor):
    """Multiply pairs of fp16."""
    return one_word("mul.f16x2 $0, $1, $2;", (pair, factor))


@triton.jit
def _twice(x):
    """Return 16-bit values in both halves of int32 registers."""
    bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.jit
def pair_of(word, DTYPE: tl.constexpr):
    """Return the halves of int32 registers, fp16 or bf16."""
    # The tuples of types stay inline: Triton 3.9 wraps the elements of a named one.
    if tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [word], (tl.float16, tl.float16), True, 1
        )
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [word], (tl.bfloat16, tl.bfloat16), True, 1
        )


@triton.jit
def bf16_pairs(w, zero, scale):
    """Return words of int4 as four pairs of (code - zero) * scale in bf16."""
    return four_words(_INT4_BF16, (w, _twice((-128 - zero).to(tl.bfloat16)), _twice(scale)))


@triton.jit
def scaled_words(w, above, scale, added, zero, CODE: tl.constexpr, MINIMA: tl.constexpr):
    """Decode words [BN, BW] to the 16-bit type of `scale`; mxfp4's are 2^14 times too small.

    With MINIMA `added` is added.
    """
    if scale.dtype == tl.bfloat16:
        p0, p1, p2, p3 = bf16_pairs(w, zero, scale)
    else:
        low, high = zero_pairs(zero)
        p0, p1, p2, p3 = word_pairs(w, above, low, high, CODE)
        factor = _twice(scale * (2.0 if CODE == "int5" else 4.0 if CODE == "int6" else 1.0))
        if MINIMA:
            sums = _twice(added)
            p0, p1 = fma_pairs(p0, factor, sums, True), fma_pairs(p1, factor, sums, True)
            p2, p3 = fma_pairs(p2, factor, sums, True), fma_pairs(p3, factor, sums, True)
        else:
            p0, p1 = times_pair(p0, factor), times_pair(p1, factor)
            p2, p3 = times_pair(p2, factor), times_pair(p3, factor)
    lower = pair_of(p0, scale.dtype) + pair_of(p1, scale.dtype)
    return in_order(lower + pair_of(p2, scale.dtype) + pair_of(p3, scale.dtype))


@triton.jit
def above_of(words, C: tl.constexpr, FORMAT: tl.constexpr):
    """Return the bits above the codes of word C of a vector, lowest in its nibbles."""
    if FORMAT == "int5":
        return words[4] >> C
    elif FORMAT == "int6":
        return words[4 + C // 2] >> C % 2 * 2
    else:
        return words[C]


@triton.jit
def word_code(w, above, J: tl.constexpr, FORMAT: tl.constexpr):
    """Return code J of each word of int4, int5 or int6."""
    code = int4_code(w, J)
    if FORMAT == "int5" or FORMAT == "int6":
        code += (int4_code(above, J) & (1 if FORMAT == "int5" else 3)) << 4
    return code


@triton.jit
def scales_of_row(scales, K: tl.constexpr, GROUP: tl.constexpr):
    """Return the elements that a row of scales has."""
    HEADS: tl.constexpr = scales.dtype.element_ty == tl.int8 or scales.dtype.element_ty == tl.int16
    return (K + GROUP - 1) // GROUP + (K // 256 * 2 if HEADS else 0)


@triton.jit
def scale_places(scales, k, GROUP: tl.constexpr):
    """Return pointers to the scales of columns k of rows, and to the heads of their blocks."""
    HELD: tl.constexpr = scales.dtype.element_ty
    if HELD == tl.int8 or HELD == tl.int16:  # noqa: SIM300
        head = scales + k // 256 * (256 // GROUP + 2)
        own = head + (k % 256 // GROUP + 2)
        if HELD == tl.int8:  # noqa: SIM300
            return own, head.to(tl.pointer_type(tl.float16), bitcast=True)
        else:
            return own, head.to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        own = scales + k // GROUP
        return own, own


@triton.jit
def brick_row(row, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Return where rows of SIZE elements begin in bricks of 8 rows and WIDTH elements of each."""
    return row // 8 * (8 * SIZE) + row % 8 * WIDTH


@triton.jit
def brick_column(at, WIDTH: tl.constexpr):
    """Return how far from its row's begin element `at` is."""
    return at // WIDTH * (8 * WIDTH) + at % WIDTH


@triton.jit
def load_scales(scales, k, GROUP: tl.constexpr, APART: tl.constexpr = 1):
    """Load the arguments of `scale_of`; a row's scales are APART elements apart."""
    at, head_at = scale_places(scales, k // GROUP * (GROUP * APART) if APART > 1 else k, GROUP)
    own = tl.load(at)
    head = own
    if own.dtype == tl.int8 or own.dtype == tl.int16:
        head = tl.load(head_at)
    return own, head


@triton.jit
def scale_of(own, head, FORMAT: tl.constexpr):
    """Return scales in fp32, and what to add to scale * (code - middle) where there are minima."""
    MIDDLE: tl.constexpr = 16 if FORMAT == "int5" else 8
    if own.dtype == tl.int8:
        scale = head.to(tl.float32) * own.to(tl.float32)
        return scale, scale
    elif own.dtype == tl.int16:
        scale, minimum = halves(head)
        scale *= (own & 255).to(tl.float32)
        return scale, scale * MIDDLE - minimum * (own >> 8).to(tl.float32)
    elif own.dtype == tl.int32:
        scale, minimum = halves(own)
        return scale, scale * MIDDLE - minimum
    else:
        scale = to_scale(own, FORMAT)
        return scale, scale
