"""Activations: what a product applies to its sums, and what the gates of experts go through."""

import math

import numpy as np

from clocher_kernels.errors import UnsupportedOp

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
