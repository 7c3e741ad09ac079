"""8-bit activations: quantise each token to int8 or fp8, and multiply codes by codes.

int8 by int8 sums in int32, exactly; fp8 is decoded in the kernel, on every architecture alike.
"""

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.gemv_bytes import MAX_TOKENS, launch_gemv
from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.pdl import start
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.dtypes import LARGEST

# Adding and subtracting 1.5 * 2^23 rounds an fp32 number to an integer, ties to even.
_ROUND = tl.constexpr(12582912.0)

LIMITS = {"int8": 127.0, "e4m3": LARGEST["e4m3"], "e5m2": LARGEST["e5m2"]}
"""Activation code -> the code value of a token's largest magnitude."""


@triton.jit
def _fp8_codes(v, LIMIT: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Round fp32 to fp8 codes (int32): nearest, ties to even, saturating."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    magnitude = tl.minimum(tl.abs(v), LIMIT)
    bits = magnitude.to(tl.int32, bitcast=True)
    even = (bits >> SHIFT) & 1
    normal = ((bits + even + ((1 << (SHIFT - 1)) - 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # This addend makes the fp32 unit round at the step of fp8's subnormal numbers.
    ADDEND: tl.constexpr = 2.0 ** (1 - BIAS + SHIFT)
    ADDEND_BITS: tl.constexpr = (127 + 1 - BIAS + SHIFT) << 23
    subnormal = (magnitude + ADDEND).to(tl.int32, bitcast=True) - ADDEND_BITS
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), subnormal, normal)
    return code | tl.where(v.to(tl.int32, bitcast=True) < 0, 128, 0)


@triton.jit
def _quantize(
    x, q, scale,
    K: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    token = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for k0 in range(0, K, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        v = tl.load(x + token * K + k, mask=k < K, other=0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(v))
    absmax = tl.maximum(tl.max(largest, 0), 1e-5)
    inverse = tl.div_rn(tl.full((), LIMIT, tl.float32), absmax)
    for k0 in range(0, K, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        v = tl.load(x + token * K + k, mask=k < K, other=0).to(tl.float32) * inverse
        if CODE == "int8":
            code = ((v + _ROUND) - _ROUND).to(tl.int32)
        elif CODE == "e4m3":
            code = _fp8_codes(v, LIMIT, 3, 7)
        else:
            code = _fp8_codes(v, LIMIT, 2, 15)
        tl.store(q + token * K + k, code.to(q.dtype.element_ty), mask=k < K)
    tl.store(scale + token, tl.div_rn(absmax, tl.full((), LIMIT, tl.float32)))


def quantize_act8(
    *, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, code: str, device: Device
) -> list[Launch]:
    """Quantise each token: scale = absmax / limit, q = nearest code of x * (limit / absmax).

    Args:
        x: [M, K] fp32, fp16 or bf16.
        q: [M, K], written; int8 for "int8", uint8 for fp8 codes.
        scale: [M] fp32, written; absmax counts as at least 1e-5.
        code: "int8" (limit 127, as BitNet's `quantize`), "e4m3" (448) or "e5m2" (57344).
        device: what to lower for.
    """
    m, k = x.shape
    block = min(triton.next_power_of_2(k), 4096)
    constants = {"K": k, "BLOCK": block, "CODE": code, "LIMIT": LIMITS[code], "PDL": device.pdl}
    args = {"x": x, "q": q, "scale": scale}
    return [Launch(_quantize, (m,), args, constants, 8 if block > 1024 else 4, device.pdl)]


def linear_act8(
    *,
    q: torch.Tensor,
    scale: torch.Tensor,
    w: DeviceTensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    code: str,
    device: Device,
) -> list[Launch]:
    """Multiply 8-bit activations: y = (q decode(w)^T) * scale + bias + residual.

    Args:
        q: [M, K] codes, int8 or uint8, from `quantize_act8`.
        scale: [M] fp32.
        w: logical [N, K], float, int8 or fp8. int8 activations by int8 weights with a scale per
            row or matrix are summed exactly.
        y: [M, N], written.
        bias: [N] fp32.
        residual: [M, N].
        code: what q holds: "int8", "e4m3" or "e5m2".
        device: what to lower for.

    Returns:
        One launch for every 8 tokens.
    """
    launches = []
    for first in range(0, len(q), MAX_TOKENS):
        tokens = slice(first, first + MAX_TOKENS)
        launches.append(
            launch_gemv(
                x=q[tokens],
                x_code=code,
                x_scales=scale[tokens],
                w=w,
                y=y[tokens],
                bias=bias,
                residual=None if residual is None else residual[tokens],
                device=device,
            )
        )
    return launches
