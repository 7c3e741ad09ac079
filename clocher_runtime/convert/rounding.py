"""Rounding to the nearest code (RTN): a float tensor gets fewer bits, a few rows at a time.

What there is to choose for int4 and int8 is the range that the codes of a cell (a row, a group, a
matrix) span; fp8, MXFP4 and ternary weights are what their format's own encoder makes of them:

    none            from the smallest to the largest element, as the format's own encoder does
    clamp:C         as none, of the elements clamped to [-C, C]
    percentile:P    as none, of the elements without the largest 100 - P % (of the magnitudes if the
                    format is symmetric, at each end if it is affine)
    mse             the one of `SEARCH` times the range of "none" with the least squared error,
                    measured with the scale as it is stored

What lies outside of the range gets its last code. Equal input gives equal bytes, whatever the
number of threads.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from clocher_kernels.dtypes import LARGEST
from clocher_kernels.errors import FormatError, UsageError
from clocher_kernels.formats import Float, Format, Fp8, Int4, Int8, Mxfp4, Ternary, scaling
from clocher_kernels.formats.fp8 import BLOCK
from clocher_kernels.quant_tensor import QuantTensor

CLIPS = ("none", "percentile:P", "clamp:C", "mse")
SEARCH = tuple(float(factor) for factor in np.linspace(1.1, 0.55, 23))
"""Factors of the scale that `mse` tries. 1 is among them, so it never does worse than `none`."""

_BLOCK_ELEMENTS = 1 << 17
_MAX_CLAMP = 1e30

Planes = dict[str, np.ndarray]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Clip:
    """How the range of a cell is chosen."""

    # one of the four ways that the text of this module describes
    kind: Literal["none", "percentile", "clamp", "mse"] = "none"
    value: float = 0.0  # P of "percentile", C of "clamp"

    def __str__(self) -> str:
        return f"{self.kind}:{self.value:.12g}" if self.value else self.kind


NO_CLIP = Clip()


def parse_clip(text: str) -> Clip:
    """Return the clip that a manifest or a command line spells.

    Raises UsageError: it is not one of `CLIPS`, or its number is out of range.
    """
    kind, colon, number = text.partition(":")
    if kind in ("none", "mse") and not colon:
        return Clip("mse") if kind == "mse" else NO_CLIP
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if kind == "percentile" and 50 < value <= 100:
        return Clip("percentile", value)
    if kind == "clamp" and 0 < value <= _MAX_CLAMP:
        return Clip("clamp", value)
    raise UsageError(
        f"clip is {text!r:.60}; known: {', '.join(CLIPS)}, with 50 < P <= 100 and C > 0"
    )


def round_tensor(
    tensor: QuantTensor, fmt: Format, clip: Clip = NO_CLIP, threads: int = 1, rows: int = 0
) -> QuantTensor:
    """Round a tensor.

    `tensor`: [..., N, K] in any format; what it decodes to is rounded; `fmt`: of integers, fp8,
    MXFP4 or ternary. Where a whole matrix shares a scale, ternary and fp8 decode all of it at a
    time; `clip`: how the range of a cell is chosen, for integers; `rows`: rows of a block; 0 leaves
    it to us. The result does not depend on it. Raises FormatError: a value is NaN or infinite, or a
    scale is beyond the type of the scales; ShapeError: the tensor is a vector.
    """
    if not isinstance(fmt, Int4 | Int8) and (isinstance(fmt, Float) or clip != NO_CLIP):
        raise FormatError(f"rounding with clip {clip} gives int4 or int8, not {fmt.name}")
    planes = {k: np.empty(p.shape, p.storage) for k, p in fmt.planes(tensor.shape).items()}
    step = rows or max(1, _BLOCK_ELEMENTS // tensor.shape[-1])
    if _is_whole(fmt):
        step = tensor.shape[-2]
    elif isinstance(fmt, Fp8) and fmt.scope == "b128":
        step = -(-step // BLOCK) * BLOCK
    with Rows(tensor, threads, step) as blocks:
        for index in np.ndindex(*tensor.shape[:-2]):
            mine = {key: plane[index] for key, plane in planes.items()}
            if isinstance(fmt, Int8) and fmt.group == "tensor":
                _round_whole(blocks, index, fmt, clip, mine)
            else:
                blocks.each(index, partial(_round_rows, fmt, clip, mine))
    return QuantTensor(tensor.shape, fmt, planes)


def _is_whole(fmt: Format) -> bool:
    """Return whether a matrix of the format is encoded in one piece."""
    return isinstance(fmt, Ternary) or (isinstance(fmt, Fp8) and fmt.scope == "tensor")


class Rows:
    """Decodes the matrices of a tensor a few rows at a time, on several threads."""

    def __init__(self, tensor: QuantTensor, threads: int, step: int) -> None:
        """Prepare to read a tensor [..., N, K], this many rows at a time."""
        self._tensor = tensor
        self._step = step
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def __enter__(self) -> "Rows":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def each(self, index: tuple[int, ...], work: Callable[[int, np.ndarray], T]) -> list[T]:
        """Return work(first row, values fp32 [n, K]) of every block of a matrix, in order."""
        read = self._reader(index)
        starts = range(0, self._tensor.shape[-2], self._step)

        def one(start: int) -> T:
            return work(start, read(start))

        return list((self._pool.map if self._pool else map)(one, starts))

    def _reader(self, index: tuple[int, ...]) -> Callable[[int], np.ndarray]:
        """Return what decodes the block at a row."""
        tensor, step = self._tensor, self._step
        rows, columns = tensor.shape[-2:]
        mine = {key: plane[index] for key, plane in tensor.planes.items()} if index else None
        if isinstance(tensor.format, Float | Mxfp4):
            # A row of these formats is a row of each of its planes.
            planes = mine or tensor.planes

            def read(start: int) -> np.ndarray:
                block = {key: plane[start : start + step] for key, plane in planes.items()}
                shape = (min(step, rows - start), columns)
                return np.ascontiguousarray(tensor.format.decode(block, shape), np.float32)

            return read
        whole = tensor.format.decode(mine, (rows, columns)) if mine else tensor.decode()
        return lambda start: whole[start : start + step]


def _round_rows(fmt: Format, clip: Clip, planes: Planes, start: int, values: np.ndarray) -> None:
    """Round whole rows [n, K], none of which shares a scale with other rows, into the planes."""
    if isinstance(fmt, Int4 | Int8) and clip.kind != "none":
        scaling.require_finite(fmt.name, values)
        encoded = _encode_clipped(values, fmt, clip)
    else:
        encoded = fmt.encode(values)
    for key, plane in planes.items():
        blocks = key == "scales" and isinstance(fmt, Fp8) and fmt.scope == "b128"
        first = start // BLOCK if blocks else start
        plane[first : first + len(encoded[key])] = encoded[key]


def _encode_clipped(values: np.ndarray, fmt: Int4 | Int8, clip: Clip) -> dict[str, np.ndarray]:
    cells = scaling.split(values, fmt.group)
    if cells.ndim == 2:
        cells = cells[:, None]
    low, high = cells.min(axis=-1), cells.max(axis=-1)
    if clip.kind == "clamp":
        low, high = _clamped(low, high, clip.value)
    elif clip.kind == "percentile":
        low, high = _percentiles(cells, values.shape[1], low, high, fmt, clip.value)
    ideal = _ideal(low, high, fmt)
    if clip.kind == "mse":
        factor = _best_factor(cells, ideal, low, fmt)
        ideal, low = _multiplied(ideal, factor, fmt), low * factor
    scales, step = scaling.store(fmt.name, ideal, fmt.scale_dtype)
    zero = _zero(step, low, fmt)
    codes = scaling.join(_codes(cells, step, zero, fmt), values.shape)
    if fmt.group == "row":
        scales, zero = scales[:, 0], zero[:, 0]
    if isinstance(fmt, Int8):
        return {"codes": codes.astype(np.int8), "scales": scales}
    zeros = None if fmt.symmetric else zero.astype(np.uint8)
    return fmt.pack(codes.astype(np.uint8), scales, zeros)


def _round_whole(rows: Rows, index: tuple[int, ...], fmt: Int8, clip: Clip, planes: Planes) -> None:
    """Round a matrix with one scale: a pass for its range, one for the codes."""

    def span(_: int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scaling.require_finite(fmt.name, values)
        return values.min(), values.max()

    lows, highs = zip(*rows.each(index, span), strict=True)
    low, high = np.min(lows, keepdims=True), np.max(highs, keepdims=True)
    if clip.kind == "clamp":
        low, high = _clamped(low, high, clip.value)
    elif clip.kind == "percentile":
        high = _magnitude_at(rows, index, clip.value)
        low = -high
    ideal = _ideal(low, high, fmt)
    if clip.kind == "mse":

        def errors(_: int, values: np.ndarray) -> np.ndarray:
            return np.stack([_error(values[None], ideal, low, f, fmt).sum() for f in SEARCH])

        best = int(np.argmin(np.sum(rows.each(index, errors), axis=0)))
        ideal = _multiplied(ideal, SEARCH[best], fmt)
    scales, step = scaling.store(fmt.name, ideal, fmt.scale_dtype)
    planes["scales"][...] = scales

    def put(start: int, values: np.ndarray) -> None:
        planes["codes"][start : start + len(values)] = _codes(values, step, np.zeros(1), fmt)

    rows.each(index, put)


def _clamped(low: np.ndarray, high: np.ndarray, limit: float) -> tuple[np.ndarray, np.ndarray]:
    return np.maximum(low, np.float32(-limit)), np.minimum(high, np.float32(limit))


def _ideal(low: np.ndarray, high: np.ndarray, fmt: Int4 | Int8) -> np.ndarray:
    """Return the scale that makes the codes span a range, before it is rounded."""
    if isinstance(fmt, Int8):
        return np.asarray(np.maximum(high, -low) / np.float32(127))
    if fmt.symmetric:
        return np.asarray(np.where(-low > high, low, high) / np.float32(-8))
    # Divided before the difference, which could overflow.
    upper, lower = np.maximum(high, 0) / np.float32(15), np.minimum(low, 0) / np.float32(15)
    return np.asarray(upper - lower)


def _zero(step: np.ndarray, low: np.ndarray, fmt: Int4 | Int8) -> np.ndarray:
    """Return the code of the value zero in each cell."""
    if isinstance(fmt, Int8) or fmt.symmetric:
        return np.full_like(step, 0 if isinstance(fmt, Int8) else 8)
    return np.asarray(np.clip(np.rint(-np.minimum(low, 0) / step), 0, 15))


def _codes(cells: np.ndarray, step: np.ndarray, zero: np.ndarray, fmt: Int4 | Int8) -> np.ndarray:
    """Return the codes of cells, as floats."""
    codes = np.asarray(cells / step[..., None])
    np.rint(codes, out=codes)
    if isinstance(fmt, Int8):
        np.clip(codes, -127, 127, out=codes)
        return codes
    codes += zero[..., None]
    np.clip(codes, 0, 15, out=codes)
    return codes


def _best_factor(
    cells: np.ndarray, ideal: np.ndarray, low: np.ndarray, fmt: Int4 | Int8
) -> np.ndarray:
    """Return the factor of each cell's scale that gives the least squared error."""
    best = np.full(ideal.shape, np.inf)
    chosen = np.ones_like(ideal)
    for factor in SEARCH:
        error = _error(cells, ideal, low, factor, fmt)
        better = error < best
        best[better] = error[better]
        chosen[better] = factor
    return chosen


