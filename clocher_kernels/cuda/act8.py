"""8-bit activations: quantise each token to int8 or fp8, and multiply codes by codes; or round.

int8 by int8 sums in int32, exactly; fp8 is decoded in the kernel, on every architecture alike.
"""

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.codes import to_f32
from clocher_kernels.cuda.finish import Tail
from clocher_kernels.cuda.finite import or_nan, saturated
from clocher_kernels.cuda.gemv_bytes import MAX_TOKENS, launch_gemv
from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.pdl import start
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.dtypes import LARGEST
from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.ops.quantize import FAKE_DTYPES

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


@triton.jit
def _fake_quantize(
    x, y,
    K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr,
    LIMIT: tl.constexpr, FLOOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start(PDL)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUP
    last = tl.minimum(first + GROUP, K)
    if CODE == "f16" or CODE == "bf16":
        for k0 in range(first, last, BLOCK):
            k = k0 + tl.arange(0, BLOCK)
            v = tl.load(x + token * K + k, mask=k < last, other=0).to(tl.float32)
            v = saturated(v, LIMIT)
            bits = v.to(tl.int32, bitcast=True)
            if CODE == "f16":
                rounded = v.to(tl.float16).to(tl.float32)
            else:
                bits = (bits + ((bits >> 16) & 1) + 0x7FFF) & -65536
                rounded = tl.where(v == v, bits.to(tl.float32, bitcast=True), v)
            tl.store(y + token * K + k, rounded, mask=k < last)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        odd = tl.zeros((BLOCK,), tl.float32)
        for k0 in range(first, last, BLOCK):
            k = k0 + tl.arange(0, BLOCK)
            v = tl.load(x + token * K + k, mask=k < last, other=0).to(tl.float32)
            v = or_nan(v)
            largest = tl.maximum(largest, tl.where(v == v, tl.abs(v), 0.0))
            odd += tl.where(v == v, 0.0, 1.0)
        absmax = tl.maximum(tl.max(largest, 0), FLOOR)
        inverse = tl.div_rn(tl.full((), LIMIT, tl.float32), absmax)
        scale = tl.div_rn(absmax, tl.full((), LIMIT, tl.float32))
        scale = tl.where(tl.sum(odd, 0) > 0, float("nan"), scale)
        for k0 in range(first, last, BLOCK):
            k = k0 + tl.arange(0, BLOCK)
            v = tl.load(x + token * K + k, mask=k < last, other=0).to(tl.float32)
            v = tl.where(tl.abs(v) < float("inf"), v, 0.0) * inverse
            if CODE == "i8":
                rounded = (tl.minimum(tl.maximum(v, -LIMIT), LIMIT) + _ROUND) - _ROUND
            else:
                # to_f32 divides by the code's unit, 2^8.
                rounded = to_f32(_fp8_codes(v, LIMIT, 3, 7), CODE, False) * 256.0
            tl.store(y + token * K + k, rounded * scale, mask=k < last)


def fake_quantize(
    *,
    x: torch.Tensor,
    y: torch.Tensor,
    dtype: str,
    group: int = 0,
    floor: float = 0.0,
    device: Device,
) -> list[Launch]:
    """Lower `ops.quantize.fake_quantize`.

    Raises:
        UnsupportedOp: it does not round to this type.
    """
    if dtype not in FAKE_DTYPES:
        raise UnsupportedOp(
            f"fake_quantize: no CUDA kernel for dtype={dtype!r}; there are {', '.join(FAKE_DTYPES)}"
        )
    k = x.shape[-1]
    scaled = dtype in ("e4m3", "i8")
    run = group if group and scaled else k
    block = min(triton.next_power_of_2(run), 4096)
    constants = {"K": k, "GROUP": run, "BLOCK": block, "CODE": dtype, "FLOOR": floor}
    constants |= {"LIMIT": LIMITS["int8"] if dtype == "i8" else LARGEST[dtype], "PDL": device.pdl}
    grid = (x.numel() // k, triton.cdiv(k, run))
    return [Launch(_fake_quantize, grid, {"x": x, "y": y}, constants, 4, device.pdl)]


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
                tail=Tail(bias=bias, residual=residual).of(tokens),
                device=device,
            )
        )
    return launches


LOWER = {"fake_quantize": fake_quantize}
