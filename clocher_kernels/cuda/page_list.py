"""Lists of pages, a bit for each: what a token can see, and the bits of words."""

import triton
import triton.language as tl

from clocher_kernels.cuda.attention_block import count_bits, in_table
from clocher_kernels.cuda.scalar import within


@triton.jit
def pages_seen(ends, ancestors, token, CELLS: tl.constexpr, PAGE: tl.constexpr):
    """Return how many pages a token sees."""
    end = within(tl.load(ends + token), CELLS + 1)
    tree = in_table(tl.load(ancestors + token), end, CELLS)
    return tl.cdiv(end + count_bits(tree.to(tl.uint64, bitcast=True)), PAGE)


@triton.jit
def _below(count):
    """Return words, uint64, whose lowest bits are set."""
    few = tl.minimum(tl.maximum(count, 0), 63).to(tl.uint64)
    ones = (few * 0 + 1 << few) - 1
    return ones | (tl.where(count > 63, 1, 0).to(tl.uint64) << 63)


@triton.jit
def run_of(begin, end, word):
    """Return the bits of pages begin .. end - 1 in words by their numbers, uint64."""
    return _below(end - 64 * word) & ~_below(begin - 64 * word)


@triton.jit
def load_words(words, word, begin, end, WORDS: tl.constexpr):
    """Return words of a list by their numbers, uint64: its pages begin .. end - 1."""
    stored = tl.load(words + word, word < WORDS, other=0)
    return stored.to(tl.uint64, bitcast=True) & run_of(begin, end, word)


@triton.jit
def lowest(bits):
    """Return the number of the lowest bit of a word that is not zero."""
    return count_bits(~bits & (bits - 1))
