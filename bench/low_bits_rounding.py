"""How matrices are rounded in the study of few bits (`bench.low_bits`): scales, levels, trellis.

Columns are rounded one after another and later ones corrected (GPTQ, arXiv 2210.17323); with a
trellis the rows of a column are a tail-biting sequence (Ungerboeck 1982; QTIP, arXiv 2406.11235).
"""

from functools import cache
from math import sqrt
from typing import Any, NamedTuple

import numba
import numpy as np

from clocher_runtime.quantize.gptq import Factor, factorise

PARITY = {0: (0, 0), 3: (0o13, 0o4)}
"""Ungerboeck's codes for amplitudes (1982): h0, h1 of 2^V states."""
_SEQUENCE, _BLOCK, _SAMPLE, _ROUNDS, _F16 = 64, 128, 1 << 17, 4, 16
_CANDIDATES = np.concatenate([np.linspace(0.5, 1.15, 14), -np.linspace(0.5, 1.15, 14)])


class Recipe(NamedTuple):
    """How a matrix is rounded."""

    bits: int
    group: int = 64
    scale: int = 16
    levels: bool = False
    gptq: bool = False
    rotate: int = 0
    trellis: int = 0
    head: int = 0
    mix: float = 0.0


def parse(text: str) -> Recipe:
    """Return the recipe that a text spells."""
    first, *words = text.split()
    own: dict[str, Any] = {"bits": int(first)}
    names = {"g": "group", "s": "scale", "rot": "rotate", "tcq": "trellis", "head": "head"}
    for word in words:
        name = word.rstrip("0123456789.")
        number = word[len(name) :]
        if name == "mix":
            own["mix"] = float(number)
        else:
            own[names.get(name, name)] = int(number) if number else True
    return Recipe(**own)


