"""Norms, rotary embedding, gated activations, row gathers."""

import numpy as np

from clocher_kernels.dtypes import LARGEST
from clocher_kernels.ops.contract import EXACT, FP32, Case, OpSpec, Param, Real, nearest
from clocher_kernels.quant_tensor import QuantTensor

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


SPECS = (
    OpSpec(
        "rms_norm",
        "y = x / rms(x) * weight over groups of D",
        (
            Param("x", "in", "M F", std=3.0),
            Param("weight", "vector", "D"),
            Param("y", "out", "M F", narrow=True),
        ),
        rms_norm,
        (
            Case("m1-d256", {"M": 1, "F": 256, "D": 256}, {"eps": 1e-5}),
            Case("m5-d100", {"M": 5, "F": 100, "D": 100}, {"eps": 1e-6}),
            Case("heads-m3-d32", {"M": 3, "F": 160, "D": 32}, {"eps": 1e-6}),
            Case("heads-m2-d20", {"M": 2, "F": 60, "D": 20}, {"eps": 1e-6}),
        ),
        FP32,
        (
            Real("m1-*", {"M": 1, "F": 2880, "D": 2880}),
            Real("heads-m3-*", {"M": 1, "F": 4096, "D": 128}),
        ),
    ),
    OpSpec(
        "rope",
        "rotate the halves of each head by its position",
        (
            Param("x", "inout", "M F"),
            Param("positions", "in", "M", "i32", below="C"),
            Param("cos", "vector", "C P"),
            Param("sin", "vector", "C P"),
        ),
        rope,
        (
            Case("m1-h4-d32", {"M": 1, "F": 128, "P": 16, "C": 64}),
            Case("m7-h3-d20", {"M": 7, "F": 60, "P": 10, "C": 33}),
            Case("m2-h1-d64", {"M": 2, "F": 64, "P": 32, "C": 8}),
        ),
        FP32,
        (Real("m1-*", {"M": 1, "F": 4096, "P": 32, "C": 4096}, label=""),),
        flops=3,
    ),
    OpSpec(
        "glu",
        "y = act(gate) * up",
        (
            Param("gate", "in", "M I", narrow=True, std=4.0),
            Param("up", "in", "M I", narrow=True),
            Param("y", "out", "M I", narrow=True),
        ),
        glu,
        tuple(
            Case(f"{act}-m{m}-i{i}", {"M": m, "I": i}, {"act": act})
            for act in ("silu", "relu2")
            for m, i in ((1, 256), (3, 100), (2, 37))
        ),
        FP32,
        (
            Real("silu-m1-*", {"M": 1, "I": 14336}),
            Real("relu2-m1-*", {"M": 1, "I": 6912}),
        ),
    ),
    OpSpec(
        "embed",
        "rows of the embedding table",
        (
            Param("ids", "in", "M", "i32", below="V"),
            Param("table", "matrix", "V K", ""),
            Param("y", "out", "M K", narrow=True),
        ),
        embed,
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
        (Real("*", {"M": 1, "V": 4096, "K": 2880}),),
    ),
    OpSpec(
        "gather_rows",
        "copy the rows whose logits are wanted",
        (
            Param("x", "in", "M K"),
            Param("rows", "in", "R", "i32", below="M"),
            Param("y", "out", "R K", narrow=True),
        ),
        gather_rows,
        (
            Case("r1-k256", {"M": 4, "R": 1, "K": 256}),
            Case("r5-k37", {"M": 9, "R": 5, "K": 37}),
        ),
        EXACT,
        (Real("r1-*", {"M": 16, "R": 1, "K": 2880}),),
        flops=0,
    ),
)
