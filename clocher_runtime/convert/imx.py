"""IMX: scales chosen by an importance-weighted search.

For every group, the scale (and zero point) with the least sum over columns j of h_j (w_j -
value_j)^2, h_j = E[x_j^2], is chosen from candidates as stored, then refined once to the
least-squares scale of its codes. The first candidate is plain rounding, so it never gets worse.

Source: llama.cpp's importance matrix (`make_qx_quants`), the imatrix observer of llm-compressor,
auto-round.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from clocher_kernels.dtypes import LARGEST, STORAGE
from clocher_kernels.errors import ShapeError, UsageError
from clocher_kernels.formats import Format, Fp8, Int4, Int8, Mxfp4, base
from clocher_kernels.formats.floats import FP8_BLOCK as BLOCK
from clocher_kernels.formats.floats import by_blocks
from clocher_kernels.quant_tensor import QuantTensor, encode

GRID = 23
STRETCHES = tuple(float(2.0 ** (i / 8)) for i in range(8))
"""Candidate scales of fp8, relative to plain rounding."""

_FLOOR = 1e-4
"""Least importance of a column that calibration never saw, relative to the mean."""
_UNIT = 1 << 15
"""Elements of a piece of work: three fp32 arrays of it fit the L2 cache."""


def search(
    values: np.ndarray, fmt: Format, importance: np.ndarray | None = None, *, threads: int = 1
) -> QuantTensor:
    """Quantise a matrix [N, K] fp32 with the scales of least weighted error.

    `importance`: [K], E[x^2] of each column; None: uniform.
    """
    rows, columns = values.shape
    if importance is not None and importance.shape != (columns,):
        raise ShapeError(f"importance is {list(importance.shape)}; expected [{columns}]")
    weights = _normalised(importance, columns)
    if isinstance(fmt, Mxfp4):
        return QuantTensor(values.shape, fmt, fmt.encode_weighted(values, weights))
    if isinstance(fmt, Fp8):
        if fmt.scope == "tensor":
            return encode(values, fmt)
        return _search_fp8(values, fmt, weights, threads)
    if not isinstance(fmt, Int4 | Int8):
        raise UsageError(f"{fmt.name} has no scales to search for; choose int4, int8, fp8 or mxfp4")
    if fmt.group == "tensor":
        row = search(
            values.reshape(1, -1), Int8("row", fmt.scale_dtype), np.tile(weights, rows)
        ).planes
        planes = {"codes": row["codes"].reshape(values.shape), "scales": row["scales"]}
        return QuantTensor(values.shape, fmt, planes)
    base.require_finite(fmt.name, values)
    size = columns if fmt.group == "row" else min(fmt.group, columns)
    groups = -(-columns // size)
    cells = np.zeros((groups, size), np.float32)
    cells.reshape(-1)[:columns] = weights
    scales = np.empty((rows, groups), STORAGE[fmt.scale_dtype])
    affine = isinstance(fmt, Int4) and not fmt.symmetric
    zeros = np.empty((rows, groups), np.uint8) if affine else None
    codes = np.empty((rows, columns), np.uint8 if isinstance(fmt, Int4) else np.int8)
    step = int(np.clip(_UNIT // size, 64, 1024))

    def work(start: int) -> None:
        part = slice(start, start + step)
        block = _Block(fmt, values[part], cells)
        scales[part] = block.scales.T
        if zeros is not None:
            zeros[part] = block.zeros.T
        codes[part] = block.codes().T[:, :columns]

    _each(work, range(0, rows, step), threads)
    shape = fmt.planes(values.shape)["scales"].shape
    scales = scales.reshape(shape)
    if isinstance(fmt, Int8):
        return QuantTensor(values.shape, fmt, {"codes": codes, "scales": scales})
    packed = fmt.pack(codes, scales, None if zeros is None else zeros.reshape(shape))
    return QuantTensor(values.shape, fmt, packed)


def _each(work: Callable[[int], None], starts: range, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, starts))


def _search_fp8(values: np.ndarray, fmt: Fp8, weights: np.ndarray, threads: int) -> QuantTensor:
    planes = {key: np.empty(p.shape, p.storage) for key, p in fmt.planes(values.shape).items()}
    blocks = fmt.scope == "b128"

    def work(start: int) -> None:
        part = np.ascontiguousarray(values[start : start + BLOCK])
        best, least = np.ones(1, np.float32), np.full(1, np.inf, np.float32)
        for stretch in np.array(STRETCHES, np.float32)[:, None]:
            wrong = fmt.decode(fmt.encode_spanning(part, stretch), part.shape) - part
            wrong *= wrong
            wrong *= weights
            error = by_blocks(np.add, wrong) if blocks else wrong.sum(axis=1)
            best = np.where(error < least, stretch, best)
            least = np.minimum(error, least)
        for key, plane in fmt.encode_spanning(part, best).items():
            first = start // BLOCK if blocks and key == "scales" else start
            planes[key][first : first + len(plane)] = plane

    _each(work, range(0, len(values), BLOCK), threads)
    return QuantTensor(values.shape, fmt, planes)


def _normalised(importance: np.ndarray | None, columns: int) -> np.ndarray:
    h = np.ones(columns) if importance is None else np.asarray(importance, np.float64)
    mean = h.mean()
    if not np.isfinite(mean) or mean <= 0:
        return np.ones(columns, np.float32)
    return np.asarray(np.maximum(h / mean, _FLOOR), np.float32)


class _Block:
    """A block of rows, transposed; the best `scales` (stored), `zeros`, `step` are [G, R]."""

    def __init__(self, fmt: Int4 | Int8, values: np.ndarray, weights: np.ndarray) -> None:
        self._fmt, self._weights = fmt, weights
        self._affine = isinstance(fmt, Int4) and not fmt.symmetric
        # Codes are stored with the zero point added; those of int8 have none.
        self._ends = (-127, 127) if isinstance(fmt, Int8) else (0, 15)
        rows, columns = values.shape
        groups, size = weights.shape
        whole = np.zeros((groups * size, rows), np.float32)
        whole[:columns] = values.T
        self._w = whole.reshape(groups, size, rows)
        self._t, self._q = np.empty_like(self._w[0]), np.empty_like(self._w[0])
        low, high = self._w.min(axis=1), self._w.max(axis=1)
        span = (1.10, 0.55) if isinstance(fmt, Int4) else (1.0, 0.9)
        if isinstance(fmt, Int8):
            ideal = np.maximum(high, -low) / np.float32(127)
        elif fmt.symmetric:
            ideal = np.where(-low > high, low, high) / np.float32(-8)
        else:
            low = np.minimum(low, 0)
            ideal = np.maximum(high, 0) / np.float32(15) - low / np.float32(15)
        self.scales, self.step = base.store(fmt.name, ideal, fmt.scale_dtype)
        self.zeros = centred = self._zero(self.step, low)
        self._error = self._errors(self.step, self.zeros)
        for stretch in np.linspace(*span, GRID, dtype=np.float32):
            scales, step = self._store(ideal * stretch)
            self._try(scales, self._zero(step, low), step)
            if self._affine:  # the range shrinks at its upper end, or at both
                self._try(scales, centred, step)
        scales, step = self._store(self._least_squares())
        self._try(scales, self.zeros, step)

    def _store(self, ideal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        dtype = self._fmt.scale_dtype
        limit = np.float32(LARGEST[dtype])
        return base.store(self._fmt.name, np.clip(ideal, -limit, limit), dtype)

    def _zero(self, step: np.ndarray, low: np.ndarray) -> np.ndarray:
        if self._affine:
            return np.asarray(np.clip(np.rint(-low / step), 0, 15))
        return np.full_like(step, 0 if isinstance(self._fmt, Int8) else 8)

    def _try(self, scales: np.ndarray, zeros: np.ndarray, step: np.ndarray) -> None:
        error = self._errors(step, zeros)
        better = error < self._error
        self._error = np.where(better, error, self._error)
        self.step = np.where(better, step, self.step)
        self.scales = np.where(better, scales, self.scales)
        self.zeros = np.where(better, zeros, self.zeros)

    def _rounded(
        self, step: np.ndarray, zeros: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield w / step, and codes less zero points, [size, R] fp32 work arrays, by group."""
        low, high = map(np.float32, self._ends)
        for w, inverse, zero in zip(self._w, np.float32(1) / step, zeros, strict=True):
            np.multiply(w, inverse, out=self._t)
            np.rint(self._t, out=self._q)
            np.maximum(self._q, low - zero, out=self._q)
            yield self._t, np.minimum(self._q, high - zero, out=self._q)

    def _errors(self, step: np.ndarray, zeros: np.ndarray) -> np.ndarray:
        """Return the weighted squared errors, [G, R]."""
        out = np.empty_like(step)
        for g, (t, q) in enumerate(self._rounded(step, zeros)):
            np.subtract(t, q, out=t)
            np.multiply(t, t, out=t)
            np.einsum("jr,j->r", t, self._weights[g], out=out[g])
        out *= step
        out *= step
        return out

    def _least_squares(self) -> np.ndarray:
        """Return the least-squares scales of the current codes, [G, R]."""
        out = self.step.copy()
        for g, (_, q) in enumerate(self._rounded(self.step, self.zeros)):
            weighted = q * self._weights[g][:, None]
            above = np.einsum("jr,jr->r", weighted, self._w[g])
            below = np.einsum("jr,jr->r", weighted, q)
            np.divide(above, below, out=out[g], where=below > 0)
        return np.where(out == 0, self.step, out)

    def codes(self) -> np.ndarray:
        """Return the stored codes, [G size, R]."""
        out = np.empty(self._w.shape, np.int8)
        for g, (_, q) in enumerate(self._rounded(self.step, self.zeros)):
            out[g] = q + self.zeros[g]
        flat = out.reshape(-1, out.shape[-1])
        return flat if isinstance(self._fmt, Int8) else flat.view(np.uint8)
