"""Quantise one matrix by GPTQ or by search, and judge the result.

GPTQ rounds column by column and corrects later columns, on the grids of `imx.search` ("static
groups"), from the largest diagonal element of the Hessian to the smallest. With H^-1 = U^T U, the
error of column i is e_i = (w_i - value_i) / U_ii.

GPTQ is taken where it beats the search on held-out inputs, either only where its output error is at
most 1.02 times that of rounding; `Outcome.fallback` names what was not taken.

Source: Frantar et al. 2023 (arXiv 2210.17323).
"""

from typing import NamedTuple

import numpy as np

from clocher_kernels.dtypes import to_f32
from clocher_kernels.formats import Format, Int4, Int8, Tcq
from clocher_kernels.formats.base import turn
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.convert import imx, trellis

DAMP = 0.05
BLOCK = 128
DO_NO_HARM = 1.02
MIN_TOKENS = 64
"""Tokens below which an expert uses its layer's statistics alone."""
MIN_HELD = 16
"""Held-out inputs below which an expert is judged with its layer's."""

HELD_ROWS = 512
"""Held-out inputs kept per linear or expert."""

_LADDER = (1.0, 2.0, 4.0, 10.0, 20.0)
_TRIANGLE = 96


class Factor(NamedTuple):
    """Factor of a damped Hessian, in the order of column visits."""

    order: np.ndarray  # column visited at each step, [K]
    upper: np.ndarray  # U, [K, K], of the permuted Hessian
    damp: float  # what was added to the diagonal, relative to its mean


def shrink(hessian: np.ndarray, tokens: int, pooled: np.ndarray) -> np.ndarray:
    """Pull a Hessian [K, K] of few tokens towards `pooled`: (n H + t P) / (n + t), t = K / 4."""
    weight = len(pooled) / 4
    mixed = hessian * np.float32(tokens / (tokens + weight))
    mixed += pooled * np.float32(weight / (tokens + weight))
    return mixed


def factorise(
    hessian: np.ndarray, dtype: type[np.floating] = np.float32, order: np.ndarray | None = None
) -> Factor | None:
    """Factorise a Hessian [K, K] in float64, damped as needed; None if impossible or zero.

    `order`: of column visits; None: the largest diagonal element first.
    """
    diagonal = np.diagonal(hessian).astype(np.float64)
    mean = float(diagonal.mean())
    if not np.isfinite(mean) or mean <= 0:
        return None
    order = np.argsort(-diagonal, kind="stable") if order is None else order
    backwards = order[::-1]
    found = _cholesky(hessian[np.ix_(backwards, backwards)].astype(np.float64))
    if found is None:
        return None
    lower, damp = found
    _invert_lower(lower)
    return Factor(order, np.ascontiguousarray(lower[::-1, ::-1], dtype), damp)


def uncompensated(hessian: np.ndarray, turned: int = 0) -> float:
    """Return tr(D) of a damped Hessian [K, K] = L D L^T: what GPTQ leaves of errors of variance 1.

    `turned`: columns of a rotation before it; see `make_inputs`. The trace if it has no factor.
    """
    matrix = _turned(hessian, turned) if turned else hessian
    found = _cholesky(matrix.astype(np.float64))
    return float(np.square(np.diagonal(found[0])).sum() if found else np.trace(matrix))


def _cholesky(work: np.ndarray) -> tuple[np.ndarray, float] | None:
    """Return the lower factor of a matrix in fp64, damped as needed, and the relative damping."""
    flat = work.reshape(-1)[:: len(work) + 1]
    base = flat.copy()
    for factor in _LADDER:
        np.add(base, DAMP * factor * base.mean(), out=flat)
        try:
            lower = np.linalg.cholesky(work)
        except np.linalg.LinAlgError:
            continue
        if np.isfinite(lower[-1, -1]):
            return lower, DAMP * factor
    return None