def _error(
    cells: np.ndarray, ideal: np.ndarray, low: np.ndarray, factor: float, fmt: Int4 | Int8
) -> np.ndarray:
    """Return the squared error of each cell if its scale is multiplied by a factor."""
    _, step = scaling.store(fmt.name, _multiplied(ideal, factor, fmt), fmt.scale_dtype)
    zero = _zero(step, low * np.float32(factor), fmt)
    steps = cells / step[..., None]
    codes = np.rint(steps)
    if isinstance(fmt, Int8):
        np.clip(codes, -127, 127, out=codes)
    elif fmt.symmetric:
        np.clip(codes, -8, 7, out=codes)
    else:
        np.clip(codes, -zero[..., None], 15 - zero[..., None], out=codes)
    codes -= steps
    squares = np.einsum("...i,...i->...", codes, codes)
    return np.asarray(squares * step.astype(np.float64) ** 2)


def _multiplied(ideal: np.ndarray, factor: float | np.ndarray, fmt: Int4 | Int8) -> np.ndarray:
    """Return a scale times a factor, which alone must not put it beyond its type."""
    largest = np.maximum(np.abs(ideal), np.float32(LARGEST[fmt.scale_dtype]))
    return np.asarray(np.clip(ideal * np.asarray(factor, np.float32), -largest, largest))


