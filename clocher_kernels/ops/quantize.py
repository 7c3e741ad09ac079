"""Quantise activations: to int8 codes with scales, or to the values of a narrower type in fp32.

A group is a run of `group` columns of a token that share a scale: 32, 128, or, if `group` is 0, all
of them. One `quantize` serves every product that reads the same activations, and so does one
`fake_quantize`.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from clocher_kernels.dtypes import LARGEST, from_f32, to_f32
from clocher_kernels.ops.contract import EXACT, Case, In, OpSpec, Out, Real, Value

Array = np.ndarray

GROUPS = (32, 128, 0)
"""Columns per activation scale; 0 for one scale per token."""

BITNET: Mapping[str, Any] = {"floor": 1e-5, "lowest": -128}
"""How BitNet quantises what its ternary weights multiply."""
GROUPED: Mapping[str, Any] = {"floor": 1e-30, "lowest": -127}
"""How we quantise what other integer weights multiply."""

FLOAT8: Mapping[str, Any] = {"floor": 1e-5, "group": 0}
"""How activations become fp8: a scale for each token."""

_NO_GROUPS = {
    "cuda": "int8 activations are for ternary weights there, which have one scale a token; what "
    "other weights multiply stays 16-bit"
}
_NO_ROUNDING = {"cuda": "activations are stored in 16 bits there, and rounded to fp8 only"}


def groups_of(k: int, group: int) -> int:
    """Return the number of activation scales of a token with K columns."""
    return -(-k // group) if group else 1


def dequantize(q: Array, scale: Array, group: int) -> Array:
    """Return q * scale, fp64 [.., K], from q i8 [.., K] and scale fp32 [.., B]."""
    k = q.shape[-1]
    wide = np.repeat(scale.astype(np.float64), group or k, axis=-1)[..., :k]
    return np.asarray(q * wide)


def _divided(x: Array, group: int, floor: float, most: np.float32) -> tuple[Array, Array]:
    """Return x over the scale of its group, not rounded, and the scales: absmax / most.

    What is not finite becomes 0, and the scale of its group NaN.
    """
    *lead, k = x.shape
    cells = np.zeros((*lead, groups_of(k, group) * (group or k)), np.float32)
    cells[..., :k] = x
    cells = cells.reshape(*lead, -1, group or k)
    finite = np.isfinite(cells)
    cells[~finite] = 0
    absmax = np.maximum(np.abs(cells).max(axis=-1), np.float32(floor))
    cells *= (most / absmax)[..., None]
    scale = np.where(finite.all(axis=-1), absmax / most, np.float32(np.nan))
    return cells.reshape(*lead, -1)[..., :k], scale


def quantize(
    *,
    x: Annotated[Array, In("M A* K")],
    q: Annotated[Array, Out("M A* K", "i8")],
    scale: Annotated[Array, Out("M A* B")],
    group: int,
    floor: float,
    lowest: int,
) -> None:
    """Quantise each group of columns to int8: q = clamp(rint(x * 127 / absmax), lowest, 127).

    Args:
        x: [M, A*, K] fp32; of experts' hidden layers [M, A, K].
        scale: [M, A*, B] fp32, written: absmax / 127; B = ceil(K / group), or 1. A group with NaN
            or infinity has the scale NaN, and any codes.
        group: columns per scale; 0 for all.
        floor: least absmax.
        lowest: least code.

    Source: with group 0, floor 1e-5 and lowest -128: BitNet b1.58 (arXiv 2402.17764) as in
    transformers' ActQuant.
    """
    steps, scale[...] = _divided(x, group, floor, np.float32(127))
    q[...] = np.clip(np.rint(steps), lowest, 127)


def fake_quantize(
    *,
    x: Annotated[Array, In("M A* K", narrow=True)],
    y: Annotated[Array, Out("M A* K")],
    dtype: str,
    group: int = 0,
    floor: float = 0.0,
) -> None:
    """Round activations to what a narrower type can hold; the values stay fp32.

    "bf16" and "f16" round to nearest, ties to even, and saturate; `group` and `floor` mean nothing.
    "e4m3" and "i8" have a scale for each group, absmax / 448 or absmax / 127: y is code * scale,
    the code the nearest to x * (448 or 127 / absmax), in fp32 as in `quantize`.

    Args:
        y: [M, A*, K] fp32, written. What is not finite becomes NaN, and where there are scales so
            does its group.
        dtype: "bf16", "f16", "e4m3" or "i8".
        group: columns per scale; 0 for all.
        floor: least absmax.

    Source: Jacob et al. 2018 (arXiv 1712.05877), section 3: quantisation simulated in floats.
    """
    most = np.float32(LARGEST.get(dtype, 127))
    if dtype in ("bf16", "f16"):
        bounded = np.clip(np.where(np.isfinite(x), x, np.float32(np.nan)), -most, most)
        y[...] = to_f32(from_f32(bounded, dtype), dtype)
        return
    k = x.shape[-1]
    steps, scale = _divided(x, group, floor, most)
    if dtype == "i8":
        rounded = np.clip(np.rint(steps), -127, 127).astype(np.int8)
    else:
        rounded = from_f32(steps, dtype)
    y[...] = to_f32(rounded, dtype) * np.repeat(scale, group or k, axis=-1)[..., :k]


def _make(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
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
    OpSpec(
        fake_quantize,
        (
            *(
                Case(f"{dtype}-m{m}-k{k}", {"M": m, "K": k}, {"dtype": dtype}, missing=_NO_ROUNDING)
                for dtype in ("bf16", "f16")
                for m, k in ((1, 256), (3, 37))
            ),
            *(
                Case(f"e4m3-m{m}-k{k}", {"M": m, "K": k}, {"dtype": "e4m3", **FLOAT8})
                for m, k in ((1, 256), (5, 100), (2, 37))
            ),
            *(
                Case(
                    f"i8-m{m}-k{k}",
                    {"M": m, "K": k},
                    {"dtype": "i8", "group": 128, "floor": GROUPED["floor"]},
                    {},
                    {"zeros": zeros},
                    missing=_NO_ROUNDING,
                )
                for m, k, zeros in ((1, 256, 0), (5, 300, 140))
            ),
            Case("e4m3-m5-a3-k37", {"M": 5, "A": 3, "K": 37}, {"dtype": "e4m3", **FLOAT8}),
        ),
        EXACT,
        (Real("*-m1-k256", {"M": 1, "K": 2880}),),
        make=_make,
        flops=3,
    ),
)
