"""Plain encoders of ggml's types: fp32 [blocks, elements] to blocks; `Ggml` says their errors."""

from collections.abc import Callable, Mapping

import numpy as np

from clocher_kernels.dtypes import LARGEST, SMALLEST
from clocher_kernels.errors import FormatError
from clocher_kernels.formats import ggml_grids
from clocher_kernels.formats.ggml_blocks import IQ4_VALUES, KINDS, POWERS

_BITS = 1 << np.arange(8, dtype=np.uint8)
_IQ4_BOUNDS = (IQ4_VALUES[1:].astype(np.float32) + IQ4_VALUES[:-1]) / 2
_GROUPS = 1024  # groups of four that are looked up in a grid at a time


def _half(kind: str, ideal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round scales to f16; one that would become zero gets the smallest value.

    Returns:
        As stored, and fp32, where 1 stands for zero because it divides.
    """
    if (largest := float(np.abs(ideal).max())) > LARGEST["f16"]:
        raise FormatError(
            f"{kind}: a scale of {largest:.3g} is beyond f16 (at most 65504); choose a format with "
            "f32 or bf16 scales"
        )
    stored = ideal.astype(np.float16)
    tiny = (stored == 0) & (ideal != 0)
    stored = np.where(tiny, np.copysign(np.float16(SMALLEST["f16"]), ideal), stored)
    stored = stored.astype(np.float16)
    return stored, np.where(stored == 0, 1, stored).astype(np.float32)


def _extreme(cells: np.ndarray) -> np.ndarray:
    """Return the element of largest magnitude of each cell, the positive one of two."""
    low, high = cells.min(axis=-1), cells.max(axis=-1)
    return np.asarray(np.where(-low > high, low, high))


def _steps(cells: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return cells / scales, 0 where the scale is 0."""
    safe = np.where(scales == 0, np.float32(1), scales)[..., None]
    return np.asarray(np.where(scales[..., None] == 0, np.float32(0), cells / safe))


def _u8(steps: np.ndarray, top: int) -> np.ndarray:
    return np.asarray(np.clip(np.rint(steps), 0, top), np.uint8)


def _pack(codes: np.ndarray, width: int) -> np.ndarray:
    """Undo `split_bits`: codes [..., 8 / width, bytes] become bytes, the first in the low bits."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return np.asarray(np.bitwise_or.reduce(codes << shifts, axis=-2))


def _pack_nibbles(codes: np.ndarray, run: int) -> np.ndarray:
    return _pack((codes & 15).reshape(len(codes), -1, 2, run), 4).reshape(len(codes), -1)


def _pack_fifths(codes: np.ndarray) -> np.ndarray:
    return np.packbits(codes >> 4, axis=-1, bitorder="little").view("<u4")[:, 0]


def _range(kind: str, cells: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Return blocks with `d` and `m`, and codes that spread over the range of each."""
    blocks = np.zeros(len(cells), KINDS[kind].fields)
    low = cells.min(axis=1)
    # Divided before the difference, which could overflow.
    blocks["d"], d = _half(kind, cells.max(axis=1) / np.float32(top) - low / np.float32(top))
    blocks["m"], _ = _half(kind, low)
    m = blocks["m"].astype(np.float32)
    return blocks, _u8((cells - m[:, None]) / d[:, None], top)


def _q4_1(cells: np.ndarray) -> np.ndarray:
    blocks, codes = _range("q4_1", cells, 15)
    blocks["qs"] = _pack_nibbles(codes, 16)
    return blocks


def _q5_1(cells: np.ndarray) -> np.ndarray:
    blocks, codes = _range("q5_1", cells, 31)
    blocks["qh"], blocks["qs"] = _pack_fifths(codes), _pack_nibbles(codes, 16)
    return blocks


def _q5_0(cells: np.ndarray) -> np.ndarray:
    blocks = np.zeros(len(cells), KINDS["q5_0"].fields)
    blocks["d"], d = _half("q5_0", _extreme(cells) / np.float32(-16))
    codes = _u8(cells / d[:, None] + np.float32(16), 31)
    blocks["qh"], blocks["qs"] = _pack_fifths(codes), _pack_nibbles(codes, 16)
    return blocks


def _iq4(steps: np.ndarray) -> np.ndarray:
    return np.searchsorted(_IQ4_BOUNDS, steps.ravel()).astype(np.uint8).reshape(steps.shape)


def _iq4_nl(cells: np.ndarray) -> np.ndarray:
    blocks = np.zeros(len(cells), KINDS["iq4_nl"].fields)
    blocks["d"], d = _half("iq4_nl", _extreme(cells) / np.float32(IQ4_VALUES[0]))
    blocks["qs"] = _pack_nibbles(_iq4(cells / d[:, None]), 16)
    return blocks


def _affine(
    kind: str, cells: np.ndarray, run: int, top: int, sub_top: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return blocks with `d` and `dmin`, scales and minima u8 [blocks, S], codes like the cells."""
    blocks = np.zeros(len(cells), KINDS[kind].fields)
    runs = cells.reshape(len(cells), -1, run)
    low = np.minimum(runs.min(axis=2), 0)
    ideal = runs.max(axis=2) / np.float32(top) - low / np.float32(top)
    blocks["d"], d = _half(kind, ideal.max(axis=1) / np.float32(sub_top))
    blocks["dmin"], dmin = _half(kind, -low.min(axis=1) / np.float32(sub_top))
    scales, minima = _u8(ideal / d[:, None], sub_top), _u8(-low / dmin[:, None], sub_top)
    steps = _steps(runs + (dmin[:, None] * minima)[..., None], d[:, None] * scales)
    return blocks, scales, minima, _u8(steps, top).reshape(cells.shape)


def _pack_sixes(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    high = scales[:, 4:] & 15 | minima[:, 4:] << 4
    parts = (part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minima))
    return np.concatenate([*parts, high], axis=1)


def _q4_k(cells: np.ndarray) -> np.ndarray:
    blocks, scales, minima, codes = _affine("q4_k", cells, 32, 15, 63)
    blocks["scales"], blocks["qs"] = _pack_sixes(scales, minima), _pack_nibbles(codes, 32)
    return blocks


def _q5_k(cells: np.ndarray) -> np.ndarray:
    blocks, scales, minima, codes = _affine("q5_k", cells, 32, 31, 63)
    blocks["scales"], blocks["qs"] = _pack_sixes(scales, minima), _pack_nibbles(codes, 32)
    blocks["qh"] = _pack((codes >> 4).reshape(-1, 8, 32), 1)
    return blocks


def _q2_k(cells: np.ndarray) -> np.ndarray:
    blocks, scales, minima, codes = _affine("q2_k", cells, 16, 3, 15)
    blocks["scales"] = scales | minima << 4
    blocks["qs"] = _pack(codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return blocks


def _symmetric(
    kind: str, cells: np.ndarray, run: int, low: int, sub_low: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return blocks with `d`, scales [blocks, S] of sub_low .. -sub_low - 1, and cells in steps.

    The element of largest magnitude of a run is `low` steps, the largest scale is `sub_low` of `d`.
    """
    blocks = np.zeros(len(cells), KINDS[kind].fields)
    runs = cells.reshape(len(cells), -1, run)
    ideal = _extreme(runs) / np.float32(low)
    blocks["d"], d = _half(kind, _extreme(ideal) / np.float32(sub_low))
    scales = np.clip(np.rint(ideal / d[:, None]), sub_low, -sub_low - 1)
    return blocks, scales, _steps(runs, d[:, None] * scales).reshape(cells.shape)


def _q6_k(cells: np.ndarray) -> np.ndarray:
    blocks, scales, steps = _symmetric("q6_k", cells, 16, -32, -128)
    codes = _u8(steps + np.float32(32), 63)
    blocks["scales"], blocks["qs"] = scales, _pack_nibbles(codes, 64)
    blocks["qh"] = _pack((codes >> 4).reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return blocks


def _q3_k(cells: np.ndarray) -> np.ndarray:
    blocks, scales, steps = _symmetric("q3_k", cells, 16, -4, -32)
    codes = _u8(steps + np.float32(4), 7)
    blocks["hmask"] = _pack((codes >> 2).reshape(-1, 8, 32), 1)
    blocks["qs"] = _pack((codes & 3).reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    sixes = (scales + 32).astype(np.uint8)
    low, high = _pack((sixes & 15).reshape(-1, 2, 8), 4), _pack((sixes >> 4).reshape(-1, 4, 4), 2)
    blocks["scales"] = np.concatenate([low, high], axis=1)
    return blocks


def _iq4_xs(cells: np.ndarray) -> np.ndarray:
    blocks, scales, steps = _symmetric("iq4_xs", cells, 32, int(IQ4_VALUES[0]), -32)
    sixes = (scales + 32).astype(np.uint16)
    blocks["scales_l"] = sixes[:, 0::2] & 15 | (sixes[:, 1::2] & 15) << 4
    blocks["scales_h"] = np.bitwise_or.reduce(
        sixes >> 4 << np.arange(0, 16, 2, dtype=np.uint16), axis=1
    )
    blocks["qs"] = _pack_nibbles(_iq4(steps), 16)
    return blocks


def _nearest(grid: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Return the row of a grid [rows, 4] that is nearest to each group of magnitudes [.., 4]."""
    points = grid.astype(np.float32)
    half_squares = np.square(points).sum(axis=1) / 2
    found = np.empty(len(magnitudes), np.uint16)
    for start in range(0, len(magnitudes), _GROUPS):
        piece = magnitudes[start : start + _GROUPS]
        found[start : start + _GROUPS] = np.argmin(half_squares - piece @ points.T, axis=1)
    return found


def _grid_scales(
    kind: str, cells: np.ndarray, largest: int, unit: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return blocks with `d`, 4-bit scales u8 [blocks, 8], and magnitudes in steps [.., 4].

    A run's scale is d * unit * (1 + 2 * code).
    """
    blocks = np.zeros(len(cells), KINDS[kind].fields)
    runs = np.abs(cells).reshape(len(cells), 8, 32)
    ideal = runs.max(axis=2) / np.float32(largest * unit)
    blocks["d"], d = _half(kind, ideal.max(axis=1) / np.float32(31))
    codes = _u8((ideal / d[:, None] - 1) / 2, 15)
    scales = d[:, None] * np.float32(unit) * (1 + 2 * codes)
    return blocks, codes, _steps(runs, scales).reshape(-1, 4)


def _iq3_s(cells: np.ndarray) -> np.ndarray:
    blocks, scales, steps = _grid_scales("iq3_s", cells, 15, 1.0)
    found = _nearest(ggml_grids.IQ3_S, steps).reshape(-1, 64)
    blocks["qs"] = found & 255
    blocks["qh"] = np.packbits((found >> 8).astype(np.uint8), axis=1, bitorder="little")
    blocks["signs"] = np.packbits(cells < 0, axis=1, bitorder="little")
    blocks["scales"] = scales[:, 0::2] | scales[:, 1::2] << 4
    return blocks


def _iq3_xxs(cells: np.ndarray) -> np.ndarray:
    blocks, scales, steps = _grid_scales("iq3_xxs", cells, 62, 0.25)
    eights = cells.reshape(-1, 8)
    negative = eights < 0
    odd = negative.sum(axis=1) % 2 == 1
    # The signs of eight are even in number, so the least element of some has the wrong one.
    least = np.abs(eights).argmin(axis=1)
    negative[odd, least[odd]] ^= True
    steps.reshape(-1, 8)[odd, least[odd]] = 0
    blocks["qs"] = _nearest(ggml_grids.IQ3_XXS, steps).reshape(-1, 64)
    signs = (negative[:, :7] @ _BITS[:7]).astype(np.uint32).reshape(-1, 8, 4)
    shifted = signs << np.array([0, 7, 14, 21], np.uint32)
    words = np.bitwise_or.reduce(shifted, axis=2)
    blocks["scales_and_signs"] = words | scales.astype(np.uint32) << 28
    return blocks


def _tq1_0(cells: np.ndarray) -> np.ndarray:
    blocks = np.zeros(len(cells), KINDS["tq1_0"].fields)
    blocks["d"], d = _half("tq1_0", np.abs(cells).max(axis=1))
    digits = _u8(cells / d[:, None] + 1, 2)
    runs = (digits[:, :160].reshape(-1, 5, 32), digits[:, 160:240].reshape(-1, 5, 16))
    blocks["qs"] = np.concatenate([_pack_digits(run) for run in runs], axis=1)
    blocks["qh"] = _pack_digits(digits[:, 240:].reshape(-1, 4, 4))
    return blocks


def _pack_digits(digits: np.ndarray) -> np.ndarray:
    """Return digits [blocks, 4 or 5, bytes] in base three as fractions of 256, rounded up."""
    weights = POWERS[::-1][: digits.shape[1]].astype(np.uint16)
    return np.asarray(((digits * weights).sum(axis=1) * 256 + 242) // 243, np.uint8)


ENCODERS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "q3_k": _q3_k,
    "q2_k": _q2_k,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "iq3_s": _iq3_s,
    "iq3_xxs": _iq3_xxs,
    "tq1_0": _tq1_0,
}
"""Type -> encoder."""
