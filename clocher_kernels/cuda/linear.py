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

MOST_SLICED = 32
"""Tokens that are multiplied in slices of 8. Two to four passes over the weights with every
multiprocessor's loads in flight are faster than tiles of tensor cores that leave most of them
without work."""


def linear(
    *,
    x: torch.Tensor,
    w: DeviceTensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    device: Device,
) -> list[Launch]:
    """Lower `ops.linear.linear`.

    Up to `MOST_SLICED` tokens a token's sum has one order, so its result is the same bits in a
    batch of any size.
    """
    if len(x) > MOST_SLICED:
        return gemm(x=x, w=w, y=y, bias=bias, residual=residual, device=device)
    lower = gemv_bytes if isinstance(w.format, Float | Int8 | Fp8) else gemv_bits
    launches = []
    for first in range(0, len(x), MAX_TOKENS):
        tokens = slice(first, first + MAX_TOKENS)
        launches += lower(
            x=x[tokens],
            w=w,
            y=y[tokens],
            bias=bias,
            residual=None if residual is None else residual[tokens],
            device=device,
        )
    return launches


LOWER = {"linear": linear}
