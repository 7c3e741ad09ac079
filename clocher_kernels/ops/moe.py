"""Mixture of experts: router, gated hidden layer of the chosen experts, weighted sum."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import numpy as np

from clocher_kernels.dtypes import LARGEST
from clocher_kernels.ops.contract import (
    NO_CODES,
    Case,
    In,
    Matrix,
    OpSpec,
    Out,
    Real,
    Tolerance,
    Value,
    Vector,
    nearest,
    no_blocks,
)
from clocher_kernels.ops.elementwise import activate
from clocher_kernels.ops.quantize import dequantize, groups_of
from clocher_kernels.plan import Attr
from clocher_kernels.quant_tensor import QuantTensor

Array = np.ndarray

Experts = Annotated[Array, In("M A", "i32", below="E")]


def route(
    *,
    logits: Annotated[Array, In("M E")],
    bias: Annotated[Array | None, Vector("E")] = None,
    ids: Annotated[Array, Out("M A", "i32")],
    weights: Annotated[Array, Out("M A")],
    score: str = "chosen",
    normalise: bool = False,
    factor: float = 1.0,
    groups: int = 0,
    group_top: int = 0,
    group_best: int = 1,
) -> None:
    """Choose A experts for each token, and their weights.

    The scores are, by `score`: "chosen", the logits, whose softmax over those that are chosen makes
    the weights (gpt-oss, Mixtral); "softmax" over all experts; "sigmoid" of each. The A largest of
    score + bias are chosen, and only from the `group_top` groups of experts whose `group_best`
    largest of them add up to most. A weight is the expert's score, divided by the sum of the
    chosen ones if they are normalised, times the factor.

    Args:
        ids: [M, A] i32, written, by descending score + bias; equal ones by ascending expert.
        weights: [M, A] fp32, written; NaN if a logit is NaN or infinity, or score + bias is NaN. A
            logit of minus infinity is that of an expert that is never chosen.
        bias: [E] fp32, for the choice alone.
        score: "chosen", "softmax" or "sigmoid".
        normalise: whether the weights are divided by their sum.
        factor: of all weights.
        groups: of E / groups experts that follow each other; 0 for one of all.
        group_top: groups that are chosen from.
        group_best: experts that speak for a group.

    Source: transformers GptOssTopKRouter, Qwen3MoeSparseMoeBlock; DeepSeek-V3 (arXiv 2412.19437),
    eq. 13 to 16 and section 2.1.2.
    """
    wide = logits.astype(np.float64)
    if score == "sigmoid":
        scores = 1 / (1 + np.exp(-wide))
    elif score == "softmax":
        scores = np.exp(wide - wide.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    else:
        scores = wide
    # In fp32, as they are compared everywhere.
    ranked = scores.astype(np.float32) if bias is None else scores.astype(np.float32) + bias
    odd = ~(logits < np.inf).all(axis=1) | np.isnan(ranked).any(axis=1)
    if groups:
        parts = ranked.reshape(len(ranked), groups, -1)
        best = -np.sort(-parts, axis=2)[:, :, :group_best].sum(axis=2)
        kept = np.argsort(-best, axis=1, kind="stable")[:, :group_top]
        closed = np.ones((len(ranked), groups), bool)
        np.put_along_axis(closed, kept, False, axis=1)
        ranked = np.where(np.repeat(closed, parts.shape[2], axis=1), -np.inf, ranked)
    order = np.argsort(-ranked, axis=1, kind="stable")[:, : ids.shape[1]]
    chosen = np.take_along_axis(scores, order, axis=1)
    if score == "chosen":
        chosen = np.exp(chosen - chosen.max(axis=1, keepdims=True))
    chosen[odd] = np.nan
    if normalise or score == "chosen":
        chosen = chosen / (chosen.sum(axis=1, keepdims=True) + 1e-20)
    ids[...] = order
    weights[...] = chosen * factor


def moe_gate_up(
    *,
    x: Annotated[Array, In("M K", "f32 i8", narrow=True, std=6.0)],
    x_scale: Annotated[Array | None, In("M B")] = None,
    ids: Experts,
    factors: Annotated[Array | None, In("M A")] = None,
    w: Annotated[QuantTensor, Matrix("E J K")],
    bias: Annotated[Array | None, Vector("E J")] = None,
    y: Annotated[Array, Out("M A I", narrow=True)],
    act: str = "clamped",
    limit: float = 0.0,
    alpha: float = 0.0,
    group: int = 0,
) -> None:
    """Compute the gated hidden layer of the chosen experts.

    gate and up are the even and odd rows of decode(w)[expert] x * factor + bias[expert]; with
    "silu" y = silu(gate) * up, with "clamped" y = (clamp(up, -limit, limit) + 1) * g *
    sigmoid(alpha * g), g = min(gate, limit). A pair that is not finite gives NaN.

    Args:
        x: [M, K]; int8 codes from `quantize` if there are scales, else fp32.
        ids: [M, A] i32, chosen experts.
        w: logical [E, J, K], J = 2 I, a format that `linear` takes.
        act: "silu" or "clamped".
        limit: clamp; of "clamped" only.
        alpha: slope of the sigmoid; of "clamped" only.
        x_scale: [M, B] fp32; B = ceil(K / group), or 1.
        factors: [M, A] fp32, of a token's activations for each expert (Llama 4).
        group: columns per activation scale; 0 for one scale per token.

    Source: gpt-oss `swiglu`; transformers GptOssExperts.
    """
    dense = w.stored()
    x = x if x_scale is None else dequantize(x, x_scale, group)
    for m in range(len(x)):
        for a, expert in enumerate(nearest(ids[m], len(dense))):
            h = dense[expert].astype(np.float64) @ x[m]
            if factors is not None:
                h *= factors[m, a]
            if bias is not None:
                h += bias[expert]
            h[np.abs(h) > LARGEST["f32"]] = np.nan
            if act == "silu":
                y[m, a] = activate(act, h[0::2]) * h[1::2]
                continue
            gate, up = np.minimum(h[0::2], limit), np.clip(h[1::2], -limit, limit)
            y[m, a] = (up + 1) * gate / (1 + np.exp(-alpha * gate))


def moe_down(
    *,
    x: Annotated[Array, In("M A I", "f32 i8", narrow=True)],
    x_scale: Annotated[Array | None, In("M A B")] = None,
    ids: Experts,
    weights: Annotated[Array | None, In("M A")] = None,
    w: Annotated[QuantTensor, Matrix("E N I")],
    bias: Annotated[Array | None, Vector("E N")] = None,
    residual: Annotated[Array | None, In("M N")] = None,
    y: Annotated[Array, Out("M N", narrow=True)],
    group: int = 0,
) -> None:
    """Project the chosen experts' hidden layers down and sum them by router weight.

    y = residual + sum over a of weights[a] * (decode(w)[ids[a]] x[a] + bias[ids[a]]).

    Args:
        x: [M, A, I]; int8 codes from `quantize` if there are scales, else fp32.
        w: logical [E, N, I], a format that `linear` takes.
        y: [M, N] fp32, written; may be the residual's own buffer.
        weights: [M, A] fp32; without them all are 1.
        x_scale: [M, A, B] fp32; B = ceil(I / group), or 1.
        group: columns per activation scale; 0 for one scale per token and expert.
    """
    dense = w.stored()
    x = x if x_scale is None else dequantize(x, x_scale, group)
    for m in range(len(x)):
        total = np.zeros(y.shape[1]) if residual is None else residual[m].astype(np.float64)
        for a, expert in enumerate(nearest(ids[m], len(dense))):
            part = dense[expert].astype(np.float64) @ x[m, a]
            if bias is not None:
                part += bias[expert]
            total += part if weights is None else weights[m, a] * part
        y[m] = total


def _make_route(case: Case, rng: "np.random.Generator") -> dict[str, Value]:
    logits = rng.standard_normal((case.sizes["M"], case.sizes["E"]), dtype=np.float32)
    logits[-1, -1] = logits[-1, 0]  # a tie
    return {"logits": logits * np.float32(2)}


_FORMATS = ("mxfp4", "bf16", "f32", "f16", "int8_row_f32", "int4_sym_g64_bf16")
_BLOCK_FORMATS = ("q4_k", "q6_k", "iq4_nl", "tcq4")
_SHAPES = ((1, 8, 2, 64, 256, True), (5, 4, 3, 37, 96, False))
_LARGE = (70, 3, 2, 11, 544, True)
_INTEGER_FORMATS = ("mxfp4", "int4_asym_g64_bf16", "int8_row_f32", "iq4_nl")
_SHAPES_OF_CODES = ((*_SHAPES[0], 32), (*_SHAPES[1], 128), (40, 3, 2, 13, 160, True, 32))
_SHAPES_OF_BLOCKS = ((5, 4, 3, 37, 512, False, 128), (40, 3, 2, 13, 256, True, 32))


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
    """Spell a case of either matmul, by its `attrs`; with a group `x` is int8.

    M tokens choose A of E experts, which make N values of K; `rest`: with bias and residual.
    """
    sides = {"J": 2 * n, "I": n, "K": k} if "act" in attrs else {"N": n, "I": k}
    sizes = {"M": m, "E": e, "A": a, **sides}
    spelled = "-".join(f"{letter.lower()}{size}" for letter, size in sizes.items())
    name = f"{'large-' if m == _LARGE[0] else ''}{fmt}-{spelled}"
    options = {"bias": rest, "residual": rest, "weights": True}
    if group is None:
        return Case(name, sizes, attrs, {"w": fmt}, options, missing=no_blocks(fmt))
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
        *(_case(attrs, fmt, *_SHAPES[0]) for fmt in _BLOCK_FORMATS),
        *(_case(attrs, fmt, *_LARGE) for fmt in _FORMATS[:2]),
        _case(attrs, "mxfp4", 40, 16, *_LARGE[2:]),  # few tokens of each expert
        *(_case(attrs, fmt, *shape) for fmt in _INTEGER_FORMATS for shape in _SHAPES_OF_CODES),
        *(_case(attrs, fmt, *shape) for fmt in ("q4_k", "q6_k") for shape in _SHAPES_OF_BLOCKS),
    )


def _other_cases(
    cases: tuple[Case, ...], name: str, attrs: Mapping[str, Attr], **there: bool
) -> tuple[Case, ...]:
    """Return a few of the cases with other attributes and other optional parameters."""
    few = [c for c in cases if c.formats["w"] in ("bf16", "int4_asym_g64_bf16", "int8_row_f32")]
    return tuple(
        replace(
            c,
            id=f"{name}-{c.id}",
            attrs={**{k: v for k, v in c.attrs.items() if k == "group"}, **attrs},
            options={**c.options, **there},
        )
        for c in few
    )


_GPT_OSS = {"M": 1, "E": 4, "A": 4}  # the experts that one token chooses
_QWEN3_A3B = {"M": 1, "E": 8, "A": 8}
_GPT_OSS_UP = {**_GPT_OSS, "J": 5760, "I": 2880, "K": 2880}
_QWEN3_UP = {**_QWEN3_A3B, "J": 1536, "I": 768, "K": 2048}
_QWEN3_DOWN = {**_QWEN3_A3B, "N": 2048, "I": 768}
_CLAMPED: dict[str, Attr] = {"act": "clamped", "limit": 7.0, "alpha": 1.702}
_UP_CASES, _DOWN_CASES = _cases(_CLAMPED), _cases({})
_V2: dict[str, Attr] = {"score": "softmax", "factor": 16.0, "groups": 4, "group_top": 2}
_V3: dict[str, Attr] = {"score": "sigmoid", "normalise": True, "factor": 2.5, "groups": 8}
_V3 |= {"group_top": 4, "group_best": 2}

SPECS = (
    OpSpec(
        route,
        (
            Case("m1-e8-a2", {"M": 1, "E": 8, "A": 2}),
            Case("m5-e33-a4", {"M": 5, "E": 33, "A": 4}),
            Case("m3-e4-a4", {"M": 3, "E": 4, "A": 4}),
            Case("softmax-m3-e16-a4", {"M": 3, "E": 16, "A": 4}, {"score": "softmax"}),
            Case(
                "normal-m2-e8-a2", {"M": 2, "E": 8, "A": 2}, {"score": "softmax", "normalise": True}
            ),
            Case("sigmoid-m4-e6-a1", {"M": 4, "E": 6, "A": 1}, {"score": "sigmoid"}),
            Case("groups-m5-e24-a3", {"M": 5, "E": 24, "A": 3}, _V2),
            Case("bias-m5-e32-a6", {"M": 5, "E": 32, "A": 6}, _V3, {}, {"bias": True}),
        ),
        Tolerance(2e-6, 2e-5),
        (Real("m1-*", {"M": 1, "E": 128, "A": 8}),),
        make=_make_route,
        flops=1,
    ),
    OpSpec(
        moe_gate_up,
        (
            *_UP_CASES,
            *_other_cases(_UP_CASES, "silu", {"act": "silu"}),
            *_other_cases(_UP_CASES[:6], "factors", {"act": "silu"}, factors=True),
        ),
        Tolerance(5e-6, 5e-5),
        (
            Real("mxfp4-m1-*", _GPT_OSS_UP),
            Real("*16-m1-*", _QWEN3_UP),
            Real("int*-m1-*", _QWEN3_UP),
        ),
        rounds=True,
    ),
    OpSpec(
        moe_down,
        (*_DOWN_CASES, *_other_cases(_DOWN_CASES[:6], "plain", {}, weights=False)),
        Tolerance(5e-6, 5e-5),
        (
            Real("mxfp4-m1-*", {**_GPT_OSS, "N": 2880, "I": 2880}),
            Real("*16-m1-*", _QWEN3_DOWN),
            Real("int*-m1-*", _QWEN3_DOWN),
        ),
        rounds=True,
    ),
)
