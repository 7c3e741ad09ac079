"""The `linear` ops: the kernel for each format and number of tokens."""

from typing import Any

import torch

from clocher_kernels.cuda.finish import Tail
from clocher_kernels.cuda.gemm import gemm
from clocher_kernels.cuda.gemv_bits import gemv_bits
from clocher_kernels.cuda.gemv_bytes import MAX_TOKENS, MOST_SLICED, gemv_bytes
from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.cuda.ternary import linear_ternary
from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats.float import Float
from clocher_kernels.formats.fp8 import Fp8
from clocher_kernels.formats.int8 import Int8
from clocher_kernels.ops.linear import sums_exactly


def linear(
    *,
    x: torch.Tensor,
    w: DeviceTensor,
    y: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    group: int = 0,
    device: Device,
    **after: Any,
) -> list[Launch]:
    """Lower `ops.linear.linear`; `after` are the fields of `finish.Tail`.

    Up to `MOST_SLICED` tokens a result is bit-identical in any batch. UnsupportedOp for int8
    activations with group scales or non-ternary weights, and for unknown activation functions.
    """
    tail = Tail(**after)
    if x_scale is not None:
        if not sums_exactly(w.format, group):
            raise no_codes("linear", w)
        return linear_ternary(x=x, x_scale=x_scale, w=w, y=y, tail=tail, device=device)
    if len(x) > MOST_SLICED:
        return gemm(x=x, w=w, y=y, tail=tail, device=device)
    lower = gemv_bytes if isinstance(w.format, Float | Int8 | Fp8) else gemv_bits
    launches = []
    for first in range(0, len(x), MAX_TOKENS):
        tokens = slice(first, first + MAX_TOKENS)
        own = tail.of(tokens)
        launches += lower(x=x[tokens], w=w, y=y[tokens], tail=own, device=device)
    return launches


def relu2_gate_up(
    *, gate: DeviceTensor, w: DeviceTensor, y: torch.Tensor, device: Device, **given: Any
) -> list[Launch]:
    """Lower `ops.skip.relu2_gate_up` as two dense matmuls.

    Skipping does not pay: a program of 16 rows could skip only if all their gates are closed, which
    at 80 % random sparsity 3 % of programs have. GPU Plans do not use this op.
    """
    up = device.scratch("relu2_up", tuple(y.shape), torch.float32)
    given["device"] = device
    first = linear(w=w, y=up, **given)
    return first + linear(w=gate, y=y, times=up, activation="relu2", **given)


def skip_linear(*, w: DeviceTensor, group: int = 0, **given: Any) -> list[Launch]:
    """Lower `ops.skip.skip_linear` as a dense `linear`; same errors."""
    if not sums_exactly(w.format, group):
        raise no_codes("skip_linear", w)
    return linear(w=w, group=group, **given)


def no_codes(op: str, w: DeviceTensor) -> UnsupportedOp:
    """Return the error for int8 activations without a kernel for the weight's format."""
    return UnsupportedOp(
        f"{op}: no CUDA kernel multiplies int8 activations by the format {w.format.name}; expected "
        "ternary weights of a linear, and one scale a token; keep these activations 16-bit"
    )


LOWER = {"linear": linear, "relu2_gate_up": relu2_gate_up, "skip_linear": skip_linear}
