"""What is made of whole rows: norms, int8 codes with a scale per token, values of fp8."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.codes import narrow, rounded_product, to_f32
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.scalar import as_activation, or_nan, start
from clocher_kernels.dtypes import LARGEST
from clocher_kernels.errors import UnsupportedOp

# Adding and subtracting 1.5 * 2^23 rounds an fp32 number to an integer, ties to even.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def make_row(
    x, gain, residual, y, scale,
    K: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, CODE: tl.constexpr,
    LIMIT: tl.constexpr, FLOOR: tl.constexpr, LOWEST: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Start; write y of K values x: with `gain` their norm, of that codes if there is a CODE."""
    k = tl.arange(0, BLOCK)
    inside = k < K
    if gain is not None:
        factor = tl.load(gain + k, inside, other=0.0)
    start(PDL)
    t = tl.load(x + k, inside, other=0.0).to(tl.float32)
    if gain is not None:
        # Squares that overflow must not become zeros.
        t = t * (1.0 / tl.sqrt(or_nan(tl.sum(t * t) / K) + EPS)) * factor
    if residual is not None:
        t += tl.load(residual + k, inside, other=0.0).to(tl.float32)
    if CODE == "":
        tl.store(y + k, as_activation(t, y), inside)
    else:
        odd = tl.max((tl.abs(t) < float("inf")).to(tl.int32) ^ 1) > 0
        absmax = tl.where(odd, 1.0, tl.maximum(tl.max(tl.abs(t)), FLOOR))
        inverse = tl.div_rn(LIMIT, absmax)
        step = tl.where(odd, float("nan"), tl.div_rn(absmax, LIMIT))
        t = tl.where(odd, 0.0, rounded_product(t, inverse, ASM))
        if CODE == "i8":
            code = tl.minimum(tl.maximum((t + _ROUND) - _ROUND, LOWEST), LIMIT).to(tl.int8)
            tl.store(scale, step)
        else:
            # to_f32 divides by the code's unit, 2^8.
            code = to_f32(narrow(t, CODE), CODE, False) * 256.0 * step
        tl.store(y + k, code, inside)


@triton.jit
def _rows(
    x, gain, residual, y, scale,
    K: tl.constexpr, GROUPS: tl.constexpr, X_ROW: tl.constexpr, RESIDUAL_ROW: tl.constexpr,
    Y_ROW: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, CODE: tl.constexpr,
    LIMIT: tl.constexpr, FLOOR: tl.constexpr, LOWEST: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, first = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS * K
    before = residual if residual is None else residual + row * RESIDUAL_ROW + first
    step = scale if scale is None else scale + row
    make_row(
        x + row * X_ROW + first, gain, before, y + row * Y_ROW + first, step,
        K, BLOCK, EPS, CODE, LIMIT, FLOOR, LOWEST, ASM, PDL,
    )  # fmt: skip


def _by_row(
    x: Tensor, y: Tensor, scale: Tensor | None, k: int, device: Device, **given: Any
) -> list[Launch]:
    """Return the launch that makes y of x, `k` values at a time."""
    x, y = x.flatten(0, -2), y.flatten(0, -2)
    groups, block = x.shape[1] // k, triton.next_power_of_2(k)
    residual = given.get("residual")
    sizes = {"K": k, "GROUPS": groups, "BLOCK": block, "X_ROW": x.stride(0), "Y_ROW": y.stride(0)}
    sizes["RESIDUAL_ROW"] = 0 if residual is None else residual.stride(0)
    given = {"x": x, "y": y, "scale": scale, **sizes, "EPS": 0.0, "CODE": "", **_LIMITS, **given}
    return [launch(_rows, (len(x) * groups,), device, _row_warps(k), **given)]


_LIMITS = {"LIMIT": 127.0, "FLOOR": 0.0, "LOWEST": 0.0}


def _row_warps(k: int) -> int:
    """Return the warps that make a row; they set the order of a norm's sum."""
    return min(max(triton.next_power_of_2(k) // 256, 1), 32)


def rms_norm(
    *,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    eps: float,
    residual: Tensor | None = None,
    device: Device,
) -> list[Launch]:
    """Lower `ops.elementwise.rms_norm`; one program per group."""
    return _by_row(x, y, None, len(weight), device, gain=weight, residual=residual, EPS=eps)


def quantize(
    *,
    x: Tensor,
    q: Tensor,
    scale: Tensor,
    group: int,
    floor: float,
    lowest: int,
    gain: Tensor | None = None,
    eps: float = 0.0,
    device: Device,
) -> list[Launch]:
    """Lower `ops.quantize.quantize` with one scale per token, with `gain` of the norm of x.

    UnsupportedOp for group scales.
    """
    if group:
        raise UnsupportedOp(
            f"quantize: no CUDA kernel has a scale for every {group} columns; expected group 0, "
            "one scale a token; keep these activations 16-bit"
        )
    own = {"CODE": "i8", "FLOOR": floor, "LOWEST": float(lowest), "gain": gain, "EPS": eps}
    return _by_row(x, q, scale, x.shape[-1], device, **own)


def fake_quantize(
    *, x: Tensor, y: Tensor, dtype: str, group: int = 0, floor: float = 0.0, device: Device
) -> list[Launch]:
    """Lower `ops.quantize.fake_quantize` to e4m3 with one scale per token; else UnsupportedOp."""
    if dtype != "e4m3" or group:
        raise UnsupportedOp(
            f"fake_quantize: no CUDA kernel rounds to {dtype} in groups of {group}; expected e4m3 "
            "in group 0, one scale a token; keep these activations 16-bit"
        )
    own = {"CODE": dtype, "LIMIT": LARGEST[dtype], "FLOOR": floor}
    return _by_row(x, y, None, x.shape[-1], device, **own)
