"""Norms, rotary embedding, gated activations, row gathers."""

from collections.abc import Mapping

import numpy as np

from clocher_kernels.dtypes import LARGEST
from clocher_kernels.formats import parse_format
from clocher_kernels.ops.contract import EXACT, FP32, Case, Cost, OpSpec, Param, Value, nearest
from clocher_kernels.plan import Attr
from clocher_kernels.quant_tensor import QuantTensor, encode

Array = np.ndarray


def rms_norm(*, x: Array, weight: Array, y: Array, eps: float) -> None:
    """Normalise groups of D values: y = x / sqrt(mean(x^2) + eps) * weight.

    A group whose squares add up to more than fp32 holds is NaN.

    Args:
        x: [M, F] fp32; F is a multiple of D. F = D is a layer norm, F = H D a norm of each head.
        weight: [D] fp32.
        y: [M, F] fp32, written; may be x itself.
        eps: added to the mean square.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), eq. 4.
    """
    groups = x.reshape(len(x), x.shape[1] // len(weight), len(weight)).astype(np.float64)
    squares = np.sum(groups * groups, axis=-1, keepdims=True)
    squares[squares > LARGEST["f32"]] = np.nan
    inverse = 1.0 / np.sqrt(squares / len(weight) + eps)
    y[...] = (groups * inverse * weight).reshape(x.shape)


def rope(*, x: Array, positions: Array, cos: Array, sin: Array) -> None:
    """Rotate the halves of each head in place (half-split, "NeoX" pairing).

    Infinity becomes NaN: a score of minus infinity would hide a key.

    Args:
        x: [M, F] fp32, updated; F = heads * 2P.
        positions: [M] i32, rows of the tables.
        cos: [C, P] fp32, attention factor included.
        sin: [C, P] fp32.

    Source: Su et al. 2021 (arXiv 2104.09864); pairing as in transformers' rotate_half.
    """
    half = cos.shape[1]
    heads = x.reshape(len(x), x.shape[1] // (2 * half), 2, half)
    finite = np.where(np.isfinite(heads), heads, np.nan).astype(np.float64)
    first, second = finite[:, :, 0], finite[:, :, 1]
    rows = nearest(positions, len(cos))
    c, s = cos[rows][:, None], sin[rows][:, None]
    heads[:, :, 0] = first * c - second * s
    heads[:, :, 1] = second * c + first * s


def glu(*, gate: Array, up: Array, y: Array, act: str) -> None:
    """Multiply an activated gate with its linear partner: y = act(gate) * up.

    A gate that is not finite gives no finite value.

    Args:
        gate: [M, I] fp32.
        up: [M, I] fp32.
        y: [M, I] fp32, written; may be gate or up itself.
        act: "silu" (Llama, Qwen) or "relu2", the squared ReLU of BitNet.
    """
    g = np.where(np.isfinite(gate), gate, np.nan).astype(np.float64)
    activated = np.square(np.maximum(g, 0)) if act == "relu2" else g / (1 + np.exp(-g))
    y[...] = activated * up


def embed(*, ids: Array, table: QuantTensor, y: Array) -> None:
    """Look up token embeddings: y[m] = decode(table)[ids[m]].

    Args:
        ids: [M] i32, each in [0, V).
        table: logical [V, K], any format.
        y: [M, K] fp32, written.
    """
    y[...] = table.decode()[nearest(ids, table.shape[0])]


def gather_rows(*, x: Array, rows: Array, y: Array) -> None:
    """Copy the rows whose logits are wanted: y[r] = x[rows[r]].

    Args:
        x: [M, K] fp32.
        rows: [R] i32.
        y: [R, K] fp32, written.
    """
    y[...] = x[nearest(rows, len(x))]


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def _make_norm(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    return {
        "x": _normal(rng, case.sizes["M"], case.sizes["F"]) * np.float32(3),
        "weight": _normal(rng, case.sizes["D"]),
    }


def _make_rope(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    s = case.sizes
    angle = rng.random((s["C"], s["P"])) * 6.3
    return {
        "x": _normal(rng, s["M"], s["F"]),
        "positions": rng.integers(0, s["C"], s["M"]).astype(np.int32),
        "cos": np.cos(angle).astype(np.float32),
        "sin": np.sin(angle).astype(np.float32),
    }


def _make_glu(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    shape = case.sizes["M"], case.sizes["I"]
    return {"gate": _normal(rng, *shape) * np.float32(4), "up": _normal(rng, *shape)}


def _make_embed(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    v, k = case.sizes["V"], case.sizes["K"]
    return {
        "ids": rng.integers(0, v, case.sizes["M"]).astype(np.int32),
        "table": encode(_normal(rng, v, k), parse_format(case.formats["table"])),
    }


def _make_gather(case: Case, rng: np.random.Generator) -> dict[str, Value]:
    s = case.sizes
    return {
        "x": _normal(rng, s["M"], s["K"]),
        "rows": rng.integers(0, s["M"], s["R"]).astype(np.int32),
    }


def _streaming(values: Mapping[str, Value], attrs: Mapping[str, Attr]) -> Cost:
    arrays = [v for v in values.values() if isinstance(v, np.ndarray)]
    largest = max(a.nbytes for a in arrays)
    return Cost(sum(a.nbytes for a in arrays) + largest, 4 * (largest // 4))


def _rope_cost(values: Mapping[str, Value], attrs: Mapping[str, Attr]) -> Cost:
    """Count a row of each table for every token, whatever the tables hold."""
    x, positions, cos = values["x"], values["positions"], values["cos"]
    assert isinstance(x, np.ndarray) and isinstance(positions, np.ndarray)
    assert isinstance(cos, np.ndarray)
    rows = 2 * len(positions) * cos.shape[1] * cos.itemsize
    return Cost(2 * x.nbytes + positions.nbytes + rows, 3 * x.size)


def _embed_cost(values: Mapping[str, Value], attrs: Mapping[str, Attr]) -> Cost:
    ids, table = values["ids"], values["table"]
    assert isinstance(table, QuantTensor)
    rows = len(ids) if isinstance(ids, np.ndarray) else 0
    return Cost(rows * (table.nbytes // table.shape[0] + 4 * table.shape[1]), 0)


def _gather_cost(values: Mapping[str, Value], attrs: Mapping[str, Attr]) -> Cost:
    x, rows = values["x"], values["rows"]
    assert isinstance(x, np.ndarray) and isinstance(rows, np.ndarray)
    return Cost(2 * len(rows) * x.shape[1] * 4, 0)


SPECS = (
    OpSpec(
        "rms_norm",
        "y = x / rms(x) * weight over groups of D",
        (Param("x", "in", "M F"), Param("weight", "vector", "D"), Param("y", "out", "M F")),
        rms_norm,
        _make_norm,
        (
            Case("m1-d256", {"M": 1, "F": 256, "D": 256}, {"eps": 1e-5}),
            Case("m5-d100", {"M": 5, "F": 100, "D": 100}, {"eps": 1e-6}),
            Case("heads-m3-d32", {"M": 3, "F": 160, "D": 32}, {"eps": 1e-6}),
            Case("heads-m2-d20", {"M": 2, "F": 60, "D": 20}, {"eps": 1e-6}),
        ),
        FP32,
        _streaming,
    ),
    OpSpec(
        "rope",
        "rotate the halves of each head by its position",
        (
            Param("x", "inout", "M F"),
            Param("positions", "in", "M", "i32"),
            Param("cos", "vector", "C P"),
            Param("sin", "vector", "C P"),
        ),
        rope,
        _make_rope,
        (
            Case("m1-h4-d32", {"M": 1, "F": 128, "P": 16, "C": 64}),
            Case("m7-h3-d20", {"M": 7, "F": 60, "P": 10, "C": 33}),
            Case("m2-h1-d64", {"M": 2, "F": 64, "P": 32, "C": 8}),
        ),
        FP32,
        _rope_cost,
    ),
    OpSpec(
        "glu",
        "y = act(gate) * up",
        (Param("gate", "in", "M I"), Param("up", "in", "M I"), Param("y", "out", "M I")),
        glu,
        _make_glu,
        tuple(
            Case(f"{act}-m{m}-i{i}", {"M": m, "I": i}, {"act": act})
            for act in ("silu", "relu2")
            for m, i in ((1, 256), (3, 100), (2, 37))
        ),
        FP32,
        _streaming,
    ),
    OpSpec(
        "embed",
        "rows of the embedding table",
        (
            Param("ids", "in", "M", "i32"),
            Param("table", "matrix", "V K", ""),
            Param("y", "out", "M K"),
        ),
        embed,
        _make_embed,
        tuple(
            Case(f"{fmt}-m{m}-k{k}", {"M": m, "V": v, "K": k}, formats={"table": fmt})
            for fmt, m, v, k in (
                ("bf16", 1, 128, 256),
                ("f32", 5, 37, 100),
                ("f16", 3, 64, 37),
                ("int8_row_f32", 2, 51, 100),
                ("int4_sym_g64_bf16", 4, 40, 160),
            )
        ),
        FP32,
        _embed_cost,
    ),
    OpSpec(
        "gather_rows",
        "copy the rows whose logits are wanted",
        (Param("x", "in", "M K"), Param("rows", "in", "R", "i32"), Param("y", "out", "R K")),
        gather_rows,
        _make_gather,
        (
            Case("r1-k256", {"M": 4, "R": 1, "K": 256}),
            Case("r5-k37", {"M": 9, "R": 5, "K": 37}),
        ),
        EXACT,
        _gather_cost,
    ),
)