def _turned(hessian: np.ndarray, columns: int) -> np.ndarray:
    """Rotate both sides of a Hessian [K, K]."""
    return turn(np.ascontiguousarray(turn(hessian, columns).T), columns)


def _invert_lower(matrix: np.ndarray) -> None:
    """Invert a lower triangular matrix in place, recursively by halves."""
    size = len(matrix)
    if size <= _TRIANGLE:
        matrix[...] = np.tril(np.linalg.inv(matrix))
        return
    half = size // 2
    top, bottom = matrix[:half, :half], matrix[half:, half:]
    _invert_lower(top)
    _invert_lower(bottom)
    matrix[half:, :half] = -(bottom @ (matrix[half:, :half] @ top))


def solve(values: np.ndarray, grid: QuantTensor, factor: Factor) -> QuantTensor:
    """GPTQ of values [N, K] fp32 or fp64 on the grid of an int4 or int8 tensor, rows or groups."""
    rows, columns = values.shape
    fmt, dtype = grid.format, values.dtype.type
    assert isinstance(fmt, Int4 | Int8) and fmt.group != "tensor", "see methods_of"
    size = columns if fmt.group == "row" else fmt.group
    step = to_f32(grid.planes["scales"], fmt.scale_dtype).reshape(rows, -1).T.astype(dtype)
    low, high = (-127, 127) if isinstance(fmt, Int8) else (0, 15)
    zero = np.full(step.shape, 0 if isinstance(fmt, Int8) else 8, np.float32)
    if "zeros" in grid.planes:
        zero = grid.planes["zeros"].reshape(rows, -1).T.astype(np.float32)
    upper = factor.upper.astype(dtype, copy=False)

    w = np.ascontiguousarray(values.T[factor.order])
    codes = np.empty((columns, rows), np.int8 if isinstance(fmt, Int8) else np.uint8)
    error = np.empty_like(w)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        w[start:stop] -= upper[:start, start:stop].T @ error[:start]
        for i in range(start, stop):
            group = factor.order[i] // size
            column = w[i] - upper[start:i, i] @ error[start:i]
            q = np.rint(column / step[group])
            q += zero[group]
            np.clip(q, low, high, out=q)
            codes[factor.order[i]] = q
            q -= zero[group]
            q *= step[group]
            np.subtract(column, q, out=error[i])
            error[i] /= upper[i, i]
    stored = np.ascontiguousarray(codes.T)
    planes = {**grid.planes, "codes": stored}
    if isinstance(fmt, Int4):
        planes = fmt.pack(stored, grid.planes["scales"], grid.planes.get("zeros"))
    return QuantTensor(values.shape, fmt, planes)


