"""Rounding to the nearest code (RTN), a few rows at a time.

For int4 and int8 the range that a cell's codes span can be chosen, see docs/quantisation.md; values
outside get its last code. `percentile:P` leaves out the largest 100 - P % of the magnitudes if the
format is symmetric, at each end if it is affine. The bytes do not depend on the number of threads.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from clocher_kernels.errors import UsageError
from clocher_kernels.formats import Float, Format, Int4, Int8, Tcq, Ternary, base
from clocher_kernels.formats.floats import FP8_BLOCK as BLOCK
from clocher_kernels.formats.tcq import STRIP
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.convert import imx, trellis

CLIPS = ("none", "percentile:P", "clamp:C", "mse")

_BLOCK_ELEMENTS = 1 << 17
_MAX_CLAMP = 1e30


@dataclass(frozen=True, slots=True)
class Clip:
    """How the range of a cell is chosen; `value` is P of "percentile", C of "clamp"."""

    kind: Literal["none", "percentile", "clamp", "mse"] = "none"
    value: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}:{self.value:.12g}" if self.value else self.kind


NO_CLIP = Clip()


def parse_clip(text: str) -> Clip:
    """Return the clip that a manifest or a command line spells, or raise UsageError."""
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
    """Round the decoded values of a tensor [..., N, K], `rows` (0: about 128 k elements) at a time.

    The result does not depend on `rows`.
    """
    planes = {k: np.empty(p.shape, p.storage) for k, p in fmt.planes(tensor.shape).items()}
    count = tensor.shape[-2]
    step = rows or max(1, _BLOCK_ELEMENTS // tensor.shape[-1])
    if isinstance(fmt, Ternary) or "tensor" in (getattr(fmt, k, "") for k in ("group", "scope")):
        step = count
    step = whole_steps(fmt, step)
    with ThreadPoolExecutor(threads) as pool:
        for index in np.ndindex(*tensor.shape[:-2]):
            matrix = QuantTensor(
                tensor.shape[-2:], tensor.format, {k: p[index] for k, p in tensor.planes.items()}
            )
            if not _has_rows(matrix):
                matrix = encode(matrix.decode(), Float("f32"))

            def one(
                start: int, index: tuple[int, ...] = index, matrix: QuantTensor = matrix
            ) -> None:
                values = np.ascontiguousarray(look_up(matrix, slice(start, start + step)))
                for key, plane in _encode(values, fmt, clip).items():
                    planes[key][index][row_part(fmt, key, start, start + len(values))] = plane

            list(pool.map(one, range(0, count, step)))
    return QuantTensor(tensor.shape, fmt, planes)


def row_part(fmt: Format, key: str, start: int, stop: int) -> slice:
    """Return where a plane of a matrix has these rows, whole steps from the first."""
    unit = _together(fmt, key)
    return slice(start // unit, -(-stop // unit))


def whole_steps(fmt: Format, rows: int) -> int:
    """Return at least so many rows, and as many as have parts of their own of each plane."""
    unit = max(_together(fmt, key) for key in ("codes", "scales"))
    return -(-rows // unit) * unit


def _together(fmt: Format, key: str) -> int:
    """Return how many rows share an index of a plane."""
    if isinstance(fmt, Tcq):
        return STRIP if key == "codes" else 1
    return BLOCK if key == "scales" and getattr(fmt, "scope", "") == "b128" else 1


def look_up(tensor: QuantTensor, index: int | slice | np.ndarray) -> np.ndarray:
    """Decode one expert of a stack, or some rows of a matrix, fp32."""
    if not _has_rows(tensor):
        return tensor.decode()[index]
    planes = {key: plane[index] for key, plane in tensor.planes.items()}
    count = () if isinstance(index, int) else (len(next(iter(planes.values()))),)
    return QuantTensor((*count, *tensor.shape[1:]), tensor.format, planes).decode()


def row_pieces(*tensors: QuantTensor, elements: int) -> Iterator[tuple[QuantTensor, ...]]:
    """Yield the same few rows of tensors of one shape; the tensors where one cannot be cut."""
    *lead, columns = tensors[0].shape or (1,)
    if not lead or not all(_has_steps(tensor) for tensor in tensors):
        yield tensors
        return
    rows, step = prod(lead), max(1, elements // columns)
    step = max(whole_steps(tensor.format, step) for tensor in tensors)
    flat = [
        {k: plane.reshape(-1, *plane.shape[len(lead) :]) for k, plane in tensor.planes.items()}
        for tensor in tensors
    ]
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield tuple(
            QuantTensor(
                (stop - start, columns),
                tensor.format,
                {k: p[row_part(tensor.format, k, start, stop)] for k, p in own.items()},
            )
            for tensor, own in zip(tensors, flat, strict=True)
        )


def _has_rows(tensor: QuantTensor) -> bool:
    """Return whether each index of the first dimension has its own part of each plane."""
    return all(plane.shape[:1] == tensor.shape[:1] for plane in tensor.planes.values())


def _has_steps(tensor: QuantTensor) -> bool:
    """Return whether whole steps of rows have parts of their own of each plane."""
    *lead, rows = tensor.shape[:-1]
    units = {key: _together(tensor.format, key) for key in tensor.planes}
    return all(
        rows % unit == 0 and tensor.planes[key].shape[: len(lead) + 1] == (*lead, rows // unit)
        for key, unit in units.items()
    )


def _encode(values: np.ndarray, fmt: Format, clip: Clip) -> dict[str, np.ndarray]:
    if isinstance(fmt, Tcq):
        return dict(trellis.search(base.turn(values, fmt.turned), fmt).planes)
    if not isinstance(fmt, Int4 | Int8) or clip == NO_CLIP:
        return fmt.encode(values)
    if clip.kind == "mse":
        return dict(imx.search(values, fmt).planes)
    base.require_finite(fmt.name, values)
    clipped = np.clip(values, -np.float32(clip.value), np.float32(clip.value))
    if clip.kind == "percentile":
        clipped = _inside(values, fmt, clip.value)
    # The range is that of the clipped values, the codes are those of the values themselves.
    planes = fmt.encode(clipped)
    chosen = {key: planes[key] for key in ("scales", "zeros") if key in planes}
    return fmt.encode_with(values, **chosen)


def _inside(values: np.ndarray, fmt: Int4 | Int8, percent: float) -> np.ndarray:
    """Clip each cell of a matrix to a percentile of itself."""
    flat = values.reshape(1, -1) if fmt.group == "tensor" else values
    columns = flat.shape[1]
    size = min(fmt.group, columns) if isinstance(fmt.group, int) else columns
    end = columns // size * size  # where a short last group begins
    out = np.empty_like(flat)
    for part, width in ((slice(0, end), size), (slice(end, columns), columns - end)):
        if width:
            cells = flat[:, part].reshape(len(flat), -1, width)
            out[:, part] = _without_outermost(cells, fmt, percent).reshape(len(flat), -1)
    return out.reshape(values.shape)


def _without_outermost(cells: np.ndarray, fmt: Int4 | Int8, percent: float) -> np.ndarray:
    size = cells.shape[-1]
    inside = max(1, math.ceil(percent * size / 100 - 1e-9)) - 1
    if isinstance(fmt, Int4) and not fmt.symmetric:
        ordered = np.partition(cells, (size - 1 - inside, inside), axis=-1)
        low, high = ordered[..., size - 1 - inside, None], ordered[..., inside, None]
        return np.asarray(np.clip(cells, low, high))
    limit = np.partition(np.abs(cells), inside, axis=-1)[..., inside, None]
    # The scale of symmetric int4 has the sign of the largest element, which clipping must not hide.
    negative = -cells.min(axis=-1, keepdims=True) > cells.max(axis=-1, keepdims=True)
    upper = np.where(negative, np.nextafter(limit, np.float32(0)), limit)
    return np.asarray(np.clip(cells, -limit, upper))
