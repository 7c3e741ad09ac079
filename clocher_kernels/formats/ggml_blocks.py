"""Blocks of ggml's quantised types: their fields, and what codes and scales they hold.

Every type is value = scale * code - minimum, with a scale and a minimum for each run of columns, so
a type is known by what `Parts` its blocks unpack to.

Source: ggml-common.h (block_q4_K and so on); ggml-quants.c (dequantize_row_*); gguf-py's quants.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from clocher_kernels.formats import ggml_grids

IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
"""Value of each code of iq4_nl and iq4_xs."""
SIGNS = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], np.uint8)
"""Signs of eight elements for each code of iq3_xxs: bit 7 makes the number of ones even."""
POWERS = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
"""What a byte of tq1_0 is multiplied by to bring each of its digits to the top."""


class Parts(NamedTuple):
    """What blocks hold: value = scale * code - minimum, in fp32, both operations rounded.

    Attributes:
        scales: fp32 [blocks, S]; S runs of a block share one each.
        codes: i8 or u8 [blocks, S, columns of a run].
        minima: fp32 [blocks, S], if the type has them.
    """

    scales: np.ndarray
    codes: np.ndarray
    minima: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of blocks.

    Attributes:
        block: elements of a block.
        fields: a block's bytes; those of f16 are the scales.
        unpack: blocks, an array of `fields`, to what they hold.
    """

    block: int
    fields: np.dtype
    unpack: Callable[[np.ndarray], Parts]


def _f32(field: np.ndarray) -> np.ndarray:
    return field.astype(np.float32)


def split_bits(packed: np.ndarray, width: int) -> np.ndarray:
    """Return [..., 8 / width, bytes]: the bits of each byte, the lowest first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return packed[..., None, :] >> shifts & np.uint8((1 << width) - 1)


def _nibbles(blocks: np.ndarray, run: int) -> np.ndarray:
    """Return the codes in `qs` [blocks, 2 * bytes]: low nibbles of a run, then its high ones."""
    return split_bits(blocks["qs"].reshape(len(blocks), -1, run), 4).reshape(len(blocks), -1)


def _fifth_bits(blocks: np.ndarray) -> np.ndarray:
    return (blocks["qh"][:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(np.uint8)


def _q4_1(blocks: np.ndarray) -> Parts:
    codes = _nibbles(blocks, 16)
    return Parts(_f32(blocks["d"])[:, None], codes[:, None], -_f32(blocks["m"])[:, None])


def _q5_0(blocks: np.ndarray) -> Parts:
    codes = (_nibbles(blocks, 16) | _fifth_bits(blocks) << 4).view(np.int8) - np.int8(16)
    return Parts(_f32(blocks["d"])[:, None], codes[:, None])


def _q5_1(blocks: np.ndarray) -> Parts:
    codes = _nibbles(blocks, 16) | _fifth_bits(blocks) << 4
    return Parts(_f32(blocks["d"])[:, None], codes[:, None], -_f32(blocks["m"])[:, None])


def _iq4_nl(blocks: np.ndarray) -> Parts:
    return Parts(_f32(blocks["d"])[:, None], IQ4_VALUES[_nibbles(blocks, 16)][:, None])


def _sixes(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 6-bit scales and minima of q4_k and q5_k, u8 [blocks, 8] each."""
    low, middle, high = scales[:, :4], scales[:, 4:8], scales[:, 8:]
    return (
        np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1),
        np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1),
    )


def _q4_k(blocks: np.ndarray) -> Parts:
    scales, minima = _sixes(blocks["scales"])
    return Parts(
        _f32(blocks["d"])[:, None] * scales,
        _nibbles(blocks, 32).reshape(-1, 8, 32),
        _f32(blocks["dmin"])[:, None] * minima,
    )


def _q5_k(blocks: np.ndarray) -> Parts:
    scales, minima = _sixes(blocks["scales"])
    return Parts(
        _f32(blocks["d"])[:, None] * scales,
        _nibbles(blocks, 32).reshape(-1, 8, 32) | split_bits(blocks["qh"], 1) << 4,
        _f32(blocks["dmin"])[:, None] * minima,
    )


def _q6_k(blocks: np.ndarray) -> Parts:
    high = split_bits(blocks["qh"].reshape(-1, 2, 32), 2).reshape(-1, 256)
    codes = (_nibbles(blocks, 64) | high << 4).view(np.int8) - np.int8(32)
    return Parts(_f32(blocks["d"])[:, None] * blocks["scales"], codes.reshape(-1, 16, 16))


