"""How matrices are rounded in the study of few bits (`bench.low_bits`): scales, trellis, GPTQ.

Values are those that `Tcq` can hold. Columns are rounded one after another and later ones corrected
(GPTQ, arXiv 2210.17323), from the unit with the largest diagonal of the Hessian to the smallest.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from clocher_kernels.dtypes import from_f32, to_f32
from clocher_kernels.formats import Format, Int8, Tcq
from clocher_kernels.formats.base import turn
from clocher_kernels.formats.tcq import DEVIATION, GROUP, LARGEST_CODE, STRIP, UNIT, levels
from clocher_kernels.quant_tensor import encode

DISTORTION = {2: 0.0873, 3: 0.0239, 4: 0.00684, 5: 0.00233, 8: 1e-4}
"""Mean squared error of a normal distribution by bits of a weight."""
_REACH, _FINE = 80, 4
_CANDIDATES = np.linspace(0.8, 1.25, 10, dtype=np.float32)
_FAR = np.float32(1e30)


class Recipe(NamedTuple):
    """How a matrix is rounded."""

    bits: int
    damp: float = 0.05  # of the Hessian; 0: later columns are not corrected
    rms: bool = False  # scales are not searched
    blind: bool = False  # the Hessian does not see which tokens matter
    mix: float = 0.0  # bits of a weight in all


def parse(text: str) -> Recipe:
    """Return the recipe that a text spells."""
    first, *words = text.split()
    own: dict[str, Any] = {}
    for word in words:
        name = word.rstrip("0123456789.")
        own[name] = float(word[len(name) :]) if word != name else True
    return Recipe(int(first), **own)


def format_of(bits: int) -> Format:
    """Return the format of a matrix with so many bits a weight."""
    return Tcq(bits) if bits in DEVIATION else Int8("row", "f16")


def nearest_levels(bits: int) -> np.ndarray:
    """Return the nearest level of each subset, for quarters of a level's unit, u8 [641, 4]."""
    at, all_ = np.arange(-_REACH * _FINE, _REACH * _FINE + 1) / _FINE, levels(bits)
    near = [np.abs(at[:, None] - all_[z::4]).argmin(axis=1) for z in range(4)]
    return (4 * np.stack(near, axis=1) + np.arange(4)).astype(np.uint8)


@numba.njit(fastmath=True, inline="always")
def _nearest(x, weight, values, table, near, index):  # type: ignore[no-untyped-def]
    """Fill the four subsets' indices and weighted squared errors."""
    reach = np.float32(_REACH)
    place = int(np.rint(min(max(x, -reach), reach) * _FINE)) + _REACH * _FINE
    for z in range(4):
        index[z] = table[place, z]
        d = x - values[index[z]]
        near[z] = d * d * weight


@numba.njit(fastmath=True)
def _step(c, near):  # type: ignore[no-untyped-def]
    """Return the costs of the eight states after a weight, and bits: the upper one came before."""
    n0, n1, n2, n3 = near[0], near[1], near[2], near[3]
    a = c[0] + n0, c[0] + n2, c[1] + n2, c[1] + n0, c[2] + n1, c[2] + n3, c[3] + n3, c[3] + n1
    b = c[4] + n2, c[4] + n0, c[5] + n0, c[5] + n2, c[6] + n3, c[6] + n1, c[7] + n1, c[7] + n3
    moves = int(b[0] < a[0]) | int(b[1] < a[1]) << 1 | int(b[2] < a[2]) << 2
    moves |= int(b[3] < a[3]) << 3 | int(b[4] < a[4]) << 4 | int(b[5] < a[5]) << 5
    moves |= int(b[6] < a[6]) << 6 | int(b[7] < a[7]) << 7
    low = min(a[0], b[0]), min(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])
    high = min(a[4], b[4]), min(a[5], b[5]), min(a[6], b[6]), min(a[7], b[7])
    return low + high, moves


@numba.njit(parallel=True, fastmath=True, cache=True)
def search(w, h, scales, values, table):  # type: ignore[no-untyped-def]
    """Return the best of some multiples of scales [N, K / 64]; w [N, K], h [K].

    A group's 64 weights are tried as one sequence, from any state.
    """
    found = scales.copy()
    zero = np.float32(0)
    for n in numba.prange(len(w)):
        near, index = np.empty(4, np.float32), np.empty(4, np.uint8)
        for g in range(scales.shape[1]):
            least = _FAR
            for candidate in _CANDIDATES:
                s = scales[n, g] * candidate
                cost = (zero, zero, zero, zero, zero, zero, zero, zero)
                for k in range(g * GROUP, (g + 1) * GROUP):
                    _nearest(w[n, k] / s, h[k] * s * s, values, table, near, index)
                    cost = _step(cost, near)[0]
                if min(cost) < least:
                    least = min(cost)
                    found[n, g] = s
    return found


