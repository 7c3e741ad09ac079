"""Mixture of experts as gpt-oss has it: router, clamped SwiGLU, weighted sum."""

from collections.abc import Mapping

import numpy as np

from clocher_kernels.dtypes import LARGEST
from clocher_kernels.formats import parse_format
from clocher_kernels.ops.contract import Case, Cost, OpSpec, Param, Tolerance, Value, nearest
from clocher_kernels.plan import Attr
from clocher_kernels.quant_tensor import QuantTensor, encode

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
    bias: Array | None = None,
) -> None:
    """Compute the gated hidden layer of the chosen experts.

    gate and up are the even and odd rows of decode(w)[expert] x + bias[expert];
    y = (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g) with g = min(gate, limit). A pair
    that is not finite gives NaN.

    Args:
        x: [M, K] fp32.
        ids: [M, A] i32, chosen experts.
        w: logical [E, J, K], J = 2 I, any format.
        y: [M, A, I] fp32, written.
        limit: clamp.
        alpha: slope of the sigmoid.
        bias: [E, J] fp32.

    Source: gpt-oss `swiglu`; transformers GptOssExperts.
    """
    dense = w.decode()
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
    bias: Array | None = None,
    residual: Array | None = None,
) -> None:
    """Project the chosen experts' hidden layers down and sum them by router weight.

    y = residual + sum over a of weights[a] * (decode(w)[ids[a]] x[a] + bias[ids[a]]).

    Args:
        x: [M, A, I] fp32.
        ids: [M, A] i32.
        weights: [M, A] fp32.
        w: logical [E, N, I], any format.
        y: [M, N] fp32, written; may be the residual's own buffer.
        bias: [E, N] fp32.
        residual: [M, N] fp32.
    """
    dense = w.decode()
    for m in range(len(x)):
        total = np.zeros(y.shape[1]) if residual is None else residual[m].astype(np.float64)
        for a, expert in enumerate(nearest(ids[m], len(dense))):
            part = dense[expert].astype(np.float64) @ x[m, a]
            if bias is not None:
                part += bias[expert]
            total += weights[m, a] * part
        y[m] = total


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def _chosen(case: Case, rng: np.random.Generator) -> Array:
    m, e, a = (case.sizes[d] for d in "MEA")
    return np.stack([rng.permutation(e)[:a] for _ in range(m)]).astype(np.int32)


def _make_topk(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    logits = _normal(rng, case.sizes["M"], case.sizes["E"])
    logits[-1, -1] = logits[-1, 0]  # a tie
    return {"logits": logits}


def _make_gate_up(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    m, e, j, k = (case.sizes[d] for d in "MEJK")
    values: dict[str, Value] = {
        "x": _normal(rng, m, k) * np.float32(2),
        "ids": _chosen(case, rng),
        "w": encode(
            _normal(rng, e, j, k) * np.float32(3 * k**-0.5), parse_format(case.formats["w"])
        ),
    }
    if case.options.get("bias", True):
        values["bias"] = _normal(rng, e, j)
    return values


def _make_down(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    m, e, n, i, a = (case.sizes[d] for d in "MENIA")
    values: dict[str, Value] = {
        "x": _normal(rng, m, a, i),
        "ids": _chosen(case, rng),
        "weights": rng.random((m, a), dtype=np.float32),
        "w": encode(_normal(rng, e, n, i) * np.float32(i**-0.5), parse_format(case.formats["w"])),
    }
    if case.options.get("bias", True):
        values["bias"] = _normal(rng, e, n)
        values["residual"] = _normal(rng, m, n)
    return values


def _topk_cost(values: Mapping[str, Value], attrs: Mapping[str, Attr]) -> Cost:
    logits = values["logits"]
    assert isinstance(logits, np.ndarray)
    return Cost(logits.nbytes, logits.size)


def _experts_cost(values: Mapping[str, Value], attrs: Mapping[str, Attr]) -> Cost:
    ids, w, x = values["ids"], values["w"], values["x"]
    assert isinstance(ids, np.ndarray) and isinstance(w, QuantTensor) and isinstance(x, np.ndarray)
    experts = len(np.unique(ids))
    n, k = w.shape[1:]
    return Cost(
        experts * w.nbytes // w.shape[0] + x.nbytes + 4 * ids.size * n, 2 * ids.size * n * k
    )


_FORMATS = ("mxfp4", "bf16", "f32", "f16", "int8_row_f32", "int4_sym_g64_bf16")
_GATE_UP_CASES = tuple(
    Case(
        f"{fmt}-{name}",
        {"M": m, "E": e, "A": a, "J": 2 * i, "I": i, "K": k},
        {"limit": 7.0, "alpha": 1.702},
        {"w": fmt},
        {"bias": bias},
    )
    for fmt in _FORMATS
    for name, m, e, a, i, k, bias in (
        ("m1-e8-a2-i64-k256", 1, 8, 2, 64, 256, True),
        ("m5-e4-a3-i37-k96", 5, 4, 3, 37, 96, False),
    )
)
_DOWN_CASES = tuple(
    Case(
        f"{fmt}-{name}",
        {"M": m, "E": e, "A": a, "N": n, "I": i},
        {},
        {"w": fmt},
        {"bias": bias},
    )
    for fmt in _FORMATS
    for name, m, e, a, n, i, bias in (
        ("m1-e8-a2-n256-i64", 1, 8, 2, 256, 64, True),
        ("m5-e4-a3-n37-i96", 5, 4, 3, 37, 96, False),
    )
)

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
        _make_topk,
        (
            Case("m1-e8-a2", {"M": 1, "E": 8, "A": 2}),
            Case("m5-e33-a4", {"M": 5, "E": 33, "A": 4}),
            Case("m3-e4-a4", {"M": 3, "E": 4, "A": 4}),
        ),
        Tolerance(2e-6, 2e-5),
        _topk_cost,
    ),
    OpSpec(
        "moe_gate_up",
        "clamped SwiGLU of the chosen experts",
        (
            Param("x", "in", "M K"),
            Param("ids", "in", "M A", "i32"),
            Param("w", "matrix", "E J K", ""),
            Param("bias", "vector", "E J", optional=True),
            Param("y", "out", "M A I"),
        ),
        moe_gate_up,
        _make_gate_up,
        _GATE_UP_CASES,
        Tolerance(5e-6, 5e-5),
        _experts_cost,
    ),
    OpSpec(
        "moe_down",
        "weighted sum of the chosen experts' projections",
        (
            Param("x", "in", "M A I"),
            Param("ids", "in", "M A", "i32"),
            Param("weights", "in", "M A"),
            Param("w", "matrix", "E N I", ""),
            Param("bias", "vector", "E N", optional=True),
            Param("residual", "in", "M N", optional=True),
            Param("y", "out", "M N"),
        ),
        moe_down,
        _make_down,
        _DOWN_CASES,
        Tolerance(5e-6, 5e-5),
        _experts_cost,
    ),
)
