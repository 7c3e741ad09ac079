"""Masks of allowed tokens as the sampling op takes them."""

import numpy as np

from clocher_kernels.ops.sampling import WORD_BITS, words_for


def masks_of(allowed: np.ndarray) -> np.ndarray:
    """Return the masks [C, W] u32 of allowed tokens, bool [C, V]; bits beyond V are set."""
    rows, v = allowed.shape
    bits = np.ones((rows, WORD_BITS * words_for(v)), bool)
    bits[:, :v] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.dtype("<u4")).astype(np.uint32)