@numba.njit(parallel=True, fastmath=True, cache=True)
def correct(w, step, upper, values, table):  # type: ignore[no-untyped-def]
    """Round units w [N, 32], columns after columns; return levels' places and errors.

    step [N, 32]: scales; upper [32, 32]: of the Hessian's factor. The 16 rows of a column start
    where those of the one before ended, and see the rows of the next.
    """
    codes, error = np.empty(w.shape, np.uint8), np.empty(w.shape, np.float32)
    zero, rows, twice = np.float32(0), STRIP, 2 * STRIP
    for part in numba.prange(len(w) // rows):
        x = w[part * rows : part * rows + rows].T.copy()
        s = step[part * rows : part * rows + rows].T.copy()
        near, index = np.empty((twice, 4), np.float32), np.empty((twice, 4), np.uint8)
        moves, wrong = np.empty(twice, np.int64), np.empty(rows, np.float32)
        state, cost = 0, (zero, _FAR, _FAR, _FAR, _FAR, _FAR, _FAR, _FAR)
        for i in range(UNIT):
            here = min(twice, (UNIT - i) * rows)
            for t in range(here):
                at, r = i + t // rows, t % rows
                weight = (s[at, r] / upper[at, at]) ** 2
                _nearest(x[at, r] / s[at, r], weight, values, table, near[t], index[t])
            for t in range(here):
                found = _step(cost, near[t])
                cost, moves[t] = found[0], found[1]
            end = 0
            for other in range(1, 8):
                if cost[other] < cost[end]:
                    end = other
            after = end
            for t in range(here - 1, -1, -1):
                if t == rows - 1:
                    after = end
                before = (end >> 1) + 4 * (moves[t] >> end & 1)
                if t < rows:
                    z = (before >> 1 & 1) | ((before ^ before >> 2 ^ end) & 1) << 1
                    codes[part * rows + t, i] = index[t, z]
                end = before
            state = after
            cost = (
                zero if state == 0 else _FAR, zero if state == 1 else _FAR,
                zero if state == 2 else _FAR, zero if state == 3 else _FAR,
                zero if state == 4 else _FAR, zero if state == 5 else _FAR,
                zero if state == 6 else _FAR, zero if state == 7 else _FAR,
            )  # fmt: skip
            for r in range(rows):
                code = codes[part * rows + r, i]
                wrong[r] = (x[i, r] - s[i, r] * values[code]) / upper[i, i]
                error[part * rows + r, i] = wrong[r]
            for j in range(i + 1, UNIT):
                for r in range(rows):
                    x[j, r] -= upper[i, j] * wrong[r]
    return codes, error


class Input(NamedTuple):
    """What a matrix's input says, in the rotated columns."""

    hessian: np.ndarray  # [K, K]
    order: np.ndarray  # of columns, units whole, [K]
    upper: torch.Tensor  # U of H^-1 = U^T U, in that order, [K, K]


def prepare(hessian: np.ndarray, recipe: Recipe) -> Input:
    """Rotate and factorise a Hessian [K, K]."""
    hessian = turn(np.ascontiguousarray(turn(hessian, GROUP).T), GROUP)
    size, diagonal = len(hessian), np.diagonal(hessian)
    units = np.argsort(-diagonal.reshape(-1, UNIT).sum(axis=1), kind="stable")
    order = (UNIT * units[:, None] + np.arange(UNIT)).ravel()
    eye = torch.eye(size, dtype=torch.float64)
    if not recipe.damp:
        return Input(hessian, order, eye.float())
    back = order[::-1]
    work = torch.from_numpy(hessian[np.ix_(back, back)].astype(np.float64))
    work.diagonal().add_(recipe.damp * float(diagonal.mean()))
    lower = torch.linalg.solve_triangular(torch.linalg.cholesky(work), eye, upper=False)
    return Input(hessian, order, lower.flip(0, 1).float().contiguous())


def quantise(w: np.ndarray, given: Input, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Return w [N, K] rounded, and its loss tr(E H E^T) by row, [N]."""
    hessian, order, upper = given
    own = turn(w, GROUP)
    if recipe.bits not in DEVIATION:
        out = turn(encode(w, format_of(recipe.bits)).decode(), GROUP)
    else:
        values, table = levels(recipe.bits), nearest_levels(recipe.bits)
        cells = own.reshape(len(own), -1, GROUP)
        scales = np.sqrt(np.square(cells).mean(axis=-1)) / np.float32(DEVIATION[recipe.bits])
        scales = np.maximum(scales, np.float32(1e-9))
        if not recipe.rms:
            h = np.ascontiguousarray(np.diagonal(hessian))
            scales = search(own, h + np.float32(1e-6) * h.mean(), scales, values, table)
        unit = to_f32(from_f32(scales.max(axis=1, keepdims=True) / LARGEST_CODE, "bf16"), "bf16")
        scales = unit * np.clip(np.rint(scales / unit), 1, LARGEST_CODE)
        rest, out = torch.from_numpy(own[:, order]), np.empty_like(own)
        for at in range(0, own.shape[1], UNIT):
            here, later = order[at : at + UNIT], slice(at + UNIT, None)
            step = np.ascontiguousarray(scales[:, here // GROUP])
            square = upper[at : at + UNIT, at : at + UNIT].contiguous().numpy()
            part = rest[:, at : at + UNIT].contiguous().numpy()
            codes, error = correct(part, step, square, values, table)
            out[:, here] = step * values[codes]
            if recipe.damp:
                found = torch.from_numpy(error)
                rest[:, later].addmm_(found, upper[at : at + UNIT, later], alpha=-1)
    wrong = own - out
    turned = (torch.from_numpy(wrong) @ torch.from_numpy(hessian)).numpy()
    return turn(out, GROUP), np.einsum("nk,nk->n", turned, wrong)
