"""GPTQ on grids that are chosen beforehand: round column by column, correct the columns to come.

The grids (scales and zero points) are those that `imx.search` found on the original columns, so
columns may be visited in any order and the result needs no index at run time ("static groups").
Columns are visited from the largest diagonal element of the Hessian to the smallest.

With H^-1 = U^T U, U upper triangular, the error of column i is e_i = (w_i - value_i) / U_ii, and
sum e_i^2 is exactly the loss tr((W - Q) H (W - Q)^T): the test of the whole recursion.

Source: Frantar et al. 2023 (arXiv 2210.17323).
"""

from dataclasses import dataclass

import numpy as np

from clocher_kernels.dtypes import to_f32
from clocher_kernels.errors import ShapeError, UsageError
from clocher_kernels.formats import Int4, Int8
from clocher_kernels.quant_tensor import QuantTensor

DAMP = 0.05
BLOCK = 128

_LADDER = (1.0, 2.0, 4.0, 10.0, 20.0)
_TRIANGLE = 96


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """The factor of a damped Hessian, in the order in which columns are visited."""

    order: np.ndarray  # column visited at each step, [K]
    upper: np.ndarray  # U, [K, K], of the permuted Hessian
    damp: float  # what was added to the diagonal, relative to its mean


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """A matrix after GPTQ."""

    tensor: QuantTensor  # the quantised matrix
    loss: float  # tr((W - Q) H (W - Q)^T) for the damped Hessian, as the recursion sums it


def shrink(hessian: np.ndarray, tokens: int, pooled: np.ndarray) -> np.ndarray:
    """Pull the Hessian of few tokens towards one of many: (n H + t P) / (n + t), t = K / 4.

    `hessian`: [K, K], of `tokens` tokens; `pooled`: [K, K], of all tokens of the layer.
    """
    weight = len(pooled) / 4
    mixed = hessian * np.float32(tokens / (tokens + weight))
    mixed += pooled * np.float32(weight / (tokens + weight))
    return mixed


def factorise(
    hessian: np.ndarray, damp: float = DAMP, dtype: type[np.floating] = np.float32
) -> Factor | None:
    """Factorise a Hessian in float64; damp it more, up to 20 times, until that succeeds.

    `hessian`: [K, K], symmetric; columns that were never active have zeros. Returns the factor, or
    None if the Hessian is zero, not finite, or cannot be factorised.
    """
    diagonal = np.diagonal(hessian).astype(np.float64)
    mean = float(diagonal.mean())
    if not np.isfinite(mean) or mean <= 0:
        return None
    order = np.argsort(-diagonal, kind="stable")
    backwards = order[::-1]
    work = hessian[np.ix_(backwards, backwards)].astype(np.float64)
    flat = work.reshape(-1)[:: len(work) + 1]
    base = flat.copy()
    for factor in _LADDER:
        np.add(base, damp * factor * mean, out=flat)
        try:
            lower = np.linalg.cholesky(work)
        except np.linalg.LinAlgError:
            continue
        if not np.isfinite(lower[-1, -1]):
            continue
        del work, flat
        _invert_lower(lower)
        return Factor(order, np.ascontiguousarray(lower[::-1, ::-1], dtype), damp * factor)
    return None


def _invert_lower(matrix: np.ndarray) -> None:
    """Invert a lower triangular matrix in place, by halves."""
    size = len(matrix)
    if size <= _TRIANGLE:
        matrix[...] = np.tril(np.linalg.inv(matrix))
        return
    half = size // 2
    top, bottom = matrix[:half, :half], matrix[half:, half:]
    _invert_lower(top)
    _invert_lower(bottom)
    matrix[half:, :half] = -(bottom @ (matrix[half:, :half] @ top))


def solve(values: np.ndarray, grid: QuantTensor, factor: Factor) -> Solution:
    """Quantise a matrix on given grids so that its outputs, not its weights, stay close.

    `values`: [N, K], fp32 or, to check the arithmetic, fp64; `grid`: a quantised form of the same
    matrix, for its scales and zero points. Raises UsageError: the grid's format is neither `Int4`
    nor `Int8`; ShapeError: the sizes differ.
    """
    rows, columns = values.shape
    fmt = grid.format
    if not isinstance(fmt, Int4 | Int8) or fmt.group == "tensor":
        raise UsageError(f"GPTQ needs an int4 or int8 format with row or group scales: {fmt.name}")
    if grid.shape != values.shape or len(factor.order) != columns:
        raise ShapeError(
            f"values {list(values.shape)}, grid {list(grid.shape)}, factor of "
            f"{len(factor.order)} columns; expected the same matrix"
        )
    dtype = values.dtype.type
    size = columns if fmt.group == "row" else fmt.group
    step = to_f32(grid.planes["scales"], fmt.scale_dtype).reshape(rows, -1).T.astype(dtype)
    zero, low, high = _levels(grid)
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
    loss = float(np.einsum("ij,ij->", error, error, dtype=np.float64))
    stored = np.ascontiguousarray(codes.T)
    planes = {**grid.planes, "codes": stored}
    if isinstance(fmt, Int4):
        planes = fmt.pack(stored, grid.planes["scales"], grid.planes.get("zeros"))
    return Solution(QuantTensor(values.shape, fmt, planes), loss)


def _levels(grid: QuantTensor) -> tuple[np.ndarray, int, int]:
    """Return the zero points, [groups, N], and the smallest and largest code."""
    rows = grid.shape[0]
    groups = grid.planes["scales"].size // rows
    if isinstance(grid.format, Int8):
        return np.zeros((groups, rows), np.float32), -127, 127
    if "zeros" not in grid.planes:
        return np.full((groups, rows), 8, np.float32), 0, 15
    return grid.planes["zeros"].reshape(rows, groups).T.astype(np.float32), 0, 15
