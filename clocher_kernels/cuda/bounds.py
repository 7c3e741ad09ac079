"""Integers that select something, kept within what there is (`ops.contract`)."""

import triton
import triton.language as tl


@triton.jit
def within(index, COUNT: tl.constexpr):
    """Return the numbers in 0 .. COUNT - 1 that are nearest to indices."""
    return tl.minimum(tl.maximum(index, 0), COUNT - 1)
