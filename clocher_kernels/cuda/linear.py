"""The `linear` op: GEMV kernels for up to 32 tokens; here, tiles for more, decoded in the kernel.

Steps along K do not depend on M. Weights are the left operand, which tensor cores take from
registers. Operands have the activations' type, sums are fp32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from clocher_kernels.cuda.codes import decode_words, to_f16, unit
from clocher_kernels.cuda.dots import to_scale
from clocher_kernels.cuda.gemv_bits import gemv_bits, linear_ternary
from clocher_kernels.cuda.gemv_bytes import MOST_SLICED, gemv_bytes
from clocher_kernels.cuda.launch import Device, Launch, launch
from clocher_kernels.cuda.prepack import DeviceTensor, stored
from clocher_kernels.cuda.scalar import PLAIN, Tail, finish, start
from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats.floats import Float, Fp8
from clocher_kernels.formats.integers import Int8
from clocher_kernels.ops.linear import sums_exactly


@triton.jit
def decoded(held, CODE: tl.constexpr, OPERAND: tl.constexpr, ASM: tl.constexpr):
    """Decode loaded weights to [BN, BK] in the operands' type, without scale and zero point."""
    if CODE == "int4" or CODE == "mxfp4" or CODE == "ternary":
        return decode_words(held, CODE, OPERAND)
    elif CODE == "float":
        return held.to(OPERAND)
    else:
        return to_f16(held, CODE, ASM).to(OPERAND)


