"""Activations, norms, rotary embedding, embeddings, heads of other sizes, row gathers."""

import math
from typing import Annotated

import numpy as np

from clocher_kernels.dtypes import LARGEST
from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats.base import turn
from clocher_kernels.formats.ggml import TRIED_KINDS
from clocher_kernels.ops.contract import (
    EXACT,
    FP32,
    Case,
    In,
    InOut,
    Matrix,
    OpSpec,
    Out,
    Real,
    Vector,
    nearest,
    no_blocks,
)
from clocher_kernels.quant_tensor import QuantTensor

Array = np.ndarray

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "sigmoid", "tanh")


def activate(act: str, x: Array, cap: float = 1.0) -> Array:
    """Return an activation of fp64 values; of what is not finite NaN.

    "silu" is x / (1 + e^-x) (Llama, Qwen); "gelu" is x Phi(x) and "gelu_tanh" its approximation by
    a tanh (Gemma; `gelu_pytorch_tanh`); "relu2" is the squared ReLU (BitNet); "sigmoid" is
    1 / (1 + e^-x) (the score of Qwen2-MoE's shared experts); "tanh" is cap * tanh(x / cap) (what
    bends the logits of Gemma 2).

    Raises:
        UnsupportedOp: another name.

    Source: Hendrycks and Gimpel 2016 (arXiv 1606.08415); Gemma 2 (arXiv 2408.00118), section 2.
    """
    check_activation("activate", act)
    x = np.where(np.isfinite(x), x, np.nan)
    if act == "relu2":
        made: Array = np.square(np.maximum(x, 0))
    elif act == "gelu":
        made = 0.5 * x * (1 + _erf(x * np.sqrt(0.5)))
    elif act == "gelu_tanh":
        made = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    elif act == "tanh":
        made = cap * np.tanh(x / cap)
    else:
        with np.errstate(over="ignore"):
            made = (x if act == "silu" else 1) / (1 + np.exp(-x))
    return made


def check_activation(op: str, act: str) -> None:
    """Raise UnsupportedOp unless an activation is known."""
    if act not in ACTIVATIONS:
        raise UnsupportedOp(f"{op}: no activation {act!r}; there are {', '.join(ACTIVATIONS)}")


_erf = np.vectorize(math.erf, otypes=[np.float64])