@numba.njit(parallel=True, fastmath=True, cache=True)
def search(w, h, levels, group, candidates):  # type: ignore[no-untyped-def]
    """Return scales [N, K / group] that minimise sum h (w - s level)^2; w [N, K], h [K]."""
    rows, columns = w.shape
    found = np.empty((rows, columns // group), np.float32)
    extreme = levels[np.argmax(np.abs(levels))]
    for n in numba.prange(rows):
        best = np.empty(group, np.float32)
        for g in range(columns // group):
            x, weight = w[n, g * group : (g + 1) * group], h[g * group : (g + 1) * group]
            top = x[np.argmax(np.abs(x))] / extreme
            least = np.float32(np.inf)
            found[n, g] = 1e-8
            if top == 0:
                continue
            for c in candidates:
                inverse = np.float32(1 / (top * c))
                best[:] = np.float32(1e30)
                for level in levels:
                    for j in range(group):
                        d = x[j] * inverse - level
                        best[j] = min(best[j], d * d)
                error = np.float32(0)
                for j in range(group):
                    error += best[j] * weight[j]
                error /= inverse * inverse
                if error < least:
                    least = error
                    found[n, g] = top * c
    return found


@numba.njit(fastmath=True)
def _viterbi(near, states, subset, start, free, cost, moves):  # type: ignore[no-untyped-def]
    """Fill moves [L, S] with the better predecessors; return the costs of the end states."""
    half = states // 2
    cost[:] = np.float32(0 if free else 1e30)
    cost[start] = 0
    new = np.empty_like(cost)
    for t in range(len(near)):
        for p in range(half):
            same, other = near[t, subset[p]], near[t, subset[p] ^ 2]
            a, b = cost[p] + same, cost[p + half] + other
            c, d = cost[p] + other, cost[p + half] + same
            moves[t, 2 * p], new[2 * p] = b < a, min(a, b)
            moves[t, 2 * p + 1], new[2 * p + 1] = d < c, min(c, d)
        cost[:] = new


@numba.njit(fastmath=True)
def _walk(moves, state, half, path):  # type: ignore[no-untyped-def]
    """Trace states back from the end; path [L] gets the state before each step; return it."""
    for t in range(len(path) - 1, -1, -1):
        state = (state >> 1) + half * moves[t, state]
        path[t] = state
    return state


@numba.njit(parallel=True, fastmath=True, cache=True)
def correct(w, step, levels, upper, subset, length):  # type: ignore[no-untyped-def]
    """Round w [N, B] column by column, correcting later ones; return codes and errors [N, B].

    step [N, B]: scales; upper [B, B]: of the Hessian's factor. With S = len(subset) > 1 states,
    `length` rows of a column are a tail-biting sequence: level 4 m + 2 z1 + z0, where z0 and z1
    are given by the state and one bit of a weight (subset: 2 z1 + z0 for 0), m by its others.
    """
    rows, columns = w.shape
    codes = np.empty((rows, columns), np.uint8)
    error = np.empty((rows, columns), np.float32)
    states = len(subset)
    for part in numba.prange(-(-rows // length)):
        first, last = part * length, min(rows, (part + 1) * length)
        size = last - first
        near = np.empty((size, 4), np.float32)
        index = np.empty((size, 4), np.uint8)
        cost, path = np.empty(states, np.float32), np.empty(size, np.int64)
        moves = np.empty((size, states), np.uint8)
        for i in range(columns):
            for r in range(size):
                x, s = w[first + r, i] / step[first + r, i], step[first + r, i] ** 2
                near[r] = np.float32(1e30)
                for k in range(len(levels)):
                    sub = k % 4 if states > 1 else 0
                    d = (x - levels[k]) ** 2 * s
                    if d < near[r, sub]:
                        near[r, sub], index[r, sub] = d, k
            if states > 1:
                half = size // 2
                turned = np.concatenate((near[half:], near[:half]))
                _viterbi(turned, states, subset, 0, True, cost, moves)
                _walk(moves, np.argmin(cost), states // 2, path)
                start = path[size - half]
                _viterbi(near, states, subset, start, False, cost, moves)
                _walk(moves, start, states // 2, path)
                for r in range(size):
                    after = path[r + 1] if r + 1 < size else start
                    codes[first + r, i] = index[r, subset[path[r]] ^ (2 * (after & 1))]
            else:
                codes[first : first + size, i] = index[:, 0]
            for r in range(first, last):
                e = (w[r, i] - step[r, i] * levels[codes[r, i]]) / upper[i, i]
                error[r, i] = e
                for j in range(i + 1, columns):
                    w[r, j] -= e * upper[i, j]
    return codes, error


@cache
def subsets(memory: int) -> np.ndarray:
    """Return 2 z1 + z0 of each state for a next bit of 0, [2^memory]; bit 0 is the newest."""
    h0, h1 = PARITY[memory]
    states = range(1 << memory)
    found = [2 * ((s & h0 >> 1).bit_count() & 1) + ((s & h1 >> 1).bit_count() & 1) for s in states]
    return np.array(found, np.int64)


def rotation(columns: int, size: int) -> np.ndarray:
    """Return a block of random signs and Hadamard, [K / size, size, size]: w @ block."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.random.default_rng(0).choice([-1, 1], (columns // size, size, 1))
    return (signs * matrix / sqrt(size)).astype(np.float32)


def turn(x: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Multiply columns of x [M, K] by blocks [K / n, n, n]."""
    parts = x.reshape(len(x), len(blocks), -1).transpose(1, 0, 2) @ blocks
    return np.ascontiguousarray(parts.transpose(1, 0, 2).reshape(x.shape))


def learn(w: np.ndarray, h: np.ndarray, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Return levels [2^bits] to choose scales with, and those of codes: 2^(bits + 1) in a trellis.

    w: [N, K], h: [K], the importance of a column.
    """
    count, group = 1 << recipe.bits, recipe.group
    levels = np.linspace(-1, 1 - 2 / count, count, dtype=np.float32)
    rows = min(len(w), max(_SEQUENCE, _SAMPLE // w.shape[1] // _SEQUENCE * _SEQUENCE))
    chosen = np.random.default_rng(0).choice(len(w), rows, replace=False)
    sample, weight = w[np.sort(chosen)], np.broadcast_to(h, (rows, len(h)))
    for _ in range(4 if recipe.levels else 0):
        step = search(sample, h, levels, group, _CANDIDATES).repeat(group, 1)
        levels = _lloyd(sample, step, weight, levels, 0)
    if not recipe.trellis:
        return levels, levels
    # Half the spacing, and a little farther out.
    wide = np.interp(np.arange(2 * count) / 2 - 0.25, np.arange(count), levels)
    wide[0], wide[-1] = 1.5 * wide[0] - 0.5 * wide[2], 1.5 * wide[-1] - 0.5 * wide[-3]
    step = search(sample, h, levels, group, _CANDIDATES).repeat(group, 1)
    return levels, _lloyd(sample, step, weight, wide.astype(np.float32), recipe.trellis)


def _lloyd(
    w: np.ndarray, step: np.ndarray, h: np.ndarray, levels: np.ndarray, memory: int
) -> np.ndarray:
    """Move levels to the weighted mean of the weights that take them, in some rounds."""
    x, s, weight = (np.ascontiguousarray(each.T).reshape(-1, 1) for each in (w, step, h))
    weight = (weight * s * s)[:, 0]
    one = np.ones((1, 1), np.float32)
    for _ in range(_ROUNDS):
        codes = correct(x.copy(), s, levels, one, subsets(memory), _SEQUENCE)[0][:, 0]
        total = np.bincount(codes, weight, len(levels))
        moved = np.bincount(codes, weight * (x / s)[:, 0], len(levels))
        levels = np.where(total > 0, moved / np.maximum(total, 1e-30), levels).astype(np.float32)
    return levels


class Input(NamedTuple):
    """What a matrix's input says, in the rotated columns."""

    hessian: np.ndarray  # [K, K]
    blocks: np.ndarray | None  # of the rotation
    factor: Factor | None  # of the Hessian, for gptq


def prepare(hessian: np.ndarray, recipe: Recipe) -> Input:
    """Rotate and factorise a Hessian [K, K]."""
    blocks = None
    if recipe.rotate:
        blocks = rotation(len(hessian), recipe.rotate)
        hessian = turn(np.ascontiguousarray(turn(hessian, blocks).T), blocks)
    return Input(hessian, blocks, factorise(hessian) if recipe.gptq else None)


def quantise(w: np.ndarray, given: Input, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Return w [N, K] rounded, and its loss tr(E H E^T) by row, [N]."""
    hessian, blocks, factor = given
    if blocks is not None:
        w = turn(w, blocks)
    size = w.shape[1]
    h = np.ascontiguousarray(np.diagonal(hessian)) + np.float32(1e-6 * np.trace(hessian) / size)
    coarse, levels = learn(w, h, recipe)
    plain = not (recipe.levels or recipe.gptq or recipe.scale < _F16)
    scales = search(w, h, coarse, recipe.group, np.ones(1) if plain else _CANDIDATES)
    if recipe.scale < _F16:
        unit = np.abs(scales).max(1, keepdims=True) / ((1 << (recipe.scale - 1)) - 1)
        code = np.rint(scales / unit)
        scales = np.where(code == 0, np.sign(scales), code).astype(np.float32) * unit
    if factor is None:
        factor = Factor(np.arange(size), np.eye(size, dtype=np.float32), 0)
    order, upper = factor.order, factor.upper
    rest, out, subset = w[:, order], np.empty_like(w), subsets(recipe.trellis)
    for at in range(0, size, _BLOCK):
        here, later = order[at : at + _BLOCK], slice(at + _BLOCK, None)
        step = np.ascontiguousarray(scales[:, here // recipe.group])
        square = np.ascontiguousarray(upper[at : at + _BLOCK, at : at + _BLOCK])
        part = np.ascontiguousarray(rest[:, at : at + _BLOCK])
        codes, error = correct(part, step, levels, square, subset, _SEQUENCE)
        out[:, here] = step * levels[codes]
        if recipe.gptq:
            rest[:, later] -= error @ upper[at : at + _BLOCK, later]
    wrong = w - out
    loss = np.einsum("nk,nk->n", wrong @ hessian, wrong)
    return turn(out, blocks.transpose(0, 2, 1)) if blocks is not None else out, loss