def _percentiles(
    cells: np.ndarray,
    columns: int,
    low: np.ndarray,
    high: np.ndarray,
    fmt: Int4 | Int8,
    percent: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the range of each cell [n, groups, size] without its outermost elements.

    The padding of a short last group is zeros. They are the smallest magnitudes, and every range
    is widened to zero, so ranks counted from the outside do not see them.
    """
    groups, size = cells.shape[1:]
    low, high = low.copy(), high.copy()
    last = columns - (groups - 1) * size
    parts = [(slice(0, groups - 1), size), (slice(groups - 1, groups), last)]
    affine = isinstance(fmt, Int4) and not fmt.symmetric
    for part, count in parts:
        outside = count - _rank(percent, count)
        if not outside or not cells[:, part].size:
            continue
        if affine:
            ordered = np.partition(cells[:, part], (outside, size - 1 - outside), axis=-1)
            low[:, part] = ordered[..., outside]
            high[:, part] = ordered[..., size - 1 - outside]
        else:
            magnitude = np.partition(np.abs(cells[:, part]), size - 1 - outside, axis=-1)
            limit = magnitude[..., size - 1 - outside]
            negative = -low[:, part] > high[:, part]
            low[:, part] = np.where(negative, -limit, 0)
            high[:, part] = np.where(negative, 0, limit)
    return low, high


def _rank(percent: float, count: int) -> int:
    """Return how many of the elements lie inside, counted from the smallest."""
    return max(1, math.ceil(percent * count / 100 - 1e-9))


def _magnitude_at(rows: Rows, index: tuple[int, ...], percent: float) -> np.ndarray:
    """Return a percentile of the magnitudes of a matrix, fp32 [1], exactly, without sorting it.

    The bits of positive floats have the order of the floats: count the upper halves, then the
    lower halves of those that share the upper half that was found.
    """

    def upper(_: int, values: np.ndarray) -> np.ndarray:
        return np.bincount(np.abs(values).view(np.uint32).reshape(-1) >> 16, minlength=1 << 16)

    counts = np.cumsum(np.sum(rows.each(index, upper), axis=0))
    rank = _rank(percent, int(counts[-1]))
    top = int(np.searchsorted(counts, rank))

    def lower(_: int, values: np.ndarray) -> np.ndarray:
        bits = np.abs(values).view(np.uint32).reshape(-1)
        return np.bincount(bits[bits >> 16 == top] & 0xFFFF, minlength=1 << 16)

    below = int(counts[top - 1]) if top else 0
    low = int(np.searchsorted(np.cumsum(np.sum(rows.each(index, lower), axis=0)), rank - below))
    return np.array([top << 16 | low], np.uint32).view(np.float32)
