"""Quantise activations: to int8 codes with a scale per token, or to values of a narrower type."""

import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.codes import to_f32
from clocher_kernels.cuda.kv import narrow
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.scalar import or_nan, saturated, start
from clocher_kernels.dtypes import LARGEST
from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.ops.quantize import FAKE_DTYPES

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
    x, q, scale,
    K: tl.constexpr, BLOCK: tl.constexpr, FLOOR: tl.constexpr, LOWEST: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
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
    inverse = tl.div_rn(127.0, absmax)
    for k0 in range(0, K, BLOCK):
        t = tl.load(x + m * K + k0 + k, k0 + k < K, other=0.0).to(tl.float32)
        steps = (rounded_product(t, inverse, ASM) + _ROUND) - _ROUND
        steps = tl.minimum(tl.maximum(tl.where(odd, 0.0, steps), LOWEST), 127.0)
        tl.store(q + m * K + k0 + k, steps.to(tl.int8), k0 + k < K)
    tl.store(scale + m, tl.where(odd, float("nan"), tl.div_rn(absmax, 127.0)))


def quantize(
    *, x: Tensor, q: Tensor, scale: Tensor, group: int, floor: float, lowest: int, device: Device
) -> list[Launch]:
    """Lower `ops.quantize.quantize` with one scale per token; UnsupportedOp for group scales."""
    if group:
        raise UnsupportedOp(
            f"quantize: no CUDA kernel has a scale for every {group} columns; expected group 0, "
            "one scale a token; keep these activations 16-bit"
        )
    k = x.shape[-1]
    block = min(triton.next_power_of_2(k), 4096)
    given = {"K": k, "BLOCK": block, "FLOOR": floor, "LOWEST": float(lowest)}
    return [launch(_quantize, (x.numel() // k,), device, x=x, q=q, scale=scale, **given)]


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
                rounded = to_f32(narrow(v, "e4m3"), CODE, False) * 256.0
            tl.store(y + token * K + k, rounded * scale, mask=k < last)


def fake_quantize(
    *, x: Tensor, y: Tensor, dtype: str, group: int = 0, floor: float = 0.0, device: Device
) -> list[Launch]:
    """Lower `ops.quantize.fake_quantize`; UnsupportedOp for an unknown dtype."""
    if dtype not in FAKE_DTYPES:
        raise UnsupportedOp(
            f"fake_quantize: no CUDA kernel for dtype={dtype!r}; there are {', '.join(FAKE_DTYPES)}"
        )
    k = x.shape[-1]
    scaled = dtype in ("e4m3", "i8")
    run = group if group and scaled else k
    block = min(triton.next_power_of_2(run), 4096)
    limit = 127.0 if dtype == "i8" else LARGEST[dtype]
    given = {"K": k, "GROUP": run, "BLOCK": block, "CODE": dtype, "FLOOR": floor, "LIMIT": limit}
    grid = (x.numel() // k, triton.cdiv(k, run))
    return [launch(_fake_quantize, grid, device, x=x, y=y, **given)]
