"""The epilogue of every matmul: y = activation(sum + bias) * times + residual."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.scalar import activate, as_activation, or_nan
from clocher_kernels.errors import ShapeError
from clocher_kernels.ops.activations import check_activation


@triton.jit
def finish(
    total, bias, times, residual, y, m, n, kept,
    N: tl.constexpr, F: tl.constexpr, ACT: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Write y[m, n] where `kept`; m (tokens) and n (of N rows) broadcast to `total`, fp32.

    `bias` [N], `times` [tokens, F] (F is N or 1) and `residual` may be None; CAP is for "tanh".
    """
    at = m * N + n
    if bias is not None:
        total += tl.load(bias + n, n < N, other=0.0)
    if ACT != "none":
        total = activate(or_nan(total), ACT, CAP)
    if times is not None:
        factor = at if F == N else m + n * 0
        total *= tl.load(times + factor, kept, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + at, kept, other=0.0).to(tl.float32)
    if times is not None:
        tl.store(y + at, as_activation(total, y), kept)
    else:
        tl.store(y + at, total.to(y.dtype.element_ty), kept)


@dataclass(frozen=True, slots=True)
class Tail:
    """The epilogue of a matmul, by the names of `ops.linear.linear`."""

    bias: torch.Tensor | None = None
    times: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    activation: str = "none"
    cap: float = 1.0

    def of(self, tokens: slice) -> "Tail":
        """Return the epilogue of some tokens."""
        own = (None if value is None else value[tokens] for value in (self.times, self.residual))
        times, residual = own
        return replace(self, times=times, residual=residual)

    def given(self, op: str, y: torch.Tensor, rows: int) -> dict[str, Any]:
        """Return the arguments of `finish`; UnsupportedOp for an unknown activation function."""
        if self.activation != "none":
            check_activation(op, self.activation)
        wide = 0 if self.times is None else self.times.shape[1]
        if wide not in (0, 1, rows):
            raise ShapeError(
                f"{op}: 'times' has {wide} values for a token; expected {rows}, one for each row "
                "of the weight, or 1"
            )
        tensors = {"bias": self.bias, "times": self.times, "residual": self.residual, "y": y}
        return {**tensors, "F": wide, "ACT": self.activation, "CAP": float(self.cap)}


PLAIN = Tail()
