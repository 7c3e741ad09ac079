"""Turn words of prepacked weights (`prepack` has the layouts) into values."""

import triton
import triton.language as tl


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
def _interleave(v0, v1, v2, v3, v4, v5, v6, v7):
    """Join 8 tiles [BN, BW], one for each element of a word, to [BN, BW * 8]."""
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    # The dimensions of the join are (BN, BW, j // 4, j // 2 % 2, j % 2) of element j.
    return tl.join(even, odd).reshape(v0.shape[0], v0.shape[1] * 8)


@triton.jit
def decode_int4(w, DTYPE: tl.constexpr):
    """Return the codes 0..15 of words i32 [BN, BW], as DTYPE [BN, BW * 8]."""
    return _interleave(
        int4_code(w, 0).to(DTYPE),
        int4_code(w, 1).to(DTYPE),
        int4_code(w, 2).to(DTYPE),
        int4_code(w, 3).to(DTYPE),
        int4_code(w, 4).to(DTYPE),
        int4_code(w, 5).to(DTYPE),
        int4_code(w, 6).to(DTYPE),
        int4_code(w, 7).to(DTYPE),
    )


@triton.jit
def decode_mxfp4(w, DTYPE: tl.constexpr):
    """Return the FP4 values (not scaled) of words i32 [BN, BW], as DTYPE [BN, BW * 8]."""
    return _interleave(
        mxfp4_value(w, 0).to(DTYPE),
        mxfp4_value(w, 1).to(DTYPE),
        mxfp4_value(w, 2).to(DTYPE),
        mxfp4_value(w, 3).to(DTYPE),
        mxfp4_value(w, 4).to(DTYPE),
        mxfp4_value(w, 5).to(DTYPE),
        mxfp4_value(w, 6).to(DTYPE),
        mxfp4_value(w, 7).to(DTYPE),
    )


@triton.jit
def decode_ternary(w, DTYPE: tl.constexpr):
    """Return the digits -1, 0, 1 of words i32 [BN, BW], as DTYPE [BN, BW * 16]."""
    even = _interleave(
        ternary_digit(w, 0).to(DTYPE),
        ternary_digit(w, 2).to(DTYPE),
        ternary_digit(w, 4).to(DTYPE),
        ternary_digit(w, 6).to(DTYPE),
        ternary_digit(w, 8).to(DTYPE),
        ternary_digit(w, 10).to(DTYPE),
        ternary_digit(w, 12).to(DTYPE),
        ternary_digit(w, 14).to(DTYPE),
    )
    odd = _interleave(
        ternary_digit(w, 1).to(DTYPE),
        ternary_digit(w, 3).to(DTYPE),
        ternary_digit(w, 5).to(DTYPE),
        ternary_digit(w, 7).to(DTYPE),
        ternary_digit(w, 9).to(DTYPE),
        ternary_digit(w, 11).to(DTYPE),
        ternary_digit(w, 13).to(DTYPE),
        ternary_digit(w, 15).to(DTYPE),
    )
    return tl.join(even, odd).reshape(w.shape[0], w.shape[1] * 16)