@triton.jit
def _gemm(
    x, w, scales, zeros, bias, times, residual, y,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    CODE: tl.constexpr, PER: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr,
    SPAN: tl.constexpr, SCALE_ROWS: tl.constexpr,
    OPERAND: tl.constexpr, ONCE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
    F: tl.constexpr, ACT: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    start(PDL)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    # Rows and tokens beyond the last repeat it and are not stored: loads need no mask for them.
    row = tl.minimum(n, N - 1)
    w_rows = w + row.to(tl.int64)[:, None] * STRIDE
    x_rows = x + tl.minimum(m, M - 1)[None, :] * K
    if SPAN > 0:
        first_scale = (row // SCALE_ROWS).to(tl.int64) * tl.cdiv(K, SPAN)
    else:
        first_scale = row * SCALE_ROWS

    total = tl.zeros((BN, BM), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        inside = k < K
        element = k0 // PER + tl.arange(0, BK // PER)
        at = w_rows + element[None, :]
        stored = (element < STRIDE)[None, :]
        if ONCE:
            held = tl.load(at, stored, 0, eviction_policy="evict_first")
        else:
            held = tl.load(at, stored, 0)
        xt = tl.load(x_rows + k[:, None], inside[:, None], 0).to(OPERAND)
        wt = decoded(held, CODE, OPERAND, ASM)

        if SPAN % BK == 0:
            # The step lies in one group of columns.
            group = first_scale[:, None] + (k0 // SPAN if SPAN > 0 else 0)
            grouped = (row < N)[:, None]
        else:
            group = first_scale[:, None] + (k // SPAN)[None, :]
            grouped = inside[None, :]
        if zeros is not None:
            wt -= tl.load(zeros + group, grouped, 0).to(OPERAND)
        elif CODE == "int4":
            wt -= 8
        if SPAN == 0:
            total = tl.dot(wt, xt, total, input_precision="ieee")
        elif SPAN % BK == 0:
            # Codes are exact in the operands' type; the sum is scaled.
            part = tl.dot(wt, xt, input_precision="ieee")
            total += part * to_scale(tl.load(scales + group, grouped, 0), CODE)
        else:
            wt *= to_scale(tl.load(scales + group, grouped, 0), CODE)
            total = tl.dot(wt, xt, total, input_precision="ieee")

    total *= UNIT
    if SPAN == 0 and scales is not None:
        total *= tl.load(scales + first_scale).to(tl.float32)[:, None]
    m = m.to(tl.int64)[None, :]
    n = n[:, None]
    finish(total, bias, times, residual, y, m, n, (n < N) & (m < M), N, F, ACT, CAP)


def _tile(
    operand: torch.dtype, span: int, m: int, n: int, device: Device
) -> tuple[int, int, int, int]:
    """Return rows of W, tokens, columns of a step (whatever M), and warps of a program."""
    bm = min(max(16, triton.next_power_of_2(m)), 32 if operand == torch.float32 else 128)
    if operand == torch.float32:
        return 64, bm, 32, 4
    bn = 128 if triton.cdiv(m, bm) * triton.cdiv(n, 128) >= device.sms else 64
    bk = 64
    while span % bk:
        bk //= 2
    return bn, bm, bk, 8 if bn * bm > 64 * 64 else 4


TL_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def operand_type(x_dtype: torch.dtype, device: Device) -> torch.dtype:
    """Return the type of matmul operands: that of the activations."""
    # Triton's interpreter cannot multiply bf16.
    return torch.float32 if x_dtype == torch.bfloat16 and not device.asm else x_dtype


def gemm(
    *, x: Tensor, w: DeviceTensor, y: Tensor, tail: Tail = PLAIN, device: Device
) -> list[Launch]:
    """Lower `ops.linear.linear` for any number of tokens."""
    (m, k), n = x.shape, w.shape[0]
    held = stored(w)
    # Groups that fit no step of 16 columns are scaled before the matmul, which needs fp32.
    operand = torch.float32 if held.span % 16 else operand_type(x.dtype, device)
    bn, bm, bk, warps = _tile(operand, held.span, m, n, device)
    sizes = {"M": m, "N": n, "K": k, "BM": bm, "BN": bn, "BK": bk}
    stored_as = {"CODE": held.code, "PER": held.per, "STRIDE": held.data.shape[-1]}
    stored_as |= {"UNIT": unit(held.code, "pairs"), "SPAN": held.span}
    stored_as |= {"SCALE_ROWS": held.scale_rows, "OPERAND": TL_TYPES[operand]}
    given = {"x": x, "w": held.data, "scales": held.scales, "zeros": held.zeros}
    given |= {"ONCE": m <= bm, **sizes, **stored_as, **tail.given("linear", y, n)}
    grid = (triton.cdiv(m, bm), triton.cdiv(n, bn))
    return [launch(_gemm, grid, device, warps, **given)]


def linear(
    *,
    x: Tensor,
    w: DeviceTensor,
    y: Tensor,
    x_scale: Tensor | None = None,
    group: int = 0,
    device: Device,
    **after: Any,
) -> list[Launch]:
    """Lower `ops.linear.linear`; `after` are the fields of `Tail`.

    Up to `MOST_SLICED` tokens a result is bit-identical in any batch. UnsupportedOp for int8
    activations with group scales or non-ternary weights, and for unknown activation functions.
    """
    given = {"x": x, "w": w, "y": y, "tail": Tail(**after), "device": device}
    if x_scale is not None:
        if not sums_exactly(w.format, group):
            raise no_codes("linear", w)
        return linear_ternary(**given, x_scale=x_scale)
    return (few if len(x) <= MOST_SLICED else gemm)(**given)


def few(*, w: DeviceTensor, **given: Any) -> list[Launch]:
    """Lower a product for few tokens, see `gemv_bits` and `gemv_bytes`."""
    if "x_scale" in given:
        return linear_ternary(w=w, **given)
    return (gemv_bytes if isinstance(w.format, Float | Int8 | Fp8) else gemv_bits)(w=w, **given)


def no_codes(op: str, w: DeviceTensor) -> UnsupportedOp:
    """Return the error for int8 activations without a kernel for the weight's format."""
    return UnsupportedOp(
        f"{op}: no CUDA kernel multiplies int8 activations by the format {w.format.name}; expected "
        "ternary weights of a linear, and one scale a token; keep these activations 16-bit"
    )
