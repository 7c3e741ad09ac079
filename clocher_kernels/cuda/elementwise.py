"""Norms, embeddings, row gathers."""

import torch
import triton
import triton.language as tl

from clocher_kernels.cuda.bounds import within
from clocher_kernels.cuda.codes import to_f32, unit
from clocher_kernels.cuda.finite import as_activation, or_nan
from clocher_kernels.cuda.launch import Device, Launch
from clocher_kernels.cuda.pdl import start
from clocher_kernels.cuda.tensors import DeviceTensor
from clocher_kernels.errors import UnsupportedOp
from clocher_kernels.formats.float import Float
from clocher_kernels.formats.fp8 import BLOCK as FP8_BLOCK
from clocher_kernels.formats.fp8 import Fp8
from clocher_kernels.formats.int4 import Int4
from clocher_kernels.formats.int8 import Int8

_BLOCK = 1024


@triton.jit
def _rms_norm(
    x,
    weight,
    residual,
    y,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    X_ROW: tl.constexpr,
    RESIDUAL_ROW: tl.constexpr,
    Y_ROW: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    factor = tl.load(weight + at, inside, other=0.0)
    start(PDL)
    value = tl.load(x + row * X_ROW + group * SIZE + at, inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(value * value) / SIZE
    # Squares that overflow must not become zeros.
    value = value * (1.0 / tl.sqrt(or_nan(mean_square) + EPS)) * factor
    if residual is not None:
        before = residual + row * RESIDUAL_ROW + group * SIZE + at
        value += tl.load(before, inside, other=0.0).to(tl.float32)
    tl.store(y + row * Y_ROW + group * SIZE + at, as_activation(value, y), inside)


def rms_norm(
    *,
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    device: Device,
) -> list[Launch]:
    """Lower `ops.elementwise.rms_norm`; one program per group."""
    size = len(weight)
    groups = x.shape[1] // size
    block = triton.next_power_of_2(size)
    constants = {
        "SIZE": size,
        "GROUPS": groups,
        "X_ROW": x.stride(0),
        "RESIDUAL_ROW": 0 if residual is None else residual.stride(0),
        "Y_ROW": y.stride(0),
        "EPS": eps,
        "BLOCK": block,
        "PDL": device.pdl,
    }
    warps = min(max(block // 256, 1), 32)
    args = {"x": x, "weight": weight, "residual": residual, "y": y}
    return [Launch(_rms_norm, (len(x) * groups,), args, constants, warps, pdl=device.pdl)]


@triton.jit
def _embed(
    ids,
    codes,
    scales,
    zeros,
    y,
    SIZE: tl.constexpr,
    ROW: tl.constexpr,
    ROWS: tl.constexpr,
    Y_ROW: tl.constexpr,
    CODE: tl.constexpr,
    UNIT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    token = within(tl.load(ids + row), ROWS).to(tl.int64)
    # Codes 0..15 of a word lie in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits.
    nibble = at // 8 * 8 + at % 2 * 4 + at % 8 // 2
    if CODE == "int4":
        byte = tl.load(codes + token * ROW + nibble // 2, inside, other=0).to(tl.int32)
        value = ((byte >> (nibble % 2 * 4)) & 15).to(tl.float32)
    else:
        value = to_f32(tl.load(codes + token * ROW + at, inside, other=0), CODE, False) * UNIT
    if GROUP > 0:
        scale = token // SCALE_ROWS * SCALE_ROW + at // GROUP
        if CODE == "int4":
            value -= (
                8.0 if zeros is None else tl.load(zeros + scale, inside, other=0).to(tl.float32)
            )
        value *= tl.load(scales + scale, inside, other=0.0).to(tl.float32)
    if SCALE != 1.0:
        value *= SCALE
    tl.store(y + row * Y_ROW + at, value.to(y.dtype.element_ty), inside)


def embed(
    *,
    ids: torch.Tensor,
    table: DeviceTensor,
    y: torch.Tensor,
    scale: float = 1.0,
    device: Device,
) -> list[Launch]:
    """Lower `ops.elementwise.embed` for plain floats, int8, fp8 and int4.

    Raises:
        UnsupportedOp: a table of another format.
    """
    fmt, (rows, size) = table.format, table.shape
    group: int | str = ""
    if isinstance(fmt, Float):
        code = "float"
    elif isinstance(fmt, Int8):
        code, group = "int8", fmt.group
    elif isinstance(fmt, Fp8):
        code, group = fmt.code_dtype, fmt.scope
    elif isinstance(fmt, Int4):
        code, group = "int4", fmt.group
    else:
        raise UnsupportedOp(
            f"the CUDA back end has no embed for a {fmt.name} table; it has it for float, int8, "
            "fp8 and int4 formats; convert the embedding to one of them"
        )
    # Scales are [rows / scale_rows, scale_row]; a column serves `length` elements.
    scale_rows, length = 1, size
    if group == "tensor":
        scale_rows = rows
    elif group == "g128":
        length = FP8_BLOCK
    elif group == "b128":
        scale_rows = length = FP8_BLOCK
    elif isinstance(group, int):
        length = group
    codes = table.planes["data" if code == "float" else "codes"]
    if code == "int4":
        codes = codes.view(torch.uint8)
    constants = {
        "SIZE": size,
        "ROW": codes.shape[-1],
        "ROWS": rows,
        "Y_ROW": y.stride(0),
        "CODE": code,
        "UNIT": unit(code, "fp32"),
        "SCALE_ROWS": scale_rows,
        "SCALE_ROW": triton.cdiv(size, length),
        "GROUP": length if group else 0,
        "SCALE": float(scale),
        "BLOCK": _BLOCK,
        "PDL": device.pdl,
    }
    args = {
        "ids": ids,
        "codes": codes,
        "scales": table.planes.get("scales"),
        "zeros": table.planes.get("zeros"),
        "y": y,
    }
    grid = (triton.cdiv(size, _BLOCK), len(ids))
    return [Launch(_embed, grid, args, constants, pdl=device.pdl)]


@triton.jit
def _gather_rows(
    x,
    rows,
    y,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    X_ROW: tl.constexpr,
    Y_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    token = within(tl.load(rows + row), TOKENS)
    value = tl.load(x + token * X_ROW + at, inside, other=0.0)
    if x.dtype != y.dtype:
        value = value.to(tl.float32).to(y.dtype.element_ty)
    tl.store(y + row * Y_ROW + at, value, inside)


def gather_rows(
    *, x: torch.Tensor, rows: torch.Tensor, y: torch.Tensor, device: Device
) -> list[Launch]:
    """Lower `ops.elementwise.gather_rows`."""
    size = x.shape[1]
    constants = {
        "SIZE": size,
        "TOKENS": len(x),
        "X_ROW": x.stride(0),
        "Y_ROW": y.stride(0),
        "BLOCK": _BLOCK,
        "PDL": device.pdl,
    }
    grid = (triton.cdiv(size, _BLOCK), len(rows))
    return [Launch(_gather_rows, grid, {"x": x, "rows": rows, "y": y}, constants, pdl=device.pdl)]


LOWER = {
    "rms_norm": rms_norm,
    "embed": embed,
    "gather_rows": gather_rows,
}
