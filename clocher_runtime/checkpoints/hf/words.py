"""int32 words of packed codes -> the codes of our formats. Only bits move; nothing is rounded.

Words are little-endian, so the bytes of a word that packs its elements low bits first are already
in order: two 4-bit codes in a byte, the even one low, as `Int4` stores them.
"""

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 neighbours the nibbles of an AWQ word hold, from the lowest."""

_TILE = 64


def transposed_bytes(words: np.ndarray) -> np.ndarray:
    """Return the bytes of words [A, N] with N first, u8 [N, 4A]."""
    rows, columns = words.shape
    out = np.empty((columns, rows), np.int32)
    for left in range(0, columns, _TILE):  # in tiles, which stay in cache
        for top in range(0, rows, _TILE):
            tile = words[top : top + _TILE, left : left + _TILE]
            out[left : left + _TILE, top : top + _TILE] = tile.T
    return out.view(np.uint8)


def nibbles(words: np.ndarray) -> np.ndarray:
    """Return the 4-bit codes of words [A, B] packed along B, low bits first, u8 [A, 8B]."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    out = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, 0::2])
    np.right_shift(packed, 4, out=out[:, 1::2])
    return out


def awq_nibbles(words: np.ndarray) -> np.ndarray:
    """Return the 4-bit codes of words [A, B] packed along B in AWQ's order, u8 [A, 8B]."""
    stored = nibbles(words).reshape(words.shape[0], -1, 8)
    out = np.empty_like(stored)
    out[:, :, AWQ_ORDER] = stored
    return out.reshape(words.shape[0], -1)


def awq_codes(words: np.ndarray) -> np.ndarray:
    """Return the codes of an AWQ "gemm" matrix, words [K, N/8], as `Int4` packs them.

    Returns:
        u8 [N, K/2]; K is even.
    """
    rows, columns = words.shape
    out = np.empty((columns, 8, rows // 2), np.uint8)
    for start in range(0, columns, _TILE):
        packed = np.ascontiguousarray(words[:, start : start + _TILE]).view(np.uint8)
        even, odd = packed[0::2], packed[1::2]
        low, high = even & 15 | odd << 4, even >> 4 | odd & 0xF0
        for byte in range(4):
            out[start : start + _TILE, AWQ_ORDER[2 * byte]] = low[:, byte::4].T
            out[start : start + _TILE, AWQ_ORDER[2 * byte + 1]] = high[:, byte::4].T
    return out.reshape(8 * columns, -1)


def signed(codes: np.ndarray) -> np.ndarray:
    """Return 8-bit codes with zero at 128 as signed ones, i8 of the same shape."""
    return (codes ^ np.uint8(0x80)).view(np.int8)