def _q3_k(blocks: np.ndarray) -> Parts:
    low = split_bits(blocks["scales"][:, None, :8], 4).reshape(-1, 16)
    high = split_bits(blocks["scales"][:, None, 8:], 2).reshape(-1, 16)
    scales = (low | high << 4).view(np.int8) - np.int8(32)
    codes = split_bits(blocks["qs"].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    codes = (codes | split_bits(blocks["hmask"], 1) << 2).view(np.int8) - np.int8(4)
    return Parts(_f32(blocks["d"])[:, None] * scales, codes.reshape(-1, 16, 16))


def _q2_k(blocks: np.ndarray) -> Parts:
    codes = split_bits(blocks["qs"].reshape(-1, 2, 32), 2)
    return Parts(
        _f32(blocks["d"])[:, None] * (blocks["scales"] & 15),
        codes.reshape(-1, 16, 16),
        _f32(blocks["dmin"])[:, None] * (blocks["scales"] >> 4),
    )


def _iq4_xs(blocks: np.ndarray) -> Parts:
    low = split_bits(blocks["scales_l"][..., None], 4).reshape(-1, 8)
    high = blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | high.astype(np.uint8) << 4).view(np.int8) - np.int8(32)
    codes = IQ4_VALUES[_nibbles(blocks, 16)]
    return Parts(_f32(blocks["d"])[:, None] * scales, codes.reshape(-1, 8, 32))


def _signed(magnitudes: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Return magnitudes i8 [blocks, 64, 4] with the signs u8 [blocks, 32], a bit an element."""
    negative = (signs[..., None] >> np.arange(8, dtype=np.uint8) & 1).view(np.int8)
    magnitudes = magnitudes.reshape(negative.shape)
    return np.where(negative, -magnitudes, magnitudes).reshape(-1, 8, 32)


def _iq3_s(blocks: np.ndarray) -> Parts:
    scales = split_bits(blocks["scales"][..., None], 4).reshape(-1, 8)
    high = blocks["qh"][..., None] >> np.arange(8, dtype=np.uint8) & 1
    indices = blocks["qs"] | high.reshape(-1, 64).astype(np.uint16) << 8
    return Parts(
        _f32(blocks["d"])[:, None] * (1 + 2 * scales),
        _signed(ggml_grids.IQ3_S[indices], blocks["signs"]),
    )


def _iq3_xxs(blocks: np.ndarray) -> Parts:
    words = blocks["scales_and_signs"]
    scales = _f32(words >> 28) + np.float32(0.5)
    signs = SIGNS[words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127]
    return Parts(
        _f32(blocks["d"])[:, None] * scales * np.float32(0.5),
        _signed(ggml_grids.IQ3_XXS[blocks["qs"]], signs.reshape(-1, 32)),
    )


def _tq1_0(blocks: np.ndarray) -> Parts:
    """Each byte is a fraction of 256 in base three: its next digit is the whole part of three."""
    runs = (
        blocks["qs"][:, None, :32] * POWERS,
        blocks["qs"][:, None, 32:] * POWERS,
        blocks["qh"][:, None] * POWERS[:4],
    )
    bytes_ = np.concatenate([run.reshape(len(blocks), -1) for run in runs], axis=1)
    digits = (bytes_.astype(np.uint16) * 3 >> 8).astype(np.int8) - np.int8(1)
    return Parts(_f32(blocks["d"])[:, None], digits[:, None])


def _fields(*fields: tuple[str, str] | tuple[str, str, int]) -> np.dtype:
    return np.dtype(list(fields))


_D, _M, _DMIN = ("d", "<f2"), ("m", "<f2"), ("dmin", "<f2")
_QH32, _QS16, _QS128 = ("qh", "<u4"), ("qs", "u1", 16), ("qs", "u1", 128)
_SCALES12 = ("scales", "u1", 12)

KINDS = {
    "q4_k": Kind(256, _fields(_D, _DMIN, _SCALES12, _QS128), _q4_k),
    "q5_k": Kind(256, _fields(_D, _DMIN, _SCALES12, ("qh", "u1", 32), _QS128), _q5_k),
    "q6_k": Kind(256, _fields(_QS128, ("qh", "u1", 64), ("scales", "i1", 16), _D), _q6_k),
    "q3_k": Kind(256, _fields(("hmask", "u1", 32), ("qs", "u1", 64), _SCALES12, _D), _q3_k),
    "q2_k": Kind(256, _fields(("scales", "u1", 16), ("qs", "u1", 64), _D, _DMIN), _q2_k),
    "q4_1": Kind(32, _fields(_D, _M, _QS16), _q4_1),
    "q5_0": Kind(32, _fields(_D, _QH32, _QS16), _q5_0),
    "q5_1": Kind(32, _fields(_D, _M, _QH32, _QS16), _q5_1),
    "iq4_nl": Kind(32, _fields(_D, _QS16), _iq4_nl),
    "iq4_xs": Kind(256, _fields(_D, ("scales_h", "<u2"), ("scales_l", "u1", 4), _QS128), _iq4_xs),
    "iq3_s": Kind(
        256,
        _fields(_D, ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)),
        _iq3_s,
    ),
    "iq3_xxs": Kind(256, _fields(_D, ("qs", "u1", 64), ("scales_and_signs", "<u4", 8)), _iq3_xxs),
    "tq1_0": Kind(256, _fields(("qs", "u1", 48), ("qh", "u1", 4), _D), _tq1_0),
}
"""Name -> type."""
