"""Mixture of experts as gpt-oss has it: router, clamped SwiGLU, weighted sum."""

from collections.abc import Mapping

import numpy as np

from clocher_kernels.dtypes import LARGEST
from clocher_kernels.ops.contract import Case, OpSpec, Param, Real, Tolerance, Value, nearest
from clocher_kernels.ops.linear import NO_CODES
from clocher_kernels.ops.quantize import dequantize, groups_of
from clocher_kernels.plan import Attr
from clocher_kernels.quant_tensor import QuantTensor

Array = np.ndarray


def topk_softmax(*, logits: Array, ids: Array, weights: Array) -> None:
    """Choose the A experts with the largest logits and softmax over those A.

    Args:
        logits: [M, E] fp32.
        ids: [M, A] i32, written, by descending logit; equal logits by ascending expert.
        weights: [M, A] fp32, written; NaN if a logit is NaN.
    """
    order = np.argsort(-logits, axis=1, kind="stable")[:, : ids.shape[1]]
    chosen = np.take_along_axis(logits, order, axis=1).astype(np.float64)
    exps = np.exp(chosen - chosen[:, :1])
    ids[...] = order
    exps[np.isnan(logits).any(axis=1)] = np.nan
    weights[...] = exps / exps.sum(axis=1, keepdims=True)


def moe_gate_up(
    *,
    x: Array,
    ids: Array,
    w: QuantTensor,
    y: Array,
    limit: float,
    alpha: float,
    x_scale: Array | None = None,
    bias: Array | None = None,
    group: int = 0,
) -> None:
    """Compute the gated hidden layer of the chosen experts.

    gate and up are the even and odd rows of decode(w)[expert] x + bias[expert];
    y = (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g) with g = min(gate, limit). A pair
    that is not finite gives NaN.

    Args:
        x: [M, K]; int8 codes from `quantize` if there are scales, else fp32.
        ids: [M, A] i32, chosen experts.
        w: logical [E, J, K], J = 2 I, a format that `linear` takes.
        y: [M, A, I] fp32, written.
        limit: clamp.
        alpha: slope of the sigmoid.
        x_scale: [M, B] fp32; B = ceil(K / group), or 1.
        bias: [E, J] fp32.
        group: columns per activation scale; 0 for one scale per token.

    Source: gpt-oss `swiglu`; transformers GptOssExperts.
    """
    dense = w.decode()
    x = x if x_scale is None else dequantize(x, x_scale, group)
    for m in range(len(x)):
        for a, expert in enumerate(nearest(ids[m], len(dense))):
            h = dense[expert].astype(np.float64) @ x[m]
            if bias is not None:
                h += bias[expert]
            h[np.abs(h) > LARGEST["f32"]] = np.nan
            gate, up = np.minimum(h[0::2], limit), np.clip(h[1::2], -limit, limit)
            y[m, a] = (up + 1) * gate / (1 + np.exp(-alpha * gate))


def moe_down(
    *,
    x: Array,
    ids: Array,
    weights: Array,
    w: QuantTensor,
    y: Array,
    x_scale: Array | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    group: int = 0,
) -> None:
    """Project the chosen experts' hidden layers down and sum them by router weight.

    y = residual + sum over a of weights[a] * (decode(w)[ids[a]] x[a] + bias[ids[a]]).

    Args:
        x: [M, A, I]; int8 codes from `quantize` if there are scales, else fp32.
        ids: [M, A] i32.
        weights: [M, A] fp32.
        w: logical [E, N, I], a format that `linear` takes.
        y: [M, N] fp32, written; may be the residual's own buffer.
        x_scale: [M, A, B] fp32; B = ceil(I / group), or 1.
        bias: [E, N] fp32.
        residual: [M, N] fp32.
        group: columns per activation scale; 0 for one scale per token and expert.
    """
    dense = w.decode()
    x = x if x_scale is None else dequantize(x, x_scale, group)
    for m in range(len(x)):
        total = np.zeros(y.shape[1]) if residual is None else residual[m].astype(np.float64)
        for a, expert in enumerate(nearest(ids[m], len(dense))):
            part = dense[expert].astype(np.float64) @ x[m, a]
            if bias is not None:
                part += bias[expert]
            total += weights[m, a] * part
        y[m] = total


