"""Products that leave out what zeros would multiply.

Columns of a weight need not be read whose inputs are zero: those of an MLP with a squared ReLU
whose gates are closed, and those that `drop_small` has made zero. Results are those of `linear`:
what is left out would have been multiplied by zero.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from clocher_kernels.formats import Int4, Ternary
from clocher_kernels.formats.base import Format
from clocher_kernels.ops.contract import EXACT, FP32, Case, In, OpSpec, Out, Real, Value, Vector
from clocher_kernels.ops.linear import (
    Bias,
    LoraB,
    LoraX,
    Residual,
    Sums,
    Times,
    Weight,
    bent,
    linear,
    wide,
)
from clocher_kernels.ops.quantize import BITNET, groups_of, quantize
from clocher_kernels.plan import Attr

Array = np.ndarray


SKIPPED_GROUPS = (32, 64, 128)
"""Columns per scale of int4 weights whose columns can be skipped."""
GROUP = 128
"""Columns per scale of the activations that int4 weights multiply."""
_NOT_ON = {"cuda": "only CPU Plans leave out zeros; a GPU multiplies densely, with `linear`"}


def skips_columns(fmt: Format) -> bool:
    """Return whether weights of a format can be multiplied by `skip_linear`."""
    if isinstance(fmt, Int4):
        return fmt.symmetric and fmt.group in SKIPPED_GROUPS
    return isinstance(fmt, Ternary)


def skip_linear(
    *,
    x: Annotated[Array, In("M K", "i8")],
    x_scale: Annotated[Array, In("M B")],
    w: Weight,
    bias: Bias = None,
    times: Times = None,
    residual: Residual = None,
    lora_x: LoraX = None,
    lora_b: LoraB = None,
    y: Sums,
    activation: str = "none",
    cap: float = 1.0,
    group: int = 0,
) -> None:
    """Multiply what has many zeros: y = activation(x decode(w)^T + bias) * times + residual.

    It is `linear` with int8 activations, to the bit. Columns of W that zeros multiply need not be
    read.

    Args:
        x: [M, K] int8 codes.
        x_scale: [M, B] fp32; B = 1 with ternary weights, else ceil(K / 128).
        w: logical [N, K], ternary, or symmetric int4 with a scale for 32, 64 or 128 columns.
        group: columns per activation scale: 128, or with ternary weights 0: one scale per token.
        others: as `linear` has them.

    Source: that zeros of a ReLU need not be computed is of "Deja Vu" (arXiv 2310.17157).
    """
    after: dict[str, Any] = {"bias": bias, "times": times, "residual": residual}
    after |= {"lora_x": lora_x, "lora_b": lora_b}
    after |= {"activation": activation, "cap": cap, "group": group}
    linear(x=x, x_scale=x_scale, w=w, y=y, **after)


def _make_codes(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    m, k = (case.sizes[d] for d in "MK")
    if case.attrs["group"]:
        x = rng.integers(-127, 128, (m, k)).astype(np.int8)
        x[rng.random((m, k)) >= case.options["live"]] = 0
        return {"x": x}
    values = rng.standard_normal((m, k), np.float32)
    values[rng.random((m, k)) >= case.options["live"]] = 0
    q, scale = np.empty(values.shape, np.int8), np.empty((m, 1), np.float32)
    quantize(x=values, q=q, scale=scale, group=0, **BITNET)
    return {"x": q, "x_scale": scale}


def _case(fmt: str, m: int, n: int, k: int, live: float, more: Mapping[str, Any]) -> Case:
    """Spell a case; `live` is the share of the columns that are not zero."""
    group = 0 if fmt == "ternary" else GROUP
    return Case(
        f"{fmt}-m{m}-n{n}-k{k}-live{int(100 * live)}",
        {"M": m, "N": n, "K": k, "B": groups_of(k, group), **wide(more, n)},
        {"group": group, **bent(more)},
        {"w": fmt, "x": "i8"},
        {"x_scale": True, "live": live, **more},
        FP32 if group else None,
        missing=_NOT_ON,
    )


_CASES = (
    _case("ternary", 1, 64, 256, 0.2, {}),
    _case("ternary", 1, 132, 100, 0.1, {"bias": True}),
    _case("ternary", 2, 148, 600, 0.2, {"residual": True}),
    _case("ternary", 2, 64, 40, 0.9, {"bias": True, "residual": True}),
    _case("ternary", 1, 256, 512, 0.0, {"residual": True}),
    _case("ternary", 1, 256, 512, 1.0, {}),
    _case("ternary", 3, 52, 352, 0.2, {"bias": True}),
    _case("ternary", 37, 48, 384, 0.3, {"residual": True}),
    _case("int4_sym_g32_f16", 1, 256, 384, 0.6, {}),
    _case("int4_sym_g32_f16", 2, 148, 352, 0.75, {"bias": True, "residual": True}),
    _case("int4_sym_g32_f16", 3, 148, 352, 0.75, {"bias": True, "act": "gelu", "times": "N"}),
    _case("int4_sym_g64_f16", 1, 37, 100, 0.1, {"residual": True}),
    _case("int4_sym_g64_bf16", 2, 300, 640, 0.0, {}),
    _case("int4_sym_g128_f32", 1, 520, 300, 1.0, {"bias": True}),
    _case("int4_sym_g32_f16", 1, 148, 352, 0.75, {"bias": True, "act": "silu", "times": "N"}),
)

_LANES = 16


def drop_small(
    *,
    x: Annotated[Array, In("M K")],
    threshold: Annotated[Array | None, Vector("T")] = None,
    y: Annotated[Array, Out("M K")],
    most: float = 1.0,
    least: float = 1.0,
) -> None:
    """Set the activations of a token to zero that are small.

    With a threshold, those below it. Without one it is the token's own: that which keeps the
    largest ceil(K f). f is `least` where all weight is in one channel, and `most` where it is in
    all alike: f = least + (most - least) (sum |x|)^2 / (K sum x^2), the inverse participation
    ratio, an entropy (of order 2) without a logarithm. As many as share the last place are kept.

    Args:
        x: [M, K] fp32. NaN and infinity are kept.
        threshold: [T] fp32, T = 1.
        most: largest share of channels to keep.
        least: smallest one; that of `most` for the same share in every token.

    Source: TEAL (arXiv 2408.14690) for thresholds; Q-Sparse (arXiv 2407.10969) for the largest K.
    """
    size = np.abs(x)
    if threshold is not None:
        y[...] = np.where(size < threshold[0], np.float32(0), x)
        return
    for row, out, values in zip(size, y, x, strict=True):
        bits = row.view(np.int32)
        count = _kept(row, np.float32(most), np.float32(least))
        out[...] = np.where(bits < np.sort(bits)[len(row) - count], np.float32(0), values)


def _kept(size: Array, most: np.float32, least: np.float32) -> int:
    """Return how many of a token's channels are kept; every step is rounded to fp32."""
    k = np.float32(len(size))
    with np.errstate(all="ignore"):
        total, squares = _lane_sum(size), _lane_sum(size * size)
        even = total * total / (k * squares)
    if not even <= 1:
        even = np.float32(1)
    wanted = (least + (most - least) * even) * k
    return int(max(1, min(np.ceil(wanted), len(size))))


