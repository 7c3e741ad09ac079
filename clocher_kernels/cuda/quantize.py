"""Quantise activations with a scale per token: to int8 codes, or to values of fp8."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.codes import to_f32
from clocher_kernels.cuda.kv import narrow
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.scalar import start
from clocher_kernels.dtypes import LARGEST
from clocher_kernels.errors import UnsupportedOp

# Adding and subtracting 1.5 * 2^23 rounds an fp32 number to an integer, ties to even.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def rounded_product(a, b, ASM: tl.constexpr):
    """Multiply in fp32; the product is rounded before any addition."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1
        )
    else:
        return a * b


@triton.jit
def _quantize(
    x, y, scale,
    K: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, LIMIT: tl.constexpr,
    FLOOR: tl.constexpr, LOWEST: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    start(PDL)
    largest, odd = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for k0 in range(0, K, BLOCK):
        t = tl.load(x + m * K + k0 + k, k0 + k < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(t))
        odd |= (tl.abs(t) < float("inf")).to(tl.int32) ^ 1
    odd = tl.max(odd, axis=0) > 0
    absmax = tl.where(odd, 1.0, tl.maximum(tl.max(largest, axis=0), FLOOR))
    inverse = tl.div_rn(LIMIT, absmax)
    step = tl.where(odd, float("nan"), tl.div_rn(absmax, LIMIT))
    for k0 in range(0, K, BLOCK):
        t = tl.load(x + m * K + k0 + k, k0 + k < K, other=0.0).to(tl.float32)
        t = tl.where(odd, 0.0, rounded_product(t, inverse, ASM))
        if CODE == "i8":
            code = tl.minimum(tl.maximum((t + _ROUND) - _ROUND, LOWEST), LIMIT).to(tl.int8)
        else:
            # to_f32 divides by the code's unit, 2^8.
            code = to_f32(narrow(t, CODE), CODE, False) * 256.0 * step
        tl.store(y + m * K + k0 + k, code, k0 + k < K)
    if CODE == "i8":
        tl.store(scale + m, step)


def quantize(
    *, x: Tensor, q: Tensor, scale: Tensor, group: int, floor: float, lowest: int, device: Device
) -> list[Launch]:
    """Lower `ops.quantize.quantize` with one scale per token; UnsupportedOp for group scales."""
    if group:
        raise UnsupportedOp(
            f"quantize: no CUDA kernel has a scale for every {group} columns; expected group 0, "
            "one scale a token; keep these activations 16-bit"
        )
    given = {"y": q, "scale": scale, "CODE": "i8", "LIMIT": 127.0, "LOWEST": float(lowest)}
    return _by_token(x, device, FLOOR=floor, **given)


def _by_token(x: Tensor, device: Device, **given: Any) -> list[Launch]:
    k = x.shape[-1]
    block = min(triton.next_power_of_2(k), 4096)
    return [launch(_quantize, (x.numel() // k,), device, x=x, K=k, BLOCK=block, **given)]


def fake_quantize(
    *, x: Tensor, y: Tensor, dtype: str, group: int = 0, floor: float = 0.0, device: Device
) -> list[Launch]:
    """Lower `ops.quantize.fake_quantize` to e4m3 with one scale per token; else UnsupportedOp."""
    if dtype != "e4m3" or group:
        raise UnsupportedOp(
            f"fake_quantize: no CUDA kernel rounds to {dtype} in groups of {group}; expected e4m3 "
            "in group 0, one scale a token; keep these activations 16-bit"
        )
    given = {"y": y, "CODE": dtype, "LIMIT": LARGEST[dtype], "LOWEST": 0.0}
    return _by_token(x, device, FLOOR=floor, **given)