def rms_norm(
    *,
    x: Annotated[Array, In("M F", std=3.0)],
    weight: Annotated[Array, Vector("D")],
    residual: Annotated[Array | None, In("M F")] = None,
    y: Annotated[Array, Out("M F", narrow=True)],
    eps: float,
) -> None:
    """Normalise groups of D values: y = x / sqrt(mean(x^2) + eps) * weight + residual.

    A group whose squares add up to more than fp32 holds is NaN.

    Args:
        x: [M, F] fp32; F is a multiple of D. F = D is a layer norm, F = H D a norm of each head.
        y: [M, F] fp32, written; may be x itself, or the residual's own buffer.
        eps: added to the mean square.
        residual: [M, F] fp32; of models that normalise what a block adds (Gemma 2, OLMo 2).

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), eq. 4.
    """
    groups = x.reshape(len(x), x.shape[1] // len(weight), len(weight)).astype(np.float64)
    squares = np.sum(groups * groups, axis=-1, keepdims=True)
    squares[squares > LARGEST["f32"]] = np.nan
    inverse = 1.0 / np.sqrt(squares / len(weight) + eps)
    normal = (groups * inverse * weight).reshape(x.shape)
    y[...] = normal if residual is None else normal + residual


def rope(
    *,
    x: Annotated[Array, InOut("M F")],
    positions: Annotated[Array, In("M", "i32", below="C")],
    cos: Annotated[Array, Vector("C P")],
    sin: Annotated[Array, Vector("C P")],
    head: int = 0,
) -> None:
    """Rotate the first 2P values of each head in place, as halves ("NeoX" pairing).

    Infinity becomes NaN: a score of minus infinity would hide a key.

    Args:
        x: [M, F] fp32, updated; F = heads * head.
        positions: [M] i32, rows of the tables.
        cos: [C, P] fp32, attention factor included.
        head: values of a head, at least 2P; those beyond 2P stay as they are. 0 for 2P.

    Source: Su et al. 2021 (arXiv 2104.09864); pairing as in transformers' rotate_half.
    """
    half = cos.shape[1]
    whole = x.reshape(len(x), -1, head or 2 * half)
    heads = whole[:, :, : 2 * half].reshape(*whole.shape[:2], 2, half)
    finite = np.where(np.isfinite(heads), heads, np.nan).astype(np.float64)
    first, second = finite[:, :, 0], finite[:, :, 1]
    rows = nearest(positions, len(cos))
    c, s = cos[rows][:, None], sin[rows][:, None]
    whole[:, :, :half] = first * c - second * s
    whole[:, :, half : 2 * half] = second * c + first * s


def join_heads(
    *,
    first: Annotated[Array, In("M F")],
    second: Annotated[Array | None, In("M G")] = None,
    y: Annotated[Array, Out("M Y")],
    heads: int,
) -> None:
    """Join the halves of heads: head h of y is head h of `first`, then head h of `second`.

    Without a second, zeros follow heads that grow, and others are cut.

    Args:
        first: [M, F] fp32: `heads` heads, or, beside a second, one that all of them share.
        second: [M, G] fp32: `heads` heads.
        y: [M, Y] fp32, written; heads of A + B values, A of the first and B of the second.
        heads: their number; Y and G are multiples of it.

    Source: DeepSeek-V2 (arXiv 2405.04434), eq. 14: the keys of its latent attention.
    """
    out = y.reshape(len(y), heads, -1)
    size = out.shape[2]
    if second is None:
        left = first.reshape(len(first), heads, -1)[:, :, :size]
        out[:, :, left.shape[2] :] = 0
    else:
        right = second.reshape(len(second), heads, -1)
        left = first.reshape(len(first), -1, size - right.shape[2])
        out[:, :, left.shape[2] :] = right
    out[:, :, : left.shape[2]] = left


def embed(
    *,
    ids: Annotated[Array, In("M", "i32", below="V")],
    table: Annotated[QuantTensor, Matrix("V K")],
    y: Annotated[Array, Out("M K", narrow=True)],
    scale: float = 1.0,
) -> None:
    """Look up token embeddings: y[m] = decode(table)[ids[m]] * scale.

    Args:
        ids: [M] i32, each in [0, V).
        table: logical [V, K], any format.
        scale: of all embeddings (Gemma, Granite).
    """
    y[...] = table.stored()[nearest(ids, table.shape[0])] * np.float32(scale)


def hadamard(
    *,
    x: Annotated[Array, In("M A* K", narrow=True)],
    y: Annotated[Array, Out("M A* K", narrow=True)],
    size: int,
) -> None:
    """Rotate blocks of columns: y = x H / sqrt(size), with Sylvester's Hadamard matrix H.

    It is symmetric, so twice gives x. Stages are added in fp32 from neighbours outwards.

    Args:
        x: [M, A*, K] fp32; K is a multiple of `size`.
        y: [M, A*, K] fp32, written; may be x itself.
        size: columns of a block, 64.

    Source: QuaRot (arXiv 2404.00456), section 3: what is spread over a block has no outliers.
    """
    y[...] = turn(x, size)


def gather_rows(
    *,
    x: Annotated[Array, In("M K")],
    rows: Annotated[Array, In("R", "i32", below="M")],
    y: Annotated[Array, Out("R K", narrow=True)],
) -> None:
    """Copy the rows whose logits are wanted: y[r] = x[rows[r]]."""
    y[...] = x[nearest(rows, len(x))]


_RESIDUAL = {"residual": True}

SPECS = (
    OpSpec(
        rms_norm,
        (
            Case("m1-d256", {"M": 1, "F": 256, "D": 256}, {"eps": 1e-5}),
            Case("m5-d100", {"M": 5, "F": 100, "D": 100}, {"eps": 1e-6}),
            Case("heads-m3-d32", {"M": 3, "F": 160, "D": 32}, {"eps": 1e-6}),
            Case("heads-m2-d20", {"M": 2, "F": 60, "D": 20}, {"eps": 1e-6}),
            *(
                Case(f"residual-m3-d{d}", {"M": 3, "F": d, "D": d}, {"eps": 1e-6}, {}, _RESIDUAL)
                for d in (100, 256)
            ),
        ),
        FP32,
        (
            Real("m1-*", {"M": 1, "F": 2880, "D": 2880}),
            Real("heads-m3-*", {"M": 1, "F": 4096, "D": 128}),
        ),
    ),
    OpSpec(
        rope,
        (
            Case("m1-h4-d32", {"M": 1, "F": 128, "P": 16, "C": 64}),
            Case("m7-h3-d20", {"M": 7, "F": 60, "P": 10, "C": 33}),
            Case("m2-h1-d64", {"M": 2, "F": 64, "P": 32, "C": 8}),
            Case("part-m3-h2-d64", {"M": 3, "F": 128, "P": 24, "C": 16}, {"head": 64}),
            Case("part-m2-h3-d20", {"M": 2, "F": 60, "P": 3, "C": 9}, {"head": 20}),
        ),
        FP32,
        (Real("m1-*", {"M": 1, "F": 4096, "P": 32, "C": 4096}, label=""),),
        flops=3,
    ),
    OpSpec(
        embed,
        tuple(
            Case(
                f"{fmt}-m{m}-k{k}",
                {"M": m, "V": v, "K": k},
                {"scale": scale},
                {"table": fmt},
                missing=no_blocks(fmt),
            )
            for fmt, m, v, k, scale in (
                ("bf16", 1, 128, 256, 1.0),
                ("f32", 5, 37, 100, 12.5),
                ("f16", 3, 64, 37, 1.0),
                ("int8_row_f32", 2, 51, 100, 1.0),
                ("int4_sym_g64_bf16", 4, 40, 160, 16.0),
                ("int4_asym_g128_f16", 5, 40, 384, 1.0),
                *((kind, 3, 40, 512, 1.0) for kind in TRIED_KINDS),
                ("tcq3", 3, 40, 192, 1.0),
            )
        ),
        FP32,
        (Real("*", {"M": 1, "V": 4096, "K": 2880}),),
    ),
    OpSpec(
        join_heads,
        (
            *(
                Case(name, {"M": m, "F": f, "G": g, "Y": y}, {"heads": heads}, {}, {"second": 1})
                for name, m, f, g, y, heads in (
                    ("own-m3-h4", 3, 32, 64, 96, 4),
                    ("shared-m2-h3", 2, 10, 60, 90, 3),
                    ("shared-m5-h4", 5, 16, 128, 192, 4),
                )
            ),
            Case("grow-m3-h4", {"M": 3, "F": 64, "Y": 96}, {"heads": 4}),
            Case("cut-m2-h3", {"M": 2, "F": 90, "Y": 60}, {"heads": 3}),
        ),
        EXACT,
        (
            Real("shared-m2-*", {"M": 1, "F": 64, "G": 2048, "Y": 3072}),
            Real("grow-*", {"M": 1, "F": 2048, "Y": 3072}),
        ),
        flops=0,
    ),
    OpSpec(
        hadamard,
        (
            Case("m1-k256", {"M": 1, "K": 256}, {"size": 64}),
            Case("m3-k192", {"M": 3, "K": 192}, {"size": 64}),
            Case("m2-a3-k64", {"M": 2, "A": 3, "K": 64}, {"size": 64}),
        ),
        EXACT,
        (Real("m1-*", {"M": 1, "K": 8960}),),
        flops=6,
    ),
    OpSpec(
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
