"""Quantise activations to int8: codes, and a scale for each group of columns.

A group is a run of `group` columns of a token that share a scale: 32, 128, or, if `group` is 0, all
of them. One `quantize` serves every product that reads the same activations.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from clocher_kernels.ops.contract import EXACT, Case, OpSpec, Param, Real, Value

Array = np.ndarray

GROUPS = (32, 128, 0)
"""Columns per activation scale; 0 for one scale per token."""

BITNET: Mapping[str, Any] = {"floor": 1e-5, "lowest": -128}
"""How BitNet quantises what its ternary weights multiply."""
GROUPED: Mapping[str, Any] = {"floor": 1e-30, "lowest": -127}
"""How we quantise what other integer weights multiply."""

_NO_GROUPS = {
    "cuda": "int8 activations are for ternary weights there, which have one scale a token; what "
    "other weights multiply stays 16-bit"
}


def groups_of(k: int, group: int) -> int:
    """Return the number of activation scales of a token with K columns."""
    return -(-k // group) if group else 1


def dequantize(q: Array, scale: Array, group: int) -> Array:
    """Return q * scale, fp64 [.., K], from q i8 [.., K] and scale fp32 [.., B]."""
    k = q.shape[-1]
    wide = np.repeat(scale.astype(np.float64), group or k, axis=-1)[..., :k]
    return np.asarray(q * wide)


def quantize(*, x: Array, q: Array, scale: Array, group: int, floor: float, lowest: int) -> None:
    """Quantise each group of columns to int8: q = clamp(rint(x * 127 / absmax), lowest, 127).

    Args:
        x: [M, A*, K] fp32; of experts' hidden layers [M, A, K].
        q: [M, A*, K] int8, written.
        scale: [M, A*, B] fp32, written: absmax / 127; B = ceil(K / group), or 1. A group with NaN
            or infinity has the scale NaN, and any codes.
        group: columns per scale; 0 for all.
        floor: least absmax.
        lowest: least code.

    Source: with group 0, floor 1e-5 and lowest -128: BitNet b1.58 (arXiv 2402.17764) as in
    transformers' ActQuant.
    """
    *lead, k = x.shape
    size = group or k
    cells = np.zeros((*lead, groups_of(k, group) * size), np.float32)
    cells[..., :k] = x
    cells = cells.reshape(*lead, -1, size)
    finite = np.isfinite(cells)
    cells[~finite] = 0
    absmax = np.maximum(np.abs(cells).max(axis=-1), np.float32(floor))
    inverse = np.float32(127) / absmax
    codes = np.clip(np.rint(cells * inverse[..., None]), lowest, 127)
    q[...] = codes.reshape(*lead, -1)[..., :k]
    scale[...] = np.where(finite.all(axis=-1), absmax / np.float32(127), np.float32(np.nan))


def _make(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    """Make several tokens, the last of them of tiny values, and columns of zeros."""
    shape = [case.sizes[d] for d in "MAK" if d in case.sizes]
    x = rng.standard_normal(shape, dtype=np.float32)
    x[1:][-1:] *= np.float32(1e-7)
    x[..., : case.options.get("zeros", 0)] = 0
    return {"x": x}


def _case(name: str, group: int, law: Mapping[str, Any], zeros: int = 0, **sizes: int) -> Case:
    spelled = "-".join(f"{letter.lower()}{size}" for letter, size in sizes.items())
    return Case(
        f"{name}-{spelled}",
        {**sizes, "B": groups_of(sizes["K"], group)},
        {"group": group, **law},
        options={"zeros": zeros},
        missing=_NO_GROUPS if group else {},
    )


SPECS = (
    OpSpec(
        "quantize",
        "int8 codes of activations, and a scale per group of columns",
        (
            Param("x", "in", "M A* K"),
            Param("q", "out", "M A* K", "i8"),
            Param("scale", "out", "M A* B"),
        ),
        quantize,
        (
            *(_case("bitnet", 0, BITNET, M=m, K=k) for m, k in ((1, 256), (5, 100), (2, 37))),
            *(
                _case(f"g{group}", group, GROUPED, zeros, M=m, K=k)
                for group in GROUPS
                for m, k, zeros in ((1, 256, 0), (5, 100, 40), (3, 37, 0), (2, 1041, 128))
            ),
            *(
                _case(f"g{group}", group, GROUPED, M=m, A=a, K=k)
                for group in GROUPS
                for m, a, k in ((1, 2, 128), (5, 3, 37))
            ),
        ),
        EXACT,
        (
            Real("bitnet-m1-*", {"M": 1, "K": 6912}),
            Real("g*-m1-k256", {"M": 1, "K": 2880}),
            Real("g*-m1-a2-*", {"M": 1, "A": 4, "K": 2880}),
        ),
        make=_make,
        flops=3,
    ),
)