def _make_topk(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    logits = rng.standard_normal((case.sizes["M"], case.sizes["E"]), dtype=np.float32)
    logits[-1, -1] = logits[-1, 0]  # a tie
    return {"logits": logits}


_FORMATS = ("mxfp4", "bf16", "f32", "f16", "int8_row_f32", "int4_sym_g64_bf16")
_SHAPES = ((1, 8, 2, 64, 256, True), (5, 4, 3, 37, 96, False))
_LARGE = (70, 3, 2, 11, 544, True)
_INTEGER_FORMATS = ("mxfp4", "int4_asym_g64_bf16", "int8_row_f32")
_SHAPES_OF_CODES = ((*_SHAPES[0], 32), (*_SHAPES[1], 128), (40, 3, 2, 13, 160, True, 32))


def _case(
    attrs: Mapping[str, Attr],
    fmt: str,
    m: int,
    e: int,
    a: int,
    n: int,
    k: int,
    rest: bool,
    group: int | None = None,
) -> Case:
    """Spell a case of either product; with a group `x` is int8.

    Args:
        attrs: of the call; those of the gated hidden layer, or none.
        fmt: of the experts' matrices.
        m: tokens.
        e: experts.
        a: experts that a token chooses.
        n: values that an expert makes of a token.
        k: columns of a matrix.
        rest: whether there are a bias and a residual.
        group: columns per activation scale.
    """
    sides = {"J": 2 * n, "I": n, "K": k} if attrs else {"N": n, "I": k}
    sizes = {"M": m, "E": e, "A": a, **sides}
    spelled = "-".join(f"{letter.lower()}{size}" for letter, size in sizes.items())
    name = f"{'large-' if m == _LARGE[0] else ''}{fmt}-{spelled}"
    options = {"bias": rest, "residual": rest}
    if group is None:
        return Case(name, sizes, attrs, {"w": fmt}, options)
    return Case(
        f"{name}-i8-g{group}",
        {**sizes, "B": groups_of(k, group)},
        {**attrs, "group": group},
        {"w": fmt, "x": "i8"},
        {**options, "x_scale": True},
        missing=NO_CODES,
    )


def _cases(attrs: Mapping[str, Attr]) -> tuple[Case, ...]:
    return (
        *(_case(attrs, fmt, *shape) for fmt in _FORMATS for shape in _SHAPES),
        *(_case(attrs, fmt, *_LARGE) for fmt in _FORMATS[:2]),
        *(_case(attrs, fmt, *shape) for fmt in _INTEGER_FORMATS for shape in _SHAPES_OF_CODES),
    )


_GPT_OSS = {"M": 1, "E": 4, "A": 4}  # the experts that one token chooses
_QWEN3_A3B = {"M": 1, "E": 8, "A": 8}
_GPT_OSS_UP = {**_GPT_OSS, "J": 5760, "I": 2880, "K": 2880}
_QWEN3_UP = {**_QWEN3_A3B, "J": 1536, "I": 768, "K": 2048}
_QWEN3_DOWN = {**_QWEN3_A3B, "N": 2048, "I": 768}
_LIMITS = {"limit": 7.0, "alpha": 1.702}

_IDS = Param("ids", "in", "M A", "i32", below="E")

SPECS = (
    OpSpec(
        "topk_softmax",
        "route: the A largest logits and their softmax",
        (
            Param("logits", "in", "M E"),
            Param("ids", "out", "M A", "i32"),
            Param("weights", "out", "M A"),
        ),
        topk_softmax,
        (
            Case("m1-e8-a2", {"M": 1, "E": 8, "A": 2}),
            Case("m5-e33-a4", {"M": 5, "E": 33, "A": 4}),
            Case("m3-e4-a4", {"M": 3, "E": 4, "A": 4}),
        ),
        Tolerance(2e-6, 2e-5),
        (Real("m1-*", {"M": 1, "E": 128, "A": 8}),),
        make=_make_topk,
        flops=1,
    ),
    OpSpec(
        "moe_gate_up",
        "clamped SwiGLU of the chosen experts",
        (
            Param("x", "in", "M K", "f32 i8", narrow=True, std=6.0),
            Param("x_scale", "in", "M B", optional=True),
            _IDS,
            Param("w", "matrix", "E J K", ""),
            Param("bias", "vector", "E J", optional=True),
            Param("y", "out", "M A I", narrow=True),
        ),
        moe_gate_up,
        _cases(_LIMITS),
        Tolerance(5e-6, 5e-5),
        (
            Real("mxfp4-m1-*", _GPT_OSS_UP),
            Real("*16-m1-*", _QWEN3_UP),
            Real("int*-m1-*", _QWEN3_UP),
        ),
        rounds=True,
    ),
    OpSpec(
        "moe_down",
        "weighted sum of the chosen experts' projections",
        (
            Param("x", "in", "M A I", "f32 i8", narrow=True),
            Param("x_scale", "in", "M A B", optional=True),
            _IDS,
            Param("weights", "in", "M A"),
            Param("w", "matrix", "E N I", ""),
            Param("bias", "vector", "E N", optional=True),
            Param("residual", "in", "M N", optional=True),
            Param("y", "out", "M N", narrow=True),
        ),
        moe_down,
        _cases({}),
        Tolerance(5e-6, 5e-5),
        (
            Real("mxfp4-m1-*", {**_GPT_OSS, "N": 2880, "I": 2880}),
            Real("*16-m1-*", _QWEN3_DOWN),
            Real("int*-m1-*", _QWEN3_DOWN),
        ),
        rounds=True,
    ),
)
