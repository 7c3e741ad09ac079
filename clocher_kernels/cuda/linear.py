"""The `linear` op: which kernel multiplies by which format, for how many tokens."""

import torch

from clocher_kernels.cuda.gemm import gemm
from clocher_kernels.cuda.gemv_bits import gemv_bits
from clocher_kernels.cuda.gemv_bytes import MAX_TOKENS, gemv_bytes
from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.formats.float import Float
from clocher_kernels.formats.fp8 import Fp8
from clocher_kernels.formats.int8 import Int8


def linear(
    *,
    x: torch.Tensor,
    w: DeviceTensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    device: Device,
) -> list[Launch]:
    """Lower `ops.linear.linear`."""
    if x.shape[0] > MAX_TOKENS:
        lower = gemm
    elif isinstance(w.format, Float | Int8 | Fp8):
        lower = gemv_bytes
    else:
        lower = gemv_bits
    return lower(x=x, w=w, y=y, bias=bias, residual=residual, device=device)


LOWER = {"linear": linear}
