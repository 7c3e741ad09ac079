"""Decode weights in registers: int8 and fp8, and words of prepacked ones (layouts: `prepack`).

e5m2 is the upper half of fp16, e4m3 an fp16 whose exponent is off by 8. Codes come out divided by
their `unit`, a power of two, so that fp16 sums (MATH "pairs") stay in range.
"""

import triton
import triton.language as tl

# Four int8 codes -> four fp16: with the sign bit flipped a code is 0..255 and becomes the last
# byte of 1024 + code; one exact multiply-add turns 1024..1279 into (code - 128) / 128.
_INT8 = tl.constexpr("""{
.reg .b32 u, a, b, s, o;
mov.b32 s, 0x20002000;
mov.b32 o, 0xc880c880;
xor.b32 u, $2, 0x80808080;
prmt.b32 a, u, 0x64646464, 0x4140;
prmt.b32 b, u, 0x64646464, 0x4342;
fma.rn.f16x2 $0, a, s, o;
fma.rn.f16x2 $1, b, s, o;
}""")

# Four e4m3 codes -> four fp16 (divided by 256): bytes are sign-extended to 16 bits and shifted
# until the exponent is in place; the mask drops the copy of the sign in bit 14.
_E4M3 = tl.constexpr("""{
.reg .b32 a, b;
prmt.b32 a, $2, 0, 0x9180;
prmt.b32 b, $2, 0, 0xb3a2;
shl.b32 a, a, 7;
shl.b32 b, b, 7;
and.b32 $0, a, 0xbf80bf80;
and.b32 $1, b, 0xbf80bf80;
}""")

# Four e5m2 codes -> four fp16: each is the upper byte of one.
_E5M2 = tl.constexpr("""{
prmt.b32 $0, $2, 0, 0x1404;
prmt.b32 $1, $2, 0, 0x3424;
}""")


def unit(code: str, math: str) -> float:
    """Return what decoded weights must be multiplied by; `math` is "pairs" or "fp32"."""
    if code == "int8":
        return 128.0 if math == "pairs" else 1.0
    if code.startswith("tcq"):
        return 64.0
    return 256.0 if code == "e4m3" else 1.0


@triton.jit
def one_word(ASSEMBLY: tl.constexpr, operands):
    """Return the int32 $0 that assembly makes of the registers $1, $2, ..., a tuple."""
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=r" + ",r" * len(operands), operands, tl.int32, True, 1
    )


@triton.jit
def four_words(ASSEMBLY: tl.constexpr, operands):
    """Return the int32 $0 to $3 that assembly makes of the registers $4, ..., a tuple."""
    # The tuple of types stays inline: Triton 3.9 wraps the elements of a named one.
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        "=&r,=&r,=&r,=&r" + ",r" * len(operands),
        operands,
        (tl.int32, tl.int32, tl.int32, tl.int32),
        True,
        1,
    )


@triton.jit
def _f16_bits(code, CODE: tl.constexpr):
    """Turn fp8 codes (0..255, int32) into fp16 bits, int32."""
    if CODE == "e4m3":
        return ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    else:
        return code << 8


@triton.jit
def to_f16(code, CODE: tl.constexpr, ASM: tl.constexpr):
    """Decode int8 or fp8 codes of any shape to fp16, divided by the code's unit."""
    if ASM and CODE == "int8":
        return tl.inline_asm_elementwise(_INT8, "=r,=r,r", [code], tl.float16, True, 4)
    elif ASM and CODE == "e4m3":
        return tl.inline_asm_elementwise(_E4M3, "=r,=r,r", [code], tl.float16, True, 4)
    elif ASM:
        return tl.inline_asm_elementwise(_E5M2, "=&r,=r,r", [code], tl.float16, True, 4)
    elif CODE == "int8":
        return (code.to(tl.float32) * 0.0078125).to(tl.float16)
    else:
        return _f16_bits(code.to(tl.int32), CODE).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def to_f32(code, CODE: tl.constexpr, ASM: tl.constexpr):
    """Decode floats, int8 or fp8 codes of any shape into fp32, divided by the code's unit."""
    if CODE == "float" or CODE == "int8":
        return code.to(tl.float32)
    else:
        return to_f16(code, CODE, ASM).to(tl.float32)


