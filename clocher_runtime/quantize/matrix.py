"""Quantise one matrix with what calibration knows of its input, and judge the result.

GPTQ is taken where it beats the search on held-out inputs, and either only where its output error
is at most 1.02 of that of plain rounding. What was not taken is named in `Outcome.fallback`.
"""

from dataclasses import dataclass

import numpy as np

from clocher_kernels.formats import Format
from clocher_kernels.quant_tensor import QuantTensor, encode
from clocher_runtime.convert import imx
from clocher_runtime.quantize import gptq
from clocher_runtime.quantize.inputs import InputStats

DO_NO_HARM = 1.02
MIN_TOKENS = 64
"""With fewer tokens of its own an expert is quantised with its layer's statistics alone."""
MIN_HELD = 16
"""With fewer held-out inputs of its own an expert is judged with its layer's."""


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What is known of a matrix's input."""

    importance: np.ndarray  # E[x^2] of each column, [K]
    held: np.ndarray  # inputs to judge with, [m, K]; without rows the importance judges
    # of the Hessian; None for methods that need none, or where it has none
    factor: gptq.Factor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A quantised matrix and how it came about."""

    tensor: QuantTensor
    method: str  # "gptq", "imx" or "rtn": whose result it is
    fallback: str | None  # None, or why it is not the result of the method that was asked for
    nmse: float  # squared error of the outputs, relative to the outputs
    nmse_rtn: float  # the same for plain rounding
    damp: float  # of the Hessian; 0 without GPTQ


def make_inputs(stats: InputStats, pooled: InputStats | None, *, hessian: bool) -> Inputs:
    """Combine the statistics of a linear, or of an expert, with those of its whole layer.

    `pooled`: of all inputs of the layer; None for dense linears and well-fed experts.
    """
    own = pooled is None or stats.tokens >= MIN_TOKENS
    source = stats if own or pooled is None else pooled
    held = stats.held
    if pooled is not None and len(held) < MIN_HELD:
        held = pooled.held
    factor = None
    if hessian:
        matrix = source.hessian
        if own and pooled is not None:
            matrix = gptq.shrink(matrix, stats.tokens, pooled.hessian)
        factor = gptq.factorise(matrix)
    return Inputs(source.importance, held, factor)


def solve_matrix(
    values: np.ndarray, fmt: Format, method: str, inputs: Inputs, *, threads: int = 1
) -> Outcome:
    """Quantise a matrix. `values`: [N, K] fp32; `method`: "imx" or "gptq"."""
    rounded = encode(values, fmt)
    judge = _Judge(values, inputs)
    best, taken, fallback, damp = (
        imx.search(values, fmt, inputs.importance, threads=threads),
        "imx",
        None,
        0.0,
    )
    error, error_rtn = judge(best), judge(rounded)
    if method == "gptq" and inputs.factor is None:
        fallback = "imx:no_hessian"
    elif method == "gptq" and inputs.factor is not None:
        damp = inputs.factor.damp
        corrected = gptq.solve(values, best, inputs.factor).tensor
        if (lower := judge(corrected)) < error:
            best, taken, error = corrected, "gptq", lower
        else:
            fallback = "imx:held_out"
    if error > DO_NO_HARM * error_rtn:
        best, taken, error, fallback = rounded, "rtn", error_rtn, "rtn:do_no_harm"
    return Outcome(best, taken, fallback, error, error_rtn, damp)


class _Judge:
    """Output error of a quantised form of a matrix."""

    def __init__(self, values: np.ndarray, inputs: Inputs) -> None:
        self._values, self._inputs = values, inputs
        self._power = self._energy(values)

    def __call__(self, tensor: QuantTensor) -> float:
        energy = self._energy(self._values - tensor.decode())
        return energy / self._power if self._power > 0 else energy

    def _energy(self, matrix: np.ndarray) -> float:
        held = self._inputs.held
        if len(held):
            outputs = held @ matrix.T
            return float(np.einsum("ij,ij->", outputs, outputs, dtype=np.float64))
        rows = np.einsum("ij,ij->j", matrix, matrix, dtype=np.float64)
        return float(rows @ self._inputs.importance)