def _lane_sum(values: Array) -> np.float32:
    """Return the sum as 16 lanes make it, then the tree 16 -> 8 -> 4 -> 2 -> 1."""
    cells = np.zeros((-(-len(values) // _LANES), _LANES), np.float32)
    cells.reshape(-1)[: len(values)] = values
    sums = np.zeros(_LANES, np.float32)
    for row in cells:
        sums += row
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return np.float32(sums[0])


def _make_activations(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    x = rng.standard_normal([case.sizes[d] for d in "MK"], dtype=np.float32)
    x[-1] **= 3
    x[..., -3:] = 0
    x[..., 1] = x[..., 2]  # a tie
    found: dict[str, Value] = {"x": x}
    if "T" in case.sizes:
        found["threshold"] = np.full(1, 0.4, np.float32)
    return found


_DROPS: dict[str, tuple[dict[str, int], dict[str, Attr], dict[str, bool]]] = {
    "threshold": ({"T": 1}, {}, {"threshold": True}),
    "topk": ({}, {"most": 0.6, "least": 0.6}, {}),
    "adaptive": ({}, {"most": 1.0, "least": 0.5}, {}),
}
"""How a case drops: its own sizes, attributes, options."""


SPECS = (
    OpSpec(
        skip_linear,
        _CASES,
        EXACT,
        (
            Real("ternary-m1-n64-*", {"M": 1, "N": 2560, "K": 6912}),
            Real("int4_sym_g32_f16-m1-*", {"M": 1, "N": 8192, "K": 2048}),
        ),
        make=_make_codes,
    ),
    OpSpec(
        drop_small,
        tuple(
            Case(
                f"{name}-m{m}-k{k}", {"M": m, "K": k, **sizes}, attrs, {}, options, missing=_NOT_ON
            )
            for name, (sizes, attrs, options) in _DROPS.items()
            for m, k in ((1, 256), (5, 100), (3, 37))
        ),
        EXACT,
        (Real("*-m1-*", {"M": 1, "K": 8192}),),
        make=_make_activations,
    ),
)
