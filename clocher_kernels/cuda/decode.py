"""Turn words of prepacked weights (layouts: `prepack`) into values."""

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
    even = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))
    odd = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
    # The dimensions of the join are (BN, BW, j // 4, j // 2 % 2, j % 2) of element j.
    return tl.join(even, odd).reshape(w.shape[0], w.shape[1] * 8)


@triton.jit
def decode_words(w, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """Return 16 ternary digits, or 8 codes or FP4 values, per word i32 [BN, BW], in order."""
    if CODE == "ternary":
        even, odd = _eight(w, 0, 2, CODE, DTYPE), _eight(w, 1, 2, CODE, DTYPE)
        return tl.join(even, odd).reshape(w.shape[0], w.shape[1] * 16)
    else:
        return _eight(w, 0, 1, CODE, DTYPE)
