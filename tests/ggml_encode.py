"""Plain encoders of ggml's types, for files and matrices of tests; the product only reads them.

Types with minima spread the codes over the range of a run (K-quants: widened to include zero at its
lower end), the others give the element of largest magnitude the first code (q5_0: -16, iq4: -127);
tq1_0 takes the largest magnitude as its scale, iq3 gives it the last magnitude of the grid. The
error of an element is at most half a step s of its run, and where the scales of runs are codes
themselves half a step of theirs: with `top` the largest code
    q4_k, q5_k, q2_k: s / 2 + top * d / 2 + dmin / 2
    q6_k, q3_k: s + top * |d|, because the other sign has one code less, in scales too
    q4_1, q5_1, tq1_0: s / 2, and the rounding of m; q5_0: s
    iq4_nl: 14 |d|; iq4_xs: 14 s + 127 |d|
"""

import numpy as np

from clocher_kernels import quant_tensor
from clocher_kernels.dtypes import LARGEST, SMALLEST
from clocher_kernels.errors import FormatError
from clocher_kernels.formats import Format, Ggml
from clocher_kernels.formats.base import require_finite
from clocher_kernels.formats.ggml_blocks import (
    IQ4_VALUES,
    KINDS,
    POWERS,
    Kind,
    Plane,
    grid,
    places_of,
    write_numbers,
)
from clocher_kernels.quant_tensor import QuantTensor

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


def _store(kind: Kind, blocks: np.ndarray, codes: np.ndarray, **numbers: np.ndarray) -> None:
    """Write codes, u8 [blocks, elements], scales and minima, without their biases."""
    raw = blocks.view(np.uint8).reshape(len(blocks), -1)
    for name, values in {"codes": codes, **numbers}.items():
        write_numbers(getattr(kind, name), raw, values)


def _u8(steps: np.ndarray, top: int) -> np.ndarray:
    return np.asarray(np.clip(np.rint(steps), 0, top), np.uint8)


def _range(kind: str, cells: np.ndarray) -> np.ndarray:
    """Spread codes over the range of a block."""
    about = KINDS[kind]
    blocks, top = np.zeros(len(cells), about.fields), _top(about)
    low = cells.min(axis=1)
    # Divided before the difference, which could overflow.
    blocks["d"], d = _half(kind, cells.max(axis=1) / np.float32(top) - low / np.float32(top))
    blocks["m"], _ = _half(kind, low)
    m = blocks["m"].astype(np.float32)
    _store(about, blocks, _u8((cells - m[:, None]) / d[:, None], top))
    return blocks


def _affine(kind: str, cells: np.ndarray) -> np.ndarray:
    """Spread codes over the range of each run, with scales and minima that are codes too."""
    about = KINDS[kind]
    blocks, top = np.zeros(len(cells), about.fields), _top(about)
    sub_top = max(sum(mask << to for *_, mask, to in own) for own in places_of(about.scales))
    runs = cells.reshape(len(cells), -1, about.run)
    low = np.minimum(runs.min(axis=2), 0)
    ideal = runs.max(axis=2) / np.float32(top) - low / np.float32(top)
    blocks["d"], d = _half(kind, ideal.max(axis=1) / np.float32(sub_top))
    blocks["dmin"], dmin = _half(kind, -low.min(axis=1) / np.float32(sub_top))
    scales, minima = _u8(ideal / d[:, None], sub_top), _u8(-low / dmin[:, None], sub_top)
    steps = _steps(runs + (dmin[:, None] * minima)[..., None], d[:, None] * scales)
    _store(about, blocks, _u8(steps, top).reshape(cells.shape), scales=scales, minima=minima)
    return blocks


def _symmetric(kind: str, cells: np.ndarray) -> np.ndarray:
    """Give the first code to the element of largest magnitude of a run.

    The largest scale is the lowest of its numbers: they go one further on that side.
    """
    about = KINDS[kind]
    blocks = np.zeros(len(cells), about.fields)
    low = np.float32(-about.bias if about.table is None else about.table[0])
    numbers = {}
    if about.scales:
        runs, sub_low = cells.reshape(len(cells), -1, about.run), -(about.scale_bias or 128)
        ideal = _extreme(runs) / low
        blocks["d"], d = _half(kind, _extreme(ideal) / np.float32(sub_low))
        scales = np.clip(np.rint(ideal / d[:, None]), sub_low, -sub_low - 1)
        steps = _steps(runs, d[:, None] * scales).reshape(cells.shape)
        numbers["scales"] = (scales + about.scale_bias).astype(np.int8).view(np.uint8)
    else:
        blocks["d"], d = _half(kind, _extreme(cells) / low)
        steps = cells / d[:, None]
    if about.table is None:
        codes = _u8(steps + np.float32(about.bias), 2 * about.bias - 1)
    else:
        codes = np.searchsorted(_IQ4_BOUNDS, steps.ravel()).astype(np.uint8).reshape(steps.shape)
    _store(about, blocks, codes, **numbers)
    return blocks


def _top(kind: Kind) -> int:
    return sum(mask << to for *_, mask, to in places_of(kind.codes)[0])


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
    found = _nearest(grid("iq3_s"), steps).reshape(-1, 64)
    blocks["qs"] = found & 255
    blocks["qh"] = np.packbits((found >> 8).astype(np.uint8), axis=1, bitorder="little")
    blocks["signs"] = np.packbits(cells < 0, axis=1, bitorder="little")
    Plane(0, 4, 4, 1).write(blocks["scales"], scales)
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
    blocks["qs"] = _nearest(grid("iq3_xxs"), steps).reshape(-1, 64)
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


_OF_GRIDS = {"iq3_s": _iq3_s, "iq3_xxs": _iq3_xxs, "tq1_0": _tq1_0}


def _encoded(kind: str, cells: np.ndarray) -> np.ndarray:
    """Return blocks, an array of the kind's fields, of fp32 [blocks, elements]."""
    if kind in _OF_GRIDS:
        return _OF_GRIDS[kind](cells)
    about = KINDS[kind]
    encoder = _affine if about.minima else _range if about.low else _symmetric
    return encoder(kind, cells)


def encode(values: np.ndarray, fmt: Format) -> QuantTensor:
    """Return fp32 values in any format."""
    if not isinstance(fmt, Ggml):
        return quant_tensor.encode(values, fmt)
    plane = fmt.planes(values.shape)["blocks"]
    require_finite(fmt.name, values)
    blocks = _encoded(fmt.kind, values.reshape(-1, fmt.block)).view(np.uint8)
    return QuantTensor(values.shape, fmt, {"blocks": blocks.reshape(plane.shape)})