class InputStats:
    """Statistics of inputs x_t, weighted by p_t: that of a router, or a token's; else 1."""

    def __init__(self, columns: int, *, hessian: bool = False) -> None:
        self.tokens = 0
        self._second = np.zeros(columns)
        self._hessian = np.zeros((columns, columns), np.float32) if hessian else None
        self._held: list[np.ndarray] = []

    def add(self, x: np.ndarray, held: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Sum inputs x [m, K] fp32 with weights p [m]; `held` [m] are only kept for judging."""
        if weights is not None:
            x = x * weights[:, None]
        fit = x if not held.any() else x[~held]
        kept = sum(len(rows) for rows in self._held)
        if kept < HELD_ROWS and len(fit) < len(x):
            self._held.append(x[held][: HELD_ROWS - kept])
        self.tokens += len(fit)
        self._second += np.einsum("ij,ij->j", fit, fit)
        if self._hessian is not None and len(fit):
            self._hessian += fit.T @ fit

    @property
    def importance(self) -> np.ndarray:
        """E[p^2 x^2] of each column, [K]; zeros without tokens."""
        return self._second / max(1, self.tokens)

    @property
    def hessian(self) -> np.ndarray:
        """H = 2/n sum p^2 x x^T, [K, K]; zeros without tokens."""
        assert self._hessian is not None, "made without hessian=True"
        return self._hessian * np.float32(2 / max(1, self.tokens))

    @property
    def held(self) -> np.ndarray:
        """Held-out inputs, times p, [at most HELD_ROWS, K]."""
        return np.concatenate([np.zeros((0, len(self._second)), np.float32), *self._held])


class Inputs(NamedTuple):
    """Statistics of a matrix's input, rotated if its format is."""

    importance: np.ndarray  # E[x^2] of each column, [K]
    held: np.ndarray  # inputs to judge with, [m, K]; without rows the importance judges
    # of the Hessian; None for methods that need none, or where it has none
    factor: Factor | None = None


class Outcome(NamedTuple):
    """A quantised matrix and how it was made."""

    tensor: QuantTensor
    fallback: str | None  # None, or whose result it is instead, and why
    nmse: float  # squared error of the outputs, relative to the outputs
    nmse_rtn: float  # the same for plain rounding


def make_inputs(
    stats: InputStats, pooled: InputStats | None, *, hessian: bool, turned: int = 0
) -> Inputs:
    """Combine the statistics of a linear or expert with those of its layer, if `pooled`.

    `turned`: columns of the format's rotation (`Format.turned`), which needs the Hessian.
    """
    held, source = stats.held, stats
    if pooled is not None:
        held = held if len(held) >= MIN_HELD else pooled.held
        source = stats if stats.tokens >= MIN_TOKENS else pooled
    if not hessian:
        return Inputs(source.importance, held)
    matrix = source.hessian
    if pooled is not None and source is stats:
        matrix = shrink(matrix, stats.tokens, pooled.hessian)
    if not turned:
        return Inputs(source.importance, held, factorise(matrix))
    matrix = _turned(matrix, turned)
    importance = np.diagonal(matrix).astype(np.float64)
    factor = factorise(matrix, order=trellis.order_of(importance))
    return Inputs(importance, turn(held, turned), factor)


def solve_matrix(
    values: np.ndarray, fmt: Format, method: str, inputs: Inputs, *, threads: int = 1
) -> Outcome:
    """Quantise a matrix. `values`: [N, K] fp32; `method`: "imx" or "gptq".

    Where codes are of rotated values, so are `inputs`, and all is judged there.
    """
    if fmt.turned:
        values = turn(values, fmt.turned)

    def energy(matrix: np.ndarray) -> float:
        if len(inputs.held):
            outputs = inputs.held @ matrix.T
            return float(np.einsum("ij,ij->", outputs, outputs, dtype=np.float64))
        rows = np.einsum("ij,ij->j", matrix, matrix, dtype=np.float64)
        return float(rows @ inputs.importance)

    power = energy(values) or 1.0

    def judge(tensor: QuantTensor) -> float:
        return energy(values - tensor.stored()) / power

    if isinstance(fmt, Tcq):
        rounded = best = trellis.search(values, fmt, threads=threads)
        instead = "rtn"
    else:
        rounded = encode(values, fmt)
        best = imx.search(values, fmt, inputs.importance, threads=threads)
        instead = "imx"
    error = judge(best)
    error_rtn = error if best is rounded else judge(rounded)
    fallback: str | None = None
    if method == "gptq" and inputs.factor is None:
        fallback = f"{instead}:no_hessian"
    elif method == "gptq" and inputs.factor is not None:
        if isinstance(fmt, Tcq):
            order, upper, _ = inputs.factor
            corrected = trellis.solve(values, best, order, upper, threads=threads)
        else:
            corrected = solve(values, best, inputs.factor)
        if (lower := judge(corrected)) < error:
            best, error = corrected, lower
        else:
            fallback = f"{instead}:held_out"
    if error > DO_NO_HARM * error_rtn:
        best, error, fallback = rounded, error_rtn, "rtn:do_no_harm"
    return Outcome(best, fallback, error, error_rtn)
