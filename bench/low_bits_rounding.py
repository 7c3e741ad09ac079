"""How matrices are rounded in the study of few bits (`bench.low_bits`): as `clocher quantize` does.

Values are those that `Tcq` can hold, corrected by GPTQ (arXiv 2210.17323).
"""

from typing import Any, NamedTuple

import numpy as np

from clocher_kernels.formats import Format, Int8, Tcq
from clocher_kernels.formats.base import turn
from clocher_kernels.formats.tcq import GROUP, LEVELS
from clocher_kernels.quant_tensor import encode
from clocher_runtime.convert import trellis
from clocher_runtime.quantize.gptq import Factor, factorise

DISTORTION = {2: 0.0873, 3: 0.0239, 4: 0.00684, 5: 0.00233, 8: 1e-4}
"""Mean squared error of a normal distribution by bits of a weight."""


class Recipe(NamedTuple):
    """How a matrix is rounded."""

    bits: int
    damp: float = 0.05  # of the Hessian; 0: later columns are not corrected
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
    return Tcq(bits) if bits in LEVELS else Int8("row", "f16")


class Input(NamedTuple):
    """What a matrix's input says, in the rotated columns."""

    hessian: np.ndarray  # [K, K]
    factor: Factor | None


def prepare(hessian: np.ndarray, recipe: Recipe) -> Input:
    """Rotate and factorise a Hessian [K, K]."""
    hessian = turn(np.ascontiguousarray(turn(hessian, GROUP).T), GROUP)
    order = trellis.order_of(np.diagonal(hessian))
    factor = factorise(hessian, recipe.damp, order=order) if recipe.damp else None
    return Input(hessian, factor)


def quantise(
    w: np.ndarray, given: Input, recipe: Recipe, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return w [N, K] rounded, and its loss tr(E H E^T) by row, [N]."""
    own, fmt = turn(w, GROUP), format_of(recipe.bits)
    if isinstance(fmt, Tcq):
        made = trellis.search(own, fmt, threads=threads)
        if given.factor:
            order, upper, _ = given.factor
            made = trellis.solve(own, made, order, upper, threads=threads)
        out = made.stored()
    else:
        out = turn(encode(w, fmt).decode(), GROUP)
    wrong = own - out
    return turn(out, GROUP), np.einsum("nk,nk->n", wrong @ given.hessian, wrong)