@triton.jit
def _minifloat(x, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, LARGEST: tl.constexpr):
    """Return the codes of fp32 values: nearest even, saturating, as in `dtypes`."""
    BIAS: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    SHIFT: tl.constexpr = 23 - MANTISSA
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    MAGIC: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA + 23)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    nan = magnitude > 0x7F800000
    value = tl.minimum(tl.where(nan, 0, magnitude).to(tl.float32, bitcast=True), LARGEST)
    rounded = value.to(tl.int32, bitcast=True)
    rounded += ((rounded >> SHIFT) & 1) + ((1 << (SHIFT - 1)) - 1)
    normal = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # The sum rounds at the subnormal step, and its last bits are the code.
    subnormal = (value + MAGIC).to(tl.int32, bitcast=True) & ((1 << (MANTISSA + 1)) - 1)
    code = tl.where(value < SMALLEST_NORMAL, subnormal, normal)
    code = tl.where(nan, (1 << (EXPONENT + MANTISSA)) - 1, code)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def narrow(x, KV: tl.constexpr):
    """Round fp32 values to a KV dtype; fp8 as bytes.

    Integer arithmetic on fp32 bits: exact on every architecture and in the interpreter, equal to
    `dtypes.from_f32`, but f16 saturates (see `ops.attention`).
    """
    if KV == "e4m3":
        return _minifloat(x, 4, 3, 448.0).to(tl.uint8)
    elif KV == "e5m2":
        return _minifloat(x, 5, 2, 57344.0).to(tl.uint8)
    elif KV == "bf16":
        bits = x.to(tl.int32, bitcast=True)
        rounded = bits + ((bits >> 16) & 1) + 0x7FFF
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, rounded)
        return (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif KV == "f16":
        # Finite values stay finite; infinity and NaN are kept.
        largest = tl.where(x < 0, -65504.0, 65504.0)
        magnitude = tl.abs(x)
        over = (magnitude > 65504.0) & (magnitude < float("inf"))
        return tl.where(over, largest, x).to(tl.float16)
    else:
        return x


@triton.jit
def _as_pair(low, high):
    """Pack two fp16 tensors into int32 registers, the first one low."""
    low_bits = low.to(tl.int16, bitcast=True).to(tl.int32)
    return (low_bits & 0xFFFF) | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def halves(pair):
    """Unpack int32 registers into two fp32 values."""
    low = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def pairs(word, CODE: tl.constexpr, ASM: tl.constexpr):
    """Decode words of four codes into two pairs, in order, divided by the code's unit."""
    if ASM and CODE == "int8":
        return tl.inline_asm_elementwise(_INT8, "=r,=r,r", [word], (tl.int32, tl.int32), True, 1)
    elif ASM:
        return tl.inline_asm_elementwise(_E4M3, "=r,=r,r", [word], (tl.int32, tl.int32), True, 1)
    else:
        a = to_f16(word << 24 >> 24, CODE, False)
        b = to_f16(word << 16 >> 24, CODE, False)
        c = to_f16(word << 8 >> 24, CODE, False)
        d = to_f16(word >> 24, CODE, False)
        return _as_pair(a, b), _as_pair(c, d)


@triton.jit
def fma_pairs(a, b, c, ASM: tl.constexpr):
    """Return a * b + c on pairs, rounded once."""
    if ASM:
        return one_word("fma.rn.f16x2 $0, $1, $2, $3;", (a, b, c))
    else:
        a0, a1 = halves(a)
        b0, b1 = halves(b)
        c0, c1 = halves(c)
        return _as_pair((a0 * b0 + c0).to(tl.float16), (a1 * b1 + c1).to(tl.float16))


@triton.jit
def quarters(v, LANES: tl.constexpr):
    """Split [LANES * 4] into the four elements of each lane, [LANES] each."""
    even, odd = tl.split(tl.reshape(v, (LANES, 2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


@triton.jit
def weight_factors(
    row, LANES: tl.constexpr, CODE: tl.constexpr, MATH: tl.constexpr, ASM: tl.constexpr
):
    """Turn a row's loaded weights into the factors of `dot`, a tuple."""
    if MATH == "pairs":
        low, high = pairs(row, CODE, ASM)
        return quarters(low, LANES) + quarters(high, LANES)
    else:
        return (to_f32(row, CODE, ASM),)


@triton.jit
def token_factors(x, LANES: tl.constexpr, MATH: tl.constexpr):
    """Turn a token's loaded activations into the factors of `dot`, a tuple."""
    if MATH == "pairs":
        low, high = x.to(tl.int32), (x >> 32).to(tl.int32)
        return quarters(low, LANES) + quarters(high, LANES)
    else:
        return (x.to(tl.float32),)


@triton.jit
def rounded_product(a, b, ASM: tl.constexpr):
    """Multiply in fp32; the product is rounded before any addition."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1
        )
    else:
        return a * b


@triton.jit
def dot(
    w, x, at: tl.constexpr,
    LANES: tl.constexpr, LANE: tl.constexpr, MATH: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Sum the products of each lane's chunk: x with w[at], w[at + 1], ..."""
    if MATH == "pairs":
        # One chain of packed multiply-adds, then fp32.
        total = tl.zeros((LANES,), tl.int32)
        for i in tl.static_range(8):
            total = fma_pairs(w[at + i], x[i], total, ASM)
        low, high = halves(total)
        return low + high
    elif LANE == 2:
        # Which of two products is rounded before their sum differs from token to token otherwise.
        return tl.sum(tl.reshape(rounded_product(w[at], x[0], ASM), (LANES, LANE)), 1)
    else:
        return tl.sum(tl.reshape(w[at] * x[0], (LANES, LANE)), 1)


@triton.jit
def joined(parts, COUNT: tl.constexpr):
    """Join COUNT (2^n) tensors [...] to [..., 2, 2, ...], in order."""
    level = parts
    for bit in tl.static_range(1, 8):
        if COUNT >> bit > 0:
            wider = ()
            for i in tl.static_range(COUNT >> bit):
                wider = wider + (tl.join(level[i], level[i + (COUNT >> bit)]),)
            level = wider
    return level[0]


@triton.jit
def to_scale(stored, FORMAT: tl.constexpr):
    """Return stored scales in fp32; mxfp4's are powers of two, code 0 a subnormal."""
    if FORMAT == "mxfp4":
        return tl.maximum(stored.to(tl.int32) << 23, 0x00400000).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)


@triton.jit
def int4_code(w, J: tl.constexpr):
    """Return code 0..15 of element J of each word."""
    return (w >> (J // 2 * 4 + J % 2 * 16)) & 15


@triton.jit
def mxfp4_value(w, J: tl.constexpr):
    """Return the FP4 value of element J of each word, fp16, not scaled."""
    half = w >> (J % 2 * 16)
    if J // 4 == 1:
        half = ((half >> 3) & 0x0E0E) | ((half << 7) & 0x8080)
    bits = (half << (J // 2 % 2 * 8)) & 0x8E00
    # As an fp16 the bits are 2^14 times too small.
    return bits.to(tl.int16).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def ternary_digit(w, J: tl.constexpr):
    """Return the digit -1, 0 or 1 of element J of each word."""
    return ((w >> (J % 4 * 8 + J // 4 * 2)) & 3) - 1


@triton.jit
def in_order(v):
    """Join elements 0 .. 7 of words [BN, BW], a tuple, to [BN, BW * 8]."""
    even = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))
    odd = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
    # The dimensions of the join are (BN, BW, j // 4, j // 2 % 2, j % 2) of element j.
    return tl.join(even, odd).reshape(v[0].shape[0], v[0].shape[1] * 8)


@triton.jit
def _eight(w, first: tl.constexpr, step: tl.constexpr, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """Return elements first, first + step, ... of words [BN, BW], joined to [BN, BW * 8]."""
    v = ()
    for j in tl.static_range(8):
        if CODE == "int4":
            v = v + (int4_code(w, first + j * step).to(DTYPE),)
        elif CODE == "mxfp4":
            v = v + (mxfp4_value(w, first + j * step).to(DTYPE),)
        else:
            v = v + (ternary_digit(w, first + j * step).to(DTYPE),)
    return in_order(v)


@triton.jit
def decode_words(w, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """Return 16 ternary digits, or 8 codes or FP4 values, per word i32 [BN, BW], in order."""
    if CODE == "ternary":
        even, odd = _eight(w, 0, 2, CODE, DTYPE), _eight(w, 1, 2, CODE, DTYPE)
        return tl.join(even, odd).reshape(w.shape[0], w.shape[1] * 16)
    else:
        return _eight(w, 0, 1, CODE, DTYPE)
