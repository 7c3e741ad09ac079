"""Rounding to trellises (`Tcq`): a search for scales, and correction of later columns (GPTQ).

Scales are those of the root mean square, times the factor of least squared error. A search weighted
by importance gained nothing. See `cpu_fallback.ops.encode_trellis` for the rounding itself.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from clocher_kernels.formats import Tcq, base
from clocher_kernels.formats.tcq import COLUMNS, GROUP, LARGEST_CODE, STRIP, UNIT
from clocher_kernels.quant_tensor import QuantTensor
from clocher_runtime.engine.backends import trellis_rounder

FACTORS = {
    bits: np.linspace(*ends, 11, dtype=np.float32)
    for bits, ends in {2: (0.9, 1.1), 3: (0.75, 1.2), 4: (0.65, 1.15), 5: (0.55, 1.1)}.items()
}
"""Bits of a weight -> candidate scales, relative to those of the root mean square."""

_BLOCK = 128
_PAIR = 2 * STRIP
_PIECE = 8 * _PAIR


def order_of(importance: np.ndarray) -> np.ndarray:
    """Return the columns [K] in the order of rounding: units by their mean importance."""
    first = np.argsort(-importance.reshape(-1, UNIT).mean(axis=1), kind="stable") * UNIT
    return np.asarray((first[:, None] + np.array(COLUMNS)).reshape(-1))


def search(values: np.ndarray, fmt: Tcq, *, threads: int = 1) -> QuantTensor:
    """Round a rotated matrix [N, K] fp32 with scales of least error; 16 rows depend on no others.

    Raises FormatError, ShapeError.
    """
    planes = fmt.planes(values.shape)
    base.require_finite(fmt.name, values)
    factors = FACTORS[fmt.bits]
    ideal, rows = fmt.scales_for(base.split(values, GROUP) * factors[-1])
    least, scales = np.full(ideal.shape, np.inf, np.float32), ideal
    codes = np.empty(planes["codes"].shape, np.uint8)
    grid = QuantTensor(values.shape, fmt, {"codes": codes, "scales": scales, "rows": rows})
    work = _Work(values, grid, order_of(np.ones(values.shape[1])), threads)
    for factor in factors:
        trial = np.rint(ideal * (factor / factors[-1]))
        trial = np.clip(trial, 1, LARGEST_CODE).astype(np.uint8)
        _, errors = work.rounded(trial, None)
        lost = np.einsum("gkn,gkn->ng", *[errors.reshape(-1, GROUP, errors.shape[1])] * 2)
        better = lost[: len(values)] < least
        least = np.where(better, lost[: len(values)], least)
        scales = np.where(better, trial, scales)
    return work.tensor(scales, None)


def solve(
    values: np.ndarray, grid: QuantTensor, order: np.ndarray, upper: np.ndarray, *, threads: int = 1
) -> QuantTensor:
    """GPTQ of rotated values [N, K] fp32 with the scales of a tensor; see `gptq.Factor`."""
    return _Work(values, grid, order, threads).tensor(grid.planes["scales"], upper)


class _Work:
    """A matrix as it is rounded: transposed, columns in order, rows padded to pairs of strips."""

    def __init__(
        self, values: np.ndarray, grid: QuantTensor, order: np.ndarray, threads: int
    ) -> None:
        assert isinstance(grid.format, Tcq)
        self._format, self._grid, self._order, self._threads = grid.format, grid, order, threads
        rows, columns = values.shape
        self._w = np.zeros((columns, -(-rows // _PAIR) * _PAIR), np.float32)
        self._w[:, :rows] = values.T[order]
        self._pieces = [
            slice(start, min(start + _PIECE, self._w.shape[1]))
            for start in range(0, self._w.shape[1], _PIECE)
        ]

    def rounded(
        self, scales: np.ndarray, upper: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return codes 2 m + u, u8, and errors, fp32, both [K, padded N] in order."""
        w, bits = self._w, self._format.bits
        steps = np.zeros((len(w) // UNIT, w.shape[1]), np.float32)
        found = self._format.steps({**self._grid.planes, "scales": scales})
        steps[:, : len(scales)] = found.T[self._order[::UNIT] // GROUP]
        codes, errors = np.empty(w.shape, np.uint8), np.empty_like(w)
        round_columns = trellis_rounder()
        size = _BLOCK if upper is not None else len(w)
        with ThreadPoolExecutor(self._threads) as pool:
            for start in range(0, len(w), size):
                part, block, lower = slice(start, start + size), w[start : start + size], None
                if upper is not None:
                    block = block - upper[:start, part].T @ errors[:start]
                    lower = np.ascontiguousarray(upper[part, part].T)
                given = (bits, block, steps[start // UNIT :], lower, codes[part], errors[part])
                list(pool.map(lambda rows, given=given: round_columns(*given, rows), self._pieces))
        return codes, errors

    def tensor(self, scales: np.ndarray, upper: np.ndarray | None) -> QuantTensor:
        """Return the tensor with these scales."""
        codes, _ = self.rounded(scales, upper)
        rows = -(-self._grid.shape[0] // STRIP) * STRIP
        path = np.empty((rows, len(codes)), np.uint8)
        path[:, self._order] = codes[:, :rows].T
        packed = self._format.pack(path & 1, path >> 1)
        planes = {"codes": packed, "scales": scales, "rows": self._grid.planes["rows"]}
        return QuantTensor(self._grid.shape, self._format, planes)
